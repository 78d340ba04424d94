"""Device functions that find thresholds in one row of logits without sorting it.

One program owns a row and sweeps it in blocks.  The first sweep keeps the maximum of each lane
(tokens with equal id modulo BLOCK).  The j-th largest lane maximum bounds the j-th largest logit from
below, so a second sweep can compact the few logits at or above it into scratch memory, where the exact
search is cheap.  If they do not fit, the row is bisected by sweeps until what is left fits.

The bisection snaps its bounds to values that occur, so it ends on an exact logit, ties included.
"""

from __future__ import annotations

from mrv2_kernels._triton import tl, triton


@triton.jit
def lane_maxima(row_ptr, vocab, lanes_ptr, BLOCK: tl.constexpr):
    """Store the lane maxima; return the row's maximum and whether it holds NaN."""
    acc: tl.constexpr = lanes_ptr.dtype.element_ty
    lane_max = tl.full([BLOCK], float("-inf"), acc)
    lane = tl.arange(0, BLOCK)
    for base in range(0, vocab, BLOCK):
        logits = tl.load(row_ptr + base + lane, mask=base + lane < vocab, other=float("-inf")).to(acc)
        lane_max = tl.maximum(lane_max, logits, propagate_nan=tl.PropagateNan.ALL)
    tl.store(lanes_ptr + lane, lane_max)
    has_nan = tl.max((lane_max != lane_max).to(tl.int32), axis=0) > 0
    tl.debug_barrier()
    return tl.max(lane_max, axis=0), has_nan


@triton.jit
def lane_floor(lanes_ptr, top, rank, BLOCK: tl.constexpr):
    """Return `floor_of` the BLOCK lane maxima in memory."""
    floor, reaching = floor_of(tl.load(lanes_ptr + tl.arange(0, BLOCK)), top, rank)
    return floor, reaching


@triton.jit
def floor_of(lanes, top, rank):
    """Return a logit that at least `rank` but not many more lanes reach, and how many lanes reach it.

    If fewer than `rank` lanes are finite it is the lowest finite one; `top` is the largest.
    """
    floor = tl.min(tl.where(lanes > float("-inf"), lanes, top), axis=0)
    reaching = tl.sum((lanes >= floor).to(tl.int32), axis=0)
    ceiling = top
    while (floor < ceiling) & (reaching > rank + rank // 4 + 8):
        middle = floor * 0.5 + ceiling * 0.5
        middle = tl.where(middle > floor, tl.minimum(middle, ceiling), ceiling)
        is_above = lanes >= middle
        count = tl.sum(is_above.to(tl.int32), axis=0)
        if count >= rank:
            floor = tl.min(tl.where(is_above, lanes, top), axis=0)
            reaching = count
        else:
            ceiling = tl.max(tl.where(is_above, float("-inf"), lanes), axis=0)
    return floor, reaching


@triton.jit
def collect(row_ptr, vocab, top, floor, reference, values_ptr, ids_ptr, BLOCK: tl.constexpr):
    """Compact the logits at or above `floor`, and their ids, into at most BLOCK entries of scratch.

    They are ordered by lane, then id.  Returns their number (nothing is stored if they do not fit), their
    mass, the row's mass (``sum(exp(x - top))``) and the number of logits at or above `reference`.
    """
    acc: tl.constexpr = values_ptr.dtype.element_ty
    lane = tl.arange(0, BLOCK)
    counts = tl.zeros([BLOCK], tl.int32)
    num_reached = tl.zeros([BLOCK], tl.int32)
    found_mass = tl.zeros([BLOCK], acc)
    row_mass = tl.zeros([BLOCK], acc)
    for base in range(0, vocab, BLOCK):
        mask = base + lane < vocab
        logits = tl.load(row_ptr + base + lane, mask=mask, other=float("-inf")).to(acc)
        mass = tl.exp(logits - top)
        is_found = (logits >= floor) & mask
        counts += is_found.to(tl.int32)
        row_mass += mass
        found_mass += tl.where(is_found, mass, 0.0)
        num_reached += ((logits >= reference) & mask).to(tl.int32)
    num_found = tl.sum(counts, axis=0)
    if num_found <= BLOCK:
        # offsets of the lanes, once: no step of the sweep waits for other lanes
        place = tl.cumsum(counts, axis=0) - counts
        for base in range(0, vocab, BLOCK):
            mask = base + lane < vocab
            logits = tl.load(row_ptr + base + lane, mask=mask, other=float("-inf")).to(acc)
            is_found = (logits >= floor) & mask
            tl.store(values_ptr + place, logits, mask=is_found)
            tl.store(ids_ptr + place, (base + lane).to(acc), mask=is_found)
            place += is_found.to(tl.int32)
    tl.debug_barrier()
    return num_found, tl.sum(found_mass, axis=0), tl.sum(row_mass, axis=0), tl.sum(num_reached, axis=0)


@triton.jit
def _collect_window(row_ptr, vocab, low, high, values_ptr, BLOCK: tl.constexpr):
    """Compact the logits in [low, high], known to fit into BLOCK entries; return their number."""
    acc: tl.constexpr = values_ptr.dtype.element_ty
    lane = tl.arange(0, BLOCK)
    counts = tl.zeros([BLOCK], tl.int32)
    for base in range(0, vocab, BLOCK):
        logits = tl.load(row_ptr + base + lane, mask=base + lane < vocab, other=float("-inf")).to(acc)
        counts += ((logits >= low) & (logits <= high)).to(tl.int32)
    place = tl.cumsum(counts, axis=0) - counts
    # a search before this one may still read the scratch memory
    tl.debug_barrier()
    for base in range(0, vocab, BLOCK):
        logits = tl.load(row_ptr + base + lane, mask=base + lane < vocab, other=float("-inf")).to(acc)
        is_found = (logits >= low) & (logits <= high)
        tl.store(values_ptr + place, logits, mask=is_found)
        place += is_found.to(tl.int32)
    tl.debug_barrier()
    return tl.sum(counts, axis=0)


@triton.jit
def _narrow(
    ptr,
    length,
    low,
    high,
    num_from_low,
    mass_above,
    num_above,
    top,
    target,
    limit,
    by_mass,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Bisect [low, high] for `locate` until it holds at most `limit` logits, or one value if that is 0.

    `num_from_low` counts the logits >= low; `num_above` and `mass_above` describe those > high, which
    need not be in the array.  Returns the updated five; at the end of a search `high` is the answer.
    """
    lane = tl.arange(0, BLOCK)
    outer_mass = mass_above
    outer_num = num_above
    while (low < high) & (num_from_low - num_above > limit):
        middle = low * 0.5 + high * 0.5
        middle = tl.where(middle > low, tl.minimum(middle, high), high)
        masses = tl.zeros([BLOCK], ACC)
        counts = tl.zeros([BLOCK], tl.int32)
        above = tl.full([BLOCK], float("inf"), ACC)
        below = tl.full([BLOCK], float("-inf"), ACC)
        for base in range(0, length, BLOCK):
            logits = tl.load(ptr + base + lane, mask=base + lane < length, other=float("-inf")).to(ACC)
            is_above = logits >= middle
            counts += is_above.to(tl.int32)
            masses += tl.where(is_above, tl.exp(logits - top), 0.0)
            above = tl.minimum(above, tl.where(is_above, logits, float("inf")))
            below = tl.maximum(below, tl.where(is_above, float("-inf"), logits))
        count = outer_num + tl.sum(counts, axis=0)
        mass = outer_mass + tl.sum(masses, axis=0)
        if tl.where(by_mass, mass, count.to(ACC)) >= target:
            low = tl.min(above, axis=0)
            num_from_low = count
        else:
            high = tl.max(below, axis=0)
            num_above = count
            mass_above = mass
    return low, high, num_from_low, mass_above, num_above


@triton.jit
def locate(row_ptr, vocab, scratch_ptr, low, num_from_low, top, target, by_mass, BLOCK: tl.constexpr):
    """Return the largest value v in [low, top] with ``weight(x >= v) >= target``.

    The weight of a logit is 1, or its mass ``exp(x - top)`` with `by_mass`.  `num_from_low` is the number
    of logits at or above `low`.  Returns v, mass and number of the logits above v, and its ties.
    """
    acc: tl.constexpr = scratch_ptr.dtype.element_ty
    no_mass = tl.zeros([], acc)
    none = tl.zeros([], tl.int32)
    low, high, num_from_low, mass_above, num_above = _narrow(
        row_ptr, vocab, low, top, none + num_from_low, no_mass, none, top, target, BLOCK, by_mass, acc, BLOCK
    )
    if low < high:
        num_inside = _collect_window(row_ptr, vocab, low, high, scratch_ptr, BLOCK)
        low, high, num_from_low, mass_above, num_above = _narrow(
            scratch_ptr,
            num_inside,
            low,
            high,
            num_from_low,
            mass_above,
            num_above,
            top,
            target,
            0,
            by_mass,
            acc,
            BLOCK,
        )
    return high, mass_above, num_above, num_from_low - num_above
