"""Draw from rows with min-p, top-k or top-p without masking the vocabulary: each logit is read once.

A program reads one chunk of a row and keeps the maximum of each group of tokens.  The program that arrives last at
a row, or one of a second launch (`launches` decides by the batch), bounds the smallest kept logit from below by these
maxima (by the k-th largest one, of groups or of spans of groups, or by ``max + T log(min_p)``), reads again only the
groups that reach the bound, a few tens of them, ranks the logits found there each against each, and draws from what is
kept (`_truncated_row`).

A row whose kept tokens may not fit, such as a nucleus of thousands, is left over: the same program draws it in another
way, or a last launch does (`gumbel_wide`; `launches` decides by the batch).
Both draw what `Truncation.apply` and `gumbel_sample` draw.
"""

from __future__ import annotations

import torch

from mrv2_kernels._triton import cdiv, next_power_of_2, tl, triton
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.gemm.pdl import gdc_launch_dependents, gdc_wait, has_pdl
from mrv2_kernels.sampling._truncated_row import chunk_maxima, draw_scanned_row, store_chunk
from mrv2_kernels.sampling.gumbel_wide import (
    MAX_PROGRAMS,
    draw_wide_row,
    draw_wide_rows,
    wide_constants,
    wide_memory,
)
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
    SPANS: tl.constexpr,
    HOT: tl.constexpr,
    FEW: tl.constexpr,
    COLLECT: tl.constexpr,
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scan one chunk; unless IS_SPLIT, the program that arrives last at a row draws."""
    if PDL:
        # in this order: what the second launch reads before its own wait was written before this one ended
        gdc_wait()
        gdc_launch_dependents()
    # row by row: the ends of rows lie beside the reading of others
    row = (tl.program_id(0) // num_chunks).to(tl.int64)
    chunk = tl.program_id(0) % num_chunks
    row_ptr = logits_ptr + row * logits_stride
    if ALL_ROWS:
        # on their way before the parameters, which hang on each other
        maxima = chunk_maxima(row_ptr, vocab, chunk, LANES, WIDTH, REPEATS)
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
            maxima = chunk_maxima(row_ptr, vocab, chunk, LANES, WIDTH, REPEATS)
        store_chunk(
            maxima, row_ptr, vocab, temperature, with_mass, chunk, scratch_ptr, LANES, WIDTH, REPEATS, CHUNKS, SPANS
        )
        if not IS_SPLIT:
            tl.debug_barrier()
            if tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel") == num_chunks - 1:
                tl.store(arrived_ptr + row, 0)
                drawn = draw_scanned_row(
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
                    SPANS,
                    HOT,
                    FEW,
                    COLLECT,
                    THREADS,
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
    copy_ptr,
    copy_stride,
    lanes_ptr,
    vocab,
    num_chunks,
    DRAWS_WIDE: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    REPEATS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPANS: tl.constexpr,
    HOT: tl.constexpr,
    FEW: tl.constexpr,
    COLLECT: tl.constexpr,
    THREADS: tl.constexpr,
    WIDE_FEW: tl.constexpr,
    WIDE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Draw from one row whose chunks are scanned; with DRAWS_WIDE no row is left over."""
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
        drawn = draw_scanned_row(
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
            SPANS,
            HOT,
            FEW,
            COLLECT,
            THREADS,
        )
        if DRAWS_WIDE:
            if drawn == -2:
                drawn = draw_wide_row(
                    logits_ptr + row * logits_stride,
                    vocab,
                    seed,
                    position,
                    temperature,
                    min_p,
                    top_k,
                    top_p,
                    copy_ptr + row * copy_stride,
                    lanes_ptr + row * (3 * WIDE_BLOCK),
                    WIDE_FEW,
                    WIDE_BLOCK,
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
    pdl = has_pdl(logits)
    num_chunks = cdiv(vocab, _LANES * _WIDTH * launch.repeats)
    chunks = next_power_of_2(num_chunks)
    constants = _constants(launch, chunks)
    size = chunks * (_LANES + 2 + constants["SPANS"]) + _HOT + 3 * _FEW
    scratch = torch.empty(num_rows, size, dtype=torch.float32, device=logits.device)
    where = (sampled, sampled.stride(0), logits, logits.stride(0), logit_slots, positions, temperature, seeds)
    limits = truncation[:3]
    scanned = (scratch, scratch.stride(0), vocab, num_chunks)
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
        launch_pdl=pdl,
    )
    if launch.is_split:
        # memory of a row's own: no more rows than a launch for such rows has programs
        draws_wide = launch.draws_wide and num_rows <= MAX_PROGRAMS
        copy, lanes = wide_memory(num_rows, vocab, logits.device) if draws_wide else (scratch, scratch)
        _draw_kernel[(num_rows,)](
            *where,
            *limits,
            *scanned[:2],
            copy,
            copy.stride(0),
            lanes,
            *scanned[2:],
            DRAWS_WIDE=draws_wide,
            PDL=pdl,
            **constants,
            **wide_constants(),
            num_warps=launch.draw_warps,
            launch_pdl=pdl,
        )
        if draws_wide:
            return
    draw_wide_rows(logits, sampled, logit_slots, positions, temperature, seeds, truncation=truncation, pdl=pdl)


def _constants(launch: TruncatedLaunch, chunks: int) -> dict[str, int]:
    return {
        "LANES": _LANES,
        "WIDTH": _WIDTH,
        "REPEATS": launch.repeats,
        "CHUNKS": chunks,
        # 128 spans a row, where a chunk has so many groups: pairs of them are compared
        "SPANS": max(1, min(_LANES, 128 // chunks)),
        "HOT": _HOT,
        "FEW": _FEW,
        "COLLECT": launch.collect,
        # of the program that draws
        "THREADS": 32 * (launch.draw_warps if launch.is_split else launch.num_warps),
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
        **more,
        "vocab": "i32",
        "num_chunks": "i32",
    }


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    aligned = frozenset({"logits_ptr", "logits_stride", "vocab", "scratch_ptr"})
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
            signature=_signature(dtype, copy_ptr="*fp32", copy_stride="i32", lanes_ptr="*fp32"),
            constexprs={
                "DRAWS_WIDE": draws_wide,
                "PDL": True,
                **_constants(two, 32),
                **wide_constants(),
            },
            num_warps=two.draw_warps,
            aligned=aligned,
        )
        for dtype in ("bf16", "fp32")
        for draws_wide in (False, True)
    ]
    return scans + draws
