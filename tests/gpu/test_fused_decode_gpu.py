"""The fused decode launch, compiled, against float64 over a poisoned cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fused_cases import FusedCase, fused_case
from models.paged_harness import PagedHarness
from mrv2.bench.forward_tuning import in_force
from mrv2_kernels.attention.order import longest_first
from mrv2_kernels.attention.plan import DecodePlan, decode_choice, decode_plan
from mrv2_kernels.gemm.pdl import has_pdl
from mrv2_models.registry import load_model
from serving import random_prompt

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


def mixed_lengths(batch: int, seed: int = 0) -> list[int]:
    return torch.randint(100, 2049, (batch,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("batch", [1, 5, 64, 250, 256, 257, 1024])
def test_the_order_is_that_of_the_host(batch: int) -> None:
    # few lengths, so many ties, and padding
    lengths = torch.randint(0, 40, (batch,), generator=torch.Generator().manual_seed(batch)).int()
    assert torch.equal(longest_first(lengths.cuda()).cpu(), longest_first(lengths))


@pytest.mark.parametrize("batch", [64, 256])
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn])
def test_an_order_leaves_every_bit_as_it_is(batch: int, cache_dtype: torch.dtype | None) -> None:
    sizes = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "padding": 3, "device": "cuda"}
    case = fused_case(mixed_lengths(batch), dtype=torch.bfloat16, cache_dtype=cache_dtype, **sizes)
    pdl = has_pdl(case.qkv)
    plan = decode_choice(batch, 8, 128, torch.bfloat16, cache_dtype).plan
    expected = case.run("triton", plan)
    if cache_dtype is None:
        case.check(expected, TOLERANCE[torch.bfloat16])
    order = longest_first(case.seq_lens)
    shuffled = torch.randperm(batch + 3, device="cuda").int()
    for each in (order, shuffled):
        torch.cuda.synchronize()
        for out in [case.run("triton", plan, order=each, pdl=pdl) for _ in range(10)]:
            assert torch.equal(out, expected)


@pytest.mark.parametrize("batch", [64, 256])
def test_the_order_of_a_captured_step_follows_the_lengths(batch: int) -> None:
    """As in a forward pass: the order, an ordinary launch, then launches that start ahead of those before them."""
    lengths = mixed_lengths(batch)
    case = case_of(SHAPES[0], torch.bfloat16, lengths)
    pdl, plan = has_pdl(case.qkv), decode_plan(batch, 8, 128, torch.bfloat16)
    start = case.qkv.clone()

    def step() -> tuple[torch.Tensor, ...]:
        order = longest_first(case.seq_lens)
        case.qkv.copy_(start)
        return order, *(case.run("triton", plan, order=order, pdl=pdl) for _ in range(3))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        order, *outs = step()
    tables, num_padding = case.block_tables.long(), len(case.seq_lens) - batch
    for seed in range(4):
        # each context a part of what it was: what lies beyond it is not read
        shares = torch.rand(batch, generator=torch.Generator().manual_seed(seed))
        now = [max(1, int(length * share)) for length, share in zip(lengths, shares.tolist(), strict=True)]
        seq_lens = torch.tensor([*now, *[0] * num_padding], dtype=torch.int32, device="cuda")
        last = (seq_lens - 1).clamp_min(0).long()
        slots = tables.gather(1, last[:, None] // 16).squeeze(1) * 16 + last % 16
        case.seq_lens.copy_(seq_lens)
        case.positions.copy_(last)
        case.slot_mapping.copy_(torch.where(seq_lens > 0, slots, -1))
        graph.replay()
        graph.replay()
        assert torch.equal(order.cpu(), longest_first(seq_lens.cpu()))
        expected = case.run("triton", plan)
        assert torch.isfinite(expected).all()
        assert all(torch.equal(out, expected) for out in outs)


@pytest.mark.parametrize("num_rows", [64, 100])
def test_logits_are_bit_by_bit_the_same_in_any_order(num_rows: int) -> None:
    choice = decode_choice(num_rows, 8, 128, torch.bfloat16)
    assert choice.ordered
    model = load_model("qwen3-0.6b", load_format="dummy", dtype="bfloat16", device="cuda", max_model_len=1024)
    harness = PagedHarness(model, num_blocks=8 * num_rows + 8)
    harness.step({f"r{i}": random_prompt(i, 3 + i % 50, model.config.vocab_size) for i in range(num_rows)})
    batch, state = harness.batch({f"r{i}": [11 + i] for i in range(num_rows)}), harness.state

    def forward() -> torch.Tensor:
        return model(**state.prepare_inputs(batch), attn=state.prepare_attn(batch), kv_caches=harness.kv_caches)

    with in_force(num_rows, replace(choice, ordered=False)):
        expected = forward()
    assert torch.isfinite(expected).all() and torch.equal(forward(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden = forward()
    for _ in range(5):
        hidden.zero_()
        graph.replay()
        assert torch.equal(hidden, expected)
