"""Tokens do not depend on the schedule: see `schedule_cases`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from mrv2.config import Knobs
from mrv2.sampling_params import SamplingParams
from schedule_cases import DRAFTERS, MAX_TOKENS, RUNNER_MODES, V1_DRAFTERS, draw_case, run_case
from serving import Collector, make_core

NUM_CI_SEEDS = 220
NUM_SLOW_SEEDS = 5000


@pytest.mark.parametrize("seed", range(NUM_CI_SEEDS))
def test_tokens_do_not_depend_on_the_schedule(seed: int) -> None:
    run_case(draw_case(seed))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(NUM_SLOW_SEEDS // 10))
def test_tokens_do_not_depend_on_the_schedule_many(block: int) -> None:
    for seed in range(10_000 + 10 * block, 10_000 + 10 * (block + 1)):
        run_case(draw_case(seed))


def test_every_pair_of_axis_values_is_drawn() -> None:
    cases = [draw_case(seed).axes for seed in range(NUM_CI_SEEDS)]
    values = {axis: sorted({repr(c[axis]) for c in cases}) for axis in cases[0]}
    missing = [
        (a, x, b, y)
        for a, b in combinations(values, 2)
        for x in values[a]
        for y in values[b]
        if not impossible({a: x, b: y}) and not any(repr(c[a]) == x and repr(c[b]) == y for c in cases)
    ]
    assert not missing, f"{len(missing)} pairs never drawn: {missing[:5]}"


def impossible(pair: dict[str, str]) -> bool:
    runners = [r for r, mode in RUNNER_MODES if repr(mode) == pair.get("mode")]
    drafters = {repr(drafter) for each in V1_DRAFTERS.values() for drafter in each}
    if pair.get("runner") == "'v1'" and "drafter" in pair and pair["drafter"] not in drafters:
        return True
    if pair.get("mode") in ("'depth 3'", "'depth 4'") and pair.get("runner") is None:
        return False
    return "runner" in pair and "mode" in pair and not any(repr(r) == pair["runner"] for r in runners)


def seeds_with(**axes: Any) -> Iterator[int]:
    return (s for s in range(NUM_CI_SEEDS) if all(draw_case(s).axes[k] == v for k, v in axes.items()))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_replays_whole_steps(drafter: str) -> None:
    """The product would prove little about graphs if its steps with drafts fell back to stages."""
    axes = {"cuda_graphs": "step", "input_prep": "device", "switches": False, "aborts": False, "num_drafts": 2}
    for case in [draw_case(seed) for seed in seeds_with(drafter=drafter, runner="v2")][:2]:
        # no feature takes a batch out of the graphs
        requests = tuple(replace(r, features=None) for r in case.requests)
        assert run_case(replace(case, axes=case.axes | axes, requests=requests)) > 0


def test_tight_pools_do_preempt() -> None:
    """The product would prove little about preemption if no case preempted."""
    preempted = 0
    for seed in list(seeds_with(pool="tight", runner="v2", switches=False, aborts=False))[:6]:
        case = draw_case(seed)
        core = make_core(
            max_num_seqs=9, num_gpu_blocks=9, enable_prefix_caching=False, knobs=Knobs(async_scheduling=False)
        )
        collector = Collector(core)
        for index, request in enumerate(case.requests):
            params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
            collector.submit(f"r{index}", list(request.prompt), params)
        collector.run()
        preempted += core.scheduler.stats.num_preemptions
        core.shutdown()
    assert preempted > 0
