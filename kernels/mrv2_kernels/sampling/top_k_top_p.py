"""Keep the k most likely tokens, then the smallest set of them that holds mass p; mask the rest in place.

Tokens are ranked by (logit descending, id ascending).  Top-k keeps exactly the first k.  Top-p takes
the softmax over what top-k kept and keeps the shortest prefix whose mass reaches p, at least one token:
a token stays if the mass before it is below p.  Ties at either border therefore keep the lowest ids.

Both twins keep the same tokens, except where the mass before a token equals p to within the rounding
of a sum (float32 in the kernel, float64 in the reference).
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._numerics import accumulator_dtype
from mrv2_kernels._triton import tl, triton
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.sampling._select import collect, lane_floor, lane_maxima, locate

# logits that are compared each with each instead of bisected
_FEW = 256
_BLOCK = 4096
_NUM_WARPS = 16


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
def _top_k_top_p_kernel(
    logits_ptr,
    logits_stride,
    logit_slots_ptr,
    top_k_ptr,
    top_p_ptr,
    scratch_ptr,
    vocab,
    FEW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(logit_slots_ptr + row).to(tl.int64)
    top_k = tl.load(top_k_ptr + slot)
    top_p = tl.load(top_p_ptr + slot)
    truncate_row(logits_ptr + row * logits_stride, vocab, scratch_ptr + row * 3 * BLOCK, top_k, top_p, FEW, BLOCK)


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


def apply_top_k_top_p_triton(
    # [N, V] any float dtype, any row stride, in and out
    logits: torch.Tensor,
    # [N] int32: row of the request state
    logit_slots: torch.Tensor,
    # [R] int32, 0 = off
    top_k: torch.Tensor,
    # [R] float32, 1 = off
    top_p: torch.Tensor,
) -> None:
    """Set what top-k, then top-p, drop to -inf; at least one token stays.

    Rows with both off, and rows whose maximum is not finite or that hold NaN, are not touched.
    """
    assert logits.stride(1) == 1, f"logits have inner stride {logits.stride(1)}: their rows must be contiguous"
    num_rows, vocab = logits.shape
    if num_rows == 0:
        return
    scratch = torch.empty(num_rows, 3, _BLOCK, dtype=accumulator_dtype(logits.dtype), device=logits.device)
    _top_k_top_p_kernel[(num_rows,)](
        logits,
        logits.stride(0),
        logit_slots,
        top_k,
        top_p,
        scratch,
        vocab,
        FEW=min(_FEW, _BLOCK),
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )


def apply_top_k_top_p_torch(
    # [N, V] any float dtype, any row stride, in and out
    logits: torch.Tensor,
    # [N] int32: row of the request state
    logit_slots: torch.Tensor,
    # [R] int32, 0 = off
    top_k: torch.Tensor,
    # [R] float32, 1 = off
    top_p: torch.Tensor,
) -> None:
    """Torch reference of `apply_top_k_top_p`."""
    vocab = logits.shape[1]
    k, p = top_k[logit_slots], top_p[logit_slots]
    k = torch.where((k <= 0) | (k >= vocab), vocab, k)
    rows = ((k < vocab) | (p < 1.0)).nonzero().squeeze(1)
    if rows.shape[0] == 0:
        return
    chosen = logits[rows].to(accumulator_dtype(logits.dtype))
    k, p = k[rows].unsqueeze(1), p[rows].unsqueeze(1).double()
    sorted_logits, ids = chosen.sort(dim=1, descending=True, stable=True)
    kept = torch.arange(vocab, device=logits.device) < k
    mass = (sorted_logits - sorted_logits[:, :1]).exp().double() * kept
    total = mass.cumsum(dim=1)
    within = total - mass < p * total[:, -1:]
    within[:, 0] = True
    kept &= within | (p >= 1.0)
    # NaN sorts first, so that one look at the first column finds NaN, +inf and all -inf
    kept |= ~sorted_logits[:, :1].isfinite()
    dropped = torch.empty_like(kept).scatter_(1, ids, ~kept)
    logits[rows] = logits[rows].masked_fill_(dropped, float("-inf"))


apply_top_k_top_p = dispatch(apply_top_k_top_p_triton, apply_top_k_top_p_torch)


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    return [
        AotCase(
            kernel=_top_k_top_p_kernel,
            signature={
                "logits_ptr": f"*{dtype}",
                "logits_stride": "i32",
                "logit_slots_ptr": "*i32",
                "top_k_ptr": "*i32",
                "top_p_ptr": "*fp32",
                "scratch_ptr": "*fp64" if dtype == "fp64" else "*fp32",
                "vocab": "i32",
            },
            constexprs={"FEW": _FEW, "BLOCK": _BLOCK},
            num_warps=_NUM_WARPS,
        )
        for dtype in ("bf16", "fp32", "fp64")
    ]
