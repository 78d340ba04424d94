"""Draw from the truncated rows that `gumbel_truncated` left over: one program scales, masks and draws a row.

A few rows are drawn by the very programs that left them over, many by a launch of their own.

The scaled logits stand in a row of scratch memory, one a program and not one a logits row, so that a batch of
wide rows costs time, never memory.
"""

from __future__ import annotations

import torch

from mrv2_kernels._triton import tl, triton
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.gemm.pdl import gdc_launch_dependents, gdc_wait
from mrv2_kernels.sampling._mask_row import truncate_row
from mrv2_kernels.sampling.gumbel import gumbel_score
from mrv2_kernels.sampling.truncation import Truncation

_BLOCK = 4096
_FEW = 256
_NUM_WARPS = 16
# programs, and rows of scratch memory
MAX_PROGRAMS = 64


@triton.jit
def _scale_row(copy_ptr, row_ptr, vocab, temperature, min_p, BLOCK: tl.constexpr):
    """Write the scaled logits of a row, -inf for those that min-p drops."""
    lane = tl.arange(0, BLOCK)
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    for base in range(0, vocab, BLOCK):
        mask = base + lane < vocab
        logits = tl.load(row_ptr + base + lane, mask=mask, other=float("-inf")).to(tl.float32)
        scaled = tl.div_rn(logits, temperature)
        tops = tl.maximum(tops, scaled)
        tl.store(copy_ptr + base + lane, scaled, mask=mask)
    tl.debug_barrier()
    if min_p > 0.0:
        limit = tl.max(tops, axis=0) + tl.log(min_p)
        for base in range(0, vocab, BLOCK):
            mask = base + lane < vocab
            scaled = tl.load(copy_ptr + base + lane, mask=mask, other=float("-inf"))
            tl.store(copy_ptr + base + lane, tl.where(scaled < limit, float("-inf"), scaled), mask=mask)
        tl.debug_barrier()


@triton.jit
def _draw_scaled(row_ptr, vocab, temperature, seed, position, BLOCK: tl.constexpr):
    """Return the token of the best score of a scaled row, the lowest of equal ones."""
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    tokens = tl.zeros([BLOCK], tl.int32) + 0x7FFFFFFF
    for base in range(0, vocab, BLOCK):
        token = base + lane
        logits = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf"))
        score = gumbel_score(logits, temperature, seed, position, token, True)
        is_better = score > best
        best = tl.where(is_better, score, best)
        tokens = tl.where(is_better, token, tokens)
    return tl.min(tl.where(best == tl.max(best, axis=0), tokens, 0x7FFFFFFF), axis=0)


@triton.jit
def draw_wide_row(
    row_ptr,
    vocab,
    seed,
    position,
    temperature,
    min_p,
    top_k,
    top_p,
    copy_ptr,
    scratch_ptr,
    WIDE_FEW: tl.constexpr,
    WIDE_BLOCK: tl.constexpr,
):
    """Return the token drawn from a truncated row without NaN and with something above -inf.

    `copy_ptr`: [V] float32, `scratch_ptr`: [3, WIDE_BLOCK] float32, both of this program alone and overwritten.
    """
    _scale_row(copy_ptr, row_ptr, vocab, temperature, min_p, WIDE_BLOCK)
    truncate_row(copy_ptr, vocab, scratch_ptr, top_k, top_p, WIDE_FEW, WIDE_BLOCK)
    tl.debug_barrier()
    return _draw_scaled(copy_ptr, vocab, temperature, seed, position, WIDE_BLOCK).to(tl.int64)


@triton.jit(do_not_specialize=["num_rows"])
def _wide_kernel(
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
    copy_ptr,
    copy_stride,
    scratch_ptr,
    num_rows,
    vocab,
    WIDE_FEW: tl.constexpr,
    WIDE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0).to(tl.int64)
    copy_ptr += program * copy_stride
    scratch_ptr += program * 3 * WIDE_BLOCK
    for row in range(program, num_rows, tl.num_programs(0)):
        if tl.load(sampled_ptr + row * sampled_stride) == -2:
            slot = tl.load(logit_slots_ptr + row).to(tl.int64)
            drawn = draw_wide_row(
                logits_ptr + row * logits_stride,
                vocab,
                tl.load(seeds_ptr + slot),
                tl.load(positions_ptr + row),
                tl.load(temperature_ptr + slot),
                tl.load(min_p_ptr + slot),
                tl.load(top_k_ptr + slot),
                tl.load(top_p_ptr + slot),
                copy_ptr,
                scratch_ptr,
                WIDE_FEW,
                WIDE_BLOCK,
            )
            tl.store(sampled_ptr + row * sampled_stride, drawn)
            tl.debug_barrier()


def wide_memory(num_programs: int, vocab: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory of as many programs: [programs, V] and [programs, 3, BLOCK] float32, not initialised."""
    copy = torch.empty(num_programs, vocab, dtype=torch.float32, device=device)
    return copy, torch.empty(num_programs, 3, _BLOCK, dtype=torch.float32, device=device)


def wide_constants() -> dict[str, int]:
    """Return the constants of `draw_wide_row`."""
    return {"WIDE_FEW": min(_FEW, _BLOCK), "WIDE_BLOCK": _BLOCK}


def draw_wide_rows(
    # [N, V] bfloat16, float16 or float32, any row stride; raw
    logits: torch.Tensor,
    # [N] int64, in and out: -2 = to be drawn
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
    truncation: Truncation,
    pdl: bool = False,
) -> None:
    """Replace each -2 in `sampled` by the row's token; such rows hold no NaN and something above -inf.  CUDA only.

    `pdl`: the kernel launched before lets this one start while it runs (`gemm.pdl`).
    """
    num_rows, vocab = logits.shape
    num_programs = min(num_rows, MAX_PROGRAMS)
    copy, scratch = wide_memory(num_programs, vocab, logits.device)
    _wide_kernel[(num_programs,)](
        sampled,
        sampled.stride(0),
        logits,
        logits.stride(0),
        logit_slots,
        positions,
        temperature,
        seeds,
        truncation.min_p,
        truncation.top_k,
        truncation.top_p,
        copy,
        copy.stride(0),
        scratch,
        num_rows,
        vocab,
        **wide_constants(),
        PDL=pdl,
        num_warps=_NUM_WARPS,
        launch_pdl=pdl,
    )


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    return [
        AotCase(
            kernel=_wide_kernel,
            signature={
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
                "copy_ptr": "*fp32",
                "copy_stride": "i32",
                "scratch_ptr": "*fp32",
                "num_rows": "i32",
                "vocab": "i32",
            },
            constexprs={"PDL": True, **wide_constants()},
            num_warps=_NUM_WARPS,
        )
        for dtype in ("bf16", "fp32")
    ]
