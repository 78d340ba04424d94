"""Device functions that draw from one truncated row, once the maxima of its groups are known (`gumbel_truncated`).

One program owns the row, and nothing here waits for memory that is not in the L2 cache, so what counts is the number
of steps that all its threads take together.  Scratch memory of a row, in float32:

    CHUNKS * LANES     maxima of the groups
    CHUNKS * 2         of each chunk its maximum, and its mass relative to that
    CHUNKS * SPANS     maxima of the spans: LANES / SPANS groups side by side in a chunk
    HOT                groups that are read again
    FEW * 3            logits that were found, divided by the temperature; their ids; their masses
"""

from __future__ import annotations

from mrv2_kernels._triton import tl, triton
from mrv2_kernels.sampling._block_draw import larger, max_or_nan
from mrv2_kernels.sampling._select import floor_of
from mrv2_kernels.sampling.gumbel import gumbel_score


@triton.jit
def chunk_maxima(row_ptr, vocab, chunk, LANES: tl.constexpr, WIDTH: tl.constexpr, REPEATS: tl.constexpr):
    """Return the maxima of the chunk's groups. [LANES]"""
    offset = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    start = chunk * (LANES * WIDTH * REPEATS)
    tops = tl.full([LANES, WIDTH], float("-inf"), tl.float32)
    for repeat in tl.static_range(REPEATS):
        token = start + repeat * (LANES * WIDTH) + offset
        logits = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        tops = larger(tops, logits)
    return tl.reduce(tops, 1, larger)


@triton.jit
def store_chunk(
    maxima,
    row_ptr,
    vocab,
    temperature,
    with_mass,
    chunk,
    scratch_ptr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    REPEATS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPANS: tl.constexpr,
):
    """Store the maxima of the chunk's groups and spans and, where wanted, its maximum and mass relative to that."""
    tl.store(scratch_ptr + chunk * LANES + tl.arange(0, LANES), maxima)
    spans_ptr = scratch_ptr + CHUNKS * (LANES + 2) + chunk * SPANS
    tl.store(spans_ptr + tl.arange(0, SPANS), tl.reduce(tl.reshape(maxima, [SPANS, LANES // SPANS]), 1, larger))
    if with_mass:
        offset = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        start = chunk * (LANES * WIDTH * REPEATS)
        top = tl.max(maxima, axis=0)
        mass = tl.zeros([LANES, WIDTH], tl.float32)
        for repeat in tl.static_range(REPEATS):
            token = start + repeat * (LANES * WIDTH) + offset
            logits = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
            mass += tl.where(logits > float("-inf"), tl.exp((logits - top) / temperature), 0.0)
        totals_ptr = scratch_ptr + CHUNKS * LANES + chunk
        tl.store(totals_ptr, top)
        tl.store(totals_ptr + CHUNKS, tl.sum(tl.sum(mass, axis=1), axis=0))


@triton.jit
def _grid(NUM: tl.constexpr, THREADS: tl.constexpr):
    """Return 0 to NUM - 1: a thread has a row, neighbours in a column are neighbours. [<= THREADS, NUM / THREADS]"""
    ROWS: tl.constexpr = min(NUM, THREADS)
    return tl.arange(0, ROWS)[:, None] + ROWS * tl.arange(0, NUM // ROWS)[None, :]


@triton.jit
def _places(is_wanted):
    """Return distinct places from 0 on for the wanted entries of a grid, row by row, and their number."""
    flags = is_wanted.to(tl.int32)
    counts = tl.sum(flags, axis=1)
    before = tl.cumsum(counts, axis=0) - counts
    return before[:, None] + tl.cumsum(flags, axis=1) - 1, tl.sum(counts, axis=0)


@triton.jit
def _collect_groups(
    row_ptr,
    vocab,
    temperature,
    scaled_top,
    group,
    maxima,
    floor,
    limit,
    hot_ptr,
    values_ptr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    REPEATS: tl.constexpr,
    HOT: tl.constexpr,
    FEW: tl.constexpr,
    COLLECT: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Compact the scaled logits whose raw ones reach `floor` and that reach `limit`; return their number.

    Their ids and their masses relative to `scaled_top` stand behind them.  Nothing above FEW is stored; a number above
    FEW also stands for too many groups.
    """
    is_hot = maxima >= floor
    hot_place, num_hot = _places(is_hot)
    num_found = num_hot * 0
    if num_hot > HOT:
        num_found += FEW + 1
    else:
        tl.store(hot_ptr + hot_place, group.to(tl.float32), mask=is_hot)
        tl.debug_barrier()
        for base in range(0, num_hot * (WIDTH * REPEATS), COLLECT):
            entry = base + _grid(COLLECT, THREADS)
            mask = entry < num_hot * (WIDTH * REPEATS)
            hot = tl.load(hot_ptr + entry // (WIDTH * REPEATS), mask=mask, other=0.0).to(tl.int32)
            run = (entry // WIDTH) % REPEATS
            token = (hot // LANES * REPEATS + run) * (LANES * WIDTH) + hot % LANES * WIDTH + entry % WIDTH
            mask = mask & (token < vocab)
            logits = tl.load(row_ptr + token, mask=mask, other=float("-inf")).to(tl.float32)
            scaled = tl.div_rn(logits, temperature)
            is_found = (logits >= floor) & (scaled >= limit) & mask
            place, count = _places(is_found)
            if num_found + count <= FEW:
                place += num_found
                tl.store(values_ptr + place, scaled, mask=is_found)
                tl.store(values_ptr + FEW + place, token.to(tl.float32), mask=is_found)
                tl.store(values_ptr + 2 * FEW + place, tl.exp(scaled - scaled_top), mask=is_found)
            num_found += count
        tl.debug_barrier()
    return num_found


@triton.jit
def _kept_of_found(values_ptr, num_found, row_mass, top_k, top_p, FEW: tl.constexpr, MOST: tl.constexpr):
    """Return of the at most MOST logits that were collected the values, ids, which are kept, and if they suffice.

    `row_mass` is the mass that top-p shares out without top-k; negative = all of it was collected.
    """
    place = tl.arange(0, MOST)
    values = tl.load(values_ptr + place, mask=place < num_found, other=float("-inf"))
    ids = tl.load(values_ptr + FEW + place, mask=place < num_found, other=0.0)
    masses = tl.load(values_ptr + 2 * FEW + place, mask=place < num_found, other=0.0)
    ranks = tl.zeros([16, MOST], tl.int32)
    masses_before = tl.zeros([16, MOST], tl.float32)
    for base in range(0, num_found, 16):
        other = base + tl.arange(0, 16)
        others = tl.load(values_ptr + other, mask=other < num_found, other=float("-inf"))[:, None]
        other_ids = tl.load(values_ptr + FEW + other, mask=other < num_found, other=0.0)[:, None]
        other_masses = tl.load(values_ptr + 2 * FEW + other, mask=other < num_found, other=0.0)[:, None]
        # a thread keeps its own logits and goes through the others
        precedes = (others > values[None, :]) | ((others == values[None, :]) & (other_ids < ids[None, :]))
        ranks += precedes.to(tl.int32)
        masses_before += tl.where(precedes, other_masses, 0.0)
    rank = tl.sum(ranks, axis=0)
    mass_before = tl.sum(masses_before, axis=0)
    is_kept = place < num_found
    found_mass = tl.sum(masses, axis=0)
    shared = tl.where(row_mass < 0.0, found_mass, row_mass)
    if top_k > 0:
        is_kept = is_kept & (rank < top_k)
        shared = tl.sum(tl.where(is_kept, masses, 0.0), axis=0)
    if top_p < 1.0:
        is_kept = is_kept & ((mass_before < top_p * shared) | (rank == 0))
    return values, ids, is_kept, found_mass >= top_p * row_mass


@triton.jit
def _draw_found(
    values_ptr, num_found, row_mass, temperature, seed, position, top_k, top_p, FEW: tl.constexpr, MOST: tl.constexpr
):
    """Return the token drawn from what `_kept_of_found` keeps; -2 = top-p needs more than was collected."""
    values, ids, is_kept, is_enough = _kept_of_found(values_ptr, num_found, row_mass, top_k, top_p, FEW, MOST)
    drawn = tl.full([], -2, tl.int64)
    if is_enough:
        score = gumbel_score(values, temperature, seed, position, ids.to(tl.int32), True)
        score = tl.where(is_kept, score, float("-inf"))
        best = tl.max(score, axis=0)
        drawn = tl.min(tl.where(is_kept & (score == best), ids, float("inf")), axis=0).to(tl.int64)
    return drawn


@triton.jit
def _border_of_found(values_ptr, num_found, row_mass, top_k, top_p, FEW: tl.constexpr, MOST: tl.constexpr):
    """Return the smallest logit that `_kept_of_found` keeps and the last id of its kept ties; -2 = not known."""
    values, ids, is_kept, is_enough = _kept_of_found(values_ptr, num_found, row_mass, top_k, top_p, FEW, MOST)
    value = tl.min(tl.where(is_kept, values, float("inf")), axis=0)
    last = tl.max(tl.where(is_kept & (values == value), ids, -1.0), axis=0)
    return value, tl.where(is_enough, last, -2.0)


@triton.jit
def _num_reaching(maxima, floor):
    return tl.sum(tl.sum((maxima >= floor).to(tl.int32), axis=1), axis=0)


@triton.jit
def _floor_of_spans(spans, top_k):
    """Return the `top_k`-th largest maximum of a span, which at least `top_k` logits reach; -inf if there is none."""
    reaching = tl.sum((spans[:, None] >= spans[None, :]).to(tl.int32), axis=0)
    return tl.max(tl.where(reaching >= top_k, spans, float("-inf")), axis=0)


@triton.jit
def _find_candidates(
    row_ptr,
    vocab,
    temperature,
    min_p,
    top_k,
    scratch_ptr,
    num_chunks,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    REPEATS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPANS: tl.constexpr,
    HOT: tl.constexpr,
    FEW: tl.constexpr,
    COLLECT: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Collect the logits that may be kept; return their number and the row's mass (see `_kept_of_found`).

    -1 = the row holds NaN or nothing above -inf; above FEW = too many, or the maximum is +inf.
    """
    totals_ptr = scratch_ptr + CHUNKS * LANES
    spans_ptr = totals_ptr + CHUNKS * 2
    hot_ptr = spans_ptr + CHUNKS * SPANS
    values_ptr = hot_ptr + HOT
    span = tl.arange(0, CHUNKS * SPANS)
    spans = tl.load(spans_ptr + span, mask=span < num_chunks * SPANS, other=float("-inf"), cache_modifier=".cg")
    # pairs are swapped, so that no thread takes four neighbours at once: the places of hot groups would change threads
    group = _grid(CHUNKS * LANES, THREADS) ^ 1
    maxima = tl.load(scratch_ptr + group, mask=group < num_chunks * LANES, other=float("-inf"), cache_modifier=".cg")
    top = max_or_nan(spans)
    row_mass = tl.full([], -1.0, tl.float32)
    num_found = tl.full([], FEW + 1, tl.int32)
    if (top != top) | (top == float("-inf")):
        num_found = tl.full([], -1, tl.int32)
    elif (top < float("inf")) & (top_k <= FEW):
        scaled_top = tl.div_rn(top, temperature)
        # the lowest finite float32: all that is above -inf
        floor = tl.full([], -3.4028234663852886e38, tl.float32)
        limit = floor
        if min_p > 0.0:
            limit = scaled_top + tl.log(min_p)
            floor = limit * temperature
        of_spans = tl.full([], float("-inf"), tl.float32)
        if (top_k > 0) & (top_k <= CHUNKS * SPANS // 2):
            of_spans = _floor_of_spans(spans, top_k)
        # where the best logits lie side by side the bound of spans is too low
        if (of_spans > float("-inf")) & (_num_reaching(maxima, of_spans) <= FEW // 2):
            floor = tl.maximum(floor, of_spans)
        elif (top_k > 0) | (min_p == 0.0):
            rank = tl.where(top_k > 0, top_k, FEW // 2)
            of_rank, reaching = floor_of(tl.ravel(maxima, can_reorder=True), top, rank)
            # too few groups for the k-th largest maximum to bound anything; top-p finds out by the mass
            is_bound = (reaching >= top_k) | (top_k == 0)
            floor = tl.where(is_bound, tl.maximum(floor, of_rank), floor)
        # logits a rounding below the bound may be equal to it once they are divided
        floor = tl.maximum(floor - (tl.abs(floor) + tl.abs(top)) * 4.76837158203125e-07, -3.4028234663852886e38)
        num_found = _collect_groups(
            row_ptr,
            vocab,
            temperature,
            scaled_top,
            group,
            maxima,
            floor,
            limit,
            hot_ptr,
            values_ptr,
            LANES,
            WIDTH,
            REPEATS,
            HOT,
            FEW,
            COLLECT,
            THREADS,
        )
        if (num_found <= FEW) & (top_k == 0) & (min_p == 0.0):
            chunk = tl.arange(0, CHUNKS)
            tops = tl.load(totals_ptr + chunk, mask=chunk < num_chunks, other=float("-inf"), cache_modifier=".cg")
            masses = tl.load(totals_ptr + CHUNKS + chunk, mask=chunk < num_chunks, other=0.0, cache_modifier=".cg")
            row_mass = tl.sum(masses * tl.exp((tops - top) / temperature), axis=0)
    return num_found, row_mass


@triton.jit
def draw_scanned_row(
    row_ptr,
    vocab,
    seed,
    position,
    temperature,
    min_p,
    top_k,
    top_p,
    scratch_ptr,
    num_chunks,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    REPEATS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPANS: tl.constexpr,
    HOT: tl.constexpr,
    FEW: tl.constexpr,
    COLLECT: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Return the token drawn from a row whose chunks are scanned; -1 = none, -2 = left over."""
    num_found, row_mass = _find_candidates(
        row_ptr,
        vocab,
        temperature,
        min_p,
        top_k,
        scratch_ptr,
        num_chunks,
        LANES,
        WIDTH,
        REPEATS,
        CHUNKS,
        SPANS,
        HOT,
        FEW,
        COLLECT,
        THREADS,
    )
    values_ptr = scratch_ptr + CHUNKS * (LANES + 2 + SPANS) + HOT
    drawn = tl.full([], -2, tl.int64)
    if num_found < 0:
        drawn += 1
    elif num_found <= FEW // 2:
        drawn = _draw_found(values_ptr, num_found, row_mass, temperature, seed, position, top_k, top_p, FEW, FEW // 2)
    elif num_found <= FEW:
        drawn = _draw_found(values_ptr, num_found, row_mass, temperature, seed, position, top_k, top_p, FEW, FEW)
    return drawn


@triton.jit
def border_of_scanned_row(
    row_ptr,
    vocab,
    top_k,
    top_p,
    scratch_ptr,
    num_chunks,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    REPEATS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPANS: tl.constexpr,
    HOT: tl.constexpr,
    FEW: tl.constexpr,
    COLLECT: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Return the smallest logit that top-k and top-p keep of a row whose chunks are scanned, and its last kept id.

    The id is -1 where the row holds NaN or nothing above -inf, and -2 where the row is left over.
    """
    one = tl.full([], 1.0, tl.float32)
    num_found, row_mass = _find_candidates(
        row_ptr,
        vocab,
        one,
        one * 0.0,
        top_k,
        scratch_ptr,
        num_chunks,
        LANES,
        WIDTH,
        REPEATS,
        CHUNKS,
        SPANS,
        HOT,
        FEW,
        COLLECT,
        THREADS,
    )
    values_ptr = scratch_ptr + CHUNKS * (LANES + 2 + SPANS) + HOT
    value = one * float("-inf")
    last = one * -2.0
    if num_found < 0:
        last += 1.0
    elif num_found <= FEW // 2:
        value, last = _border_of_found(values_ptr, num_found, row_mass, top_k, top_p, FEW, FEW // 2)
    elif num_found <= FEW:
        value, last = _border_of_found(values_ptr, num_found, row_mass, top_k, top_p, FEW, FEW)
    return value, last
