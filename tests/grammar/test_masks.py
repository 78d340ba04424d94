"""Masks on the host: rows of drafts, and what a JSON schema may say."""

from __future__ import annotations

import json

import jsonschema
import numpy as np
import pytest

from grammar.schemas import FORMATS, random_document
from grammar.serving import TOKENIZER
from grammar.toy import EOS, VOCAB_SIZE
from mrv2.engine.grammar.backend import GrammarBackend, GrammarMatcher, fill_draft_rows
from mrv2.engine.grammar.vocabulary import Vocabulary
from mrv2.engine.grammar.xgrammar_backend import XGrammarBackend
from mrv2.structured_outputs import StructuredOutputsParams

WORDS = -(-VOCAB_SIZE // 32)


@pytest.fixture(scope="module")
def backend() -> GrammarBackend:
    return XGrammarBackend(Vocabulary.of(TOKENIZER, VOCAB_SIZE))


def start(backend: GrammarBackend, **constraint: object) -> GrammarMatcher:
    params = StructuredOutputsParams(**constraint)  # type: ignore[arg-type]
    backend.check(params)
    return backend.matcher(backend.compile(params), (EOS,))


def allowed_by(bits: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 7])
@pytest.mark.parametrize("illegal_at", [None, 0, 2])
def test_mask_i_of_a_drafted_row_is_that_of_the_state_after_drafts_1_to_i(backend, num_drafts, illegal_at):
    """Against a second matcher that is advanced step by step."""
    rng = np.random.default_rng(num_drafts)
    drafting, stepping = (start(backend, regex="[0-9]{5}x?") for _ in range(2))
    walker, drafts = start(backend, regex="[0-9]{5}x?"), []
    bits = np.zeros((1, WORDS), dtype=np.int32)
    while len(drafts) < num_drafts and not walker.terminated:
        walker.fill(bits, 0)
        drafts.append(int(rng.choice(allowed_by(bits))))
        walker.accept(drafts[-1])
    drafts += [-1] * (num_drafts - len(drafts))
    if illegal_at is not None and illegal_at < num_drafts:
        # a letter is legal nowhere but at the end
        drafts[illegal_at] = 3 + ord("q")

    rows = np.full((2 + num_drafts + 1, WORDS), 12345, dtype=np.int32)
    num_accepted = fill_draft_rows(drafting, drafts, rows, 1)

    expected, count = [], 0
    for index in range(num_drafts + 1):
        if stepping.terminated:
            expected.append(np.full(WORDS, -1, dtype=np.int32))
        else:
            stepping.fill(bits, 0)
            expected.append(bits[0].copy())
        if index < num_drafts and count == index and drafts[index] >= 0 and stepping.accept(drafts[index]):
            count += 1
        else:
            expected += [expected[-1]] * (num_drafts - index)
            break
    assert num_accepted == count
    assert np.array_equal(rows[1:-1], np.stack(expected))
    assert (rows[[0, -1]] == 12345).all(), "a row of a neighbour was written"
    # the matcher is where it was
    drafting.fill(rows, 0)
    assert np.array_equal(rows[0], rows[1])


@pytest.mark.parametrize("block", range(6))
def test_texts_of_random_schemas_validate(backend, block):
    """Random walks over allowed tokens, for schemas of every keyword that is accepted."""
    bits, num_ended = np.zeros((1, WORDS), dtype=np.int32), 0
    for seed in range(15 * block, 15 * block + 15):
        rng = np.random.default_rng(seed)
        schema = random_document(rng, formats=FORMATS)
        matcher = start(backend, json=schema, disable_any_whitespace=bool(seed % 2))
        tokens: list[int] = []
        while not matcher.terminated and len(tokens) < 400:
            matcher.fill(bits, 0)
            allowed = allowed_by(bits)
            assert len(allowed), f"seed {seed}: dead end after {TOKENIZER.decode(tokens)!r} of {schema}"
            ends = EOS in allowed and rng.random() < 0.7
            tokens.append(EOS if ends else int(rng.choice(allowed)))
            assert matcher.accept(tokens[-1])
        if matcher.terminated:
            num_ended += 1
            text = b"".join(TOKENIZER.token_bytes(token) for token in tokens[:-1]).decode("utf-8")
            jsonschema.validate(json.loads(text), schema)
    assert num_ended >= 8, "most walks never ended: they prove little"


def test_json_object_is_any_object(backend):
    matcher = start(backend, json_object=True)
    for byte in b'{"a": [1, {"b": null}], "c": "d"}':
        assert matcher.accept(3 + byte), chr(byte)
    assert matcher.accept(EOS) and matcher.terminated
    assert not start(backend, json_object=True).accept(3 + ord("["))


def test_structural_tag_constrains_what_follows_the_trigger(backend):
    content = {"type": "json_schema", "json_schema": {"type": "integer"}}
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": ["<f>"],
            "tags": [{"begin": "<f>", "content": content, "end": "</f>"}],
        },
    }
    matcher = start(backend, structural_tag=tag)
    for byte in b"free text <f>":
        assert matcher.accept(3 + byte), chr(byte)
    assert not matcher.accept(3 + ord("x"))
    for byte in b"17</f>":
        assert matcher.accept(3 + byte), chr(byte)


@pytest.mark.parametrize("lead", range(0xC2, 0xF5))
def test_a_split_character_is_continued_as_utf8_has_it(backend, lead):
    matcher = start(backend, regex='[^"]{3}')
    assert matcher.accept(3 + lead)
    bits = np.zeros((1, WORDS), dtype=np.int32)
    matcher.fill(bits, 0)
    seconds = {TOKENIZER.token_bytes(int(token))[0] for token in allowed_by(bits)}
    width = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
    legal = {second for second in range(256) if _is_prefix(bytes([lead, second]), width)}
    assert seconds == legal
    matcher.accept(3 + min(legal))
    matcher.rollback(1)
    bits[:] = 0
    matcher.fill(bits, 0)
    assert {TOKENIZER.token_bytes(int(token))[0] for token in allowed_by(bits)} == legal


def _is_prefix(text: bytes, width: int) -> bool:
    """True if a character of `width` bytes begins like this."""
    try:
        (text + b"\x80" * (width - len(text))).decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
