"""Tuning in a whole forward pass: what is tried, what is chosen, and that nothing stays changed."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

import pytest
import torch

from mrv2.bench import forward_tuning
from mrv2.bench.forward_tuning import (
    BUCKETS,
    ForwardTime,
    best_choice,
    candidates,
    decode_batch,
    in_force,
    lengths,
    mixed_contexts,
    report,
    tune_forward,
)
from mrv2.bench.layer_problems import BLOCK_SIZE
from mrv2.bench.workloads import make_workload
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


@pytest.mark.parametrize("batch", sorted(BUCKETS))
def test_whole_contexts_are_tried_in_the_order_in_force_and_the_plan_in_force_in_both(batch: int) -> None:
    first, found = now(batch), candidates(batch)
    both = {choice.ordered for choice in found if replace(choice, ordered=first.ordered) == first}
    assert both == ({False, True} if first.plan.num_splits == 1 else {False})
    for choice in found:
        if choice.fused and choice.plan != first.plan:
            assert choice.ordered == (first.ordered and choice.plan.num_splits == 1)
    labels = [forward_tuning._label(asdict(choice)) for choice in found]
    assert len(set(labels)) == len(labels)


def test_a_record_from_before_there_was_an_order_has_none() -> None:
    before = asdict(replace(now(64), ordered=True))
    assert forward_tuning._label(before).endswith(" ahead ordered")
    del before["ordered"]
    assert forward_tuning._label(before).endswith(" ahead")


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


def test_mixed_contexts_count_twice() -> None:
    first, second = candidates(64)[:2]
    short, long, mixed = BUCKETS[64]
    us = {first: (100.0, 100.0, 100.0), second: (100.0, 150.0, 80.0)}
    times = [
        ForwardTime(64, contexts, choice, each)
        for choice in us
        for contexts, each in zip((short, long, mixed), us[choice], strict=True)
    ]
    # 0.8^2 < 1 / 1.5 < 0.8
    assert best_choice(times, 64) == second
    assert best_choice(times[:-1], 64) == first


@pytest.mark.parametrize("batch", [batch for batch in BUCKETS if "mixed" in BUCKETS[batch]])
def test_mixed_contexts_are_those_of_a_step_of_workload_e(batch: int) -> None:
    requests, contexts = make_workload("e", vocab_size=1 << 16).requests, Counter(mixed_contexts(batch))
    steps = []
    for step in range(1, 1025):
        # who has a token to come after this step, and who gets the last one in it
        later = Counter(r.input_len + step for r in requests if r.output_len > step)
        last = Counter(r.input_len + step for r in requests if r.output_len == step)
        if later <= contexts <= later + last:
            steps.append(step)
    assert contexts.total() == batch == len(lengths(batch, "mixed")) and len(steps) == 1
    assert lengths(batch, 7) == (7,) * batch


def test_workload_e_has_no_more_requests_to_mix() -> None:
    with pytest.raises(ConfigError, match="256 requests"):
        mixed_contexts(257)


def test_requests_share_no_block_and_write_where_their_context_ends() -> None:
    contexts = (1, 16, 17, 300)
    order = torch.randperm(40).int() + 1
    batch = decode_batch(order, contexts)
    (tables,), (slots,) = batch.block_tables, batch.slot_mappings
    assert batch.seq_lens.tolist() == list(contexts) and batch.positions.tolist() == [0, 15, 16, 299]
    taken = [row[: -(-context // BLOCK_SIZE)].tolist() for row, context in zip(tables, contexts, strict=True)]
    assert [*chain(*taken)] == order[: sum(map(len, taken))].tolist()
    assert slots.tolist() == [
        blocks[-1] * BLOCK_SIZE + (context - 1) % BLOCK_SIZE for blocks, context in zip(taken, contexts, strict=True)
    ]


def test_it_needs_a_gpu() -> None:
    device = make_device("host")
    with pytest.raises(ConfigError, match="CUDA"):
        tune_forward(device)
    device.close()
