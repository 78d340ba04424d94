"""Device functions that draw from one block of a row, and the keys by which blocks are compared.

A key is a 63-bit integer: the bits of the float32 score, made monotonic, above the token's complement.
Its order is (score ascending, id descending), so that a maximum keeps the lowest id of equal scores; NaN
stands above everything, and 0 stands for "nothing above -inf".
"""

from __future__ import annotations

from mrv2_kernels._triton import tl, triton
from mrv2_kernels.sampling.gumbel import gumbel_score
from mrv2_kernels.sampling.noise import loose_log2_uniform


@triton.jit
def larger(a, b):
    """Return the larger of two, NaN if one of them is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def max_or_nan(x):
    """Return the maximum of a vector, NaN if it holds one."""
    return tl.reduce(x, 0, larger)


@triton.jit
def score_key(score, token):
    """Return the key of a float32 score (scalar, int64); 0 for -inf."""
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.int32, bitcast=True)
    order = (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True).to(tl.int64)
    order = tl.where(score != score, 0xFFFFFFFF, order)
    key = (order << 31) | (0x7FFFFFFF - token).to(tl.int64)
    return tl.where(score == float("-inf"), key * 0, key)


@triton.jit
def key_score(key):
    """Return the score of a key; -inf for 0."""
    order = (key >> 31).to(tl.uint32).to(tl.int32, bitcast=True)
    bits = tl.where(order < 0, order ^ -2147483648, ~order)
    return tl.where(key == 0, float("-inf"), bits.to(tl.float32, bitcast=True))


@triton.jit
def key_token(key):
    """Return the token of a key; -1 if its score is NaN or there is none."""
    none = (key == 0) | ((key >> 31) == 0xFFFFFFFF)
    return tl.where(none, -1, 0x7FFFFFFF - (key & 0x7FFFFFFF))


@triton.jit
def _exact_key(row_ptr, start, vocab, temperature, seed, position, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Return the key of the best token of the block by its exact scores, a few at a time: it spares registers."""
    lane = tl.arange(0, STEP)
    key = tl.zeros([], tl.int64)
    # masked vocabularies come here block by block; they need no noise
    if max_or_nan(logits_before(row_ptr, start, vocab, BLOCK).to(tl.float32)) != float("-inf"):
        for base in range(start, start + BLOCK, STEP):
            token = base + lane
            logits = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
            score = gumbel_score(logits, temperature, seed, position, token, False)
            best = max_or_nan(score)
            first = tl.min(tl.where(score == best, lane, STEP - 1), axis=0)
            key = tl.maximum(key, score_key(best, base + first))
    return key


@triton.jit
def _bound_of(score):
    """Return what a bound (see `random_key`) reaches if its token may reach `score`, roundings included."""
    orders = score * 1.4426950408889634
    return (orders - 159.0 - (tl.abs(orders) + 400.0) * 9.5367431640625e-07) * 8388608.0


@triton.jit
def _best_of_few(bound, score, first, row_ptr, start, temperature, seed, position, BLOCK: tl.constexpr):
    """Return the key of the best token, where `first` has the largest bound and `score`: one rival after another."""
    lane = tl.arange(0, BLOCK)
    key = score_key(score, start + first)
    bound = tl.where(lane == first, float("-inf"), bound)
    top = tl.max(bound, axis=0)
    while top >= _bound_of(score):
        rival = tl.min(tl.where(bound == top, lane, BLOCK - 1), axis=0)
        token = start + rival
        other = gumbel_score(tl.load(row_ptr + token).to(tl.float32), temperature, seed, position, token, False)
        key = tl.maximum(key, score_key(other, token))
        score = tl.maximum(score, other)
        bound = tl.where(lane == rival, float("-inf"), bound)
        top = tl.max(bound, axis=0)
    return key


@triton.jit
def random_key(
    logits, row_ptr, start, vocab, temperature, seed, position, rival, BLOCK: tl.constexpr, STEP: tl.constexpr
):
    """Return the key of the best token of ``[start, start + BLOCK)``, or 0 if it cannot reach the score `rival`.

    `logits` [BLOCK] are the block's, -inf beyond the vocabulary; the temperature is not 0.
    """
    lane = tl.arange(0, BLOCK)
    # 2^23 (logits / T + g) / log(2) - 159 * 2^23, from above
    bound = logits.to(tl.float32) * (12102203.161561485 / temperature) - loose_log2_uniform(
        seed, position, start + lane
    )
    top = max_or_nan(bound)
    key = tl.zeros([], tl.int64)
    is_odd = (top != top) | (tl.abs(top) == float("inf"))
    if top >= _bound_of(rival):
        first = tl.min(tl.where(bound == top, lane, BLOCK - 1), axis=0)
        best = start + first
        score = gumbel_score(tl.load(row_ptr + best).to(tl.float32), temperature, seed, position, best, False)
        num_rivals = tl.sum((bound >= _bound_of(score)).to(tl.int32), axis=0) - 1
        key = score_key(score, best)
        if num_rivals > 16:
            is_odd = True
        elif (num_rivals > 0) & (not is_odd):
            key = _best_of_few(bound, score, first, row_ptr, start, temperature, seed, position, BLOCK)
    if is_odd:
        # a crowd of rivals, or nothing that a bound can be trusted for
        key = _exact_key(row_ptr, start, vocab, temperature, seed, position, BLOCK, STEP)
    return key


@triton.jit
def logits_before(row_ptr, start, end, BLOCK: tl.constexpr):
    """Load a block, -inf from `end` on; without a branch, so that nothing waits for it early. [BLOCK]"""
    token = start + tl.arange(0, BLOCK)
    return tl.load(row_ptr + token, mask=token < end, other=float("-inf"))
