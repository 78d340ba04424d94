"""Mixed paged attention: both twins against dense float64 attention, over a poisoned cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv2_kernels.attention import _reference, mixed_plan
from mrv2_kernels.attention.mixed_plan import MixedPlan
from mrv2_kernels.attention.paged import paged_attention
from mrv2_kernels.attention.plan import MAX_SPLIT_PAIRS, arrivals_of
from paged_cases import UNTOUCHED, PagedCase, paged_case

TWINS = ("torch", "triton")
FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3}


def _attend(twin: str, case: PagedCase, num_splits: int | None = None) -> torch.Tensor:
    return case.attend(getattr(paged_attention, twin), num_splits=num_splits)


def _check(twin: str, case: PagedCase, num_splits: int | None = None) -> None:
    out = _attend(twin, case, num_splits)
    tolerance = TOLERANCE[case.q.dtype]
    num_tokens = len(case.expected)
    torch.testing.assert_close(out[:num_tokens].double(), case.expected, rtol=tolerance, atol=tolerance)
    assert (out[num_tokens:] == UNTOUCHED).all(), "rows of no request must stay as they were"


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize(
    "heads, kv_heads, dim, block_size",
    [(2, 2, 64, 16), (4, 2, 128, 16), (9, 3, 64, 16), (4, 1, 64, 32), (7, 1, 64, 16), (2, 1, 96, 32)],
)
def test_mixed_batch_of_any_group(twin: str, heads: int, kv_heads: int, dim: int, block_size: int) -> None:
    _check(
        twin,
        paged_case(
            [1, 0, 17, 5, 1],
            [33, 0, 17, 41, 1],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            block_size=block_size,
            padding=2,
        ),
    )


@pytest.mark.parametrize("twin", TWINS)
def test_chunked_prefill_longer_than_a_tile(twin: str) -> None:
    _check(twin, paged_case([50, 1, 70], [115, 70, 70], num_heads=3, num_kv_heads=1, head_dim=64))


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("length", [1, 15, 16, 31, 32, 33])
def test_edges_of_blocks_and_tiles(twin: str, length: int) -> None:
    _check(twin, paged_case([length, 1, 2], [length, length, length + 1], num_heads=4, num_kv_heads=2, head_dim=64))


@pytest.mark.parametrize("num_splits", [1, 2, 8])
@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 2, 64), (3, 1, 96)])
def test_programs_share_a_context(
    heads: int, kv_heads: int, dim: int, num_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contexts of no whole tile, of less than a share, of shares exactly, and with a last one that is short."""
    monkeypatch.setattr(mixed_plan, "_MIN_SHARE", 128)
    shape = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim}
    case = paged_case([1, 0, 20, 40, 1, 3, 33], [9, 0, 148, 296, 256, 520, 33], padding=2, **shape)
    _check("triton", case, num_splits)
    arrivals = arrivals_of(torch.device("cpu"))
    assert not arrivals.any(), "the next launch finds the counters as it needs them"
    # in the order of the shares, not of who arrives
    assert torch.equal(_attend("triton", case, num_splits), _attend("triton", case, num_splits))


def test_shares_of_a_cache_of_eight_bit_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_plan, "_MIN_SHARE", 64)
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.float16}
    _check("triton", paged_case([1, 40], [300, 420], cache_dtype=FP8, **shape), 4)


def test_how_many_share_is_a_matter_of_padded_sizes() -> None:
    """Steps of few tokens need them; steps that fill the device, and more programs than counters, do without."""

    # Qwen3-0.6B: 8 KV heads, 32 queries a block
    def plan(num_tokens: int, num_requests: int) -> MixedPlan:
        return mixed_plan.mixed_plan(num_tokens, num_requests, 8, 2, 1024, torch.bfloat16)

    found = {tokens: plan(tokens, 64).num_splits for tokens in (32, 64, 128, 320, 576, 1024, 8192)}
    assert found == {32: 8, 64: 8, 128: 8, 320: 4, 576: 2, 1024: 2, 8192: 1}
    assert plan(32, MAX_SPLIT_PAIRS // 8).num_splits == 1
    assert all(splits & (splits - 1) == 0 for splits in found.values())
    assert {plan(tokens, 64).min_share for tokens in (32, 320)} == {512, 1024}
    # what rows an engine has beyond its tokens costs nothing
    assert plan(96, 512).num_programs == plan(96, 96).num_programs == 1056
    assert plan(8192, 512).num_programs == (512 + (8192 - 512) // 32) * 8


@settings(deadline=None)
@given(st.lists(st.integers(0, 70), min_size=1, max_size=40), st.integers(0, 40), st.integers(0, 50))
def test_a_launch_has_programs_for_all_blocks(query_lens: list[int], more_requests: int, more_tokens: int) -> None:
    num_tokens = sum(query_lens) + more_tokens
    if num_tokens:
        plan = mixed_plan.mixed_plan(
            num_tokens, len(query_lens) + more_requests, 2, 4, max(query_lens), torch.bfloat16, num_splits=1
        )
        block_q = plan.tile.block_m // 4
        assert plan.num_programs >= 2 * sum(-(-n // block_q) for n in query_lens)


@pytest.mark.parametrize("num_splits", [2, 8])
def test_a_program_goes_on_while_there_is_work(num_splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of no request, of several, of the shares of one; any number of programs gives the same bits."""
    monkeypatch.setattr(mixed_plan, "_MIN_SHARE", 32)
    case = paged_case([1, 0, 40, 3], [100, 0, 200, 3], num_heads=4, num_kv_heads=2, head_dim=64, padding=2)
    outs = []
    for most in (1, 6, 1 << 20):
        monkeypatch.setattr(mixed_plan, "_MAX_PROGRAMS", most)
        outs.append(_attend("triton", case, num_splits))
    _check("triton", case, num_splits)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def test_more_requests_than_a_program_looks_at_at_once() -> None:
    lengths = {0: 1, 7: 3, 128: 1, 170: 2, 299: 1}
    query_lens = [lengths.get(request, 0) for request in range(300)]
    case = paged_case(query_lens, [2 * n for n in query_lens], num_heads=2, num_kv_heads=1, head_dim=64)
    _check("triton", case)


@pytest.mark.parametrize("twin", TWINS)
def test_only_one_request(twin: str) -> None:
    _check(twin, paged_case([6], [6], num_heads=2, num_kv_heads=1, head_dim=64))


@pytest.mark.parametrize("twin, dtype", [("torch", torch.float64), ("torch", torch.float16), ("triton", torch.float16)])
def test_other_dtypes(twin: str, dtype: torch.dtype) -> None:
    _check(twin, paged_case([1, 20], [40, 25], num_heads=4, num_kv_heads=2, head_dim=64, dtype=dtype, padding=1))


def test_reference_in_chunks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_reference, "MAX_SCORES", 1)
    case = paged_case(
        [40, 40, 1], [60, 40, 9], num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float64, padding=1
    )
    _check("torch", case)


def test_a_request_does_not_depend_on_its_neighbours() -> None:
    def shape(dtype: torch.dtype) -> dict[str, object]:
        return {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": dtype}

    case = paged_case([1, 1, 9, 1], [50, 60, 30, 7], **shape(torch.float64))
    together = _attend("torch", case)
    starts = case.query_start_loc.tolist()
    for request in range(4):
        rows = slice(starts[request], starts[request + 1])
        alone = torch.empty_like(together[rows])
        paged_attention.torch(
            case.q[rows],
            case.k_cache,
            case.v_cache,
            case.block_tables[request : request + 1],
            torch.tensor([0, rows.stop - rows.start], dtype=torch.int32),
            case.seq_lens[request : request + 1],
            alone,
            scale=case.scale,
            max_query_len=case.max_query_len,
        )
        torch.testing.assert_close(alone, together[rows], rtol=1e-13, atol=1e-13)


def test_splits_that_no_counters_or_tiles_are_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = paged_case([1], [4], num_heads=2, num_kv_heads=1, head_dim=64)
    with pytest.raises(ValueError, match="num_splits=3 must be a power of two"):
        _attend("triton", case, 3)
    monkeypatch.setattr(mixed_plan, "MAX_SPLIT_PAIRS", 1)
    with pytest.raises(ValueError, match="more than 1 pairs"):
        _attend("triton", case, 2)


def test_float64_is_refused_by_triton_with_the_remedy() -> None:
    case = paged_case([1], [4], num_heads=2, num_kv_heads=1, head_dim=64, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"float64 call paged_attention\.torch"):
        _attend("triton", case)


def test_cache_of_another_dtype_is_refused() -> None:
    case = paged_case([1], [4], num_heads=2, num_kv_heads=1, head_dim=64)
    with pytest.raises(ValueError, match=r"KV cache is torch\.float16"):
        paged_attention.triton(
            case.q,
            case.k_cache.half(),
            case.v_cache.half(),
            case.block_tables,
            case.query_start_loc,
            case.seq_lens,
            case.empty_out(),
            scale=1.0,
            max_query_len=1,
        )


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_cache_of_eight_bit_floats_is_read_as_it_is(twin: str, dtype: torch.dtype) -> None:
    lengths = {"query_lens": [1, 0, 17, 5, 40], "seq_lens": [33, 0, 17, 101, 40]}
    for dim in (64, 96):
        case = paged_case(**lengths, num_heads=6, num_kv_heads=2, head_dim=dim, dtype=dtype, cache_dtype=FP8, padding=1)
        _check(twin, case)


def test_a_cache_of_another_dtype_is_refused() -> None:
    case = paged_case([1], [3], num_heads=2, num_kv_heads=1, head_dim=64, cache_dtype=torch.float16)
    with pytest.raises(ValueError, match="must be torch.float32 or torch.float8_e4m3fn"):
        _attend("triton", case)
