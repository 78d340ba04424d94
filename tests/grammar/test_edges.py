"""Where a grammar ends, cannot go on, is refused, or meets another rule."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grammar.serving import PERSON, REGEX, TOKENIZER, submit, text_of, toy_core
from grammar.toy import EOS, VOCAB_SIZE
from mrv2.config import Knobs
from mrv2.engine.core import EngineCore
from mrv2.engine.grammar.backend import GrammarBackend, GrammarMatcher
from mrv2.errors import ConfigError, RequestError
from mrv2.sampling_params import SamplingParams
from serving import Collector, make_core

BYTES = {TOKENIZER.token_bytes(token): token for token in reversed(range(3, 359))}


def params(constraint: dict[str, Any], **changes: Any) -> SamplingParams:
    return SamplingParams(
        **({"temperature": 1.0, "seed": 3, "max_tokens": 40, "structured_outputs": constraint} | changes)
    )


@pytest.fixture
def core(tmp_path: Path) -> Any:
    core = toy_core(tmp_path)
    yield core
    core.shutdown()


@pytest.mark.parametrize("runner", ["v2", "v1"])
def test_a_finished_grammar_allows_the_end_token_alone(runner: str, tmp_path: Path) -> None:
    core = toy_core(tmp_path, knobs=Knobs(runner=runner))
    collector = Collector(core)
    submit(collector, "r", [9], params({"choice": ["ab"]}))
    served = collector.run()["r"]
    assert text_of(served.token_ids) == "ab" and served.token_ids[-1] == EOS
    assert (served.finish_reason, served.stop_reason) == ("stop", EOS)
    core.shutdown()


def test_ignore_eos_does_not_go_on_behind_the_grammar(core: EngineCore) -> None:
    collector = Collector(core)
    submit(collector, "r", [9], params({"regex": "[0-9]{4}"}, ignore_eos=True))
    served = collector.run()["r"]
    assert served.finish_reason == "stop" and len(text_of(served.token_ids)) == 4


def test_max_tokens_cuts_a_grammar_short(core: EngineCore) -> None:
    collector = Collector(core)
    submit(collector, "r", [9], params({"regex": "[x-z]{50}"}, max_tokens=5))
    served = collector.run()["r"]
    assert served.finish_reason == "length" and len(served.token_ids) == 5


def test_a_stop_token_inside_the_grammar_stops(core: EngineCore) -> None:
    collector = Collector(core)
    submit(collector, "r", [9], params({"choice": ["x!y"]}, stop_token_ids=[BYTES[b"!"]]))
    served = collector.run()["r"]
    assert (served.finish_reason, served.stop_reason) == ("stop", BYTES[b"!"])
    assert text_of(served.token_ids) == "x!"


def test_min_tokens_holds_the_end_back_while_the_grammar_can_go_on(core: EngineCore) -> None:
    collector = Collector(core)
    submit(collector, "long", [9], params({"regex": "[!-/]*"}, min_tokens=12, temperature=0.0, max_tokens=14))
    submit(collector, "short", [9], params({"choice": ["a"]}, min_tokens=12))
    served = collector.run()
    assert len(served["long"].token_ids) >= 12
    # nothing but the end is left: min_tokens gives way
    assert served["short"].finish_reason == "stop" and text_of(served["short"].token_ids) == "a"


@pytest.mark.parametrize("runner", ["v2", "v1"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_dead_end_ends_its_request_with_the_reason(runner: str, asynchronous: bool, tmp_path: Path) -> None:
    core = toy_core(tmp_path, knobs=Knobs(runner=runner, async_scheduling=asynchronous))
    core.grammars.compiler._backend = ToyBackend(dead_after=3)
    collector = Collector(core)
    free = SamplingParams(temperature=1.0, seed=1, max_tokens=20, ignore_eos=True)
    submit(collector, "free", [4, 5], free)
    submit(collector, "dead", [9], params({"regex": "digits"}))
    served = collector.run()
    assert served["dead"].finish_reason == "error"
    assert served["dead"].stop_reason == "dead end: after 3 tokens no token of the vocabulary continues the grammar"
    assert len(served["dead"].token_ids) == 3
    alone = toy_core(tmp_path, max_num_seqs=1, knobs=Knobs(async_scheduling=False))
    neighbour = Collector(alone)
    submit(neighbour, "free", [4, 5], free)
    assert served["free"].token_ids == neighbour.run()["free"].token_ids
    core.shutdown()
    alone.shutdown()


def test_a_grammar_with_no_legal_token_under_other_rules_is_an_error(core: EngineCore) -> None:
    collector = Collector(core)
    submit(collector, "r", [9], params({"choice": ["a"]}, allowed_token_ids=[BYTES[b"b"]]))
    served = collector.run()["r"]
    assert served.finish_reason == "error" and "every token was masked" in str(served.stop_reason)


def test_a_matcher_that_raises_fails_its_request_alone(core: EngineCore) -> None:
    core.grammars.compiler._backend = ToyBackend(raise_after=2)
    collector = Collector(core)
    submit(collector, "bad", [9], params({"regex": "digits"}))
    submit(collector, "free", [9], SamplingParams(max_tokens=9, seed=1, ignore_eos=True))
    served = collector.run()
    assert served["bad"].finish_reason == "error" and "out of stack" in str(served["bad"].stop_reason)
    assert served["free"].finish_reason == "length"


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"json": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "strin"}}}},
         "#/properties/b/type: 'strin' is not one of .*did you mean 'string'"),
        ({"json": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}}, "#/uniqueItems: .*not be"),
        ({"json": {"$ref": "#/$defs/x", "$defs": {"x": {"not": {}}}}}, "#/\\$defs/x/not"),
        ({"json": {"type": "string", "pattern": "(?=a)b"}}, "#/pattern: position 1: .*no lookaround"),
        ({"regex": "a(b"}, "position 4"),
        ({"regex": r"(a)\1"}, "position 4: the escape .*not supported"),
        ({"grammar": "root ::= foo"}, "line 1, column 10.*foo"),
        ({"structural_tag": {"type": "structural_tag", "format": {"type": "nothing"}}}, "nothing"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused_at_submission_with_the_place(
    core: EngineCore, constraint: dict[str, Any], message: str
) -> None:
    collector = Collector(core)
    with pytest.raises(RequestError, match=message):
        submit(collector, "r", [9], params(constraint))
    assert not core.has_unfinished
    submit(collector, "next", [9], params({"choice": ["a"]}))
    assert collector.run()["next"].finish_reason == "stop"


def test_an_engine_without_tokenizer_or_end_token_refuses() -> None:
    core = make_core()
    collector = Collector(core)
    with pytest.raises(RequestError, match="needs the tokenizer's vocabulary"):
        submit(collector, "r", [9], params({"regex": REGEX}))
    with pytest.raises(RequestError, match="give stop_token_ids"):
        collector.submit("r", [9], params({"regex": REGEX}))
    core.shutdown()
    with pytest.raises(ConfigError, match="grammar_backend='xgrammar': .*vocabulary"):
        make_core(grammar_backend="xgrammar")


def test_without_the_library_the_remedy_is_named(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(RequestError, match=r"request r: .*pip install 'mrv2-workbench\[structured\]'"):
        submit(Collector(core), "r", [9], params({"regex": REGEX}))


class ToyBackend(GrammarBackend):
    """Digits only, without any library; may compile late, run into a dead end, or fail."""

    name = "toy"

    def __init__(self, *, dead_after: int = 99, raise_after: int = 99, gate: threading.Event | None = None) -> None:
        self.dead_after, self.raise_after, self.gate = dead_after, raise_after, gate

    def check(self, params: Any) -> None:
        pass

    def compile(self, params: Any) -> str:
        if self.gate is not None:
            assert self.gate.wait(30), "the test never opened the gate"
        if params.regex == "broken":
            raise RuntimeError("too many states")
        return params.regex

    def matcher(self, compiled: Any, end_token_ids: Any) -> GrammarMatcher:
        return ToyMatcher(self, end_token_ids[0])


class ToyMatcher(GrammarMatcher):
    """Any number of digits, then the end."""

    def __init__(self, backend: ToyBackend, end: int) -> None:
        self.backend, self.end, self.tokens = backend, end, []
        self.allowed = np.zeros(-(-VOCAB_SIZE // 32) * 32, dtype=np.uint8)
        self.allowed[[BYTES[b"%d" % digit] for digit in range(10)]] = 1

    def accept(self, token: int) -> bool:
        legal = not self.terminated and (token == self.end or bool(self.allowed[token]))
        if legal:
            self.tokens.append(token)
        return legal

    def rollback(self, num_tokens: int) -> None:
        del self.tokens[len(self.tokens) - num_tokens :]

    def fill(self, bits: np.ndarray, row: int) -> None:
        if len(self.tokens) >= self.backend.raise_after:
            raise RuntimeError("out of stack")
        bits[row] = np.packbits(self.allowed, bitorder="little").view(np.int32)
        if len(self.tokens) >= self.backend.dead_after:
            bits[row] = 0

    @property
    def terminated(self) -> bool:
        return self.end in self.tokens


def test_a_request_waits_for_its_grammar_and_others_pass_it(tmp_path: Path) -> None:
    core, gate = toy_core(tmp_path), threading.Event()
    core.grammars.compiler._backend = ToyBackend(gate=gate)
    collector = Collector(core)
    submit(collector, "late", [9], params({"regex": "digits"}, max_tokens=4))
    submit(collector, "broken", [9], params({"regex": "broken"}))
    submit(collector, "aborted", [9], params({"regex": "digits"}))
    submit(collector, "free", [9], SamplingParams(max_tokens=6, seed=1, ignore_eos=True))
    assert core.snapshot().num_grammar_compiling == 3
    core.abort(["aborted"])
    while collector.served["free"].finish_reason is None:
        collector.step()
    collector.step()
    assert collector.served["late"].token_ids == [] and core.has_unfinished
    gate.set()
    served = collector.run()
    assert served["late"].finish_reason == "length" and len(served["late"].token_ids) == 4
    assert served["broken"].finish_reason == "error" and "too many states" in str(served["broken"].stop_reason)
    assert served["aborted"].finish_reason == "abort"
    assert core.snapshot().num_grammar_compiling == 0
    core.shutdown()


def test_equal_constraints_are_compiled_once(core: EngineCore) -> None:
    collector = Collector(core)
    for index in range(4):
        submit(collector, f"r{index}", [9 + index], params({"json": dict(PERSON)}, seed=index))
    collector.run()
    assert core.grammars.compiler.num_compiled == 1


def test_special_and_padding_tokens_are_never_allowed(core: EngineCore) -> None:
    """A grammar that allows any text allows no token without bytes."""
    matcher = core.grammars.compiler.submit(params({"regex": "(.|\n)*"}).structured_outputs, (EOS,)).matcher()
    bits = np.zeros((1, -(-VOCAB_SIZE // 32)), dtype=np.int32)
    matcher.fill(bits, 0)
    allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    known = TOKENIZER.vocab_size
    assert EOS in allowed and 0 not in allowed and 1 not in allowed and allowed.max() < known


def test_logprobs_are_those_behind_the_mask(core: EngineCore) -> None:
    collector = Collector(core)
    submit(collector, "r", [9], params({"choice": ["ab"]}, logprobs=2, temperature=0.0))
    outputs = collector.run()["r"].outputs
    rows = [row for output in outputs for row in output.logprobs or []]
    assert rows and rows[-1].token_ids[0] == EOS
    assert rows[-1].logprobs[0] == 0.0 and rows[-1].sampled_rank == 1
    assert rows[-1].logprobs[2] == -np.inf


def test_runner_switches_keep_the_state(tmp_path: Path) -> None:
    core = toy_core(tmp_path)
    collector = Collector(core)
    submit(collector, "r", [9], params({"regex": "[a-f]{20}"}))
    turn = 0
    while core.has_unfinished:
        collector.step()
        turn += 1
        core.set_knobs(runner=("v1", "v2")[turn // 2 % 2], grammar_overlap=("deferred", "blocking")[turn % 2])
    assert len(text_of(collector.served["r"].token_ids)) == 20
    core.shutdown()
