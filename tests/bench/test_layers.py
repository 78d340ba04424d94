"""The layer benchmark's checks, search and tables on the host's references; the times themselves need CUDA."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from mrv2.bench import forward_tuning, layer_problems, layers
from mrv2.bench.bandwidth import Limit
from mrv2.bench.layer_problems import QWEN3, SMOLLM2, DecodeProblem, Pool, PrefillProblem, check_decode, check_prefill
from mrv2.bench.layers import LayerTime, candidate, headline, make_record, measure_layers, report
from mrv2.device import Device, make_device
from mrv2.errors import ConfigError
from mrv2_kernels.attention._tiles import TileShape
from mrv2_kernels.attention.plan import MAX_SPLITS, DecodePlan, decode_plan

CPU = torch.device("cpu")
PLAN = DecodePlan(block_n=64, num_warps=4, num_stages=3, num_splits=8, tiles_per_split=2)
TILE = TileShape(64, 64, 4, 2)
# small enough for a host
TINY = replace(QWEN3, num_heads=4, num_kv_heads=2)


@pytest.fixture
def host() -> Iterator[Device]:
    device = make_device("host")
    yield device
    device.close()


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float8_e4m3fn])
def test_what_is_right_passes_its_check(kept: torch.dtype) -> None:
    check_decode(SMOLLM2, PLAN, False, CPU, kept)
    check_prefill(SMOLLM2, TILE, CPU)


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_decode_kernel_that_is_off_fails_its_check(kept: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    right = layer_problems.fused_decode_attention

    def wrong(*args: Any, scale: float, plan: DecodePlan, pdl: bool) -> None:
        right(*args, scale=1.5 * scale, plan=plan, pdl=pdl)

    monkeypatch.setattr(layer_problems, "fused_decode_attention", wrong)
    with pytest.raises(ArithmeticError, match="from float64"):
        check_decode(SMOLLM2, PLAN, False, CPU, kept)


def test_a_kernel_that_writes_nothing_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_problems, "fused_decode_attention", lambda *_args, **_options: None)
    monkeypatch.setattr(layer_problems, "paged_attention", lambda *_args, **_options: None)
    with pytest.raises(ArithmeticError):
        check_decode(SMOLLM2, PLAN, False, CPU)
    with pytest.raises(ArithmeticError):
        check_prefill(SMOLLM2, TILE, CPU)


@pytest.mark.parametrize("shape", [TINY, SMOLLM2])
def test_the_chain_computes_what_the_fused_launch_does(shape: layer_problems.HeadShape) -> None:
    """Both are timed on one problem; the chain rotates in place, so it goes last."""
    problem = DecodeProblem(Pool(shape, 64, CPU), [1, 40, 200], padding=1)
    problem.fused(PLAN)
    fused = problem.out.clone()
    problem.chain()
    torch.testing.assert_close(problem.out, fused)


def test_calls_of_a_graph_take_blocks_of_their_own() -> None:
    pool = Pool(TINY, 64, CPU)
    first = DecodeProblem(pool, [100, 30])
    second = DecodeProblem(pool, [100, 30], first.next_block)
    blocks = [set(each.block_tables[0, :7].tolist() + each.block_tables[1, :2].tolist()) for each in (first, second)]
    assert len(blocks[0] | blocks[1]) == 18


def test_flops_are_those_of_the_visible_pairs() -> None:
    problem = PrefillProblem(Pool(TINY, 8, CPU), 2, 3, 5)
    # queries at positions 2, 3, 4 see 3 + 4 + 5 keys; two products of 2 FLOPs an element
    assert problem.flops == 2 * 12 * 2 * 2 * 128 * 4


@pytest.mark.parametrize("batch", [1, 8, 32, 64, 256])
def test_the_plan_in_force_is_among_the_candidates(batch: int) -> None:
    tiles = {QWEN3: [tile for tile, *_ in forward_tuning.SHAPES[batch]], SMOLLM2: layers.TILES[SMOLLM2.head_dim]}
    for shape in (QWEN3, SMOLLM2):
        plan = decode_plan(batch, shape.num_kv_heads, shape.head_dim, torch.bfloat16)
        assert (plan.block_n, plan.num_warps, plan.num_stages) in tiles[shape]
        for programs in layers.PROGRAMS:
            assert 1 <= candidate(shape, batch, (64, 4, 3), programs, 256).num_splits <= MAX_SPLITS


def run_bench(host: Device, monkeypatch: pytest.MonkeyPatch, fail: Callable[[str], bool]) -> layers._Bench:
    """Search over two tiny batches with the host's references and times that are made up."""
    monkeypatch.setattr(layers, "BATCHES", {TINY: (2, 1)})
    monkeypatch.setattr(layers, "CONTEXTS", {TINY: (20, 40)})
    monkeypatch.setattr(layers, "_BUFFER_BYTES", 1)
    bench = layers._Bench(host, Limit(4e12, "made up"), {}, time.monotonic() + 60, lambda _: None)

    def timed(name: str, work: Sequence[Callable[[], None]]) -> float | None:
        if fail(name):
            bench.failures[name] = "made up"
            return None
        host.main.run("measure", lambda: [call() for call in work])
        host.synchronize("test")
        # splits are made to look cheap, and so is a tile of 32 keys
        return 1e-6 * ((2 if "block_n=32" in name else 3) + (0 if "num_splits=32" in name else 1))

    monkeypatch.setattr(bench, "_try", timed)
    bench.measure_model(TINY)
    return bench


def test_the_search_finds_the_plan_that_is_fastest_over_all_contexts(
    host: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = run_bench(host, monkeypatch, fail=lambda _: False)
    for plan in bench.plans[TINY.name].values():
        assert plan.block_n == 32 and plan.num_splits == 32
    record = make_record(bench.times, bench.prefills, bench.plans, bench.failures, bench.limit)
    assert json.loads(json.dumps(record)) == record
    assert len([line for line in report(record).splitlines() if line.startswith(TINY.name)]) == 4
    for cells in headline(record)["us"].values():
        assert cells["best"] == cells["plan"] == 2.0 and cells["chain"] == 4.0


def test_a_candidate_that_fails_is_left_out_and_named(host: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = run_bench(host, monkeypatch, fail=lambda name: "block_n=32" in name)
    assert all(plan.block_n != 32 for plan in bench.plans[TINY.name].values())
    assert bench.failures
    assert "made up" in report(make_record(bench.times, [], bench.plans, bench.failures, bench.limit))


def test_prefills_are_timed_for_every_tile(host: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = layers._Bench(host, Limit(4e12, "made up"), {}, time.monotonic() + 60, lambda _: None)

    def timed(_: str, work: Sequence[Callable[[], None]]) -> float:
        host.main.run("measure", lambda: [call() for call in work])
        host.synchronize("test")
        return 1e-3

    monkeypatch.setattr(bench, "_try", timed)
    bench._measure_prefill(Pool(TINY, 16, CPU), 2, 33, 33)
    variants = [each.variant for each in bench.prefills]
    assert variants == ["now", *map(layers._prefill_name, layers.PREFILL_TILES), "torch, contiguous"]


def test_no_time_is_a_named_failure(host: Device) -> None:
    bench = layers._Bench(host, Limit(4e12, "made up"), {}, time.monotonic() - 1, lambda _: None)
    assert bench._try("late", [lambda: None]) is None
    assert bench.failures == {"late": "left out: no time"}


def test_an_error_in_a_process_of_its_own_is_a_finding() -> None:
    found = layers._alone(layers._check_prefill, (TILE,))
    assert len(found) == 1 or torch.cuda.is_available()


def test_times_are_grouped_by_bucket() -> None:
    times = [
        LayerTime("m", 1, 128, "chain", None, 10.0, 1.0, 0.1),
        LayerTime("m", 1, 128, "fused", PLAN, 5.0, 2.0, 0.2),
        LayerTime("m", 1, 128, "fused", replace(PLAN, num_splits=4), 4.0, 2.0, 0.2),
        LayerTime("m", 1, 128, "fused pdl", PLAN, 3.0, 2.0, 0.2),
    ]
    record = make_record(times, [], {"m": {1: PLAN}}, {}, Limit(4e12, "made up"))
    assert headline(record)["us"] == {"m 1x128": {"chain": 10.0, "plan": 5.0, "fused pdl": 3.0, "best": 4.0}}


def test_it_needs_cuda(host: Device) -> None:
    with pytest.raises(ConfigError, match="CUDA"):
        measure_layers(host)
