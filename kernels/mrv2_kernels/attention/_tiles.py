"""What the attention kernels share: online softmax over tiles of a paged context, and combining shares of one.

Rows of a tile are (query, head of the group) pairs that share one KV head.  Scores live in the
base-2 domain: ``exp2(x * scale * log2(e))`` equals ``exp(x * scale)``.  Accumulators are fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mrv2_kernels._numerics import FP8, FP8_MAX
from mrv2_kernels._triton import constant, next_power_of_2, tl, triton
from mrv2_kernels.gemm.unpack import E4M3_PAIRS_TO_BF16

LOG2_E = 1.4426950408889634
_FP8_MAX = constant(FP8_MAX)


@triton.jit
def as_kept(x, DTYPE: tl.constexpr):
    """Return x as a cache of DTYPE keeps it; 8-bit floats take what is too large as their largest."""
    if tl.float8e4nv == DTYPE:
        x = tl.clamp(x.to(tl.float32), -_FP8_MAX, _FP8_MAX)
    return x.to(DTYPE)


@triton.jit
def as_pairs(ptr):
    """Return a pointer to 8-bit floats as one to pairs of them."""
    return ptr.to(tl.pointer_type(tl.int16), bitcast=True)


@triton.jit
def unpaired(x, DTYPE: tl.constexpr, UNPACK: tl.constexpr):
    """Return the even and the odd elements of rows of 8-bit floats, x [N, D / 2] pairs; UNPACK: by `gemm.unpack`."""
    if UNPACK:
        even, odd = tl.inline_asm_elementwise(
            E4M3_PAIRS_TO_BF16, "=r,=r,r", [x], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        even = (x & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(DTYPE)
        odd = ((x >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(DTYPE)
    return even, odd


@triton.jit
def split_columns(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the even and the odd columns of x [ROWS, COLUMNS]."""
    return tl.split(tl.reshape(x, (ROWS, COLUMNS // 2, 2)))


@triton.jit
def join_columns(even, odd, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Inverse of `split_columns`."""
    return tl.reshape(tl.join(even, odd), (ROWS, COLUMNS))


@triton.jit
def load_block_ids(table_ptr, keys, stop, BLOCK_SIZE: tl.constexpr):
    """Return the blocks [N] of the positions `keys` [N]; 0 from `stop` on, which is not read."""
    return tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < stop, other=0)


@triton.jit
def load_tile(
    k_ptr,
    v_ptr,
    block_ids,
    keys,
    stop,
    TOKEN_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return k and v [N, D] of the positions `keys` [N]; with MASKED, zeros from `stop` on, which are not read."""
    dims = tl.arange(0, BLOCK_D)
    slots = block_ids.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE
    offsets = slots[:, None] * TOKEN_STRIDE + dims[None, :]
    if MASKED or BLOCK_D != HEAD_DIM:
        in_context = (keys < stop)[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + offsets, mask=in_context, other=0.0)
        v = tl.load(v_ptr + offsets, mask=in_context, other=0.0)
    else:
        k = tl.load(k_ptr + offsets)
        v = tl.load(v_ptr + offsets)
    return k, v


@triton.jit
def _weigh(scores, row_max, row_sum, visible, scale_log2, MASKED: tl.constexpr):
    """Return (weights [M, N], what the sums so far are multiplied by [M], row_max [M], row_sum [M])."""
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    # the scale is positive: it need not touch every score before the exponential's fused multiply-subtract
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale_log2)
    rescale = tl.exp2(row_max - new_max)
    weights = tl.exp2(scores * scale_log2 - new_max[:, None])
    return weights, rescale, new_max, row_sum * rescale + tl.sum(weights, axis=1)


@triton.jit
def fold_tile(
    q,
    k,
    v,
    acc,
    row_max,
    row_sum,
    visible,
    scale_log2,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold k and v [N, D] into (acc [M, D], row_max [M], row_sum [M]) and return them.

    Without MASKED every row sees every key; with it, those where `visible` [M, N] (or [1, N]) says so, of
    which each row that has seen none yet must see one.
    """
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    weights, rescale, row_max, row_sum = _weigh(scores, row_max, row_sum, visible, scale_log2, MASKED)
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return acc, row_max, row_sum


@triton.jit
def fold_pairs(
    q_even,
    q_odd,
    k,
    v,
    acc_even,
    acc_odd,
    row_max,
    row_sum,
    visible,
    scale_log2,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    UNPACK: tl.constexpr,
):
    """Like `fold_tile`, of 8-bit keys and values, [N, D / 2] pairs: with even and odd columns [M, D / 2] apart.

    A pair is what tensor cores' loads move and transpose as one element; its halves need not be shuffled.
    """
    k_even, k_odd = unpaired(k, q_even.dtype, UNPACK)
    scores = tl.dot(q_even, tl.trans(k_even), input_precision=PRECISION)
    scores = tl.dot(q_odd, tl.trans(k_odd), scores, input_precision=PRECISION)
    weights, rescale, row_max, row_sum = _weigh(scores, row_max, row_sum, visible, scale_log2, MASKED)
    weights = weights.to(q_even.dtype)
    v_even, v_odd = unpaired(v, q_even.dtype, UNPACK)
    acc_even = tl.dot(weights, v_even, acc_even * rescale[:, None], input_precision=PRECISION)
    acc_odd = tl.dot(weights, v_odd, acc_odd * rescale[:, None], input_precision=PRECISION)
    return acc_even, acc_odd, row_max, row_sum


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
    step,
    scale_log2,
    TOKEN_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    UNPACK: tl.constexpr,
):
    """Fold the tiles at start, start + step, ... before `stop` into (acc [M, D], row_max [M], row_sum [M]).

    `k_ptr` and `v_ptr` point at this KV head in slot 0.  Without MASKED every row sees every key and
    the tiles end where the range does; with it, keys from `stop` on are neither read nor seen, and
    row m sees keys up to `last_visible[m]` (at least one key of the first tile).  Caches of 8-bit floats
    are read in pairs, which UNPACK converts by the instructions of `gemm.unpack`.
    """
    PAIRS: tl.constexpr = k_ptr.dtype.element_ty == tl.float8e4nv
    # read a tile ahead, so that the loads of keys and values depend on nothing and can be pipelined
    block_ids = load_block_ids(table_ptr, start + tl.arange(0, BLOCK_N), stop, BLOCK_SIZE)
    if PAIRS:
        ROWS: tl.constexpr = q.shape[0]
        q_even, q_odd = split_columns(q, ROWS, BLOCK_D)
        acc_even, acc_odd = split_columns(acc, ROWS, BLOCK_D)
        for first in range(start, stop, step):
            keys = first + tl.arange(0, BLOCK_N)
            k, v = load_tile(
                as_pairs(k_ptr),
                as_pairs(v_ptr),
                block_ids,
                keys,
                stop,
                TOKEN_STRIDE // 2,
                BLOCK_SIZE,
                HEAD_DIM // 2,
                BLOCK_D // 2,
                MASKED,
            )
            block_ids = load_block_ids(table_ptr, keys + step, stop, BLOCK_SIZE)
            visible = (keys[None, :] <= last_visible[:, None]) & (keys < stop)[None, :]
            acc_even, acc_odd, row_max, row_sum = fold_pairs(
                q_even,
                q_odd,
                k,
                v,
                acc_even,
                acc_odd,
                row_max,
                row_sum,
                visible,
                scale_log2,
                MASKED,
                PRECISION,
                UNPACK,
            )
        acc = join_columns(acc_even, acc_odd, ROWS, BLOCK_D)
    else:
        for first in range(start, stop, step):
            keys = first + tl.arange(0, BLOCK_N)
            k, v = load_tile(k_ptr, v_ptr, block_ids, keys, stop, TOKEN_STRIDE, BLOCK_SIZE, HEAD_DIM, BLOCK_D, MASKED)
            block_ids = load_block_ids(table_ptr, keys + step, stop, BLOCK_SIZE)
            visible = (keys[None, :] <= last_visible[:, None]) & (keys < stop)[None, :]
            acc, row_max, row_sum = fold_tile(q, k, v, acc, row_max, row_sum, visible, scale_log2, MASKED, PRECISION)
    return acc, row_max, row_sum


@triton.jit
def combine_shares(
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    first_head,
    num_splits,
    num_shares,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Combine the shares of the GROUP heads from `first_head` on; pointers stand at this request's row.

    BLOCK_GROUP heads at a time, whose shares are read together: a power of two.
    """
    splits = tl.arange(0, BLOCK_SPLITS)
    dims = tl.arange(0, BLOCK_D)
    filled = splits < num_shares
    in_head = dims < HEAD_DIM
    for first in tl.static_range(0, GROUP, BLOCK_GROUP):
        members = first + tl.arange(0, BLOCK_GROUP)
        in_group = members < GROUP
        heads = first_head + members
        part = heads[:, None] * num_splits + splits[None, :]
        mask = in_group[:, None] & filled[None, :]
        # other programs wrote these: read them where the writes meet, in L2
        lse = tl.load(partial_lse_ptr + part, mask=mask, other=float("-inf"), cache_modifier=".cg")
        partial = tl.load(
            partial_out_ptr + part[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=mask[:, :, None] & in_head[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        # heads beyond the group weigh nothing, by 1 and not by 0
        top = tl.where(in_group, tl.max(lse, axis=1), 0.0)
        weights = tl.exp2(lse - top[:, None])
        total = tl.where(in_group, tl.sum(weights, axis=1), 1.0)
        out = tl.sum(partial * weights[:, :, None], axis=1) / total[:, None]
        offsets = heads[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=in_group[:, None] & in_head[None, :])


@triton.jit
def normed_and_rotated(
    # [M, D] or [D], and the same elements with the halves of each head exchanged
    x,
    partner,
    # [D]
    weight,
    partner_weight,
    cos,
    signed_sin,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EPS: tl.constexpr,
    AXIS: tl.constexpr,
):
    """Return heads normed (with HAS_NORM) and rotated, fp32; AXIS is that of the D elements."""
    x = x.to(tl.float32)
    partner = partner.to(tl.float32)
    if HAS_NORM:
        mean_square = tl.sum(x * x, axis=AXIS, keep_dims=True) / HEAD_DIM
        inverse_rms = 1.0 / tl.sqrt(mean_square + EPS)
        x = x * inverse_rms * weight
        partner = partner * inverse_rms * partner_weight
    return x * cos + partner * signed_sin


def heads_at_once(group: int, num_splits: int, block_d: int) -> int:
    """Return how many heads `combine_shares` reads together: as many as registers allow, a power of two."""
    wanted = next_power_of_2(group)
    return max(1, min(wanted, 8192 // (next_power_of_2(num_splits) * block_d)))


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
    if not (k_cache.dtype == v_cache.dtype and v_cache.dtype in (q.dtype, FP8)):
        raise ValueError(
            f"{op}: q is {q.dtype} but the KV cache is {k_cache.dtype} / {v_cache.dtype}; it must be {q.dtype} or {FP8}"
        )
    head_dim, num_kv_heads = q.shape[2], k_cache.shape[2]
    if q.shape[1] % num_kv_heads:
        raise ValueError(f"{op}: {q.shape[1]} query heads are no multiple of {num_kv_heads} KV heads")
    for name, x in (("q", q), ("out", out)):
        if x.stride(2) != 1 or x.stride(1) != head_dim:
            raise ValueError(f"{op}: {name} needs adjacent heads (strides [any, {head_dim}, 1]), got {x.stride()}")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError(f"{op}: the KV caches must be contiguous")
