"""Drafts that a grammar forces: the same tokens in fewer steps, whoever else drafts and however the steps lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grammar.serving import TOKENIZER, mixed_params, mixed_prompt, submit, text_of, toy_core
from grammar.test_drafts import KnowingSpeculator
from grammar.toy import EOS, VOCAB_SIZE
from mrv2.config import EngineConfig, Knobs
from mrv2.device import make_device
from mrv2.engine.grammar.backend import GrammarMatcher
from mrv2.engine.grammar.vocabulary import Vocabulary
from mrv2.engine.grammar.xgrammar_backend import XGrammarBackend
from mrv2.errors import ConfigError
from mrv2.instrument import sync_guard
from mrv2.sampling_params import SamplingParams
from mrv2.structured_outputs import StructuredOutputsParams
from serving import Collector

K = 4
ALONE: dict[str, Any] = {"grammar_drafts": True, "num_spec_tokens": K}
NGRAM: dict[str, Any] = {**ALONE, "spec_method": "ngram"}
MODES = {
    "sync": Knobs(async_scheduling=False, **ALONE),
    "depth 1": Knobs(queue_depth=1, **ALONE),
    "depth 2": Knobs(**ALONE),
    "depth 4": Knobs(queue_depth=4, **ALONE),
    "blocking": Knobs(grammar_overlap="blocking", **ALONE),
    "main stream copies": Knobs(output_copy="main_stream", **ALONE),
    "one draft": Knobs(grammar_drafts=True, num_spec_tokens=1),
    "step graphs": Knobs(cuda_graphs="step", **ALONE),
    "ngram": Knobs(**NGRAM),
    "ngram sync": Knobs(async_scheduling=False, **NGRAM),
    "ngram adaptive": Knobs(adaptive_drafts=True, **NGRAM),
    "host inputs": Knobs(input_prep="host", **NGRAM),
    "suffix": Knobs(grammar_drafts=True, num_spec_tokens=2, spec_method="suffix"),
}
NUM = 14
# long forced texts between short choices
FORM = {
    "type": "object",
    "properties": {"name": {"enum": ["ab", "cd"]}, "is_even": {"type": "boolean"}, "weight": {"enum": [1, 2]}},
    "required": ["name", "is_even", "weight"],
    "additionalProperties": False,
}
FORMED = StructuredOutputsParams(json=FORM, disable_any_whitespace=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("toy")


def params_of(index: int) -> SamplingParams:
    """Every other request is one with long forced texts, the others are mixed ones."""
    if index % 2:
        return SamplingParams(temperature=1.0, seed=index, max_tokens=120, structured_outputs=FORMED)
    return mixed_params(index // 2)[0]


def serve(folder: Path, knobs: Knobs, **options: Any) -> tuple[Collector, Any]:
    """Serve the first requests, arriving over time; return what came and the engine, shut down."""
    core = toy_core(folder, max_num_spec_tokens=K, ngram_min=1, speculators=("suffix",), knobs=knobs, **options)
    collector, index = Collector(core), 0
    while index < NUM or core.has_unfinished:
        while index < NUM and len(core.scheduler.waiting) < 3:
            submit(collector, f"r{index}", mixed_prompt(index), params_of(index))
            index += 1
        collector.step()
    core.shutdown()
    return collector, core


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, list[int]]:
    collector, _ = serve(folder, Knobs(async_scheduling=False))
    return {name: served.token_ids for name, served in collector.served.items()}


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_without_drafts(mode: str, folder: Path, plain: dict[str, list[int]]) -> None:
    collector, core = serve(folder, MODES[mode])
    assert {name: served.token_ids for name, served in collector.served.items()} == plain
    counted = {"accepted tokens"} if core.knobs.input_prep == "host" else set()
    assert set(core.device.waits) <= {"output", "drafts", "graph capture"} | counted, core.device.waits
    forced = core.scheduler.stats.forced
    assert sum(forced.num_drafted) >= sum(forced.num_accepted) > 0
    snapshot = core.snapshot()
    assert (snapshot.num_forced_drafted, snapshot.num_forced_accepted) == (
        sum(forced.num_drafted),
        sum(forced.num_accepted),
    )
    if MODES[mode].spec_method == "off":
        # nobody but a grammar drafts
        assert forced == core.scheduler.stats.drafts


def test_late_streams_spoilt_memory_and_preemption_change_nothing(folder: Path, plain: dict[str, list[int]]) -> None:
    """Chains read before they are there, or after the next ones have replaced them, would show here."""
    for seed, knobs in enumerate((MODES["depth 2"], MODES["ngram"])):
        device = make_device(
            "host", poison=True, random_delay_s=0.002, delay_streams=("grammar", "copy", "main"), seed=seed
        )
        collector, core = serve(folder, knobs, ready=device, max_num_seqs=6, num_gpu_blocks=20)
        assert core.scheduler.stats.num_preemptions > 0
        assert {name: served.token_ids for name, served in collector.served.items()} == plain


def test_what_is_forced_token_by_token_is_always_accepted_and_saves_steps(folder: Path) -> None:
    """Bytes that no longer token covers: the model cannot spell them otherwise."""
    constraint = StructuredOutputsParams(regex="(Q|X)[Z]{20}(Q|X)[V]{17}")
    steps = {}
    for name, knobs in (("plain", Knobs()), ("drafts", Knobs(**ALONE))):
        core = toy_core(folder, max_num_spec_tokens=K, knobs=knobs)
        collector = Collector(core)
        submit(
            collector, "r", [5], SamplingParams(temperature=1.0, seed=3, max_tokens=60, structured_outputs=constraint)
        )
        served = collector.run()["r"]
        core.shutdown()
        assert served.finish_reason == "stop" and len(text_of(served.token_ids)) == 39
        steps[name] = core.scheduler.step
        forced = core.scheduler.stats.forced
        assert forced.num_drafted == forced.num_accepted
    # 20 Z: one is sampled before they are known to be forced, the others come five a step
    assert steps["drafts"] <= steps["plain"] - 20, steps


def test_another_spelling_drops_the_chain(folder: Path) -> None:
    """Chains are the tokenizer's spelling; a model that spells otherwise gets no wrong draft behind it."""
    core = toy_core(folder, max_num_spec_tokens=K, knobs=Knobs(**ALONE))
    collector = Collector(core)
    # the first token of the tokenizer's spelling of the forced text is forbidden
    backend = core.grammars.compiler.backend
    matcher = backend.matcher(backend.compile(FORMED), (EOS,))
    first = matcher.forced_tokens(1)[0]
    submit(
        collector,
        "r",
        [5],
        SamplingParams(temperature=1.0, seed=1, max_tokens=120, structured_outputs=FORMED, logit_bias={first: -100.0}),
    )
    seen: list[list[int]] = []
    take = core.executor.take_drafts

    def watched(req_ids: list[str]) -> np.ndarray:
        drafts = take(req_ids)
        seen.append(drafts[0].tolist())
        return drafts

    core.executor.take_drafts = watched  # type: ignore[method-assign]
    served = collector.run()["r"]
    core.shutdown()
    assert served.finish_reason == "stop" and first != served.token_ids[0]
    # the first step's chain expected the forbidden token
    assert seen[0] == [-1] * K and any(drafts[0] >= 0 for drafts in seen)


class Stubborn(GrammarMatcher):
    """Allows everything, ends never, and says that the tokens 50, 51, ... must follow, whatever was said."""

    def accept(self, token: int) -> bool:
        return True

    def rollback(self, num_tokens: int) -> None:
        pass

    def fill(self, bits: np.ndarray, row: int) -> None:
        bits[row] = -1

    def forced_tokens(self, most: int) -> list[int]:
        return list(range(50, 50 + most))

    @property
    def terminated(self) -> bool:
        return False


@pytest.mark.parametrize("method", ["off", "ngram"])
@pytest.mark.parametrize("verification", ["token_exact", "standard"])
def test_forced_tokens_that_are_none_change_nothing(method: str, verification: str, folder: Path) -> None:
    """A wrong chain costs drafts, not tokens: the target has the last word."""
    tokens = {}
    for name in ("plain", "drafts"):
        more = {**ALONE, "spec_method": method} if name == "drafts" else {}
        core = toy_core(folder, max_num_spec_tokens=K, knobs=Knobs(verification=verification, **more))  # type: ignore[arg-type]
        collector = Collector(core)
        # greedy: every verification accepts what the target says, and nothing else
        params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        submit(collector, "r", [5, 6], params)
        core.scheduler.requests["r"].grammar = Stubborn()
        tokens[name] = collector.run()["r"].token_ids
        core.shutdown()
    assert tokens["plain"] == tokens["drafts"]


def test_a_forced_chain_stands_before_the_drafts_of_the_method(folder: Path) -> None:
    """A drafter that is always wrong: only what the grammar forces can be accepted."""
    core = toy_core(folder, max_num_spec_tokens=K, knobs=Knobs(**NGRAM))
    wrong = KnowingSpeculator(1)
    wrong.sequences = []
    core.executor.runner.drafting.speculators["ngram"] = wrong  # type: ignore[attr-defined]
    collector = Collector(core)
    constraint = StructuredOutputsParams(regex="Z{30}")
    submit(collector, "r", [5], SamplingParams(temperature=1.0, seed=3, max_tokens=60, structured_outputs=constraint))
    served = collector.run()["r"]
    core.shutdown()
    assert text_of(served.token_ids) == "Z" * 30
    assert sum(core.scheduler.stats.num_accepted) == sum(core.scheduler.stats.forced.num_accepted) >= 20


def test_forced_drafts_are_those_of_the_text_that_must_follow() -> None:
    """Each legal behind those before it, spelt as the tokenizer spells, the end token last; the state stays."""
    backend = XGrammarBackend(Vocabulary.of(TOKENIZER, VOCAB_SIZE))
    matcher = backend.matcher(backend.compile(StructuredOutputsParams(regex="(a|b)name: [0-9]true")), (EOS,))
    assert matcher.forced_tokens(9) == []
    matcher.accept(3 + ord("a"))
    spelt = TOKENIZER.encode("name: ", add_special_tokens=False)
    assert matcher.forced_tokens(9) == spelt and matcher.forced_tokens(1) == spelt[:1]
    for token in [*spelt, 3 + ord("7")]:
        assert matcher.accept(token)
    ending = [*TOKENIZER.encode("true", add_special_tokens=False), EOS]
    assert matcher.forced_tokens(9) == ending
    for token in ending:
        assert matcher.accept(token)
    assert matcher.terminated


def test_nothing_but_outputs_and_drafts_is_waited_for(folder: Path) -> None:
    core = toy_core(folder, max_num_seqs=6, num_gpu_blocks=40, max_num_spec_tokens=K, knobs=MODES["depth 2"])
    collector, index = Collector(core), 0
    for _ in range(8):
        submit(collector, f"r{index}", mixed_prompt(index), params_of(index))
        index += 1
    collector.run()
    first = core.scheduler.step
    with sync_guard(core.device, mode="error") as guard:
        while core.scheduler.step - first < 120:
            if len(core.scheduler.waiting) < 3:
                submit(collector, f"r{index}", mixed_prompt(index), params_of(index))
                index += 1
            collector.step()
        core.drain()
    assert not guard.violations
    assert set(guard.waits) == {"output", "drafts"}
    core.abort(list(core.scheduler.requests))
    collector.run()
    core.shutdown()


def test_the_knob_may_be_turned_while_requests_run(folder: Path, plain: dict[str, list[int]]) -> None:
    core = toy_core(folder, max_num_spec_tokens=K, ngram_min=1)
    collector, index, turn = Collector(core), 0, 0
    while index < NUM or core.has_unfinished:
        while index < NUM and len(core.scheduler.waiting) < 3:
            submit(collector, f"r{index}", mixed_prompt(index), params_of(index))
            index += 1
        collector.step()
        turn += 1
        if turn % 3 == 0:
            runner = ("v2", "v1", "v2")[turn % 9 // 3]
            core.set_knobs(
                runner=runner,
                grammar_drafts=runner == "v2" and bool(turn % 2),
                spec_method=("off", "ngram")[turn % 4 // 2] if runner == "v2" else "off",
                num_spec_tokens=1 + turn % K,
            )
    core.shutdown()
    assert {name: served.token_ids for name, served in collector.served.items()} == plain


def test_free_requests_get_no_place_for_drafts(folder: Path) -> None:
    core = toy_core(folder, max_num_spec_tokens=K, knobs=MODES["depth 2"])
    collector = Collector(core)
    submit(collector, "free", [4, 5], SamplingParams(max_tokens=40, seed=1, ignore_eos=True))
    submit(collector, "bound", [4, 5], SamplingParams(max_tokens=100, seed=1, structured_outputs=FORMED))
    num_drafts = set()
    schedule = core.scheduler.schedule

    def watched() -> Any:
        scheduled = schedule()
        if scheduled is not None and "free" in scheduled.req_ids:
            num_drafts.add(int(scheduled.num_draft_tokens[scheduled.req_ids.index("free")]))
        return scheduled

    core.scheduler.schedule = watched  # type: ignore[method-assign]
    collector.run()
    core.shutdown()
    assert num_drafts == {0} and sum(core.scheduler.stats.forced.num_drafted) > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runner": "v1"}, "runner='v1' cannot draft by grammar_drafts.*staged"),
        ({"num_spec_tokens": 0}, "set it to at least 1"),
        ({"draft_sampling": "sampled", "verification": "standard"}, "takes the place of drafts whose probabilities"),
    ],
)
def test_combinations_that_cannot_work_are_refused_with_the_reason(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Knobs(grammar_drafts=True, **changes)


def test_an_engine_without_room_for_drafts_refuses() -> None:
    with pytest.raises(ConfigError, match="max_num_spec_tokens=0; load it with more"):
        EngineConfig(model="tiny-llama", knobs=Knobs(grammar_drafts=True))


def test_only_exact_verification_promises_the_tokens() -> None:
    exact, standard = Knobs(grammar_drafts=True), Knobs(grammar_drafts=True, verification="standard")
    assert exact.promises_tokens_of(Knobs()) and not standard.promises_tokens_of(Knobs())
