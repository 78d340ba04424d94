"""Masks on the host: rows of drafts, and what a JSON schema may say."""

from __future__ import annotations

import json

import jsonschema
import numpy as np
import pytest

from grammar.schemas import FORMATS, random_document
from grammar.serving import TOKENIZER
from grammar.toy import EOS, VOCAB_SIZE
from mrv2.engine.grammar.backend import GrammarBackend, GrammarMatcher
from mrv2.engine.grammar.masks import DraftedRow, fill_draft_rows
from mrv2.engine.grammar.regex import num_states
from mrv2.engine.grammar.vocabulary import Vocabulary
from mrv2.engine.grammar.xgrammar_backend import Compiled, XGrammarBackend, XGrammarMatcher
from mrv2.engine.grammar.xgrammar_fill import FillCost, MaskFiller
from mrv2.structured_outputs import StructuredOutputsParams

WORDS = -(-VOCAB_SIZE // 32)
PATTERNS = [
    *(r"a", r"^a$|^b$", r"a|^b$", r"\d{3}-\d{2}", r".", r".*", r"(.|\n)*", r"[^a]*", r'[^"]{3}', r"\w+", r"\W", r"\s+"),
    *(r"\S*", r"\D", r"\n\t\r\f\v", r"\x41\u0042", r"[\x41-\x43]", r"\cA", r"a*?", r"a+?b", r"a{2,}", r"(?:ab|cd)+"),
    *(
        r"é+",
        r"[é-ü]+",
        r"[^é]",
        r"[a\-z]",
        r"[-a]",
        r"[\]^$(?]+",
        r"\^\$",
        r"()",
        r"(a|)b",
        r"a||b",
        r"[\w-]+",
        r"[^\d]",
    ),
    *('"', r"\\", r"\/", r"[\\]", r"[!-/]*", r"^(yes|no)$", "😀{2}", r"(a{2,3}b){2}", r"[a-c]{0}", r"x{0,2}y", "a\nb"),
    *("[\x01-\x1f]", "a b", r"[^\W]", "a}", r"(\d{3}-\d{2}|[a-k]{2,5}!)", r"[a-z]{3,12}( [a-z]{3,12}){3,7}\."),
]


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
    row = DraftedRow(drafting, drafts, 1)
    fill_draft_rows([row], rows)

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
    assert row.num_legal == count
    assert np.array_equal(rows[1:-1], np.stack(expected))
    assert (rows[[0, -1]] == 12345).all(), "a row of a neighbour was written"
    # the matcher is where it was
    drafting.fill(rows, 0)
    assert np.array_equal(rows[0], rows[1])


def walk(matcher: GrammarMatcher, rng: np.random.Generator, length: int) -> list[int]:
    """Advance over random allowed tokens; return them."""
    bits, tokens = np.zeros((1, WORDS), dtype=np.int32), []
    while len(tokens) < length and not matcher.terminated:
        matcher.fill(bits, 0)
        tokens.append(int(rng.choice(allowed_by(bits))))
        assert matcher.accept(tokens[-1])
    return tokens


def test_masks_of_many_requests_are_those_of_each_alone(backend):
    """Rows with and without drafts, legal and not, in one call against one call each."""
    texts = ["[0-9]{5}x?", "(a|b)*c", ".{0,9}", "yes|no"]
    for seed in range(12):
        rng = np.random.default_rng(seed)
        rows, first = [], 0
        for _ in range(6):
            matcher = start(backend, regex=texts[int(rng.integers(len(texts)))])
            drafts = walk(matcher, rng, int(rng.integers(5)))
            matcher.rollback(len(drafts))
            if drafts and rng.random() < 0.4:
                drafts[int(rng.integers(len(drafts)))] = int(rng.choice([-1, EOS, 3 + ord("q")]))
            rows.append(DraftedRow(matcher, drafts, first))
            first += 1 + len(drafts)
        together, alone = np.zeros((first, WORDS), np.int32), np.zeros((first, WORDS), np.int32)
        fill_draft_rows(rows, together)
        for row in rows:
            again = DraftedRow(row.matcher, row.drafts, row.first_row)
            fill_draft_rows([again], alone)
            assert again.num_legal == row.num_legal
        assert np.array_equal(together, alone), f"seed {seed}"


class Failing(GrammarMatcher):
    """Allows everything; raises at the verb `where`, or behind that many drafts."""

    def __init__(self, where: str | int) -> None:
        self.where, self.num_accepted = where, 0

    def accept(self, token: int) -> bool:
        self.num_accepted += 1
        self._fail("accept")
        return True

    def rollback(self, num_tokens: int) -> None:
        self._fail("rollback")

    def fill(self, bits: np.ndarray, row: int) -> None:
        self._fail(self.num_accepted)
        bits[row] = -1

    @property
    def terminated(self) -> bool:
        return False

    def _fail(self, at: str | int) -> None:
        if at == self.where:
            raise RuntimeError(f"failed at {at}")


@pytest.mark.parametrize("where", [0, 2, "accept", "rollback"])
def test_a_matcher_that_raises_spoils_its_own_rows_alone(backend, where):
    good = [DraftedRow(start(backend, regex="[ab]*"), [3 + ord("a")] * 3, first) for first in (0, 8)]
    fine, bad = DraftedRow(Failing("never"), [5, 5, 5], 12), DraftedRow(Failing(where), [5, 5, 5], 4)
    bits = np.full((16, WORDS), 7, dtype=np.int32)
    fill_draft_rows([good[0], bad, good[1], fine], bits)
    assert str(bad.error) == f"failed at {where}" and not bits[4:8].any()
    assert [row.error for row in (*good, fine)] == [None] * 3 and [row.num_legal for row in (*good, fine)] == [3] * 3
    assert (bits[12:] == -1).all() and np.array_equal(bits[:4], bits[8:12]) and bits[:4].any(axis=1).all()


def test_masks_of_threads_are_those_of_one_fill_after_the_other(backend):
    library = backend._library  # type: ignore[attr-defined]
    matchers = [start(backend, regex=f"[a-k]{{{n}}}[0-9]*") for n in range(1, 9)]
    for n, matcher in enumerate(matchers):
        walk(matcher, np.random.default_rng(n), n)
    wanted = np.zeros((10, WORDS), dtype=np.int32)
    XGrammarMatcher.fill_many(matchers, wanted, range(1, 9))
    raw = [matcher._matcher for matcher in matchers]  # type: ignore[attr-defined]
    filler, calls = MaskFiller(library, 2), []
    batch = filler._batch.batch_fill_next_token_bitmask
    filler._batch.batch_fill_next_token_bitmask = lambda found, *rest: (calls.append(len(found)), batch(found, *rest))
    # cheap and dear ones, by turns
    costs = [FillCost(1e9 * (n % 2)) for n in range(8)]
    got = np.zeros((10, WORDS), dtype=np.int32)
    filler.fill(raw, costs, got, range(1, 9))
    assert calls == [4] and np.array_equal(got, wanted)
    assert all(cost.ns < 1e9 for cost in costs[1::2]) and all(cost.ns > 0 for cost in costs[::2])
    # what was dear is tried as a cheap one again once its fills take little
    for _ in range(80):
        filler.fill(raw, costs, got, range(1, 9))
    assert len(calls) < 80


@pytest.mark.parametrize("block", range(4))
def test_an_automaton_has_the_masks_of_the_rules(backend, block):
    """A regular expression is compiled to one automaton; the library's own way is by rules of a grammar."""
    info = backend._info  # type: ignore[attr-defined]
    compiler = backend._library.GrammarCompiler(info, max_threads=1)  # type: ignore[attr-defined]
    for pattern in PATTERNS[block::4]:
        assert num_states(pattern)[1] <= 128
        by_rules = Compiled(compiler.compile_regex(pattern), None)
        for seed in range(6):
            rng = np.random.default_rng(seed)
            matchers = [start(backend, regex=pattern), backend.matcher(by_rules, (EOS,))]
            bits, tokens = np.zeros((2, WORDS), dtype=np.int32), []
            while len(tokens) < 30 and not matchers[0].terminated:
                for row, matcher in enumerate(matchers):
                    matcher.fill(bits, row)
                where = f"{pattern!r} behind {TOKENIZER.decode(tokens)!r}"
                assert np.array_equal(bits[0], bits[1]), where
                tokens.append(int(rng.choice(allowed_by(bits[:1]))))
                accepted = [matcher.accept(tokens[-1]) for matcher in matchers]
                assert accepted == [True, True], where
            assert matchers[0].terminated == matchers[1].terminated


def test_a_lone_bracket_is_read_as_the_rules_read_it(backend):
    assert start(backend, regex="a]").accept(3 + ord("a"))


@pytest.mark.parametrize(
    ("pattern", "states", "largest"),
    [
        ("abc", 3, 0),
        (r"[a-z\]]{3,12}( [a-z]{3,12}){3,7}\.", 12 + 7 * 13 + 1, 12),
        (r"a{2,}(b|c){4}\{9}", 2 + 8 + 3, 4),
        ("(a{10}){300}", 3000, 300),
        ("[^{5}]{0,7}", 7, 7),
        ("^$", 0, 0),
    ],
)
def test_states_of_an_automaton_are_counted_before_it_is_made(pattern, states, largest):
    assert num_states(pattern) == (states, largest)


def test_what_would_take_too_many_states_is_compiled_by_rules(backend):
    for pattern in ("(a{90}b){90}", "x{129}"):
        compiled = backend.compile(StructuredOutputsParams(regex=pattern))
        assert "Regex(" not in str(compiled.grammar.grammar), pattern
    assert "Regex(" in str(backend.compile(StructuredOutputsParams(regex="(a{9}b){9}")).grammar.grammar)


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize(("low", "high"), [(0, 3), (2, 2), (1, 200), (4, None), (0, 0)])
def test_strings_of_bounded_length_hold_no_control_character(backend, compact, low, high):
    schema = {"type": "string", "minLength": low} | ({} if high is None else {"maxLength": high})
    for seed in range(4):
        matcher, bits = start(backend, json=schema, disable_any_whitespace=compact), np.zeros((1, WORDS), np.int32)
        rng, tokens = np.random.default_rng(seed), []
        while not matcher.terminated and len(tokens) < 300:
            matcher.fill(bits, 0)
            texts = [TOKENIZER.token_bytes(int(token)) for token in allowed_by(bits)]
            assert not any(min(text, default=255) < 0x20 for text in texts), "between the quotes alone is anything here"
            tokens.append(int(rng.choice(allowed_by(bits))))
            assert matcher.accept(tokens[-1])
        if matcher.terminated:
            value = json.loads(b"".join(TOKENIZER.token_bytes(token) for token in tokens[:-1]).decode())
            assert low <= len(value) and (high is None or len(value) <= high)


def test_lines_may_stand_between_the_parts_of_a_text_with_bounded_strings(backend):
    schema = {"type": "array", "items": {"type": "string", "maxLength": 2}}
    matcher, bits = start(backend, json=schema), np.zeros((1, WORDS), dtype=np.int32)
    assert matcher.accept(3 + ord("["))
    matcher.fill(bits, 0)
    texts = {TOKENIZER.token_bytes(int(token)) for token in allowed_by(bits)}
    assert {b"\n", b"\r", b" "} <= texts and b"\t" not in texts


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
