"""Keep the k most likely tokens, then the smallest set of them that holds mass p; mask the rest in place.

Tokens are ranked by (logit descending, id ascending).  Top-k keeps exactly the first k.  Top-p takes
the softmax over what top-k kept and keeps the shortest prefix whose mass reaches p, at least one token:
a token stays if the mass before it is below p.  Ties at either border therefore keep the lowest ids.

Three launches: programs scan chunks of rows, one a row finds the smallest kept logit among its few largest
(`_truncated_row`), and programs mask blocks of rows.  What one program a row needs for sweeps of its own is spared so;
rows whose kept tokens may be many are left to them (`_mask_row`).

Both twins keep the same tokens, except where the mass before a token equals p to within the rounding
of a sum (float32 in the kernel, float64 in the reference).
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._numerics import accumulator_dtype
from mrv2_kernels._triton import cdiv, next_power_of_2, tl, triton
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.gemm.pdl import gdc_launch_dependents, gdc_wait, has_pdl
from mrv2_kernels.sampling._mask_row import truncate_row
from mrv2_kernels.sampling._truncated_row import border_of_scanned_row, chunk_maxima, store_chunk

# logits that are compared each with each instead of bisected
_FEW = 256
_BLOCK = 4096
_NUM_WARPS = 16
# a chunk, which a program scans, is _LANES groups of _WIDTH * _REPEATS tokens; most groups that are read again; logits
# that are looked at together then.  They order sums of masses, so they must not hang on the batch
_LANES = 128
_WIDTH = 8
_REPEATS = 5
_HOT = 256
_COLLECT = 4096
# warps of a program that scans or masks a part of a row
_PART_WARPS = 4


@triton.jit
def _is_on(top_k, top_p, vocab):
    return ((top_k > 0) & (top_k < vocab)) | (top_p < 1.0)


@triton.jit
def _scan_kernel(
    logits_ptr,
    logits_stride,
    logit_slots_ptr,
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
    SPANS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scan one chunk of a row."""
    if PDL:
        # in this order: what the second launch reads before its own wait was written before this one ended
        gdc_wait()
        gdc_launch_dependents()
    row = (tl.program_id(0) // num_chunks).to(tl.int64)
    chunk = tl.program_id(0) % num_chunks
    slot = tl.load(logit_slots_ptr + row).to(tl.int64)
    top_k = tl.load(top_k_ptr + slot)
    if _is_on(top_k, tl.load(top_p_ptr + slot), vocab):
        row_ptr = logits_ptr + row * logits_stride
        maxima = chunk_maxima(row_ptr, vocab, chunk, LANES, WIDTH, REPEATS)
        scratch_ptr += row * scratch_stride
        # without top-k the mass of the whole row is shared out
        with_mass = (top_k <= 0) | (top_k >= vocab)
        one = tl.full([], 1.0, tl.float32)
        store_chunk(maxima, row_ptr, vocab, one, with_mass, chunk, scratch_ptr, LANES, WIDTH, REPEATS, CHUNKS, SPANS)


@triton.jit
def _border_kernel(
    borders_ptr,
    logits_ptr,
    logits_stride,
    logit_slots_ptr,
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
    SPANS: tl.constexpr,
    HOT: tl.constexpr,
    FEW: tl.constexpr,
    COLLECT: tl.constexpr,
    THREADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store the smallest logit that is kept of a row, and its last kept id; -1 = nothing is to be masked any more."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    # written before the first launch began, so read before its end
    slot = tl.load(logit_slots_ptr + row).to(tl.int64)
    top_k = tl.load(top_k_ptr + slot)
    top_p = tl.load(top_p_ptr + slot)
    value = tl.full([], 0.0, tl.float32)
    last = tl.full([], -1.0, tl.float32)
    if PDL:
        gdc_wait()
    if _is_on(top_k, top_p, vocab):
        row_ptr = logits_ptr + row * logits_stride
        scratch_ptr += row * scratch_stride
        value, last = border_of_scanned_row(
            row_ptr,
            vocab,
            tl.where(top_k < vocab, tl.maximum(top_k, 0), 0),
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
        if last == -2.0:
            tl.debug_barrier()
            truncate_row(row_ptr, vocab, scratch_ptr, top_k, top_p, FEW, BLOCK)
            last += 1.0
    tl.store(borders_ptr + 2 * row, value)
    tl.store(borders_ptr + 2 * row + 1, last)


@triton.jit
def _mask_kernel(logits_ptr, logits_stride, borders_ptr, vocab, num_blocks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Mask one block of a row whose border is known."""
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    token = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
    value = tl.load(borders_ptr + 2 * row, cache_modifier=".cg")
    last = tl.load(borders_ptr + 2 * row + 1, cache_modifier=".cg").to(tl.int32)
    if last >= 0:
        ptrs = logits_ptr + row * logits_stride + token
        logits = tl.load(ptrs, mask=token < vocab).to(tl.float32)
        is_kept = (logits > value) | ((logits == value) & (token <= last))
        # whole vectors are stored, kept logits too: single words would cost four times the stores
        tl.store(ptrs, tl.where(is_kept, logits, float("-inf")), mask=token < vocab)


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
    """Mask one row, whatever its format."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(logit_slots_ptr + row).to(tl.int64)
    top_k = tl.load(top_k_ptr + slot)
    top_p = tl.load(top_p_ptr + slot)
    truncate_row(logits_ptr + row * logits_stride, vocab, scratch_ptr + row * 3 * BLOCK, top_k, top_p, FEW, BLOCK)


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
    if logits.dtype == torch.float64:
        scratch = torch.empty(num_rows, 3, _BLOCK, dtype=torch.float64, device=logits.device)
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
        return
    pdl = has_pdl(logits)
    num_chunks = cdiv(vocab, _LANES * _WIDTH * _REPEATS)
    scan, search = _constants(next_power_of_2(num_chunks))
    size = scan["CHUNKS"] * (_LANES + 2 + scan["SPANS"]) + search["HOT"] + 3 * search["FEW"]
    # a row that is left over is masked with the memory of its scan
    scratch = torch.empty(num_rows, max(size, 3 * _BLOCK), dtype=torch.float32, device=logits.device)
    borders = torch.empty(num_rows, 2, dtype=torch.float32, device=logits.device)
    limits = (logits, logits.stride(0), logit_slots, top_k, top_p)
    scanned = (scratch, scratch.stride(0), vocab, num_chunks)
    _scan_kernel[(num_rows * num_chunks,)](*limits, *scanned, **scan, PDL=pdl, num_warps=_PART_WARPS, launch_pdl=pdl)
    _border_kernel[(num_rows,)](
        borders, *limits, *scanned, **scan, **search, PDL=pdl, num_warps=_NUM_WARPS, launch_pdl=pdl
    )
    num_blocks = cdiv(vocab, _BLOCK)
    _mask_kernel[(num_rows * num_blocks,)](
        logits,
        logits.stride(0),
        borders,
        vocab,
        num_blocks,
        BLOCK=_BLOCK,
        PDL=pdl,
        num_warps=_PART_WARPS,
        launch_pdl=pdl,
    )


def _constants(chunks: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the constants of the scan and those that the search for borders has in addition."""
    scan = {
        "LANES": _LANES,
        "WIDTH": _WIDTH,
        "REPEATS": _REPEATS,
        "CHUNKS": chunks,
        # 128 spans a row, where a chunk has so many groups: pairs of them are compared
        "SPANS": max(1, min(_LANES, 128 // chunks)),
    }
    search = {
        "HOT": _HOT,
        "FEW": min(_FEW, _BLOCK),
        "COLLECT": _COLLECT,
        "THREADS": 32 * _NUM_WARPS,
        "BLOCK": _BLOCK,
    }
    return scan, search


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
    limits = {"logits_stride": "i32", "logit_slots_ptr": "*i32", "top_k_ptr": "*i32", "top_p_ptr": "*fp32"}
    scanned = {"scratch_ptr": "*fp32", "scratch_stride": "i32", "vocab": "i32", "num_chunks": "i32"}
    aligned = frozenset({"logits_ptr", "logits_stride", "vocab", "scratch_ptr"})
    scan, search = _constants(32)
    narrow = [
        case
        for dtype in ("bf16", "fp32")
        for case in (
            AotCase(
                kernel=_scan_kernel,
                signature={"logits_ptr": f"*{dtype}", **limits, **scanned},
                constexprs={**scan, "PDL": True},
                num_warps=_PART_WARPS,
                aligned=aligned,
            ),
            AotCase(
                kernel=_border_kernel,
                signature={"borders_ptr": "*fp32", "logits_ptr": f"*{dtype}", **limits, **scanned},
                constexprs={**scan, **search, "PDL": True},
                num_warps=_NUM_WARPS,
                aligned=aligned,
            ),
            AotCase(
                kernel=_mask_kernel,
                signature={
                    "logits_ptr": f"*{dtype}",
                    "logits_stride": "i32",
                    "borders_ptr": "*fp32",
                    "vocab": "i32",
                    "num_blocks": "i32",
                },
                constexprs={"BLOCK": _BLOCK, "PDL": True},
                num_warps=_PART_WARPS,
                aligned=frozenset({"logits_ptr", "logits_stride", "vocab"}),
            ),
        )
    ]
    wide = AotCase(
        kernel=_top_k_top_p_kernel,
        signature={"logits_ptr": "*fp64", **limits, "scratch_ptr": "*fp64", "vocab": "i32"},
        constexprs={"FEW": _FEW, "BLOCK": _BLOCK},
        num_warps=_NUM_WARPS,
    )
    return [*narrow, wide]
