"""Attention kernels, compiled, against dense float64 attention over a poisoned cache."""

from __future__ import annotations

import pytest
import torch

from mrv2_kernels.attention import mixed_plan
from mrv2_kernels.attention.decode import decode_num_splits, paged_attention_decode
from mrv2_kernels.attention.paged import paged_attention
from paged_cases import UNTOUCHED, PagedCase, paged_case

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
# query heads, KV heads, head size: Qwen3-0.6B, SmolLM2-135M, and odd groups
SHAPES = [(16, 8, 128), (9, 3, 64), (7, 1, 128), (4, 4, 64)]


def _case(query_lens: list[int], seq_lens: list[int], shape: tuple[int, int, int], **options: object) -> PagedCase:
    heads, kv_heads, dim = shape
    arguments: dict[str, object] = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "device": "cuda"}
    return paged_case(query_lens, seq_lens, **(arguments | options))


def _decode(case: PagedCase, num_splits: int, out: torch.Tensor) -> None:
    paged_attention_decode(
        case.q[: len(out)],
        case.k_cache,
        case.v_cache,
        case.block_tables,
        case.seq_lens,
        out,
        scale=case.scale,
        num_splits=num_splits,
    )


def _check(out: torch.Tensor, case: PagedCase) -> None:
    tolerance = TOLERANCE[case.q.dtype]
    actual = out[: len(case.expected)].double()
    torch.testing.assert_close(actual, case.expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", SHAPES)
def test_mixed_batch(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    query_lens = [1, 0, 17, 300, 1, 5, 64, 1]
    seq_lens = [1, 0, 17, 900, 2048, 4096, 64, 63]
    case = _case(query_lens, seq_lens, shape, dtype=dtype, padding=3)
    # an upper bound picks the tile shape; the answer must not depend on it
    for max_query_len in (300, 2048):
        out = case.attend(paged_attention, max_query_len=max_query_len)
        _check(out, case)
        assert (out[len(case.expected) :] == UNTOUCHED).all()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_splits", [1, 2, 8])
def test_programs_share_the_contexts_of_a_mixed_batch(
    shape: tuple[int, int, int], dtype: torch.dtype, num_splits: int
) -> None:
    query_lens = [1, 0, 17, 300, 1, 5, 64, 1, 128, 33]
    seq_lens = [1, 0, 17, 900, 2048, 4096, 64, 257, 2048, 1056]
    case = _case(query_lens, seq_lens, shape, dtype=dtype, padding=3)
    outs = [case.attend(paged_attention, max_query_len=300, num_splits=num_splits) for _ in range(20)]
    _check(outs[0], case)
    assert (outs[0][len(case.expected) :] == UNTOUCHED).all()
    assert all(torch.equal(out, outs[0]) for out in outs), "the order of the sum is that of the shares"


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_splits", [2, 8])
def test_a_program_goes_on_while_there_is_work(
    shape: tuple[int, int, int], dtype: torch.dtype, num_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any number of programs gives the same bits: an item begins in memory that the one before has done with."""
    case = _case([1] * 70 + [0, 64, 5, 130], [300] * 70 + [0, 2048, 3000, 900], shape, dtype=dtype, padding=3)
    outs = []
    for most in (1, 264, mixed_plan._MAX_PROGRAMS, 1 << 20):
        monkeypatch.setattr(mixed_plan, "_MAX_PROGRAMS", most)
        outs += [case.attend(paged_attention, num_splits=num_splits) for _ in range(5)]
    _check(outs[0], case)
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_splits", [1, 4, 32])
def test_decode(shape: tuple[int, int, int], dtype: torch.dtype, num_splits: int) -> None:
    seq_lens = [1, 15, 16, 17, 63, 64, 65, 128, 1000, 4096]
    case = _case([1] * len(seq_lens), seq_lens, shape, dtype=dtype, padding=2)
    out = case.empty_out()[: len(case.seq_lens)]
    _decode(case, num_splits, out)
    _check(out, case)
    assert (out[len(seq_lens) :] == 0).all(), "padding rows must be zeros"


@pytest.mark.parametrize("batch", [1, 32, 256])
@pytest.mark.parametrize("block_size", [16, 32])
def test_decode_of_a_batch_with_the_usual_split_count(batch: int, block_size: int) -> None:
    seq_lens = torch.randint(1, 1024, (batch,), generator=torch.Generator().manual_seed(batch)).tolist()
    case = _case([1] * batch, seq_lens, (16, 8, 128), dtype=torch.bfloat16, block_size=block_size)
    out = case.empty_out()
    _decode(case, decode_num_splits(batch, 8), out)
    _check(out, case)


def test_a_captured_decode_follows_lengths_and_tables_that_change() -> None:
    first = _case([1] * 4, [100, 3, 50, 700], (16, 8, 128), dtype=torch.bfloat16, seed=1)
    second = _case([1] * 4, [7, 650, 120, 40], (16, 8, 128), dtype=torch.bfloat16, seed=2)
    rows = max(len(first.k_cache), len(second.k_cache))
    width = max(first.block_tables.shape[1], second.block_tables.shape[1])
    k_cache, v_cache = torch.zeros(2, rows, *first.k_cache.shape[1:], device="cuda", dtype=torch.bfloat16)
    tables = torch.zeros(4, width, device="cuda", dtype=torch.int32)
    static = PagedCase(
        q=first.q.clone(),
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=tables,
        query_start_loc=first.query_start_loc,
        seq_lens=first.seq_lens.clone(),
        scale=first.scale,
        max_query_len=1,
        expected=first.expected,
    )
    out = static.empty_out()
    _decode(static, 8, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _decode(static, 8, out)
    for case in (first, second):
        static.q.copy_(case.q)
        static.seq_lens.copy_(case.seq_lens)
        tables[:, : case.block_tables.shape[1]] = case.block_tables
        k_cache[: len(case.k_cache)] = case.k_cache
        v_cache[: len(case.v_cache)] = case.v_cache
        graph.replay()
        _check(out, case)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", SHAPES)
def test_a_cache_of_eight_bit_floats(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    kept = {"dtype": dtype, "cache_dtype": torch.float8_e4m3fn, "padding": 3}
    case = _case([1, 0, 17, 300, 1, 64], [1, 0, 17, 900, 4096, 64], shape, **kept)
    _check(case.attend(paged_attention, max_query_len=300), case)
    case = _case([1] * 5, [1, 31, 900, 2048, 4096], shape, **kept)
    for num_splits in (1, 8):
        out = case.empty_out()[: len(case.seq_lens)]
        _decode(case, num_splits, out)
        _check(out, case)
