"""The fused decode launch, compiled, against float64 over a poisoned cache."""

from __future__ import annotations

import pytest
import torch

from fused_cases import FusedCase, fused_case
from mrv2_kernels.attention.plan import DecodePlan, decode_plan
from mrv2_kernels.gemm.pdl import has_pdl

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# query heads, KV heads, head size, norms: Qwen3-0.6B, SmolLM2-135M, and odd groups
SHAPES = [(16, 8, 128, True), (9, 3, 64, False), (7, 1, 128, True), (4, 4, 64, True), (2, 1, 96, False)]
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 66, 128, 129, 1000, 4096]


def case_of(shape: tuple[int, int, int, bool], dtype: torch.dtype, lengths: list[int], seed: int = 0) -> FusedCase:
    heads, kv_heads, dim, has_norm = shape
    return fused_case(
        lengths,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        has_norm=has_norm,
        dtype=dtype,
        device="cuda",
        padding=2,
        seed=seed,
    )


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_splits", [1, 4, 32])
def test_any_heads(shape: tuple[int, int, int, bool], dtype: torch.dtype, num_splits: int) -> None:
    case = case_of(shape, dtype, LENGTHS)
    block_n, num_stages = (32, 1) if dtype == torch.float32 else (64, 3)
    plan = DecodePlan(block_n, 4, num_stages, num_splits, tiles_per_split=2)
    case.check(case.run("triton", plan), TOLERANCE[dtype])


@pytest.mark.parametrize("batch", [1, 8, 32, 256])
def test_the_plan_in_force(batch: int) -> None:
    lengths = torch.randint(1, 1024, (batch,), generator=torch.Generator().manual_seed(batch)).tolist()
    case = case_of(SHAPES[0], torch.bfloat16, lengths)
    plan = decode_plan(batch, 8, 128, torch.bfloat16)
    case.check(case.run("triton", plan), TOLERANCE[torch.bfloat16])


def test_the_last_to_arrive_leaves_no_trace_in_the_result() -> None:
    case = case_of(SHAPES[0], torch.bfloat16, LENGTHS)
    plan = DecodePlan(32, 4, 3, 32, tiles_per_split=1)
    first = case.run("triton", plan)
    assert all(torch.equal(case.run("triton", plan), first) for _ in range(20))


@pytest.mark.parametrize("pdl", [False, True])
def test_captured_steps_that_depend_on_each_other(pdl: bool) -> None:
    """Each launch of the graph reads the cache and the heads that the launch before it wrote."""
    if pdl and not has_pdl(torch.empty(1, device="cuda")):
        pytest.skip("needs compute capability 9.0")
    case = case_of(SHAPES[0], torch.bfloat16, [700, 3, 65, 1])
    plan = DecodePlan(64, 4, 3, 8, tiles_per_split=1)
    heads = case.num_heads
    start = case.qkv.clone()
    slots, lengths, positions = case.slot_mapping.clone(), case.seq_lens.clone(), case.positions.clone()

    def steps(dependent: bool) -> None:
        case.qkv.copy_(start)
        for _ in range(6):
            out = case.run("triton", plan, pdl=dependent)
            case.qkv[:, :heads].copy_(out)

    steps(False)
    expected = case.qkv.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps(pdl)
    for _ in range(5):
        case.qkv.zero_()
        graph.replay()
        assert torch.equal(case.qkv, expected)
    unchanged = ((case.slot_mapping, slots), (case.seq_lens, lengths), (case.positions, positions))
    assert all(torch.equal(now, before) for now, before in unchanged)


def test_back_to_back_dependent_launches_share_their_counters_in_order() -> None:
    if not has_pdl(torch.empty(1, device="cuda")):
        pytest.skip("needs compute capability 9.0")
    case = case_of(SHAPES[0], torch.bfloat16, LENGTHS)
    plan = DecodePlan(32, 4, 3, 32, tiles_per_split=1)
    first = case.run("triton", plan)
    for out in [case.run("triton", plan, pdl=True) for _ in range(50)]:
        assert torch.equal(out, first)
    case.check(first, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_splits", [1, 32])
def test_a_cache_of_eight_bit_floats(shape: tuple[int, int, int, bool], dtype: torch.dtype, num_splits: int) -> None:
    heads, kv_heads, dim, _ = shape
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "padding": 2, "device": "cuda"}
    case = fused_case(LENGTHS, has_norm=False, exact=True, dtype=dtype, cache_dtype=torch.float8_e4m3fn, **sizes)
    block_n, num_stages = (32, 1) if dtype == torch.float32 else (64, 3)
    case.check(case.run("triton", DecodePlan(block_n, 4, num_stages, num_splits, tiles_per_split=2)), TOLERANCE[dtype])
