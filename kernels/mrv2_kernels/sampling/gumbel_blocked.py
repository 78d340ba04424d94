"""Draw a block of tokens, then a token of that block; the same distribution with noise for one block alone.

With ``L_b = log(sum of exp(logits / T) over block b)``, ``argmax(L_b + g_b)`` draws block b with its share of the
mass, and ``argmax(logits / T + g)`` inside it a token with its share of the block.  The product is softmax, by
the chain rule.  An element costs one exponential in place of a hash and two logarithms.

The noise is a pure function of (seed, position, block) and (seed, position, token), so draws are as stateless
as those of `gumbel_sample`, but they are other tokens.  One launch sums, a second draws: no program waits for another,
those that sum have few registers, and the second launch makes the blocks' noise while the first still sums.

Rows with top-k, top-p or min-p go to `gumbel_truncated`, whose noise is the tokens' own.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._numerics import accumulator_dtype
from mrv2_kernels._triton import cdiv, next_power_of_2, tl, triton
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.gemm.pdl import gdc_launch_dependents, gdc_wait, has_pdl
from mrv2_kernels.sampling._block_draw import key_token, score_key
from mrv2_kernels.sampling._block_mass import entries_before, log_mass
from mrv2_kernels.sampling.gumbel import check_logits, gumbel_sample
from mrv2_kernels.sampling.gumbel_truncated import draw_truncated_rows
from mrv2_kernels.sampling.launches import BLOCKED, launch_of
from mrv2_kernels.sampling.noise import exponential_fp32, gumbel_noise_of_torch
from mrv2_kernels.sampling.truncation import Truncation, is_truncated
from mrv2_kernels.sampling.workspace import DrawWorkspace

# part of the definition: another size draws other tokens
_BLOCK = 1024
# of a program that sums, each with a block of its own
_NUM_WARPS = 4
# block b's noise is that of token 2^24 + b, which no vocabulary has; the kernel spells the number out
_FIRST_BLOCK = 1 << 24


@triton.jit
def _sum_kernel(
    logits_ptr,
    logits_stride,
    logit_slots_ptr,
    temperature_ptr,
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    masses_ptr,
    vocab,
    num_blocks,
    TRUNCATED: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    INNER: tl.constexpr,
    LANES: tl.constexpr,
    WARPS: tl.constexpr,
    SPAN: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store the L_b of SPAN blocks a warp; block b is the ``b // GROUPS``-th of program ``b % GROUPS``."""
    if PDL:
        # in this order: what the second launch reads before its own wait was written before this one ended
        gdc_wait()
        gdc_launch_dependents()
    # row by row: the ends of rows lie beside the reading of others
    row = (tl.program_id(0) // GROUPS).to(tl.int64)
    first = tl.program_id(0) % GROUPS
    row_ptr = logits_ptr + row * logits_stride
    SIZE: tl.constexpr = BLOCK // 2 if IN_PAIRS else BLOCK
    end = vocab
    if IN_PAIRS:
        row_ptr = row_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        end = vocab // 2
    # [repeats * WARPS * LANES, INNER]: a warp has a block, a lane INNER entries side by side, again and again
    place = tl.arange(0, SIZE * WARPS // INNER)
    entry = (
        INNER * (place % LANES) + SIZE * GROUPS * (place // LANES % WARPS) + LANES * INNER * (place // LANES // WARPS)
    )
    entry = entry[:, None] + tl.arange(0, INNER)[None, :]
    if not TRUNCATED:
        # on their way before the parameters, which hang on each other
        ahead = entries_before(row_ptr, first * SIZE + entry, end, IN_PAIRS)
    slot = tl.load(logit_slots_ptr + row).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot)
    is_plain = True
    if TRUNCATED:
        is_plain = not is_truncated(min_p_ptr + slot, top_k_ptr + slot, top_p_ptr + slot, temperature, vocab)
    if is_plain:
        thread = tl.arange(0, WARPS * LANES)
        block = GROUPS * (thread // LANES)
        masses_ptr += row * num_blocks
        num_turns = 1
        if SPAN > 1:
            num_turns = tl.minimum(tl.cdiv(num_blocks - first, GROUPS * WARPS), SPAN)
        if TRUNCATED:
            ahead = entries_before(row_ptr, first * SIZE + entry, end, IN_PAIRS)
        for _ in range(num_turns):
            entries = ahead
            if SPAN > 1:
                ahead = entries_before(row_ptr, (first + GROUPS * WARPS) * SIZE + entry, end, IN_PAIRS)
            if IN_PAIRS:
                if (first + GROUPS * (WARPS - 1) + 1) * BLOCK > vocab:
                    # two of -inf
                    entries = tl.where(first * SIZE + entry < end, entries, -8323200)
            mass = log_mass(entries, temperature, IN_PAIRS, LANES, WARPS)
            is_stored = (thread % LANES == 0) & (first + block < num_blocks)
            tl.store(masses_ptr + first + block, mass, mask=is_stored)
            first += GROUPS * WARPS


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
    PDL: tl.constexpr,
):
    """Draw a block of each row by the L_b in memory, then a token of that block."""
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
    entry = tl.arange(0, BLOCKS)
    log_noise = tl.zeros([BLOCKS], tl.float32)
    if is_plain & (temperature != 0.0):
        log_noise = tl.log(exponential_fp32(seed, position, 16777216 + entry))
    if PDL:
        gdc_wait()
    if is_plain:
        mask = entry < num_blocks
        mass = tl.load(masses_ptr + row * num_blocks + entry, mask=mask, other=float("-inf"), cache_modifier=".cg")
        key = tl.max(score_key(mass - log_noise, entry), axis=0)
        block = key_token(key)
        if block >= 0:
            token = block.to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
            row_ptr = logits_ptr + row * logits_stride
            score = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
            if temperature != 0.0:
                score = score * (1.0 / temperature) - tl.log(exponential_fp32(seed, position, token))
            key = tl.max(score_key(score, token), axis=0)
        tl.store(sampled_ptr + row * sampled_stride, key_token(key))


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
    num_groups = cdiv(num_blocks, _NUM_WARPS * launch.span)
    masses = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits.device)
    parameters = (min_p, top_k, top_p, masses, vocab, num_blocks)
    _sum_kernel[(num_rows * num_groups,)](
        logits,
        logits.stride(0),
        logit_slots,
        temperature,
        *parameters,
        TRUNCATED=truncation is not None,
        **_tile(logits),
        SPAN=launch.span,
        GROUPS=num_groups,
        BLOCK=_BLOCK,
        PDL=pdl,
        num_warps=_NUM_WARPS,
        launch_pdl=pdl,
    )
    _pick_kernel[(num_rows,)](
        sampled,
        sampled.stride(0),
        logits,
        logits.stride(0),
        logit_slots,
        positions,
        temperature,
        seeds,
        *parameters,
        TRUNCATED=truncation is not None,
        BLOCKS=next_power_of_2(num_blocks),
        BLOCK=_BLOCK,
        PDL=pdl,
        num_warps=launch.pick_warps,
        launch_pdl=pdl,
    )


def _tile(logits: torch.Tensor) -> dict[str, int]:
    """Return how `_sum_kernel` lays a block over lanes: a part of a sum's order, so by the tensor, not by its rows."""
    is_aligned = logits.data_ptr() % 16 == 0 and logits.stride(0) % 16 == 0
    # two bf16 in a word, whose larger ones are found two at once
    in_pairs = is_aligned and logits.dtype == torch.bfloat16 and logits.shape[1] % 16 == 0
    return _tile_of(4 if in_pairs else logits.dtype.itemsize, is_aligned=is_aligned, in_pairs=in_pairs)


def _tile_of(itemsize: int, *, is_aligned: bool, in_pairs: bool) -> dict[str, int]:
    """Return the constants of `_sum_kernel` for entries of `itemsize` bytes; lanes read 16 bytes where they may."""
    inner = 16 // itemsize if is_aligned else 1
    lanes = min(32, _BLOCK // (2 if in_pairs else 1) // inner)
    return {"IN_PAIRS": in_pairs, "INNER": inner, "LANES": lanes, "WARPS": _NUM_WARPS}


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
    sums = [
        AotCase(
            kernel=_sum_kernel,
            signature=_signature(dtype, of_sum=True),
            constexprs={
                "TRUNCATED": truncated,
                **_tile_of(4 if in_pairs or dtype == "fp32" else 2, is_aligned=is_aligned, in_pairs=in_pairs),
                "SPAN": span,
                "GROUPS": cdiv(149, _NUM_WARPS * span),
                "BLOCK": _BLOCK,
                "PDL": True,
            },
            num_warps=_NUM_WARPS,
            aligned=frozenset({"logits_ptr", "logits_stride", "vocab"} if is_aligned else ()),
            may_share=False,
        )
        for dtype, is_aligned, in_pairs in (
            ("bf16", True, True),
            ("bf16", True, False),
            ("bf16", False, False),
            ("fp16", True, False),
            ("fp32", True, False),
            ("fp32", False, False),
        )
        for truncated, span in ((False, 1), (False, 2), (True, 1))
    ]
    picks = [
        AotCase(
            kernel=_pick_kernel,
            signature=_signature(dtype, of_sum=False),
            constexprs={"TRUNCATED": truncated, "BLOCKS": 256, "BLOCK": _BLOCK, "PDL": True},
            num_warps=launch_of(BLOCKED, 1).pick_warps,
            aligned=frozenset({"logits_ptr", "logits_stride", "vocab"}),
        )
        for dtype in ("bf16", "fp32")
        for truncated in (False, True)
    ]
    return sums + picks


def _signature(dtype: str, *, of_sum: bool) -> dict[str, str]:
    rows = {
        "logits_ptr": f"*{dtype}",
        "logits_stride": "i32",
        "logit_slots_ptr": "*i32",
        "temperature_ptr": "*fp32",
        "min_p_ptr": "*fp32",
        "top_k_ptr": "*i32",
        "top_p_ptr": "*fp32",
        "masses_ptr": "*fp32",
        "vocab": "i32",
        "num_blocks": "i32",
    }
    drawn = {"sampled_ptr": "*i64", "sampled_stride": "i32", "positions_ptr": "*i32", "seeds_ptr": "*i64"}
    return rows if of_sum else rows | drawn
