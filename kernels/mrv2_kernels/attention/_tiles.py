"""The inner loop of both attention kernels: online softmax over tiles of a paged context.

Rows of a tile are (query, head of the group) pairs that share one KV head.  Scores live in the
base-2 domain: ``exp2(x * scale * log2(e))`` equals ``exp(x * scale)``.  Accumulators are fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mrv2_kernels._triton import tl, triton

LOG2_E = 1.4426950408889634


@triton.jit
def attend_tiles(
    q,
    acc,
    row_max,
    row_sum,
    last_visible,
    k_ptr,
    v_ptr,
    table_ptr,
    start,
    stop,
    scale_log2,
    TOKEN_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold keys [start, stop) into (acc [M, D], row_max [M], row_sum [M]) and return them.

    `k_ptr` and `v_ptr` point at this KV head in slot 0.  Without MASKED every row sees every key and
    the range is a whole number of tiles; with it, keys from `stop` on are neither read nor seen, and
    row m sees keys up to `last_visible[m]` (at least one key of the first tile).
    """
    dims = tl.arange(0, BLOCK_D)
    for first in range(start, stop, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        if MASKED:
            block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < stop, other=0).to(tl.int64)
        else:
            block = tl.load(table_ptr + keys // BLOCK_SIZE).to(tl.int64)
        offsets = (block * BLOCK_SIZE + keys % BLOCK_SIZE)[:, None] * TOKEN_STRIDE + dims[None, :]
        if MASKED or BLOCK_D != HEAD_DIM:
            in_context = (keys < stop)[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(k_ptr + offsets, mask=in_context, other=0.0)
            v = tl.load(v_ptr + offsets, mask=in_context, other=0.0)
        else:
            k = tl.load(k_ptr + offsets)
            v = tl.load(v_ptr + offsets)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        if MASKED:
            visible = (keys[None, :] <= last_visible[:, None]) & (keys < stop)[None, :]
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        rescale = tl.exp2(row_max - new_max)
        weights = tl.exp2(scores - new_max[:, None])
        row_sum = row_sum * rescale + tl.sum(weights, axis=1)
        acc = acc * rescale[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        row_max = new_max
    return acc, row_max, row_sum


@dataclass(frozen=True)
class TileShape:
    """Launch shape of an attention kernel."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def check_inputs(op: str, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor) -> None:
    """Raise `ValueError` where the kernels of `op` would compute nonsense."""
    if q.dtype == torch.float64:
        raise ValueError(f"{op}: the Triton kernel takes float16, bfloat16 or float32; for float64 call {op}.torch")
    if not q.dtype == k_cache.dtype == v_cache.dtype:
        raise ValueError(f"{op}: q is {q.dtype} but the KV cache is {k_cache.dtype} / {v_cache.dtype}; cast one")
    head_dim, num_kv_heads = q.shape[2], k_cache.shape[2]
    if q.shape[1] % num_kv_heads:
        raise ValueError(f"{op}: {q.shape[1]} query heads are no multiple of {num_kv_heads} KV heads")
    for name, x in (("q", q), ("out", out)):
        if x.stride(2) != 1 or x.stride(1) != head_dim:
            raise ValueError(f"{op}: {name} needs adjacent heads (strides [any, {head_dim}, 1]), got {x.stride()}")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError(f"{op}: the KV caches must be contiguous")
