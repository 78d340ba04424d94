"""The fused decode launch: both twins against float64, over a poisoned cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from fused_cases import FusedCase, fused_case
from mrv2_kernels.attention import fused_decode
from mrv2_kernels.attention.fused_decode import fused_decode_attention
from mrv2_kernels.attention.order import longest_first
from mrv2_kernels.attention.plan import (
    MAX_SPLIT_PAIRS,
    MAX_SPLITS,
    DecodePlan,
    decode_choice,
    decode_plan,
    measured,
    split_bound,
)
from mrv2_kernels.gemm.pdl import has_pdl
from paged_cases import UNTOUCHED

FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3}


def plan_of(num_splits: int, tiles_per_split: int = 1) -> DecodePlan:
    return DecodePlan(block_n=32, num_warps=4, num_stages=1, num_splits=num_splits, tiles_per_split=tiles_per_split)


@pytest.mark.parametrize("twin", ["torch", "triton"])
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize(
    "heads, kv_heads, dim, block_size, has_norm",
    [
        (2, 2, 64, 16, True),
        (4, 2, 128, 16, True),
        (9, 3, 64, 16, False),
        (4, 1, 64, 32, True),
        (7, 1, 64, 16, False),
        (2, 1, 96, 32, True),
    ],
)
def test_any_group(
    twin: str, num_splits: int, heads: int, kv_heads: int, dim: int, block_size: int, has_norm: bool
) -> None:
    case = fused_case(
        [33, 1, 100],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        block_size=block_size,
        has_norm=has_norm,
        padding=2,
    )
    case.check(case.run(twin, plan_of(num_splits)), TOLERANCE[torch.float32])


@pytest.mark.parametrize("num_splits, tiles_per_split", [(1, 1), (2, 1), (3, 2), (8, 1), (8, 2)])
@pytest.mark.parametrize("length", [1, 2, 32, 33, 34, 64, 65, 97, 130])
def test_splits_cover_the_context_once(num_splits: int, tiles_per_split: int, length: int) -> None:
    case = fused_case([length], num_heads=2, num_kv_heads=1, head_dim=64)
    case.check(case.run("triton", plan_of(num_splits, tiles_per_split)), TOLERANCE[torch.float32])


@pytest.mark.parametrize("twin, dtype", [("torch", torch.float64), ("torch", torch.float16), ("triton", torch.float16)])
def test_other_dtypes(twin: str, dtype: torch.dtype) -> None:
    case = fused_case([70, 130], num_heads=4, num_kv_heads=2, head_dim=64, dtype=dtype, padding=1)
    case.check(case.run(twin, plan_of(2)), TOLERANCE[dtype])


def test_both_twins_write_the_same_cache() -> None:
    """What later steps read is rounded as the token's own step rounded it."""
    cases = [fused_case([40, 7], num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float16) for _ in range(2)]
    for twin, case in zip(("torch", "triton"), cases, strict=True):
        case.run(twin, plan_of(2))
    written = cases[0].k_cache.nan_to_num(0.0)
    torch.testing.assert_close(cases[1].k_cache.nan_to_num(0.0), written, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("twin", ["torch", "triton"])
def test_the_inputs_stay_as_they_are(twin: str) -> None:
    case = fused_case([40], num_heads=4, num_kv_heads=2, head_dim=64)
    before = case.qkv.clone()
    case.run(twin, plan_of(2))
    assert torch.equal(case.qkv, before)


@pytest.mark.parametrize("num_splits", [2, 4, 8])
def test_contexts_of_one_batch_use_as_many_splits_as_their_own_length_asks_for(num_splits: int) -> None:
    """Bit by bit what each gets alone: a neighbour's length and padding change nothing."""
    contexts, plan = [1, 300, 64, 65, 500, 130], plan_of(num_splits, tiles_per_split=2)
    case = fused_case(contexts, num_heads=2, num_kv_heads=1, head_dim=64, padding=2)
    out = case.run("triton", plan)
    case.check(out, TOLERANCE[torch.float32])
    for row in range(len(contexts)):
        names = ("qkv", "positions", "block_tables", "seq_lens", "slot_mapping")
        alone = replace(case, **{name: getattr(case, name)[row : row + 1] for name in names})
        assert torch.equal(alone.run("triton", plan)[0], out[row])


@pytest.mark.parametrize("max_registers", [None, 96])
def test_the_plan_says_how_many_registers_a_thread_may_hold(
    max_registers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, object]] = []

    class Launch:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **options: seen.append(options)

    monkeypatch.setattr(fused_decode, "_fused_decode_kernel", Launch())
    case = fused_case([40], num_heads=2, num_kv_heads=1, head_dim=64)
    case.run("triton", replace(plan_of(2), max_registers=max_registers))
    assert seen[0].get("maxnreg") == max_registers


def mixed_case() -> FusedCase:
    return fused_case([3, 300, 64, 1, 500, 65], num_heads=4, num_kv_heads=2, head_dim=64, padding=2)


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("twin", ["torch", "triton"])
def test_any_order_of_requests_gives_the_same_bits(twin: str, num_splits: int) -> None:
    expected, plan = mixed_case(), plan_of(num_splits)
    out = expected.run(twin, plan)
    expected.check(out, TOLERANCE[torch.float32])
    shuffled = torch.randperm(8, generator=torch.Generator().manual_seed(1)).int()
    for order in (longest_first(expected.seq_lens), shuffled):
        case = mixed_case()
        assert torch.equal(case.run(twin, plan, order=order), out)
        for cache, before in ((case.k_cache, expected.k_cache), (case.v_cache, expected.v_cache)):
            torch.testing.assert_close(cache, before, rtol=0, atol=0, equal_nan=True)


def test_a_program_takes_the_request_that_the_order_names() -> None:
    """What an order leaves out, which no caller's does, nobody computes."""
    case = mixed_case()
    order = torch.tensor([4, 1, 2, 7, 0, 0, 0, 4], dtype=torch.int32)
    out = case.run("triton", plan_of(1), order=order)
    named = torch.zeros(8, dtype=torch.bool)
    named[order.long()] = True
    torch.testing.assert_close(out[named].double(), case.expected[named], rtol=1e-5, atol=1e-5)
    assert (out[~named] == UNTOUCHED).all()


@pytest.mark.parametrize("twin", ["torch", "triton"])
def test_an_order_of_another_batch_is_refused(twin: str) -> None:
    case = fused_case([4, 9], num_heads=2, num_kv_heads=1, head_dim=64)
    wrong = (torch.arange(3).int(), torch.arange(2), torch.arange(4).int()[::2], torch.arange(2).int()[None])
    for order in wrong:
        with pytest.raises(ValueError, match=r"order must be contiguous int32 \[2\]"):
            case.run(twin, plan_of(1), order=order)


def test_with_an_order_the_heads_of_a_request_start_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    grids: list[tuple[int, ...]] = []

    class Launch:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *args, **options: None

    monkeypatch.setattr(fused_decode, "_fused_decode_kernel", Launch())
    case = fused_case([40, 3, 5], num_heads=4, num_kv_heads=2, head_dim=64)
    case.run("triton", plan_of(4))
    case.run("triton", plan_of(4), order=longest_first(case.seq_lens))
    assert grids == [(3, 2, 4), (2, 3, 4)]


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8])
def test_batches_that_were_measured_so_start_the_longest_contexts_first(cache_dtype: torch.dtype) -> None:
    table = measured(cache_dtype)[128]
    # from somewhere on all do; one context more or less is nothing to a batch of many
    first = min(pairs for pairs, choice in table.items() if choice.ordered)
    assert 256 < first <= 512 and all(choice.ordered == (pairs >= first) for pairs, choice in table.items())
    for batch in range(1, 1025):
        choice = decode_choice(batch, 8, 128, torch.bfloat16, cache_dtype)
        assert not choice.ordered or (choice.fused and choice.plan.num_splits == 1)
        # as many pairs as the first such choice is nearer to than that of 256, the last of the others
        assert choice.ordered == (batch * 8 > (256 * first) ** 0.5)
        assert not decode_choice(batch, 3, 64, torch.bfloat16, cache_dtype).ordered
        assert not decode_choice(batch, 8, 128, torch.float32).ordered


def test_a_launch_leaves_the_next_one_nothing_to_trip_over() -> None:
    case = fused_case([97, 40], num_heads=4, num_kv_heads=2, head_dim=64, padding=1)
    for num_splits in (4, 4, 2, 8):
        case.check(case.run("triton", plan_of(num_splits)), TOLERANCE[torch.float32])


def test_more_pairs_than_counters_are_refused_and_not_planned() -> None:
    case = fused_case([4], num_heads=2, num_kv_heads=1, head_dim=64)
    q, k, v = (x.expand(MAX_SPLIT_PAIRS + 1, -1, -1) for x in case.qkv.split((2, 1, 1), dim=1))
    with pytest.raises(ValueError, match="take the plan from decode_plan"):
        fused_decode_attention.triton(  # type: ignore[attr-defined]  # the twins ride on the function object
            q,
            k,
            v,
            None,
            0.0,
            case.cos_sin,
            case.positions,
            case.k_cache,
            case.v_cache,
            case.block_tables,
            case.seq_lens,
            case.slot_mapping,
            q,
            scale=1.0,
            plan=plan_of(2),
        )
    assert decode_plan(MAX_SPLIT_PAIRS + 1, 1, 64, torch.bfloat16).num_splits == 1


def test_float64_is_refused_by_triton_with_the_remedy() -> None:
    case = fused_case([4], num_heads=2, num_kv_heads=1, head_dim=64, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"float64 call fused_decode_attention\.torch"):
        case.run("triton", plan_of(1))


def test_dependent_launch_is_refused_where_the_device_lacks_it() -> None:
    case = fused_case([4], num_heads=2, num_kv_heads=1, head_dim=64)
    assert not has_pdl(case.qkv)
    with pytest.raises(ValueError, match="has_pdl"):
        case.run("triton", plan_of(1), pdl=True)


@pytest.mark.parametrize("num_kv_heads", [1, 3, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8])
def test_a_plan_splits_by_a_power_of_two_and_only_as_many_pairs_as_there_are_counters(
    num_kv_heads: int, head_dim: int, cache_dtype: torch.dtype
) -> None:
    batches = [*range(1, 3000), MAX_SPLIT_PAIRS // num_kv_heads + 1, 10 * MAX_SPLIT_PAIRS]
    for batch in batches:
        plan = decode_choice(batch, num_kv_heads, head_dim, torch.bfloat16, cache_dtype).plan
        assert plan.num_splits in {1 << i for i in range(MAX_SPLITS.bit_length())}
        assert plan.num_splits == 1 or batch * num_kv_heads <= MAX_SPLIT_PAIRS


@pytest.mark.parametrize("num_kv_heads", [1, 3, 8])
def test_the_split_bound_is_a_power_of_two_that_falls_with_the_batch(num_kv_heads: int) -> None:
    counts = [split_bound(batch, num_kv_heads) for batch in range(1, 3000)]
    assert counts == sorted(counts, reverse=True)
    assert set(counts) <= {1 << i for i in range(MAX_SPLITS.bit_length())}
    assert counts[-1] == 1 and split_bound(MAX_SPLIT_PAIRS + 1, 1, programs=1 << 30) == 1


@pytest.mark.parametrize("head_dim, num_kv_heads", [(128, 8), (64, 3)])
def test_a_batch_takes_the_choice_of_the_nearest_measured_one(head_dim: int, num_kv_heads: int) -> None:
    table = measured(torch.bfloat16)[head_dim]
    for batch in range(1, 2000):
        pairs = batch * num_kv_heads
        nearest = min(table, key=lambda each: max(pairs / each, each / pairs))
        assert decode_choice(batch, num_kv_heads, head_dim, torch.bfloat16) == table[nearest]
    # what counts is how many pairs there are
    assert decode_choice(32, 1, head_dim, torch.bfloat16) == decode_choice(4, 8, head_dim, torch.bfloat16)


@pytest.mark.parametrize("head_dim, dtype", [(64, torch.float32), (128, torch.float32), (256, torch.bfloat16)])
@pytest.mark.parametrize("batch", [1, 32, 256])
def test_what_nobody_measured_is_fused_in_tiles_that_fit(head_dim: int, dtype: torch.dtype, batch: int) -> None:
    choice = decode_choice(batch, 8, head_dim, dtype)
    plan = choice.plan
    assert choice.fused and not choice.ahead
    assert 2 * plan.block_n * plan.num_stages * head_dim * dtype.itemsize <= 200 << 10


@pytest.mark.parametrize("twin", ["torch", "triton"])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_cache_of_eight_bit_floats(twin: str, num_splits: int) -> None:
    """The new token's key and value count as the cache keeps them, in this step as in later ones."""
    # Triton's interpreter does not carry when it rounds to 8-bit floats
    exact = twin == "triton"
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "cache_dtype": FP8, "padding": 2}
    case = fused_case([33, 1, 130], has_norm=not exact, exact=exact, **sizes)
    case.check(case.run(twin, plan_of(num_splits)), TOLERANCE[torch.float32])


@pytest.mark.parametrize("twin", ["torch", "triton"])
def test_a_cache_of_eight_bit_floats_takes_what_is_too_large_as_its_largest(twin: str) -> None:
    case = fused_case([20], num_heads=2, num_kv_heads=1, head_dim=64, cache_dtype=FP8, has_norm=False)
    case.qkv[:, 2:] *= 1e4
    case.run(twin, plan_of(1))
    slot = int(case.slot_mapping[0])
    for cache in (case.k_cache, case.v_cache):
        written = cache[slot // 16, slot % 16].float()
        assert written.isfinite().all() and written.abs().max() == 448.0


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_cache_of_eight_bit_floats_has_plans_of_its_own_that_fit(head_dim: int) -> None:
    for batch in (1, 8, 32, 64, 256, 2000):
        plan = decode_choice(batch, 8, head_dim, torch.bfloat16, FP8).plan
        assert 2 * plan.block_n * plan.num_stages * head_dim <= 100 << 10
        # a cache in the dtype of the queries changes nothing
        plain = decode_choice(batch, 8, head_dim, torch.bfloat16)
        assert decode_choice(batch, 8, head_dim, torch.bfloat16, torch.bfloat16) == plain
    # what nobody measured stays so
    assert decode_choice(4, 8, head_dim, torch.float32, FP8) == decode_choice(4, 8, head_dim, torch.float32)
