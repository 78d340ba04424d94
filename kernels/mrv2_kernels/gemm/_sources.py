"""The norm before a product of few rows as a part of that product.

Every program computes all rows that it multiplies, in registers, and puts them into shared memory.  That reads more,
and is worth a launch less for few rows: one decoding request of Qwen3-0.6B with 384 tokens of context, all layers with
attention, 491 us on an H200 where norms of their own make it 510 (traces/bench/h200-products-in-parts.json).

Tried there too, and of no help: the product behind decode attention that combines the shares of split contexts itself,
so that nothing counts arrivals (585 us instead of 515).
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
