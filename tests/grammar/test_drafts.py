"""Structured output with drafts in flight: every text validates, and is what it is without drafts."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from grammar.serving import mixed_params, mixed_prompt, submit, text_of, toy_core
from grammar.toy import EOS
from mrv2.config import Knobs
from mrv2.device import make_device
from mrv2.instrument import sync_guard
from mrv2.sampling_params import SamplingParams
from schedule_cases import KnowingSpeculator
from serving import Collector, Served

K = 4
SPEC: dict[str, Any] = {"spec_method": "ngram", "num_spec_tokens": K}
MODES = {
    "sync": Knobs(async_scheduling=False, **SPEC),
    "depth 2": Knobs(**SPEC),
    "depth 2 blocking": Knobs(grammar_overlap="blocking", **SPEC),
    "depth 4": Knobs(queue_depth=4, **SPEC),
    "main stream copies": Knobs(output_copy="main_stream", **SPEC),
    "host inputs": Knobs(input_prep="host", **SPEC),
    "host inputs blocking": Knobs(input_prep="host", grammar_overlap="blocking", **SPEC),
    "one draft": Knobs(spec_method="ngram", num_spec_tokens=1),
}
NUM = 14


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("toy")


@cache
def alone(folder: Path, index: int) -> list[int]:
    core = toy_core(folder, max_num_seqs=1, enable_prefix_caching=False, knobs=Knobs(async_scheduling=False))
    collector = Collector(core)
    submit(collector, "alone", mixed_prompt(index), mixed_params(index)[0])
    served = collector.run()["alone"]
    core.shutdown()
    return served.token_ids


def knowing_core(folder: Path, sequences: list[list[int]], seed: int = 1, **options: Any):
    core = toy_core(folder, max_num_spec_tokens=K, **options)
    knowing = KnowingSpeculator(seed)
    knowing.sequences = sequences
    core.executor.runner.drafting.speculators["ngram"] = knowing  # type: ignore[attr-defined]
    return core


def run_mixed(folder: Path, **options: Any) -> tuple[dict[str, Served], dict[str, int], list[int]]:
    """Serve the first mixed requests with drafts that are right but for every fifth; every row drafts."""
    core = knowing_core(folder, [mixed_prompt(i) + alone(folder, i) + [EOS, 300, 301] for i in range(NUM)], **options)
    collector, index = Collector(core), 0
    while index < NUM or core.has_unfinished:
        while index < NUM and len(core.scheduler.waiting) < 3:
            submit(collector, f"r{index}", mixed_prompt(index), mixed_params(index)[0])
            index += 1
        collector.step()
    waits, stats = dict(core.device.waits), core.scheduler.stats
    core.shutdown()
    return collector.served, waits, [sum(stats.num_drafted), sum(stats.num_accepted), core.scheduler.step]


@pytest.mark.parametrize("mode", MODES)
def test_texts_validate_and_are_those_without_drafts(mode: str, folder: Path) -> None:
    served, waits, (drafted, accepted, _) = run_mixed(folder, knobs=MODES[mode])
    for index in range(NUM):
        mine, constraint = served[f"r{index}"], mixed_params(index)[1]
        assert mine.token_ids == alone(folder, index), f"request {index}"
        if constraint is not None:
            assert mine.finish_reason == "stop" and constraint.accepts(text_of(mine.token_ids))
    counted = {"accepted tokens"} if MODES[mode].input_prep == "host" else set()
    assert set(waits) <= {"output", "drafts"} | counted, waits
    assert 0 < accepted < drafted


def test_drafts_save_steps_of_constrained_requests(folder: Path) -> None:
    steps = {}
    for name, knobs in (("plain", Knobs()), ("drafts", MODES["depth 2"])):
        core = knowing_core(folder, [mixed_prompt(1) + alone(folder, 1)], knobs=knobs)
        core.executor.runner.drafting.speculators["ngram"].rng = _Never()  # type: ignore[attr-defined]
        collector = Collector(core)
        submit(collector, "r", mixed_prompt(1), mixed_params(1)[0])
        collector.run()
        steps[name] = core.scheduler.step
        core.shutdown()
    assert steps["drafts"] < 0.5 * steps["plain"], steps


@pytest.mark.parametrize("verification", ["token_exact", "standard", "block"])
@pytest.mark.parametrize("depth", [1, 2])
def test_illegal_drafts_are_never_accepted(verification: str, depth: int, folder: Path) -> None:
    """A drafter that says letters where only digits may stand, and a stop token in the middle."""

    class Letters:
        def propose(self, state, idx_mapping, num_sampled, num_draft_tokens, max_len) -> None:
            drafts = [3 + ord("7"), 3 + ord("q"), 3 + ord("7"), EOS][:num_draft_tokens]
            state.draft_tokens[idx_mapping.long()] = state.draft_tokens.new_tensor(drafts)

    core = toy_core(folder, max_num_spec_tokens=K, knobs=Knobs(queue_depth=depth, verification=verification, **SPEC))  # type: ignore[arg-type]
    core.executor.runner.drafting.speculators["ngram"] = Letters()  # type: ignore[attr-defined]
    collector = Collector(core)
    for seed in range(8):
        params = SamplingParams(
            temperature=1.0, seed=seed, max_tokens=40, structured_outputs={"regex": "[0-9]{9}"}, min_tokens=seed % 4
        )
        submit(collector, f"r{seed}", [5, 6, 7 + seed], params)
    served = collector.run()
    core.shutdown()
    for name, mine in served.items():
        assert mine.finish_reason == "stop", (name, mine)
        assert text_of(mine.token_ids).isdigit() and len(text_of(mine.token_ids)) == 9
    assert core.scheduler.stats.num_accepted[1] == 0 and sum(core.scheduler.stats.num_drafted) > 0


@pytest.mark.parametrize("max_drafts", range(1, K + 1))
def test_the_end_token_inside_an_accepted_run_ends_the_request(max_drafts: int, folder: Path) -> None:
    knobs = Knobs(spec_method="ngram", num_spec_tokens=max_drafts)
    for index in (1, 3, 5):
        core = knowing_core(folder, [mixed_prompt(index) + alone(folder, index) + [EOS] * 5], knobs=knobs)
        core.executor.runner.drafting.speculators["ngram"].rng = _Never()  # type: ignore[attr-defined]
        collector = Collector(core)
        submit(collector, "r", mixed_prompt(index), mixed_params(index)[0])
        served = collector.run()["r"]
        core.shutdown()
        assert served.token_ids == alone(folder, index) and served.finish_reason == "stop"


def test_late_streams_and_spoilt_memory_change_nothing(folder: Path) -> None:
    """Drafts read before they are there, or after the next ones have replaced them, would show here."""
    device = make_device("host", poison=True, random_delay_s=0.002, delay_streams=("grammar", "copy", "main"), seed=5)
    served, _, _ = run_mixed(folder, ready=device, knobs=MODES["depth 2"])
    for index in range(NUM):
        assert served[f"r{index}"].token_ids == alone(folder, index), f"request {index}"


def test_nothing_but_outputs_and_drafts_is_waited_for(folder: Path) -> None:
    core = toy_core(
        folder, max_num_seqs=6, num_gpu_blocks=24, max_num_spec_tokens=K, ngram_min=1, knobs=MODES["depth 2"]
    )
    collector, index = Collector(core), 0
    for _ in range(8):
        submit(collector, f"r{index}", mixed_prompt(index), mixed_params(index)[0])
        index += 1
    collector.run()
    first = core.scheduler.step
    with sync_guard(core.device, mode="error") as guard:
        while core.scheduler.step - first < 120:
            if len(core.scheduler.waiting) < 3:
                submit(collector, f"r{index}", mixed_prompt(index), mixed_params(index)[0])
                index += 1
            collector.step()
        core.drain()
    assert not guard.violations
    assert set(guard.waits) == {"output", "drafts"}
    core.abort(list(core.scheduler.requests))
    collector.run()
    core.shutdown()


class _Never:
    @staticmethod
    def random() -> float:
        return 1.0
