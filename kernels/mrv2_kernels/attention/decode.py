"""Paged attention of one query token a request, with the context split over programs.

Program (request, KV head, split) folds its share of the context into a partial output and its
base-2 log-sum-exp.  The last program of a (request, KV head) to arrive combines the shares:

    out = sum_s 2^(lse_s - m) * out_s / sum_s 2^(lse_s - m),    m = max_s lse_s

A share is ceil(seq_len / num_splits) rounded up to a tile, computed on the device, so a launch can be
captured in a CUDA graph and replayed with any lengths.  A context of one share is written directly, by
its only program; programs without a share leave at once.  The order of the sum is that of the shares,
so the result does not depend on who arrives last.

Legend: B_pad = requests with padding, NB = blocks, BS = block size, MB = blocks a row, Hq / Hkv =
query / KV heads, D = head size.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import next_power_of_2, tl, triton
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.attention._reference import attend_paged
from mrv2_kernels.attention._tiles import (
    LOG2_E,
    TileShape,
    attend_tiles,
    check_inputs,
    combine_shares,
    heads_at_once,
)
from mrv2_kernels.attention.plan import MAX_SPLIT_PAIRS, MAX_SPLITS, arrivals_of
from mrv2_kernels.gemm.unpack import unpacks

# programs up to which a long tile pays for heads of 128: two on each SM of an H200
FEW_PROGRAMS = 264


@triton.jit(do_not_specialize=["num_splits"])
def _decode_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    seq_lens_ptr,
    out_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    arrivals_ptr,
    q_stride,
    out_stride,
    table_stride,
    num_splits,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    UNPACK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + request)
    share = tl.cdiv(tl.cdiv(seq_len, num_splits), BLOCK_N) * BLOCK_N
    start = split * share
    stop = tl.minimum(start + share, seq_len)
    # split 0 stays also for an empty context, to write its zeros
    if (start >= stop) & (split > 0):
        return

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    in_group = rows < GROUP
    heads = kv_head * GROUP + rows
    mask = in_group[:, None] & (dims < HEAD_DIM)[None, :]
    tile = heads[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + request * q_stride + tile, mask=mask, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    last_visible = tl.zeros([BLOCK_M], tl.int32) + seq_len
    acc, row_max, row_sum = attend_tiles(
        q,
        acc,
        row_max,
        row_sum,
        last_visible,
        k_cache_ptr + kv_head * HEAD_DIM,
        v_cache_ptr + kv_head * HEAD_DIM,
        block_tables_ptr + request * table_stride,
        start,
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
    out_row_ptr = out_ptr + request * out_stride
    if BLOCK_SPLITS == 1:
        tl.store(out_row_ptr + tile, acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        num_shares = tl.cdiv(seq_len, tl.maximum(share, 1))
        if num_shares <= 1:
            tl.store(out_row_ptr + tile, acc.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            first_part = request * (NUM_KV_HEADS * GROUP) * num_splits
            part = heads * num_splits + split
            request_out_ptr = partial_out_ptr + first_part * HEAD_DIM
            request_lse_ptr = partial_lse_ptr + first_part
            tl.store(request_out_ptr + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)
            tl.store(request_lse_ptr + part, row_max + tl.log2(row_sum), mask=in_group)
            # every thread's stores come before the arrival that publishes them
            tl.debug_barrier()
            arrivals = arrivals_ptr + request * NUM_KV_HEADS + kv_head
            if tl.atomic_add(arrivals, 1) == num_shares - 1:
                tl.store(arrivals, 0)
                combine_shares(
                    request_out_ptr,
                    request_lse_ptr,
                    out_row_ptr,
                    kv_head * GROUP,
                    num_splits,
                    num_shares,
                    GROUP,
                    BLOCK_GROUP,
                    HEAD_DIM,
                    BLOCK_D,
                    BLOCK_SPLITS,
                )


def decode_num_splits(batch: int, num_kv_heads: int, num_sms: int = 132) -> int:
    """Return how many programs share a context: a power of two that gives each SM about two programs.

    A pure function of the padded batch, so that eager steps and graph replays sum in one order.
    """
    wanted = 2 * num_sms // max(batch * num_kv_heads, 1)
    return 1 << (min(max(wanted, 1), MAX_SPLITS).bit_length() - 1)


def _tile_shape(dtype: torch.dtype, group: int, block_d: int, num_programs: int) -> TileShape:
    block_m = max(16, next_power_of_2(group))
    if dtype == torch.float32:
        return TileShape(block_m, block_n=32, num_warps=4, num_stages=1)
    if block_d > 128:
        return TileShape(block_m, block_n=64, num_warps=4, num_stages=2)
    if block_d <= 64:
        return TileShape(block_m, block_n=128, num_warps=4, num_stages=3)
    if num_programs <= FEW_PROGRAMS:
        return TileShape(block_m, block_n=128, num_warps=4, num_stages=2)
    return TileShape(block_m, block_n=64, num_warps=4, num_stages=3)


def paged_attention_decode_triton(
    # [B_pad, Hq, D], token stride free
    q: torch.Tensor,
    # [NB, BS, Hkv, D], contiguous
    k_cache: torch.Tensor,
    # [NB, BS, Hkv, D], contiguous
    v_cache: torch.Tensor,
    # [B_pad, MB] int32
    block_tables: torch.Tensor,
    # [B_pad] int32, 0 = padding
    seq_lens: torch.Tensor,
    # [B_pad, Hq, D], token stride free
    out: torch.Tensor,
    *,
    scale: float,
    num_splits: int,
    # ([B_pad, Hq, num_splits, D] fp32, [B_pad, Hq, num_splits] fp32) scratch, allocated when absent
    partial: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Write the attention of each request's newest token over its whole context; padding rows get zeros.

    Take `num_splits` from `decode_num_splits`.  With splits, launches on one device share arrival
    counters, so they must be ordered: on one stream, or by events.  Raises `ValueError` for float64 (only
    the torch twin computes that) and for layouts that the kernel cannot read.
    """
    check_inputs("paged_attention_decode", q, k_cache, v_cache, out)
    batch, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    if batch == 0:
        return
    if num_splits == 1:
        partial_out = partial_lse = arrivals = out
    elif batch * num_kv_heads > MAX_SPLIT_PAIRS:
        raise ValueError(
            f"paged_attention_decode: {num_splits} splits of {batch} requests x {num_kv_heads} KV heads exceed "
            f"{MAX_SPLIT_PAIRS} pairs; take num_splits from decode_num_splits, which is 1 there"
        )
    else:
        arrivals = arrivals_of(q.device)
        partial_out, partial_lse = partial or (
            torch.empty((batch, num_heads, num_splits, head_dim), dtype=torch.float32, device=q.device),
            torch.empty((batch, num_heads, num_splits), dtype=torch.float32, device=q.device),
        )
    group = num_heads // num_kv_heads
    block_d = next_power_of_2(head_dim)
    shape = _tile_shape(q.dtype, group, block_d, batch * num_kv_heads * num_splits)
    _decode_kernel[(batch, num_kv_heads, num_splits)](
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        out,
        partial_out,
        partial_lse,
        arrivals,
        q.stride(0),
        out.stride(0),
        block_tables.stride(0),
        num_splits,
        scale * LOG2_E,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        BLOCK_SPLITS=next_power_of_2(num_splits),
        BLOCK_GROUP=heads_at_once(group, num_splits, block_d),
        PRECISION="ieee",
        UNPACK=unpacks(q, k_cache.dtype),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )


def paged_attention_decode_torch(
    # [B_pad, Hq, D]
    q: torch.Tensor,
    # [NB, BS, Hkv, D]
    k_cache: torch.Tensor,
    # [NB, BS, Hkv, D]
    v_cache: torch.Tensor,
    # [B_pad, MB] int32
    block_tables: torch.Tensor,
    # [B_pad] int32
    seq_lens: torch.Tensor,
    # [B_pad, Hq, D]
    out: torch.Tensor,
    *,
    scale: float,
    num_splits: int,
    partial: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Reference of `paged_attention_decode`, the implementation of the host backend; never splits."""
    lengths = seq_lens.tolist()
    batch = len(lengths)
    attend_paged(q, k_cache, v_cache, block_tables, list(range(batch)), [1] * batch, lengths, out, scale)


paged_attention_decode = dispatch(paged_attention_decode_triton, paged_attention_decode_torch)


def aot_cases() -> list[AotCase]:
    """Return a representative signature of each kernel of this module."""
    signature: dict[str, str] = {"scale_log2": "fp32"}
    signature |= dict.fromkeys(("q_ptr", "k_cache_ptr", "v_cache_ptr", "out_ptr"), "*bf16")
    signature |= dict.fromkeys(("partial_out_ptr", "partial_lse_ptr"), "*fp32")
    signature |= dict.fromkeys(("block_tables_ptr", "seq_lens_ptr", "arrivals_ptr"), "*i32")
    signature |= dict.fromkeys(("q_stride", "out_stride", "table_stride", "num_splits"), "i32")
    shape = _tile_shape(torch.bfloat16, group=2, block_d=128, num_programs=256)
    constants: dict[str, object] = {"NUM_KV_HEADS": 8, "GROUP": 2, "BLOCK_SIZE": 16, "HEAD_DIM": 128, "BLOCK_D": 128}
    constants |= {
        "BLOCK_M": shape.block_m,
        "BLOCK_N": shape.block_n,
        "BLOCK_SPLITS": 32,
        "BLOCK_GROUP": 2,
        "PRECISION": "ieee",
    }
    eight_bits = signature | dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), "*fp8e4nv")
    return [
        AotCase(_decode_kernel, each, constants | {"UNPACK": unpack}, num_warps=shape.num_warps)
        for each, unpack in ((signature, False), (eight_bits, True))
    ]
