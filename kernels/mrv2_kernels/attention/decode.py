"""Paged attention of one query token a request, with the context split over programs.

Program (request, KV head, split) folds its share of the context into a partial output and its
log-sum-exp; a second kernel combines the splits:

    out = sum_s 2^(lse_s - m) * out_s / sum_s 2^(lse_s - m),    m = max_s lse_s

A share is ceil(seq_len / num_splits) rounded up to a tile, computed on the device, so a launch can
be captured in a CUDA graph and replayed with any lengths.  With one split the output is written
directly and nothing is combined.

Legend: B_pad = requests with padding, NB = blocks, BS = block size, MB = blocks a row, Hq / Hkv =
query / KV heads, D = head size.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import tl, triton
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.attention._reference import attend_paged
from mrv2_kernels.attention._tiles import LOG2_E, TileShape, attend_tiles, check_inputs

MAX_SPLITS = 32


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
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + request)
    share = tl.cdiv(tl.cdiv(seq_len, num_splits), BLOCK_N) * BLOCK_N
    start = split * share
    stop = tl.minimum(start + share, seq_len)

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    in_group = rows < GROUP
    heads = kv_head * GROUP + rows
    if SPLIT:
        NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
        part = (request * NUM_HEADS + heads) * num_splits + split
        if start >= stop:
            tl.store(partial_lse_ptr + part, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=in_group)
            return

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
        scale_log2,
        NUM_KV_HEADS * HEAD_DIM,
        BLOCK_SIZE,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_N,
        True,
        PRECISION,
    )
    # an empty context has row_sum 0 and yields zeros
    acc = acc / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
    if SPLIT:
        tl.store(partial_out_ptr + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)
        tl.store(partial_lse_ptr + part, row_max + tl.log2(row_sum), mask=in_group)
    else:
        tl.store(out_ptr + request * out_stride + tile, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_splits"])
def _combine_splits_kernel(
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    out_stride,
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    splits = tl.arange(0, BLOCK_SPLITS)
    dims = tl.arange(0, BLOCK_D)
    in_head = dims < HEAD_DIM
    part = (request * NUM_HEADS + head) * num_splits + splits
    lse = tl.load(partial_lse_ptr + part, mask=splits < num_splits, other=float("-inf"))
    # an empty split has lse -inf and never wrote its partial output; an empty context has only such splits
    filled = lse > float("-inf")
    peak = tl.max(lse, axis=0)
    weights = tl.exp2(lse - tl.where(peak > float("-inf"), peak, 0.0))
    mask = filled[:, None] & in_head[None, :]
    partial = tl.load(partial_out_ptr + part[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    total = tl.sum(weights, axis=0)
    out = tl.sum(partial * weights[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + request * out_stride + head * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=in_head)


def decode_num_splits(batch: int, num_kv_heads: int, num_sms: int = 132) -> int:
    """Return how many programs share a context: a power of two that gives each SM about two programs.

    A pure function of the padded batch, so that eager steps and graph replays sum in one order.
    """
    wanted = 2 * num_sms // max(batch * num_kv_heads, 1)
    return 1 << (min(max(wanted, 1), MAX_SPLITS).bit_length() - 1)


def _tile_shape(dtype: torch.dtype, group: int) -> TileShape:
    block_m = max(16, triton.next_power_of_2(group))
    if dtype == torch.float32:
        return TileShape(block_m, block_n=32, num_warps=4, num_stages=1)
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

    Take `num_splits` from `decode_num_splits`.  Raises `ValueError` for float64 (only the torch twin
    computes that) and for layouts that the kernel cannot read.
    """
    check_inputs("paged_attention_decode", q, k_cache, v_cache, out)
    batch, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    if batch == 0:
        return
    group = num_heads // num_kv_heads
    block_d = triton.next_power_of_2(head_dim)
    shape = _tile_shape(q.dtype, group)
    split = num_splits > 1
    if not split:
        partial_out = partial_lse = out
    elif partial is not None:
        partial_out, partial_lse = partial
    else:
        partial_out = torch.empty((batch, num_heads, num_splits, head_dim), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty((batch, num_heads, num_splits), dtype=torch.float32, device=q.device)
    _decode_kernel[(batch, num_kv_heads, num_splits)](
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        out,
        partial_out,
        partial_lse,
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
        SPLIT=split,
        PRECISION="ieee",
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    if split:
        _combine_splits_kernel[(batch, num_heads)](
            partial_out,
            partial_lse,
            out,
            out.stride(0),
            num_splits,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            BLOCK_SPLITS=triton.next_power_of_2(num_splits),
            num_warps=2,
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
    bf16 = dict.fromkeys(("q_ptr", "k_cache_ptr", "v_cache_ptr", "out_ptr"), "*bf16")
    fp32 = dict.fromkeys(("partial_out_ptr", "partial_lse_ptr"), "*fp32")
    int32 = {"block_tables_ptr": "*i32", "seq_lens_ptr": "*i32"}
    sizes = dict.fromkeys(("q_stride", "out_stride", "table_stride", "num_splits"), "i32")
    shape = _tile_shape(torch.bfloat16, group=2)
    head: dict[str, object] = {"HEAD_DIM": 128, "BLOCK_D": 128}
    decode = AotCase(
        _decode_kernel,
        bf16 | fp32 | int32 | sizes | {"scale_log2": "fp32"},
        head
        | {"NUM_KV_HEADS": 8, "GROUP": 2, "BLOCK_SIZE": 16, "SPLIT": True, "PRECISION": "ieee"}
        | {"BLOCK_M": shape.block_m, "BLOCK_N": shape.block_n},
        num_warps=shape.num_warps,
    )
    combine = AotCase(
        _combine_splits_kernel,
        fp32 | {"out_ptr": "*bf16", "out_stride": "i32", "num_splits": "i32"},
        head | {"NUM_HEADS": 16, "BLOCK_SPLITS": 32},
        num_warps=2,
    )
    return [decode, combine]
