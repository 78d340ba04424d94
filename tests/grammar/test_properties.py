"""Tokens of grammar rows do not depend on the schedule: preemption, aborts, chunks, depth, runner, delays."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grammar.serving import CONSTRAINTS, submit, text_of, toy_core
from mrv2.config import Knobs
from mrv2.device import make_device
from mrv2.sampling_params import SamplingParams
from serving import Collector, random_prompt

NUM_CI_SEEDS = 36
MAX_TOKENS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("toy")


def params_of(number: int) -> SamplingParams:
    """Parameters of request `number`; three of four follow a grammar."""
    bound = number % 4 != 3
    return SamplingParams(
        temperature=0.0 if number % 5 == 0 else 1.0,
        seed=number,
        max_tokens=MAX_TOKENS if bound else 1 + number % 18,
        ignore_eos=not bound,
        structured_outputs=CONSTRAINTS[number % len(CONSTRAINTS)].params if bound else None,
        logprobs=number % 3 if number % 7 == 0 else None,
    )


def prompt_of(number: int) -> list[int]:
    return random_prompt(number % 6, 1 + 17 * number % 70)


@cache
def alone(folder: Path, number: int) -> list[int]:
    core = toy_core(folder, max_num_seqs=1, enable_prefix_caching=False, knobs=Knobs(async_scheduling=False))
    collector = Collector(core)
    submit(collector, "alone", prompt_of(number), params_of(number))
    served = collector.run()["alone"]
    core.shutdown()
    return served.token_ids


def random_knobs(rng: np.random.Generator) -> dict[str, Any]:
    runner = ("v1", "v2")[int(rng.integers(2))]
    num_spec_tokens = int(rng.integers(0, 5))
    return {
        "runner": runner,
        "async_scheduling": bool(rng.random() < 0.8),
        "queue_depth": int(rng.integers(1, 5 if runner == "v2" else 3)),
        "grammar_overlap": ("deferred", "deferred", "blocking")[int(rng.integers(3))],
        "input_prep": ("device", "host")[int(rng.integers(2))],
        "spec_method": ("off", "ngram")[int(rng.integers(2))] if runner == "v2" else "off",
        "num_spec_tokens": num_spec_tokens,
        "grammar_drafts": runner == "v2" and num_spec_tokens > 0 and bool(rng.integers(2)),
    }


def run_case(folder: Path, seed: int) -> int:
    """Serve a random case; return its preemptions."""
    rng = np.random.default_rng(seed)
    numbers = [int(n) for n in rng.integers(0, 24, size=int(rng.integers(3, 9)))]
    tight, delays = bool(rng.integers(2)), bool(rng.integers(2))
    max_num_seqs = int(rng.integers(2, 7))
    core = toy_core(
        folder,
        make_device("host", poison=True, random_delay_s=0.001 if delays else 0.0, seed=seed),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=48,
        max_num_spec_tokens=4,
        ngram_min=1,
        num_gpu_blocks=(1 + 7 + int(rng.integers(3))) if tight else 100,
        enable_prefix_caching=bool(rng.integers(2)),
        knobs=Knobs(**random_knobs(rng)),
    )
    collector, turn = Collector(core), 0
    arrivals = {index: int(rng.integers(10)) for index in range(len(numbers))}
    aborts = {index: int(rng.integers(30)) for index in range(len(numbers)) if rng.random() < 0.2}
    while turn < 30 or core.has_unfinished:
        for index, number in enumerate(numbers):
            if arrivals[index] == turn:
                submit(collector, f"r{index}", prompt_of(number), params_of(number))
            if aborts.get(index) == turn:
                core.abort([f"r{index}"])
        if rng.random() < 0.1:
            core.set_knobs(**random_knobs(rng))
        collector.step()
        turn += 1
        assert turn < 3000, f"not done after {turn} turns: {core.snapshot()}"
    for index, number in enumerate(numbers):
        served, want = collector.served[f"r{index}"], alone(folder, number)
        where = f"seed {seed}, request {index} (number {number})"
        if served.finish_reason == "abort":
            assert served.token_ids == want[: len(served.token_ids)], where
            continue
        assert served.token_ids == want, where
        if params_of(number).structured_outputs is not None:
            assert served.finish_reason == "stop", where
            assert CONSTRAINTS[number % len(CONSTRAINTS)].accepts(text_of(served.token_ids)), where
    core.scheduler.check()
    assert core.snapshot().kv_blocks_used == 0, "blocks are held after the last request"
    own = {"accepted tokens", "v1: to_list", "v1: prepare_inputs barrier"}
    assert set(core.device.waits) <= {"output", "drafts"} | own, core.device.waits
    preemptions = core.scheduler.stats.num_preemptions
    core.shutdown()
    return preemptions


@pytest.mark.parametrize("block", range(NUM_CI_SEEDS // 6))
def test_tokens_do_not_depend_on_the_schedule(block: int, folder: Path) -> None:
    for seed in range(6 * block, 6 * block + 6):
        run_case(folder, seed)


@pytest.mark.parametrize("runner", ["v2", "v1"])
def test_a_preempted_grammar_goes_on_where_its_delivered_tokens_end(runner: str, folder: Path) -> None:
    """Six requests in a pool for two: all are preempted with tokens in flight."""
    core = toy_core(
        folder,
        max_num_seqs=6,
        num_gpu_blocks=9,
        enable_prefix_caching=False,
        knobs=Knobs(runner=runner),  # type: ignore[arg-type]
    )
    collector = Collector(core)
    for number in (0, 4, 8, 12, 16, 20):
        submit(collector, f"r{number}", prompt_of(number), params_of(number))
    served = collector.run()
    assert core.scheduler.stats.num_preemptions > 0 and core.scheduler.stats.num_stale_delivered > 0
    for number in (0, 4, 8, 12, 16, 20):
        assert served[f"r{number}"].token_ids == alone(folder, number), number
    core.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("block", range(40))
def test_tokens_do_not_depend_on_the_schedule_many(block: int, folder: Path) -> None:
    for seed in range(10_000 + 25 * block, 10_000 + 25 * (block + 1)):
        run_case(folder, seed)
