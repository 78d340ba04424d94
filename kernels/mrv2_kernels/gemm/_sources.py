"""Where a product of few rows takes its input from, besides memory as it is: what would else be a kernel before it.

Every program computes the rows that it multiplies, in registers, and puts them into shared memory.  That reads more,
and is worth a launch less for up to eight rows.
"""

from __future__ import annotations

from mrv2_kernels._gluon import gl, gluon
from mrv2_kernels.gemm.pdl import gdc_wait


@gluon.jit
def _padded(
    # [ROWS, K]
    x,
    ROWS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    K: gl.constexpr,
):
    """Return x [BLOCK_M, K], its rows repeated: what tensor cores compute of rows beyond the last is never stored."""
    if ROWS == BLOCK_M:
        return x
    else:
        REPEATED: gl.constexpr = gl.BlockedLayout(
            [BLOCK_M // ROWS, ROWS, 8], [1, 1, 32], [1, 1, gl.num_warps()], [2, 1, 0]
        )
        once = gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(0, REPEATED)), 0)
        repeated = once.to(gl.float32) + gl.zeros([BLOCK_M // ROWS, ROWS, K], gl.float32, REPEATED)
        return gl.reshape(repeated.to(x.dtype), [BLOCK_M, K])


@gluon.jit
def normed_sums(
    # [NUM_SUMS, M, K] float32
    x_ptr,
    # [M, K]
    residual_ptr,
    # [K]
    norm_ptr,
    # [M, K], out
    stream_ptr,
    num_rows,
    num_inputs,
    is_writer,
    NUM_SUMS: gl.constexpr,
    EPS: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    WIDE_K: gl.constexpr,
    PDL: gl.constexpr,
):
    """Return the norm of the sums plus the residual, as `layers.norm` computes it; one program writes that sum."""
    # all threads share a row
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, gl.num_warps()], [1, 0])
    DTYPE: gl.constexpr = norm_ptr.dtype.element_ty
    m = gl.arange(0, ROWS, gl.SliceLayout(1, ROW))[:, None]
    k = gl.arange(0, WIDE_K, gl.SliceLayout(0, ROW))[None, :]
    mask = (m < num_rows) & (k < num_inputs)
    weight = gl.load(norm_ptr + k, mask=k < num_inputs, other=0.0).to(gl.float32)
    offsets = m.to(gl.int64) * num_inputs + k
    plane = num_rows.to(gl.int64) * num_inputs
    if PDL:
        gdc_wait()
    residual = gl.load(residual_ptr + offsets, mask=mask, other=0.0).to(gl.float32)
    total = gl.load(x_ptr + offsets, mask=mask, other=0.0)
    for s in gl.static_range(1, NUM_SUMS):
        total += gl.load(x_ptr + s * plane + offsets, mask=mask, other=0.0)
    summed = (total.to(DTYPE).to(gl.float32) + residual).to(DTYPE)
    if is_writer:
        gl.store(stream_ptr + offsets, summed, mask=mask)
    wide = summed.to(gl.float32)
    inverse_rms = 1.0 / gl.sqrt(gl.sum(wide * wide, axis=1) / num_inputs + EPS)
    return _padded((wide * inverse_rms[:, None] * weight).to(DTYPE), ROWS, BLOCK_M, WIDE_K)


@gluon.jit
def combined_shares(
    # [M, heads, num_splits, D] float32
    x_ptr,
    # [M, heads, num_splits] float32
    lse_ptr,
    # [M] int32
    seq_lens_ptr,
    num_rows,
    head,
    num_heads,
    tiles_per_split,
    ROWS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_KEYS: gl.constexpr,
    NUM_SPLITS: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Return one head's attention, the mean of the shares weighted by their sums of exponentials.

    How many shares a context has follows from its length, as `attention.fused_decode` counts them.
    """
    W: gl.constexpr = gl.num_warps()
    # shares at once: each warp its part of them
    ONCE: gl.constexpr = max(W, min(NUM_SPLITS, 16))
    SHARES: gl.constexpr = gl.BlockedLayout([1, ONCE // W, 4], [1, 1, 32], [1, W, 1], [2, 1, 0])
    PAIR: gl.constexpr = gl.SliceLayout(2, SHARES)
    ROW: gl.constexpr = gl.SliceLayout(1, PAIR)
    m = gl.arange(0, ROWS, ROW)
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(1, SHARES)))[None, None, :]
    num_cached = gl.maximum(gl.load(seq_lens_ptr + m, mask=m < num_rows, other=0) - 1, 0)
    num_tiles = (num_cached + BLOCK_KEYS - 1) // BLOCK_KEYS
    shares = gl.minimum(gl.maximum((num_tiles + tiles_per_split - 1) // tiles_per_split, 1), NUM_SPLITS)
    first = (m.to(gl.int64)[:, None] * num_heads + head) * NUM_SPLITS
    top = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    for t in gl.static_range(0, NUM_SPLITS, ONCE):
        s = gl.arange(0, ONCE, gl.SliceLayout(0, PAIR))[None, :] + t
        mask = (m < num_rows)[:, None] & (s < shares[:, None])
        top = gl.maximum(top, gl.max(gl.load(lse_ptr + first + s, mask=mask, other=float("-inf")), axis=1))
    # rows without any context weigh nothing
    top = gl.where(top == float("-inf"), 0.0, top)
    weight_sum = gl.zeros([ROWS], gl.float32, ROW)
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, gl.SliceLayout(1, SHARES))
    for t in gl.static_range(0, NUM_SPLITS, ONCE):
        s = gl.arange(0, ONCE, gl.SliceLayout(0, PAIR))[None, :] + t
        mask = (m < num_rows)[:, None] & (s < shares[:, None])
        weights = gl.exp2(gl.load(lse_ptr + first + s, mask=mask, other=float("-inf")) - top[:, None])
        value = gl.load(x_ptr + gl.expand_dims(first + s, 2) * HEAD_DIM + d, mask=gl.expand_dims(mask, 2), other=0.0)
        weight_sum += gl.sum(weights, axis=1)
        acc += gl.sum(value * gl.expand_dims(weights, 2), axis=1)
    total = gl.where(weight_sum > 0.0, weight_sum, 1.0)
    out = acc / gl.convert_layout(total, gl.SliceLayout(1, gl.SliceLayout(1, SHARES)))[:, None]
    return _padded(out.to(DTYPE), ROWS, BLOCK_M, HEAD_DIM)
