"""Device functions by which one program masks a row by top-k and top-p, however many tokens are kept.

Sweeps of the row find its largest logits (`_select`); few of them are compared each with each, many are bisected.
"""

from __future__ import annotations

from mrv2_kernels._triton import tl, triton
from mrv2_kernels.sampling._select import collect, lane_floor, lane_maxima, locate


@triton.jit
def _few_threshold(values_ptr, ids_ptr, num_values, top, row_mass, top_k, top_p, SIZE: tl.constexpr):
    """Return what `_threshold` returns, for at most SIZE logits, by comparing each with each."""
    acc: tl.constexpr = values_ptr.dtype.element_ty
    place = tl.arange(0, SIZE)
    values = tl.load(values_ptr + place, mask=place < num_values, other=float("-inf"))
    ids = tl.load(ids_ptr + place, mask=place < num_values, other=0.0)
    rank = tl.zeros([SIZE], tl.int32)
    mass_before = tl.zeros([SIZE], acc)
    for base in range(0, num_values, 32):
        other_place = base + tl.arange(0, 32)
        others = tl.load(values_ptr + other_place, mask=other_place < num_values, other=float("-inf"))
        other_ids = tl.load(ids_ptr + other_place, mask=other_place < num_values, other=0.0)
        is_tie = others[None, :] == values[:, None]
        precedes = (others[None, :] > values[:, None]) | (is_tie & (other_ids[None, :] < ids[:, None]))
        rank += tl.sum(precedes.to(tl.int32), axis=1)
        mass_before += tl.sum(tl.where(precedes, tl.exp(others - top)[None, :], 0.0), axis=1)
    is_kept = place < num_values
    if top_k > 0:
        is_kept = is_kept & (rank < top_k)
        row_mass = tl.sum(tl.where(is_kept, tl.exp(values - top), 0.0), axis=0)
    if top_p < 1.0:
        is_kept = is_kept & ((mass_before < top_p.to(acc) * row_mass) | (rank == 0))
    value = tl.min(tl.where(is_kept, values, float("inf")), axis=0)
    quota = tl.sum((is_kept & (values == value)).to(tl.int32), axis=0)
    return value, quota, tl.sum((values == value).to(tl.int32), axis=0)


@triton.jit
def _threshold(row_ptr, vocab, scratch_ptr, floor, num_from_floor, top, row_mass, top_k, top_p, BLOCK: tl.constexpr):
    """Return the smallest kept logit, how many of its ties are kept, and how many there are.

    The answer is known not to lie below `floor`, which `num_from_floor` logits reach.
    """
    acc: tl.constexpr = scratch_ptr.dtype.element_ty
    value = floor
    quota = tl.full([], 1 << 30, tl.int32)
    num_ties = tl.zeros([], tl.int32)
    kept_mass = row_mass
    for stage in range(2):
        # one loop for top-k, then top-p, so that the search is compiled once
        by_mass = stage == 1
        is_on = tl.where(by_mass, top_p < 1.0, top_k > 0)
        if is_on:
            target = tl.where(by_mass, top_p.to(acc) * kept_mass, top_k.to(acc))
            border, mass, num_above, num_ties = locate(
                row_ptr, vocab, scratch_ptr, value, num_from_floor, top, target, by_mass, BLOCK
            )
            share = tl.maximum(tl.exp(border - top), 1e-30)
            need = tl.maximum(tl.minimum(tl.ceil((target - mass) / share), 1073741824.0), 1.0).to(tl.int32)
            need = tl.where(by_mass, need, top_k - num_above)
            quota = tl.where(border == value, tl.minimum(quota, need), need)
            value = border
            kept_mass = mass + quota.to(acc) * tl.exp(value - top)
            num_from_floor = num_above + num_ties
    return value, quota, num_ties


@triton.jit
def truncate_row(row_ptr, vocab, scratch_ptr, top_k, top_p, FEW: tl.constexpr, BLOCK: tl.constexpr):
    """Apply top-k, then top-p to one row in place; scratch holds 3 BLOCK numbers of the accumulator's type."""
    acc: tl.constexpr = scratch_ptr.dtype.element_ty
    top_k = tl.where(top_k < vocab, tl.maximum(top_k, 0), 0)
    if (top_k > 0) | (top_p < 1.0):
        lanes_ptr = scratch_ptr
        values_ptr = lanes_ptr + BLOCK
        ids_ptr = values_ptr + BLOCK
        top, has_nan = lane_maxima(row_ptr, vocab, lanes_ptr, BLOCK)
        if (tl.abs(top) < float("inf")) & (has_nan == 0):
            floor, reaching = lane_floor(lanes_ptr, top, tl.where(top_k > 0, top_k, BLOCK // 4), BLOCK)
            num_found, found_mass, row_mass, _ = collect(row_ptr, vocab, top, floor, floor, values_ptr, ids_ptr, BLOCK)
            is_enough = tl.where(top_k > 0, reaching >= top_k, found_mass >= top_p.to(acc) * row_mass)
            if (num_found <= FEW) & is_enough:
                value, quota, num_ties = _few_threshold(
                    values_ptr, ids_ptr, num_found, top, row_mass, top_k, top_p, FEW
                )
            else:
                if not is_enough:
                    floor, num_found = _lowest(row_ptr, vocab, top, acc, BLOCK)
                    top_k = tl.where(num_found > top_k, top_k, 0)
                value, quota, num_ties = _threshold(
                    row_ptr, vocab, values_ptr, floor, num_found, top, row_mass, top_k, top_p, BLOCK
                )
            _mask_row(row_ptr, vocab, value, quota, num_ties, acc, BLOCK)


@triton.jit
def _lowest(row_ptr, vocab, top, ACC: tl.constexpr, BLOCK: tl.constexpr):
    """Return the lowest finite logit of a row and the number of finite ones."""
    lane = tl.arange(0, BLOCK)
    lowest = tl.zeros([BLOCK], ACC) + top
    count = tl.zeros([BLOCK], tl.int32)
    for base in range(0, vocab, BLOCK):
        logits = tl.load(row_ptr + base + lane, mask=base + lane < vocab, other=float("-inf")).to(ACC)
        is_finite = logits > float("-inf")
        lowest = tl.minimum(lowest, tl.where(is_finite, logits, top))
        count += is_finite.to(tl.int32)
    return tl.min(lowest, axis=0), tl.sum(count, axis=0)


@triton.jit
def _mask_row(row_ptr, vocab, value, quota, num_ties, ACC: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    num_seen = 0
    for base in range(0, vocab, BLOCK):
        ptrs = row_ptr + base + lane
        mask = base + lane < vocab
        logits = tl.load(ptrs, mask=mask, other=float("-inf")).to(ACC)
        is_kept = logits >= value
        if quota < num_ties:
            is_tie = logits == value
            rank = num_seen + tl.cumsum(is_tie.to(tl.int32), axis=0)
            is_kept = is_kept & ((rank <= quota) | (logits > value))
            num_seen += tl.sum(is_tie.to(tl.int32), axis=0)
        # whole vectors are stored, kept logits too: single words would cost four times the stores
        tl.store(ptrs, tl.where(is_kept, logits, float("-inf")), mask=mask)
