"""Draw a block of tokens, then a token of that block; the same distribution with noise for one block alone.

With ``L_b = log(sum of exp(logits / T) over block b)``, ``argmax(L_b + g_b)`` draws block b with its share of the
mass, and ``argmax(logits / T + g)`` inside it a token with its share of the block.  The product is softmax, by
the chain rule.  An element costs one exponential in place of a hash and two logarithms.

The noise is a pure function of (seed, position, block) and (seed, position, token), so draws are as stateless
as those of `gumbel_sample`, but they are other tokens.  In one launch the program that arrives last at a row draws;
in two, programs that sum need no barrier of the whole device and fewer registers, and the second launch begins before
the first has ended (`launches` decides by the batch).

Rows with top-k, top-p or min-p go to `gumbel_truncated`, whose noise is the tokens' own.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._numerics import accumulator_dtype
from mrv2_kernels._triton import cdiv, next_power_of_2, tl, triton
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.gemm.pdl import gdc_launch_dependents, gdc_wait, has_pdl
from mrv2_kernels.sampling._block_draw import (
    block_key,
    block_logits,
    greedy_key,
    key_token,
    logits_before,
    max_or_nan,
    score_key,
)
from mrv2_kernels.sampling._exp2 import flushed_exp2
from mrv2_kernels.sampling.gumbel import check_logits, gumbel_sample, gumbel_score
from mrv2_kernels.sampling.gumbel_truncated import draw_truncated_rows
from mrv2_kernels.sampling.launches import BLOCKED, launch_of
from mrv2_kernels.sampling.noise import gumbel_noise_of_torch
from mrv2_kernels.sampling.truncation import Truncation, is_truncated
from mrv2_kernels.sampling.workspace import DrawWorkspace

# part of the definition: another size draws other tokens
_BLOCK = 1024
_STEP = 512
# they order the sums of a block, so they must not hang on the batch
_NUM_WARPS = 1
# block b's noise is that of token 2^24 + b, which no vocabulary has; the kernel spells the number out
_FIRST_BLOCK = 1 << 24


@triton.jit
def _log_mass(logits, row_ptr, start, vocab, temperature, BLOCK: tl.constexpr):
    """Return L_b, or the largest logit where the temperature is 0; NaN if the block holds one.

    `logits` are -inf beyond the vocabulary.
    """
    if temperature == 0.0:
        top = max_or_nan(logits.to(tl.float32))
    else:
        mass = tl.sum(flushed_exp2(logits.to(tl.float32) * (1.4426950408889634 / temperature)), axis=0)
        top = tl.log2(mass) * 0.6931471805599453
        # of a larger mass nothing was lost: no term overflowed, and what was flushed is below 2^12 * 2^-126
        is_exact = (mass > 8.077935669463161e-28) & (mass < float("inf"))
        if not (is_exact & (start + BLOCK <= vocab)):
            top = _guarded_log_mass(block_logits(row_ptr, start, vocab, BLOCK), temperature)
    return top


@triton.jit
def _guarded_log_mass(logits, temperature):
    """Return L_b by exponentials relative to the largest logit; the temperature is not 0."""
    logits = logits.to(tl.float32)
    top = max_or_nan(logits)
    if tl.abs(top) < float("inf"):
        mass = tl.sum(flushed_exp2((logits - top) * (1.4426950408889634 / temperature)), axis=0)
        top = tl.div_rn(top, temperature) + tl.log(mass)
    return top


@triton.jit
def _draw_row(
    row_ptr,
    masses_ptr,
    num_blocks,
    vocab,
    temperature,
    seed,
    position,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    IS_ALONE: tl.constexpr,
):
    """Return the token drawn from a row whose blocks' L_b are in memory; -1 = none.

    A program that does nothing else (IS_ALONE) has registers for the exact scores of a whole block, which spares it
    a bound and a second look.
    """
    entry = tl.arange(0, BLOCKS)
    score = tl.load(masses_ptr + entry, mask=entry < num_blocks, other=float("-inf"), cache_modifier=".cg")
    if temperature != 0.0:
        score = gumbel_score(score, temperature, seed, position, 16777216 + entry, True)
    best = max_or_nan(score)
    drawn = tl.full([], -1, tl.int64)
    if best > float("-inf"):
        start = tl.min(tl.where(score == best, entry, BLOCKS), axis=0) * BLOCK
        logits = block_logits(row_ptr, start, vocab, BLOCK)
        if not IS_ALONE:
            key = block_key(logits, row_ptr, start, vocab, temperature, seed, position, float("-inf"), BLOCK, STEP)
        elif temperature == 0.0:
            key = greedy_key(logits, start, float("-inf"), BLOCK)
        else:
            lane = tl.arange(0, BLOCK)
            scores = gumbel_score(logits.to(tl.float32), temperature, seed, position, start + lane, False)
            top = max_or_nan(scores)
            key = score_key(top, start + tl.min(tl.where(scores == top, lane, BLOCK - 1), axis=0))
        drawn = key_token(key)
    return drawn


@triton.jit
def _blocked_kernel(
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
    masses_ptr,
    vocab,
    num_blocks,
    TRUNCATED: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    SPAN: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store the L_b of SPAN blocks; unless IS_SPLIT, the program that arrives last at a row draws."""
    if PDL:
        # in this order: what the second launch reads before its own wait was written before this one ended
        gdc_wait()
        gdc_launch_dependents()
    # row by row: the ends of rows lie beside the reading of others
    row = (tl.program_id(0) // GROUPS).to(tl.int64)
    first = tl.program_id(0) % GROUPS * SPAN
    row_ptr = logits_ptr + row * logits_stride
    end = tl.minimum((first + SPAN) * BLOCK, vocab)
    if not TRUNCATED:
        # on their way before the parameters, which hang on each other
        ahead = logits_before(row_ptr, first * BLOCK, end, BLOCK)
    slot = tl.load(logit_slots_ptr + row).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot)
    is_plain = True
    if TRUNCATED:
        is_plain = not is_truncated(min_p_ptr + slot, top_k_ptr + slot, top_p_ptr + slot, temperature, vocab)
    if is_plain:
        masses_ptr += row * num_blocks
        last = first + SPAN
        if SPAN > 1:
            last = tl.minimum(last, num_blocks)
        if TRUNCATED:
            ahead = logits_before(row_ptr, first * BLOCK, end, BLOCK)
        for block in range(first, last):
            logits = ahead
            ahead = logits_before(row_ptr, (block + 1) * BLOCK, end, BLOCK)
            log_mass = _log_mass(logits, row_ptr, block * BLOCK, vocab, temperature, BLOCK)
            tl.store(masses_ptr + block, log_mass)
        if not IS_SPLIT:
            tl.debug_barrier()
            if tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel") == GROUPS - 1:
                tl.store(arrived_ptr + row, 0)
                seed = tl.load(seeds_ptr + slot)
                position = tl.load(positions_ptr + row)
                drawn = _draw_row(
                    row_ptr, masses_ptr, num_blocks, vocab, temperature, seed, position, BLOCKS, BLOCK, STEP, False
                )
                tl.store(sampled_ptr + row * sampled_stride, drawn)


@triton.jit
def _pick_kernel(
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
    masses_ptr,
    vocab,
    num_blocks,
    TRUNCATED: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        # whatever comes next may wait on the device as well
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    # written before the first launch began, so read before its end
    slot = tl.load(logit_slots_ptr + row).to(tl.int64)
    position = tl.load(positions_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    seed = tl.load(seeds_ptr + slot)
    is_plain = True
    if TRUNCATED:
        is_plain = not is_truncated(min_p_ptr + slot, top_k_ptr + slot, top_p_ptr + slot, temperature, vocab)
    if PDL:
        gdc_wait()
    if is_plain:
        row_ptr = logits_ptr + row * logits_stride
        masses_ptr += row * num_blocks
        drawn = _draw_row(
            row_ptr, masses_ptr, num_blocks, vocab, temperature, seed, position, BLOCKS, BLOCK, STEP, True
        )
        tl.store(sampled_ptr + row * sampled_stride, drawn)


def gumbel_blocked_sample_triton(
    # [N, V] any float dtype, any row stride; raw
    logits: torch.Tensor,
    # [N] int64, out
    sampled: torch.Tensor,
    # [N] int32: row of the request state
    logit_slots: torch.Tensor,
    # [N] int32: position of the input token that produced the row
    positions: torch.Tensor,
    # [R] float32, 0 = greedy
    temperature: torch.Tensor,
    # [R] int64
    seeds: torch.Tensor,
    *,
    workspace: DrawWorkspace,
    truncation: Truncation | None = None,
) -> None:
    """Write the drawn token of each row; the arguments are those of `gumbel_fused_sample`.

    -1 where a row holds NaN or nothing above -inf; ties go to the lowest id.  float64 logits are left to the
    torch reference: the kernel's sums would waste their precision.
    """
    num_rows, vocab = check_logits(logits)
    if num_rows == 0:
        return
    workspace.check(num_rows)
    if logits.dtype == torch.float64:
        gumbel_blocked_sample_torch(
            logits, sampled, logit_slots, positions, temperature, seeds, workspace=workspace, truncation=truncation
        )
        return
    if truncation is not None:
        draw_truncated_rows(
            logits, sampled, logit_slots, positions, temperature, seeds, workspace=workspace, truncation=truncation
        )
        if truncation.all_rows:
            return
    min_p, top_k, top_p = (temperature,) * 3 if truncation is None else truncation[:3]
    launch = launch_of(BLOCKED, num_rows)
    pdl = has_pdl(logits)
    num_blocks = cdiv(vocab, _BLOCK)
    num_groups = cdiv(num_blocks, launch.span)
    masses = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits.device)
    where = (sampled, sampled.stride(0), logits, logits.stride(0), logit_slots, positions, temperature, seeds)
    constants = {
        "TRUNCATED": truncation is not None,
        "BLOCKS": next_power_of_2(num_blocks),
        "BLOCK": _BLOCK,
        "STEP": _STEP,
    }
    _blocked_kernel[(num_rows * num_groups,)](
        *where,
        min_p,
        top_k,
        top_p,
        workspace.arrived,
        masses,
        vocab,
        num_blocks,
        **constants,
        IS_SPLIT=launch.is_split,
        SPAN=launch.span,
        GROUPS=num_groups,
        PDL=pdl,
        num_warps=_NUM_WARPS,
        launch_pdl=pdl,
    )
    if launch.is_split:
        _pick_kernel[(num_rows,)](
            *where,
            min_p,
            top_k,
            top_p,
            masses,
            vocab,
            num_blocks,
            **constants,
            PDL=pdl,
            num_warps=launch.pick_warps,
            launch_pdl=pdl,
        )


def gumbel_blocked_sample_torch(
    # [N, V] any float dtype, any row stride; raw
    logits: torch.Tensor,
    # [N] int64, out
    sampled: torch.Tensor,
    # [N] int32: row of the request state
    logit_slots: torch.Tensor,
    # [N] int32: position of the input token that produced the row
    positions: torch.Tensor,
    # [R] float32, 0 = greedy
    temperature: torch.Tensor,
    # [R] int64
    seeds: torch.Tensor,
    *,
    workspace: DrawWorkspace,
    truncation: Truncation | None = None,
) -> None:
    """Torch reference of `gumbel_blocked_sample`; it needs no workspace."""
    num_rows, vocab = check_logits(logits)
    workspace.check(num_rows)
    if num_rows == 0:
        return
    drawn = _draw_plain(logits, seeds[logit_slots], positions, temperature[logit_slots].unsqueeze(1))
    if truncation is None:
        sampled.copy_(drawn)
        return
    is_truncated_row = truncation.rows(logit_slots, temperature, vocab)
    processed = truncation.apply(logits, logit_slots, temperature)
    gumbel_sample(processed, sampled, logit_slots, positions, temperature, seeds, scaled=True)
    sampled.copy_(torch.where(is_truncated_row, sampled, drawn))


def _draw_plain(
    # [N, V]
    logits: torch.Tensor,
    # [N]
    seeds: torch.Tensor,
    # [N]
    positions: torch.Tensor,
    # [N, 1]
    temperature: torch.Tensor,
) -> torch.Tensor:
    """Return the token that each row draws without truncation. [N] int64"""
    num_rows, vocab = logits.shape
    acc = accumulator_dtype(logits.dtype)
    num_blocks = cdiv(vocab, _BLOCK)
    is_random = temperature != 0.0
    scaled = logits.to(acc) / torch.where(is_random, temperature, 1.0).to(acc)
    # [N, blocks, BLOCK]
    blocks = torch.nn.functional.pad(scaled, (0, num_blocks * _BLOCK - vocab), value=float("-inf"))
    blocks = blocks.view(num_rows, num_blocks, _BLOCK)
    block_ids = torch.arange(_FIRST_BLOCK, _FIRST_BLOCK + num_blocks, dtype=torch.int32, device=logits.device)
    noise = gumbel_noise_of_torch(seeds, positions, block_ids.unsqueeze(0), acc)
    score = torch.where(is_random, blocks.logsumexp(dim=2) + noise, blocks.amax(dim=2))
    best, block = score.max(dim=1)
    # [N, BLOCK]
    inside = blocks.gather(1, block.view(-1, 1, 1).expand(-1, 1, _BLOCK)).squeeze(1)
    start = (block * _BLOCK).to(torch.int32).unsqueeze(1)
    tokens = start + torch.arange(_BLOCK, dtype=torch.int32, device=logits.device)
    noise = gumbel_noise_of_torch(seeds, positions, tokens, acc)
    inside_best, offset = torch.where(is_random, inside + noise, inside).max(dim=1)
    is_none = best.isnan() | inside_best.isnan() | (inside_best == float("-inf"))
    return (start.squeeze(1) + offset).masked_fill(is_none, -1)


gumbel_blocked_sample = dispatch(gumbel_blocked_sample_triton, gumbel_blocked_sample_torch)


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    blocks = [
        AotCase(
            kernel=_blocked_kernel,
            signature=_signature(dtype, arrived_ptr="*i32"),
            constexprs={
                "TRUNCATED": truncated,
                "IS_SPLIT": is_split,
                "SPAN": span,
                "GROUPS": cdiv(149, span),
                "BLOCKS": 256,
                "BLOCK": _BLOCK,
                "STEP": _STEP,
                "PDL": is_split,
            },
            num_warps=_NUM_WARPS,
            aligned=frozenset({"logits_ptr", "logits_stride", "vocab"}),
        )
        for dtype in ("bf16", "fp32")
        for truncated, is_split, span in ((False, True, 1), (True, False, 2), (False, True, 10))
    ]
    picks = [
        AotCase(
            kernel=_pick_kernel,
            signature=_signature(dtype),
            constexprs={"TRUNCATED": True, "BLOCKS": 256, "BLOCK": _BLOCK, "STEP": _STEP, "PDL": True},
            num_warps=4,
            aligned=frozenset({"logits_ptr", "logits_stride", "vocab"}),
        )
        for dtype in ("bf16", "fp32")
    ]
    return blocks + picks


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
        "masses_ptr": "*fp32",
        "vocab": "i32",
        "num_blocks": "i32",
        **more,
    }
