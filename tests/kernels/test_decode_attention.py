"""Split-KV decode attention: both twins against dense float64 attention, over a poisoned cache."""

from __future__ import annotations

import pytest
import torch

from mrv2_kernels.attention.decode import MAX_SPLIT_PAIRS, MAX_SPLITS, decode_num_splits, paged_attention_decode
from paged_cases import PagedCase, paged_case

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3}


def _decode(
    twin: str, case: PagedCase, num_splits: int, partial: tuple[torch.Tensor, torch.Tensor] | None = None
) -> None:
    """Decode with one row a request, padding rows included, and compare; rows of empty contexts must be zeros."""
    batch = len(case.seq_lens)
    out = case.empty_out()[:batch]
    getattr(paged_attention_decode, twin)(
        case.q[:batch],
        case.k_cache,
        case.v_cache,
        case.block_tables,
        case.seq_lens,
        out,
        scale=case.scale,
        num_splits=num_splits,
        partial=partial,
    )
    expected = torch.zeros(out.shape, dtype=torch.float64)
    expected[: len(case.expected)] = case.expected
    tolerance = TOLERANCE[case.q.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("twin", ["torch", "triton"])
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize(
    "heads, kv_heads, dim, block_size",
    [(2, 2, 64, 16), (4, 2, 128, 16), (9, 3, 64, 16), (4, 1, 64, 32), (7, 1, 64, 16), (2, 1, 96, 32)],
)
def test_any_group(twin: str, num_splits: int, heads: int, kv_heads: int, dim: int, block_size: int) -> None:
    case = paged_case(
        [1, 1, 1],
        [33, 1, 100],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        block_size=block_size,
        padding=2,
    )
    _decode(twin, case, num_splits)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 8])
@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 97])
def test_shares_cover_the_context_once(num_splits: int, length: int) -> None:
    _decode("triton", paged_case([1], [length], num_heads=2, num_kv_heads=1, head_dim=64), num_splits)


@pytest.mark.parametrize("twin, dtype", [("torch", torch.float64), ("torch", torch.float16), ("triton", torch.float16)])
def test_other_dtypes(twin: str, dtype: torch.dtype) -> None:
    case = paged_case([1, 1], [70, 130], num_heads=4, num_kv_heads=2, head_dim=64, dtype=dtype, padding=1)
    _decode(twin, case, num_splits=2)


def test_a_launch_leaves_the_next_one_nothing_to_trip_over() -> None:
    case = paged_case([1, 1], [97, 40], num_heads=4, num_kv_heads=2, head_dim=64, padding=1)
    for num_splits in (4, 4, 2, 8):
        _decode("triton", case, num_splits)


def test_more_pairs_than_counters_are_refused() -> None:
    case = paged_case([1], [4], num_heads=2, num_kv_heads=1, head_dim=64)
    q = case.q.expand(MAX_SPLIT_PAIRS + 1, -1, -1)
    with pytest.raises(ValueError, match="take num_splits from decode_num_splits"):
        paged_attention_decode.triton(
            q, case.k_cache, case.v_cache, case.block_tables, case.seq_lens, q, scale=1.0, num_splits=2
        )


def test_scratch_may_be_handed_in_and_hold_anything() -> None:
    case = paged_case([1, 1], [5, 90], num_heads=4, num_kv_heads=2, head_dim=64, padding=1)
    partial = (torch.full((3, 4, 4, 64), torch.nan), torch.full((3, 4, 4), torch.nan))
    _decode("triton", case, num_splits=4, partial=partial)


def test_float64_is_refused_by_triton_with_the_remedy() -> None:
    case = paged_case([1], [4], num_heads=2, num_kv_heads=1, head_dim=64, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"float64 call paged_attention_decode\.torch"):
        _decode("triton", case, num_splits=1)


@pytest.mark.parametrize("num_kv_heads", [1, 3, 8])
def test_split_count_is_a_bounded_power_of_two_that_falls_with_the_batch(num_kv_heads: int) -> None:
    counts = [decode_num_splits(batch, num_kv_heads) for batch in range(1, 600)]
    assert counts == sorted(counts, reverse=True)
    assert set(counts) <= {1 << i for i in range(MAX_SPLITS.bit_length())}
    assert counts[-1] == 1


@pytest.mark.parametrize("twin", ["torch", "triton"])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_cache_of_eight_bit_floats_is_read_as_it_is(twin: str, num_splits: int) -> None:
    case = paged_case(
        [1, 1, 1], [33, 1, 130], num_heads=4, num_kv_heads=2, head_dim=64, cache_dtype=torch.float8_e4m3fn, padding=1
    )
    _decode(twin, case, num_splits)
