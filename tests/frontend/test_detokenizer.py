"""Incremental text equals whole text, whatever the tokens; stop strings cut at the first occurrence."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.fake_core import CORPUS, ids_of_bytes
from mrv2 import SamplingParams
from mrv2.engine.detokenizer import (
    ByteLevelDecoder,
    Detokenizer,
    StopStrings,
    TextDecoder,
    WindowDecoder,
    make_decoder,
)
from mrv2.tokenizer import Tokenizer

# text that exercises every width of UTF-8, joined emoji, and the corpus' own words
texts = st.lists(
    st.sampled_from(["fox", " the", "ö", "你好", "日本", "🎉", "👩‍👩‍👧", "é", " ", "  1", "\n", "\ufffd"])
).map("".join) | st.text(max_size=20)


def pieces(decoder: TextDecoder, token_ids: list[int]) -> list[str]:
    return [*(decoder.push(token_id) for token_id in token_ids), decoder.flush()]


@given(data=st.data(), skip=st.booleans())
@settings(max_examples=300)
def test_byte_level_pieces_join_to_the_whole_decode(byte_level: Tokenizer, data: st.DataObject, skip: bool) -> None:
    """Any ids: characters torn apart, invalid bytes, special and added tokens, ids beyond the vocabulary."""
    token_ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size + 3), max_size=40))
    decoder = make_decoder(byte_level, skip_special_tokens=skip)
    assert isinstance(decoder, ByteLevelDecoder)
    assert "".join(pieces(decoder, token_ids)) == byte_level.decode(token_ids, skip_special_tokens=skip)


@given(text=texts)
@settings(max_examples=200)
def test_text_survives_encoding_and_incremental_decoding(byte_level: Tokenizer, text: str) -> None:
    token_ids = byte_level.encode(text)
    assert "".join(pieces(make_decoder(byte_level, skip_special_tokens=False), token_ids)) == text


@given(data=st.data(), skip=st.booleans())
@settings(max_examples=300)
def test_window_pieces_join_to_the_whole_decode(byte_fallback: Tokenizer, data: st.DataObject, skip: bool) -> None:
    """Word-start marks, stripped leading space, characters spelt as bytes; well-formed bytes only."""
    backend = byte_fallback.backend
    words = st.sampled_from(["\u2581", "\u2581\u2581", "\u2581the", "\u2581fox", "a", "ing", "<s>", "</s>", "."])
    chunks = data.draw(st.lists(words | st.sampled_from("é你🎉ñ").map(lambda c: c.encode()), max_size=20))
    token_ids: list[int] = []
    for chunk in chunks:
        token_ids += ids_of_bytes(backend, chunk) if isinstance(chunk, bytes) else [backend.token_to_id(chunk)]
    decoder = make_decoder(byte_fallback, skip_special_tokens=skip)
    assert isinstance(decoder, WindowDecoder)
    assert "".join(pieces(decoder, token_ids)) == byte_fallback.decode(token_ids, skip_special_tokens=skip)


@pytest.mark.parametrize("char", ["é", "你", "🎉"])
def test_an_unfinished_character_is_held_back(byte_level: Tokenizer, byte_fallback: Tokenizer, char: str) -> None:
    alphabet = {
        byte_level.token_bytes(i): i for i in range(byte_level.vocab_size) if len(byte_level.token_bytes(i)) == 1
    }
    spelt = [alphabet[bytes([byte])] for byte in char.encode()]
    for tokenizer, token_ids in (
        (byte_level, spelt),
        (byte_fallback, list(ids_of_bytes(byte_fallback.backend, char.encode()))),
    ):
        decoder = make_decoder(tokenizer, skip_special_tokens=True)
        *before, last, rest = pieces(decoder, token_ids)
        assert "".join(before) == "" and last == char and rest == ""
        torn = pieces(make_decoder(tokenizer, skip_special_tokens=True), token_ids[:-1])
        assert set(torn[-1]) == {"\ufffd"} and not any(torn[:-1])


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    hits = [(text.find(stop), order, stop) for order, stop in enumerate(stops) if stop in text]
    return (min(hits)[0], min(hits)[2]) if hits else None


@given(
    chunks=st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=3),
    include=st.booleans(),
)
@settings(max_examples=500)
def test_stop_strings_across_chunks(chunks: list[str], stops: list[str], include: bool) -> None:
    """Found with the first chunk that completes one; shown text is never taken back and held text is due."""
    finder = StopStrings(stops, include=include)
    text, shown = "", ""
    for chunk in chunks:
        num_old = len(text)
        text += chunk
        hit = first_stop(text, stops)
        found = finder.find(text, num_old)
        assert (found is not None) == (hit is not None)
        if found is not None and hit is not None:
            at, stop = hit
            assert found == (stop, at + len(stop) if include else at)
            assert text[: found[1]].startswith(shown)
            return
        held = finder.num_held(text)
        assert held == 0 or any(stop.startswith(text[len(text) - held :]) for stop in stops)
        shown = text[: len(text) - held]
    assert text.startswith(shown)


def run(tokenizer: Tokenizer, token_ids: list[int], params: SamplingParams) -> tuple[str, list[str], str | None]:
    """Return the final text, the pieces as shown, and the stop string."""
    detokenizer, shown = Detokenizer(tokenizer, params), []
    for token_id in token_ids:
        if detokenizer.push(token_id):
            break
        shown.append(detokenizer.take())
    detokenizer.finish()
    shown.append(detokenizer.take())
    return detokenizer.text, shown, detokenizer.stop_reason


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_over_three_tokens(byte_level: Tokenizer, include: bool) -> None:
    token_ids = [token for part in ("fox ", "S", "T", "O", "P", " dog") for token in byte_level.encode(part)]
    params = SamplingParams(stop=["STOP", "cat"], include_stop_str_in_output=include)
    text, shown, stop = run(byte_level, token_ids, params)
    assert (text, stop) == ("fox STOP" if include else "fox ", "STOP")
    assert "".join(shown) == text


def test_a_false_start_is_released(byte_level: Tokenizer) -> None:
    token_ids = [token for part in ("a", "S", "T", "O", "x") for token in byte_level.encode(part)]
    text, shown, stop = run(byte_level, token_ids, SamplingParams(stop="STOP"))
    assert (text, stop) == ("aSTOx", None)
    assert shown == ["a", "", "", "", "STOx", ""]


@given(
    text=texts, stops=st.lists(st.sampled_from(["x", "你好", "fox the", "🎉", "  1\n", "öö"]), min_size=1, max_size=2)
)
@settings(max_examples=200)
def test_streamed_text_is_the_text_up_to_the_stop(byte_level: Tokenizer, text: str, stops: list[str]) -> None:
    final, shown, stop = run(byte_level, byte_level.encode(text), SamplingParams(stop=stops))
    hit = first_stop(text, stops)
    assert stop == (hit[1] if hit else None)
    assert final == "".join(shown) == (text[: hit[0]] if hit else text)


def test_special_tokens_are_dropped_or_kept(tokenizer: Tokenizer) -> None:
    end = tokenizer.backend.token_to_id("<|end|>")
    token_ids = [*tokenizer.encode("fox"), end, *tokenizer.encode("<tool call> dog")]
    assert run(tokenizer, token_ids, SamplingParams())[0] == "fox<tool call> dog"
    assert run(tokenizer, token_ids, SamplingParams(skip_special_tokens=False))[0] == "fox<|end|><tool call> dog"


def test_corpus_round_trip(tokenizer: Tokenizer) -> None:
    for text in CORPUS[:4]:
        assert run(tokenizer, tokenizer.encode(text), SamplingParams())[0] == text
