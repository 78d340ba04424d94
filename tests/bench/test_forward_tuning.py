"""Tuning in a whole forward pass: what is tried, what is chosen, and that nothing stays changed."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from mrv2.bench import forward_tuning
from mrv2.bench.forward_tuning import BUCKETS, ForwardTime, best_choice, candidates, in_force, report, tune_forward
from mrv2.device import make_device
from mrv2.errors import ConfigError
from mrv2_kernels.attention.plan import DecodeChoice, decode_choice

ONE = 1


def now(batch: int) -> DecodeChoice:
    return decode_choice(batch, 8, 128, torch.bfloat16)


@pytest.mark.parametrize("batch", sorted(BUCKETS))
def test_the_choice_in_force_comes_first_and_each_once(batch: int) -> None:
    found = candidates(batch)
    assert found[0] == now(batch) and len(set(found)) == len(found) > 3
    assert sum(not choice.fused for choice in found) == 1


def test_a_candidate_is_in_force_for_the_block_alone() -> None:
    before = {batch: now(batch) for batch in BUCKETS}
    other = replace(before[ONE], ahead=not before[ONE].ahead)
    seen: list[DecodeChoice] = []

    def fail_inside() -> None:
        with in_force(ONE, other):
            seen.extend((now(ONE), now(64)))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail_inside()
    assert seen == [other, before[64]]
    assert {batch: now(batch) for batch in BUCKETS} == before


def test_the_shortest_context_counts_twice_and_half_measured_choices_do_not() -> None:
    first, second, third = candidates(ONE)[:3]
    short, long = BUCKETS[ONE]
    times = [
        ForwardTime(ONE, short, first, 100.0),
        ForwardTime(ONE, long, first, 400.0),
        # a quarter slower on the short one, 1.4 times as fast on the long one: 1.25^2 > 1.4
        ForwardTime(ONE, short, second, 125.0),
        ForwardTime(ONE, long, second, 400.0 / 1.4),
        ForwardTime(ONE, short, third, 1.0),
    ]
    assert best_choice(times, ONE) == first
    times[2] = replace(times[2], microseconds=110.0)
    assert best_choice(times, ONE) == second
    assert best_choice(times, 8) is None


def test_the_report_names_what_is_in_force_what_is_best_and_what_failed() -> None:
    first, second = candidates(ONE)[:2]
    short, long = BUCKETS[ONE]
    times = [ForwardTime(ONE, c, choice, us) for choice, us in ((first, 9.0), (second, 7.0)) for c in (short, long)]
    record: dict[str, Any] = {
        "model": "m",
        "kv_cache_dtype": "auto",
        "times": [asdict(each) for each in times],
        "best": {"1": asdict(second)},
        "failures": {"1 requests: x": "left out: no time"},
    }
    lines = report(record).splitlines()
    assert "7.0" in lines[2] and "in force" not in lines[2]
    assert "9.0" in lines[3] and "in force" in lines[3]
    assert lines[4].strip().startswith("best: ") and forward_tuning._label(asdict(second)) in lines[4]
    assert "left out: no time" in lines[5]


def test_it_needs_a_gpu() -> None:
    device = make_device("host")
    with pytest.raises(ConfigError, match="CUDA"):
        tune_forward(device)
    device.close()
