"""Device functions that sum the exponentials of blocks, a warp each, relative to the block's largest logit.

A tile holds entries: logits, or words of two bfloat16 (IN_PAIRS).  All sums run over a lane's own entries, then over
the lanes of its warp: nothing passes through shared memory, and no warp waits for another.
"""

from __future__ import annotations

import os

from mrv2_kernels._triton import tl, triton
from mrv2_kernels.sampling._block_draw import larger
from mrv2_kernels.sampling._exp2 import flushed_exp2


@triton.jit
def _low(words):
    """Return the first bfloat16 of each word, float32."""
    return (words << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(words):
    """Return the second bfloat16 of each word, float32."""
    return (words & -65536).to(tl.float32, bitcast=True)


if os.environ.get("TRITON_INTERPRET", "0") == "1":

    @triton.jit
    def _larger_pair(a, b):
        """Return the larger of both pairs' first and second bfloat16, NaN if one of the two is NaN."""
        low, high = larger(_low(a), _low(b)), larger(_high(a), _high(b))
        return ((low.to(tl.int32, bitcast=True) >> 16) & 65535) | (high.to(tl.int32, bitcast=True) & -65536)

else:

    @triton.jit
    def _larger_pair(a, b):
        """Return the larger of both pairs' first and second bfloat16, NaN if one of the two is NaN."""
        return tl.inline_asm_elementwise(
            "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def entries_before(row_ptr, entry, end, IN_PAIRS: tl.constexpr):
    """Load entries, logits from `end` on as -inf, pairs as anything; without a branch: nothing waits for it early."""
    if IN_PAIRS:
        return tl.load(row_ptr + entry, mask=entry < end)
    else:
        return tl.load(row_ptr + entry, mask=entry < end, other=float("-inf"))


@triton.jit
def log_mass(entries, temperature, IN_PAIRS: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr):
    """Return ``log(sum of exp(logits / T))`` of each warp, or its largest logit where the temperature is 0.

    `entries` [repeats * WARPS * LANES, inner]; the result [WARPS * LANES] is float32, the same for every lane of a
    warp, NaN if a logit is NaN.
    """
    entries = tl.reshape(entries, [entries.shape[0] // (WARPS * LANES), WARPS, LANES, entries.shape[1]])
    if IN_PAIRS:
        pair = tl.reduce(tl.reduce(entries, 3, _larger_pair, keep_dims=True), 0, _larger_pair, keep_dims=True)
        mass = larger(_low(pair), _high(pair))
    else:
        mass = tl.reduce(tl.reduce(entries.to(tl.float32), 3, larger, keep_dims=True), 0, larger, keep_dims=True)
    # [1, WARPS, 1, 1]
    mass = tl.reduce(mass, 2, larger, keep_dims=True)
    if temperature != 0.0:
        inverse = 1.0 / temperature
        # powers of two of logits in units of T log(2)
        scale = 1.4426950408889634 * inverse
        shift = mass * scale
        is_finite = tl.abs(shift) < float("inf")
        base = tl.where(is_finite, shift, 0.0)
        if IN_PAIRS:
            terms = flushed_exp2(_low(entries) * scale - base) + flushed_exp2(_high(entries) * scale - base)
        else:
            terms = flushed_exp2(entries.to(tl.float32) * scale - base)
        terms = tl.sum(tl.sum(tl.sum(terms, axis=3, keep_dims=True), axis=0, keep_dims=True), axis=2, keep_dims=True)
        # of a logit this large the others change no digit
        mass = tl.where(is_finite, (shift + tl.log2(terms)) * 0.6931471805599453, mass * inverse)
    return tl.reshape(tl.broadcast_to(mass, [1, WARPS, LANES, 1]), [WARPS * LANES])
