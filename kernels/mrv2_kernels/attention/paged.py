"""Paged attention of a mixed batch: prefill chunks, decodes and whatever lies between, in one launch.

An item of work is a block of consecutive queries of one request and one KV head, or a share of its context; the heads
of the group that share the KV head are packed beside the queries (row = query * group + head).  Items are counted on
the device, those of the last request first, a request's last block first, its shares and the heads next to each other:
long contexts, which a chunk of a prompt at the end of the batch has, start first.  Each program counts up to its own
item.  The grid depends on padded sizes alone.

Query i of a request stands at position seq_len - query_len + i and sees the keys up to there.

Where a step has few tokens, up to NUM_SPLITS programs share a block's context, for one alone takes some 1.1 us for
each 64 keys on an H200.  They share the tiles that every query of the block sees whole; the last one also
takes those around the diagonal.  Each leaves a partial output and its base-2 log-sum-exp, which the last to arrive
combines in the order of the shares, as in `decode`.  A context too short for two shares is written directly.  How
contexts are shared follows from padded sizes and a request's own lengths, never from its neighbours.

How many share, and the tile, are chosen in `mixed_plan`.

Legend: T_pad / B_pad = tokens / requests with padding, NB = blocks, BS = block size, MB = blocks a
row, Hq / Hkv = query / KV heads, D = head size.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import next_power_of_2, tl, triton
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.attention._reference import attend_paged
from mrv2_kernels.attention._tiles import LOG2_E, TileShape, attend_tiles, check_inputs
from mrv2_kernels.attention.mixed_plan import mixed_plan
from mrv2_kernels.attention.plan import arrivals_of
from mrv2_kernels.gemm.pdl import gdc_launch_dependents, gdc_wait
from mrv2_kernels.gemm.unpack import unpacks


@triton.jit
def _shares_of(query_len, seq_len, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr, MIN_SHARE):
    """Return (keys of a share, shares) of the blocks of a request, or of many: as its last block needs them."""
    last_query = tl.maximum(query_len - 1, 0) // BLOCK_Q * BLOCK_Q
    num_whole = (seq_len - query_len + last_query + 1) // BLOCK_N * BLOCK_N
    share = tl.maximum(tl.cdiv(tl.cdiv(num_whole, NUM_SPLITS), BLOCK_N) * BLOCK_N, MIN_SHARE)
    return share, tl.maximum(tl.cdiv(num_whole, share), 1)


@triton.jit
def _find_request(
    query_start_loc_ptr,
    seq_lens_ptr,
    num_requests,
    item,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_SHARE: tl.constexpr,
):
    """Return (the request of an item of work, which of its items that is, items of all), the last request first.

    The request is -1 where there are no more than `item` of them.  Every program looks at all requests: loads that
    wait for each other, as a binary search has them, take longer.
    """
    num_items = 0
    passed = 0
    passed_items = 0
    for first in range(0, num_requests, 128):
        requests = num_requests - 1 - first - tl.arange(0, 128)
        is_request = requests >= 0
        starts = tl.load(query_start_loc_ptr + requests, mask=is_request, other=0)
        query_lens = tl.load(query_start_loc_ptr + requests + 1, mask=is_request, other=0) - starts
        items = tl.cdiv(query_lens, BLOCK_Q)
        if NUM_SPLITS > 1:
            seq_lens = tl.load(seq_lens_ptr + requests, mask=is_request, other=0)
            items *= _shares_of(query_lens, seq_lens, BLOCK_Q, BLOCK_N, NUM_SPLITS, MIN_SHARE)[1]
        is_passed = is_request & (num_items + tl.cumsum(items) <= item)
        passed += tl.sum(is_passed.to(tl.int32))
        passed_items += tl.sum(tl.where(is_passed, items, 0))
        num_items += tl.sum(items)
    return num_requests - 1 - passed, item - passed_items, num_items


@triton.jit
def _combine(
    partial_out_ptr,
    partial_lse_ptr,
    # [M]
    out_rows,
    # [M]: of each row's first share
    parts,
    num_shares,
    # [M]
    in_block,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """Store the shares of a block's rows combined: other programs wrote them, they are read in L2."""
    splits = tl.arange(0, NUM_SPLITS)
    lse = tl.load(
        partial_lse_ptr + parts[:, None] + splits[None, :],
        mask=in_block[:, None] & (splits < num_shares)[None, :],
        other=float("-inf"),
        cache_modifier=".cg",
    )
    # rows of no query weigh nothing, by 1 and not by 0
    weights = tl.exp2(lse - tl.where(in_block, tl.max(lse, axis=1), 0.0)[:, None])
    weights = tl.where(in_block[:, None], weights, 1.0)
    weights = weights / tl.sum(weights, axis=1)[:, None]
    # a few columns at a time, whose loads wait for nothing, nor for each other: registers hold no more
    COLUMNS: tl.constexpr = 64
    for first in tl.range(0, BLOCK_D, COLUMNS):
        dims = first + tl.arange(0, COLUMNS)
        mask = in_block[:, None] & (dims < HEAD_DIM)[None, :]
        out = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
        for split in tl.static_range(NUM_SPLITS):
            weight = tl.sum(tl.where(splits[None, :] == split, weights, 0.0), axis=1)
            partial_ptrs = partial_out_ptr + (parts + split)[:, None] * HEAD_DIM + dims[None, :]
            partial = tl.load(partial_ptrs, mask=mask & (split < num_shares), other=0.0, cache_modifier=".cg")
            out += partial * weight[:, None]
        tl.store(out_rows[:, None] + dims[None, :], out.to(out_rows.dtype.element_ty), mask=mask)


@triton.jit
def _attend_item(
    request,
    item,
    kv_head,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    out_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    arrivals_ptr,
    q_stride,
    out_stride,
    table_stride,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_SHARE: tl.constexpr,
    PRECISION: tl.constexpr,
    UNPACK: tl.constexpr,
):
    """Attend a block of queries of `request` over its context, or over a share of that."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    query_start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    seq_len = tl.load(seq_lens_ptr + request)
    num_shares = 1
    split = 0
    if NUM_SPLITS > 1:
        share, num_shares = _shares_of(query_len, seq_len, BLOCK_Q, BLOCK_N, NUM_SPLITS, MIN_SHARE)
        split = item % num_shares
        item = item // num_shares
    # a request's last queries see the most keys: they start first
    block = tl.cdiv(query_len, BLOCK_Q) - 1 - item
    first_query = block * BLOCK_Q
    first_position = seq_len - query_len + first_query
    # tiles that the first query, hence every query, sees whole; then the ones around the diagonal
    num_whole = (first_position + 1) // BLOCK_N * BLOCK_N
    stop = tl.minimum(first_position + BLOCK_Q, seq_len)
    first_key = 0
    stop_whole = num_whole
    if NUM_SPLITS > 1:
        # earlier blocks may need fewer
        num_shares = tl.minimum(tl.maximum(tl.cdiv(num_whole, share), 1), num_shares)
        first_key = split * share
        if split < num_shares - 1:
            stop_whole = first_key + share
            stop = stop_whole

    if split < num_shares:
        rows = tl.arange(0, BLOCK_M)
        dims = tl.arange(0, BLOCK_D)
        queries = first_query + rows // GROUP
        # BLOCK_M need not be a multiple of GROUP: the last rows may belong to the next program
        in_block = (rows < BLOCK_Q * GROUP) & (queries < query_len)
        mask = in_block[:, None] & (dims < HEAD_DIM)[None, :]
        tokens = (query_start + queries).to(tl.int64)
        columns = (kv_head * GROUP + rows % GROUP)[:, None] * HEAD_DIM + dims[None, :]
        q = tl.load(q_ptr + tokens[:, None] * q_stride + columns, mask=mask, other=0.0)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        last_visible = first_position + rows // GROUP
        k_ptr = k_cache_ptr + kv_head * HEAD_DIM
        v_ptr = v_cache_ptr + kv_head * HEAD_DIM
        table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride

        acc, row_max, row_sum = attend_tiles(
            q,
            acc,
            row_max,
            row_sum,
            last_visible,
            k_ptr,
            v_ptr,
            table_ptr,
            first_key,
            stop_whole,
            BLOCK_N,
            scale_log2,
            NUM_KV_HEADS * HEAD_DIM,
            BLOCK_SIZE,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_N,
            False,
            PRECISION,
            UNPACK,
        )
        acc, row_max, row_sum = attend_tiles(
            q,
            acc,
            row_max,
            row_sum,
            last_visible,
            k_ptr,
            v_ptr,
            table_ptr,
            stop_whole,
            stop,
            BLOCK_N,
            scale_log2,
            NUM_KV_HEADS * HEAD_DIM,
            BLOCK_SIZE,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_N,
            True,
            PRECISION,
            UNPACK,
        )
        # an empty context has row_sum 0 and yields zeros
        acc = acc / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
        out_ptrs = out_ptr + tokens[:, None] * out_stride + columns
        if num_shares == 1:
            tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            # [T_pad, Hq, NUM_SPLITS]
            parts = (tokens * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + rows % GROUP) * NUM_SPLITS
            lse = row_max + tl.log2(row_sum)
            tl.store(partial_out_ptr + (parts + split)[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)
            tl.store(partial_lse_ptr + parts + split, lse, mask=in_block)
            # every thread's stores come before the arrival that publishes them
            tl.debug_barrier()
            arrivals = arrivals_ptr + (query_start // BLOCK_Q + request + block) * NUM_KV_HEADS + kv_head
            if tl.atomic_add(arrivals, 1) == num_shares - 1:
                tl.store(arrivals, 0)
                _combine(
                    partial_out_ptr,
                    partial_lse_ptr,
                    out_ptr + tokens * out_stride + (kv_head * GROUP + rows % GROUP) * HEAD_DIM,
                    parts,
                    num_shares,
                    in_block,
                    HEAD_DIM,
                    BLOCK_M,
                    BLOCK_D,
                    NUM_SPLITS,
                )


@triton.jit(do_not_specialize=["num_requests"])
def _paged_attention_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    out_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    arrivals_ptr,
    q_stride,
    out_stride,
    table_stride,
    num_requests,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    # keys that a share has at least, a multiple of BLOCK_N
    MIN_SHARE: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
    UNPACK: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    # before the wait: what launches long before this one's predecessor wrote (`gemm.pdl` says why it is there)
    if PDL:
        gdc_launch_dependents()
    # heads whose keys lie side by side are read side by side
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    at = tl.program_id(0) // NUM_KV_HEADS
    request, item, num_items = _find_request(
        query_start_loc_ptr, seq_lens_ptr, num_requests, at, BLOCK_Q, BLOCK_N, NUM_SPLITS, MIN_SHARE
    )
    # of every program, the idle ones included
    if PDL:
        gdc_wait()
    while request >= 0:
        _attend_item(
            request,
            item,
            kv_head,
            q_ptr,
            k_cache_ptr,
            v_cache_ptr,
            block_tables_ptr,
            query_start_loc_ptr,
            seq_lens_ptr,
            out_ptr,
            partial_out_ptr,
            partial_lse_ptr,
            arrivals_ptr,
            q_stride,
            out_stride,
            table_stride,
            scale_log2,
            NUM_KV_HEADS,
            GROUP,
            BLOCK_SIZE,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_M,
            BLOCK_N,
            NUM_SPLITS,
            MIN_SHARE,
            PRECISION,
            UNPACK,
        )
        at += tl.num_programs(0) // NUM_KV_HEADS
        request = -1
        if at < num_items:
            request, item, num_items = _find_request(
                query_start_loc_ptr, seq_lens_ptr, num_requests, at, BLOCK_Q, BLOCK_N, NUM_SPLITS, MIN_SHARE
            )


def paged_attention_triton(
    # [T_pad, Hq, D], token stride free
    q: torch.Tensor,
    # [NB, BS, Hkv, D], contiguous
    k_cache: torch.Tensor,
    # [NB, BS, Hkv, D], contiguous
    v_cache: torch.Tensor,
    # [B_pad, MB] int32
    block_tables: torch.Tensor,
    # [B_pad + 1] int32, constant over padding requests
    query_start_loc: torch.Tensor,
    # [B_pad] int32, tokens in the cache including this step's
    seq_lens: torch.Tensor,
    # [T_pad, Hq, D], token stride free; rows of no request are left as they are
    out: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    # tile and warps instead of those that max_query_len picks
    shape: TileShape | None = None,
    # programs that may share a context, a power of two, instead of what the padded sizes pick
    num_splits: int | None = None,
    # the launch starts before its predecessor has ended, where the device can
    pdl: bool = False,
) -> None:
    """Write the causal attention of every scheduled token over its request's cached context.

    `max_query_len` (an upper bound) only picks the tile.  With splits, launches on one device share arrival
    counters, so they must be ordered: on one stream, or by events.  Raises `ValueError` for float64 (only
    the torch twin computes that), for layouts that the kernel cannot read and for a `num_splits` that it cannot serve.
    """
    check_inputs("paged_attention", q, k_cache, v_cache, out)
    num_tokens, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    num_requests = seq_lens.shape[0]
    if num_tokens == 0 or num_requests == 0:
        return
    group = num_heads // num_kv_heads
    plan = mixed_plan(
        num_tokens, num_requests, num_kv_heads, group, max_query_len, q.dtype, shape=shape, num_splits=num_splits
    )
    partial_out = partial_lse = arrivals = out
    if plan.num_splits > 1:
        arrivals = arrivals_of(q.device)
        parts = (num_tokens, num_heads, plan.num_splits)
        partial_out = torch.empty((*parts, head_dim), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(parts, dtype=torch.float32, device=q.device)
    _paged_attention_kernel[(plan.num_programs,)](
        q,
        k_cache,
        v_cache,
        block_tables,
        query_start_loc,
        seq_lens,
        out,
        partial_out,
        partial_lse,
        arrivals,
        q.stride(0),
        out.stride(0),
        block_tables.stride(0),
        num_requests,
        scale * LOG2_E,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        BLOCK_D=next_power_of_2(head_dim),
        BLOCK_M=plan.tile.block_m,
        BLOCK_N=plan.tile.block_n,
        NUM_SPLITS=plan.num_splits,
        MIN_SHARE=plan.min_share,
        PDL=pdl,
        PRECISION="ieee",
        UNPACK=unpacks(q, k_cache.dtype),
        num_warps=plan.tile.num_warps,
        num_stages=plan.tile.num_stages,
        launch_pdl=pdl,
    )


def paged_attention_torch(
    # [T_pad, Hq, D]
    q: torch.Tensor,
    # [NB, BS, Hkv, D]
    k_cache: torch.Tensor,
    # [NB, BS, Hkv, D]
    v_cache: torch.Tensor,
    # [B_pad, MB] int32
    block_tables: torch.Tensor,
    # [B_pad + 1] int32
    query_start_loc: torch.Tensor,
    # [B_pad] int32
    seq_lens: torch.Tensor,
    # [T_pad, Hq, D]
    out: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    shape: TileShape | None = None,
    num_splits: int | None = None,
    pdl: bool = False,
) -> None:
    """Reference of `paged_attention`, the implementation of the host backend; never splits."""
    lengths = seq_lens.tolist()
    starts = query_start_loc[: len(lengths) + 1].tolist()
    query_lens = [stop - start for start, stop in pairwise(starts)]
    attend_paged(q, k_cache, v_cache, block_tables, starts[:-1], query_lens, lengths, out, scale)


paged_attention = dispatch(paged_attention_triton, paged_attention_torch)


def aot_cases() -> list[AotCase]:
    """Return a representative signature of each kernel of this module."""
    signature: dict[str, str] = {"scale_log2": "fp32"}
    signature |= dict.fromkeys(("q_ptr", "k_cache_ptr", "v_cache_ptr", "out_ptr"), "*bf16")
    signature |= dict.fromkeys(("partial_out_ptr", "partial_lse_ptr"), "*fp32")
    signature |= dict.fromkeys(("block_tables_ptr", "query_start_loc_ptr", "seq_lens_ptr", "arrivals_ptr"), "*i32")
    signature |= dict.fromkeys(("q_stride", "out_stride", "table_stride", "num_requests"), "i32")
    plan = mixed_plan(64, 64, 8, 2, 1024, torch.bfloat16)
    constants: dict[str, object] = {"NUM_KV_HEADS": 8, "GROUP": 2, "BLOCK_SIZE": 16, "HEAD_DIM": 128, "BLOCK_D": 128}
    constants |= {"BLOCK_M": plan.tile.block_m, "BLOCK_N": plan.tile.block_n, "MIN_SHARE": plan.min_share}
    constants |= {"PDL": True, "PRECISION": "ieee"}
    eight_bits = signature | dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), "*fp8e4nv")
    return [
        AotCase(
            _paged_attention_kernel,
            each,
            constants | {"NUM_SPLITS": num_splits, "UNPACK": unpack},
            num_warps=plan.tile.num_warps,
        )
        for each, unpack in ((signature, False), (eight_bits, True))
        for num_splits in (1, 4)
    ]
