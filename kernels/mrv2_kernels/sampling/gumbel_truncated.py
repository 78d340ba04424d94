"""Draw from rows with min-p, top-k or top-p without masking the vocabulary: each logit is read once.

A program reads one chunk of a row and keeps the maximum of each group of tokens.  The program that arrives last at
a row, or one of a second launch (`launches` decides by the batch), bounds the smallest kept logit from below by these
maxima (by the k-th largest one, or by ``max + T log(min_p)``), reads again only the groups that reach the bound, a
few tens of them, ranks the logits found there each against each, and draws from what is kept.

A row whose kept tokens may not fit, such as a nucleus of thousands, is left to a second launch (`gumbel_wide`).
Both draw what `Truncation.apply` and `gumbel_sample` draw.
"""

from __future__ import annotations

import torch

from mrv2_kernels._triton import cdiv, next_power_of_2, tl, triton
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.gemm.pdl import gdc_launch_dependents, gdc_wait, has_pdl
from mrv2_kernels.sampling._block_draw import larger, max_or_nan
from mrv2_kernels.sampling._select import floor_of
from mrv2_kernels.sampling.gumbel import gumbel_score
from mrv2_kernels.sampling.gumbel_wide import draw_wide_rows
from mrv2_kernels.sampling.launches import TRUNCATED, TruncatedLaunch, launch_of
from mrv2_kernels.sampling.truncation import Truncation, is_truncated
from mrv2_kernels.sampling.workspace import DrawWorkspace

# a group is `repeats` runs of _WIDTH tokens, _LANES * _WIDTH apart; a chunk is _LANES groups
_LANES = 128
_WIDTH = 8
# most groups that are read again, and most logits that are ranked each against each
_HOT = 256
_FEW = 256


@triton.jit
def _chunk_maxima(row_ptr, vocab, chunk, LANES: tl.constexpr, WIDTH: tl.constexpr, REPEATS: tl.constexpr):
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
def _store_chunk(
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
):
    """Store the maxima of the chunk's groups and, where wanted, its maximum and mass relative to that."""
    tl.store(scratch_ptr + chunk * LANES + tl.arange(0, LANES), maxima)
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
def _collect_groups(
    row_ptr,
    vocab,
    temperature,
    maxima,
    floor,
    limit,
    hot_ptr,
    values_ptr,
    ids_ptr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    REPEATS: tl.constexpr,
    HOT: tl.constexpr,
    FEW: tl.constexpr,
    COLLECT: tl.constexpr,
):
    """Compact the scaled logits whose raw ones reach `floor` and that reach `limit`; return their number.

    Nothing above FEW is stored; a number above FEW also stands for too many groups.
    """
    is_hot = maxima >= floor
    num_hot = tl.sum(is_hot.to(tl.int32), axis=0)
    num_found = num_hot * 0
    if num_hot > HOT:
        num_found += FEW + 1
    else:
        group = tl.arange(0, maxima.shape[0])
        tl.store(hot_ptr + tl.cumsum(is_hot.to(tl.int32), axis=0) - 1, group.to(tl.float32), mask=is_hot)
        tl.debug_barrier()
        for base in range(0, num_hot * (WIDTH * REPEATS), COLLECT):
            entry = base + tl.arange(0, COLLECT)
            mask = entry < num_hot * (WIDTH * REPEATS)
            hot = tl.load(hot_ptr + entry // (WIDTH * REPEATS), mask=mask, other=0.0).to(tl.int32)
            run = (entry // WIDTH) % REPEATS
            token = (hot // LANES * REPEATS + run) * (LANES * WIDTH) + hot % LANES * WIDTH + entry % WIDTH
            mask = mask & (token < vocab)
            logits = tl.load(row_ptr + token, mask=mask, other=float("-inf")).to(tl.float32)
            scaled = tl.div_rn(logits, temperature)
            is_found = (logits >= floor) & (scaled >= limit) & mask
            count = tl.sum(is_found.to(tl.int32), axis=0)
            if num_found + count <= FEW:
                place = num_found + tl.cumsum(is_found.to(tl.int32), axis=0) - 1
                tl.store(values_ptr + place, scaled, mask=is_found)
                tl.store(ids_ptr + place, token.to(tl.float32), mask=is_found)
            num_found += count
        tl.debug_barrier()
    return num_found


@triton.jit
def _kept(values, ids, num_found, values_ptr, ids_ptr, top, row_mass, top_k, top_p, FEW: tl.constexpr):
    """Return which of the collected logits top-k and top-p keep, and the mass that was collected.

    `row_mass` is the mass that top-p shares out without top-k; negative = all of it was collected.
    """
    rank = tl.zeros([FEW], tl.int32)
    mass_before = tl.zeros([FEW], tl.float32)
    for base in range(0, num_found, 16):
        other_place = base + tl.arange(0, 16)
        others = tl.load(values_ptr + other_place, mask=other_place < num_found, other=float("-inf"))
        other_ids = tl.load(ids_ptr + other_place, mask=other_place < num_found, other=0.0)
        is_tie = others[None, :] == values[:, None]
        precedes = (others[None, :] > values[:, None]) | (is_tie & (other_ids[None, :] < ids[:, None]))
        rank += tl.sum(precedes.to(tl.int32), axis=1)
        mass_before += tl.sum(tl.where(precedes, tl.exp(others - top)[None, :], 0.0), axis=1)
    is_kept = tl.arange(0, FEW) < num_found
    found_mass = tl.sum(tl.where(is_kept, tl.exp(values - top), 0.0), axis=0)
    shared = tl.where(row_mass < 0.0, found_mass, row_mass)
    if top_k > 0:
        is_kept = is_kept & (rank < top_k)
        shared = tl.sum(tl.where(is_kept, tl.exp(values - top), 0.0), axis=0)
    if top_p < 1.0:
        is_kept = is_kept & ((mass_before < top_p * shared) | (rank == 0))
    return is_kept, found_mass


@triton.jit
def _draw_row(
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
    HOT: tl.constexpr,
    FEW: tl.constexpr,
    COLLECT: tl.constexpr,
):
    """Return the token drawn from a row whose chunks are scanned; -1 = none, -2 = left over."""
    group = tl.arange(0, CHUNKS * LANES)
    maxima = tl.load(scratch_ptr + group, mask=group < num_chunks * LANES, other=float("-inf"), cache_modifier=".cg")
    top = max_or_nan(maxima)
    drawn = tl.full([], -2, tl.int64)
    if (top != top) | (top == float("-inf")):
        drawn += 1
    elif (top < float("inf")) & (top_k <= FEW):
        scaled_top = tl.div_rn(top, temperature)
        # the lowest finite float32: all that is above -inf
        floor = tl.full([], -3.4028234663852886e38, tl.float32)
        limit = floor
        if min_p > 0.0:
            limit = scaled_top + tl.log(min_p)
            floor = limit * temperature
        if (top_k > 0) | (min_p == 0.0):
            rank = tl.where(top_k > 0, top_k, FEW // 2)
            of_rank, reaching = floor_of(maxima, top, rank)
            # too few groups for the k-th largest maximum to bound anything; top-p finds out by the mass
            is_bound = (reaching >= top_k) | (top_k == 0)
            floor = tl.where(is_bound, tl.maximum(floor, of_rank), floor)
        # logits a rounding below the bound may be equal to it once they are divided
        floor = tl.maximum(floor - (tl.abs(floor) + tl.abs(top)) * 4.76837158203125e-07, -3.4028234663852886e38)
        hot_ptr = scratch_ptr + CHUNKS * (LANES + 2)
        values_ptr = hot_ptr + HOT
        ids_ptr = values_ptr + FEW
        num_found = _collect_groups(
            row_ptr,
            vocab,
            temperature,
            maxima,
            floor,
            limit,
            hot_ptr,
            values_ptr,
            ids_ptr,
            LANES,
            WIDTH,
            REPEATS,
            HOT,
            FEW,
            COLLECT,
        )
        if num_found <= FEW:
            row_mass = tl.full([], -1.0, tl.float32)
            if (top_k == 0) & (min_p == 0.0):
                chunk = tl.arange(0, CHUNKS)
                totals_ptr = scratch_ptr + CHUNKS * LANES + chunk
                tops = tl.load(totals_ptr, mask=chunk < num_chunks, other=float("-inf"), cache_modifier=".cg")
                masses = tl.load(totals_ptr + CHUNKS, mask=chunk < num_chunks, other=0.0, cache_modifier=".cg")
                row_mass = tl.sum(masses * tl.exp((tops - top) / temperature), axis=0)
            place = tl.arange(0, FEW)
            values = tl.load(values_ptr + place, mask=place < num_found, other=float("-inf"))
            ids = tl.load(ids_ptr + place, mask=place < num_found, other=0.0)
            is_kept, found_mass = _kept(
                values, ids, num_found, values_ptr, ids_ptr, scaled_top, row_mass, top_k, top_p, FEW
            )
            if found_mass >= top_p * row_mass:
                score = gumbel_score(values, temperature, seed, position, ids.to(tl.int32), True)
                score = tl.where(is_kept, score, float("-inf"))
                best = tl.max(score, axis=0)
                drawn = tl.min(tl.where(is_kept & (score == best), ids, float("inf")), axis=0).to(tl.int64)
    return drawn


@triton.jit
def _truncated_kernel(
    sampled_ptr,
    sampled_stride,
    logits_ptr,
    logits_stride,
    logit_slots_ptr,
    positions_ptr,
    temperature_ptr,
    seeds_ptr,
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    arrived_ptr,
    scratch_ptr,
    scratch_stride,
    vocab,
    num_chunks,
    ALL_ROWS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    REPEATS: tl.constexpr,
    CHUNKS: tl.constexpr,
    HOT: tl.constexpr,
    FEW: tl.constexpr,
    COLLECT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scan one chunk; unless IS_SPLIT, the program that arrives last at a row draws."""
    if PDL:
        gdc_launch_dependents()
    # row by row: the ends of rows lie beside the reading of others
    row = (tl.program_id(0) // num_chunks).to(tl.int64)
    chunk = tl.program_id(0) % num_chunks
    row_ptr = logits_ptr + row * logits_stride
    if ALL_ROWS:
        # on their way before the parameters, which hang on each other
        maxima = _chunk_maxima(row_ptr, vocab, chunk, LANES, WIDTH, REPEATS)
    slot = tl.load(logit_slots_ptr + row).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot)
    if is_truncated(min_p_ptr + slot, top_k_ptr + slot, top_p_ptr + slot, temperature, vocab):
        min_p = tl.load(min_p_ptr + slot)
        top_p = tl.load(top_p_ptr + slot)
        top_k = tl.load(top_k_ptr + slot)
        top_k = tl.where(top_k < vocab, tl.maximum(top_k, 0), 0)
        scratch_ptr += row * scratch_stride
        with_mass = (top_k == 0) & (min_p == 0.0)
        if not ALL_ROWS:
            maxima = _chunk_maxima(row_ptr, vocab, chunk, LANES, WIDTH, REPEATS)
        _store_chunk(maxima, row_ptr, vocab, temperature, with_mass, chunk, scratch_ptr, LANES, WIDTH, REPEATS, CHUNKS)
        if not IS_SPLIT:
            tl.debug_barrier()
            if tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel") == num_chunks - 1:
                tl.store(arrived_ptr + row, 0)
                drawn = _draw_row(
                    row_ptr,
                    vocab,
                    tl.load(seeds_ptr + slot),
                    tl.load(positions_ptr + row),
                    temperature,
                    min_p,
                    top_k,
                    top_p,
                    scratch_ptr,
                    num_chunks,
                    LANES,
                    WIDTH,
                    REPEATS,
                    CHUNKS,
                    HOT,
                    FEW,
                    COLLECT,
                )
                tl.store(sampled_ptr + row * sampled_stride, drawn)


@triton.jit
def _draw_kernel(
    sampled_ptr,
    sampled_stride,
    logits_ptr,
    logits_stride,
    logit_slots_ptr,
    positions_ptr,
    temperature_ptr,
    seeds_ptr,
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    scratch_ptr,
    scratch_stride,
    vocab,
    num_chunks,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    REPEATS: tl.constexpr,
    CHUNKS: tl.constexpr,
    HOT: tl.constexpr,
    FEW: tl.constexpr,
    COLLECT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Draw from one row whose chunks are scanned."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    # written before the first launch began, so read before its end
    slot = tl.load(logit_slots_ptr + row).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot)
    seed = tl.load(seeds_ptr + slot)
    position = tl.load(positions_ptr + row)
    min_p = tl.load(min_p_ptr + slot)
    top_p = tl.load(top_p_ptr + slot)
    top_k = tl.load(top_k_ptr + slot)
    is_wanted = is_truncated(min_p_ptr + slot, top_k_ptr + slot, top_p_ptr + slot, temperature, vocab)
    if PDL:
        gdc_wait()
    if is_wanted:
        drawn = _draw_row(
            logits_ptr + row * logits_stride,
            vocab,
            seed,
            position,
            temperature,
            min_p,
            tl.where(top_k < vocab, tl.maximum(top_k, 0), 0),
            top_p,
            scratch_ptr + row * scratch_stride,
            num_chunks,
            LANES,
            WIDTH,
            REPEATS,
            CHUNKS,
            HOT,
            FEW,
            COLLECT,
        )
        tl.store(sampled_ptr + row * sampled_stride, drawn)


def draw_truncated_rows(
    # [N, V] bfloat16, float16 or float32, any row stride; raw
    logits: torch.Tensor,
    # [N] int64, out
    sampled: torch.Tensor,
    # [N] int32: row of the request state
    logit_slots: torch.Tensor,
    # [N] int32
    positions: torch.Tensor,
    # [R] float32
    temperature: torch.Tensor,
    # [R] int64
    seeds: torch.Tensor,
    *,
    workspace: DrawWorkspace,
    truncation: Truncation,
) -> None:
    """Write the token of each row that is truncated and random; other rows are left alone.  CUDA only."""
    num_rows, vocab = logits.shape
    launch = launch_of(TRUNCATED, num_rows)
    pdl = launch.is_split and has_pdl(logits)
    num_chunks = cdiv(vocab, _LANES * _WIDTH * launch.repeats)
    chunks = next_power_of_2(num_chunks)
    scratch = torch.empty(num_rows, chunks * (_LANES + 2) + _HOT + 2 * _FEW, dtype=torch.float32, device=logits.device)
    where = (sampled, sampled.stride(0), logits, logits.stride(0), logit_slots, positions, temperature, seeds)
    limits = truncation[:3]
    scanned = (scratch, scratch.stride(0), vocab, num_chunks)
    constants = _constants(launch, chunks)
    _truncated_kernel[(num_rows * num_chunks,)](
        *where,
        *limits,
        workspace.arrived,
        *scanned,
        ALL_ROWS=truncation.all_rows,
        IS_SPLIT=launch.is_split,
        PDL=pdl,
        **constants,
        num_warps=launch.num_warps,
    )
    if launch.is_split:
        _draw_kernel[(num_rows,)](
            *where, *limits, *scanned, PDL=pdl, **constants, num_warps=launch.draw_warps, launch_pdl=pdl
        )
    draw_wide_rows(logits, sampled, logit_slots, positions, temperature, seeds, truncation=truncation, pdl=pdl)


def _constants(launch: TruncatedLaunch, chunks: int) -> dict[str, int]:
    return {
        "LANES": _LANES,
        "WIDTH": _WIDTH,
        "REPEATS": launch.repeats,
        "CHUNKS": chunks,
        "HOT": _HOT,
        "FEW": _FEW,
        "COLLECT": launch.collect,
    }


def _signature(dtype: str, **more: str) -> dict[str, str]:
    return {
        "sampled_ptr": "*i64",
        "sampled_stride": "i32",
        "logits_ptr": f"*{dtype}",
        "logits_stride": "i32",
        "logit_slots_ptr": "*i32",
        "positions_ptr": "*i32",
        "temperature_ptr": "*fp32",
        "seeds_ptr": "*i64",
        "min_p_ptr": "*fp32",
        "top_k_ptr": "*i32",
        "top_p_ptr": "*fp32",
        "scratch_ptr": "*fp32",
        "scratch_stride": "i32",
        "vocab": "i32",
        "num_chunks": "i32",
        **more,
    }


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    aligned = frozenset({"logits_ptr", "logits_stride", "vocab"})
    one = TruncatedLaunch(repeats=4, is_split=False)
    two = TruncatedLaunch(repeats=8, is_split=True)
    scans = [
        AotCase(
            kernel=_truncated_kernel,
            signature=_signature(dtype, arrived_ptr="*i32"),
            constexprs={
                "ALL_ROWS": launch.is_split,
                "IS_SPLIT": launch.is_split,
                "PDL": launch.is_split,
                **_constants(launch, chunks),
            },
            num_warps=launch.num_warps,
            aligned=aligned,
        )
        for dtype in ("bf16", "fp32")
        for launch, chunks in ((one, 64), (two, 32))
    ]
    draws = [
        AotCase(
            kernel=_draw_kernel,
            signature=_signature(dtype),
            constexprs={"PDL": True, **_constants(two, 32)},
            num_warps=two.draw_warps,
            aligned=aligned,
        )
        for dtype in ("bf16", "fp32")
    ]
    return scans + draws
