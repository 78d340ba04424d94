"""Draw drafts as the target would: ``argmax(logits / T + g)`` over the draft vocabulary, and keep what they came from.

The noise of draft k behind a history of n tokens is that of position n - 1 + k and of the token's *target*
id, to whose word `purpose` is added: with 0 the draft shares the noise of the target's own draw there, so
that a good drafter draws the same token.  Verification by probabilities needs noise of its own and

    probs[row, k] = softmax(logits / T),   or all mass on the draft where T = 0
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import cdiv, next_power_of_2, tl, triton
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.sampling.gumbel import gumbel_score
from mrv2_kernels.sampling.noise import gumbel_noise_of_torch

_BLOCK = 1024


@triton.jit(do_not_specialize=["step", "purpose"])
def _draw_blocks_kernel(
    partial_ptr,
    logits_ptr,
    logits_stride,
    idx_mapping_ptr,
    total_len_ptr,
    to_target_ptr,
    temperature_ptr,
    seeds_ptr,
    vocab,
    step,
    purpose,
    MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    num_blocks = tl.num_programs(1)
    draft = block * BLOCK + tl.arange(0, BLOCK)
    mask = draft < vocab
    score = tl.load(logits_ptr + req * logits_stride + draft, mask=mask, other=float("-inf"))
    slot = tl.load(idx_mapping_ptr + req).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot)
    if temperature != 0.0:
        token = draft
        if MAPPED:
            token = tl.load(to_target_ptr + draft, mask=mask, other=0).to(tl.int32)
        position = tl.load(total_len_ptr + slot) - 1 + step
        score = gumbel_score(score, temperature, tl.load(seeds_ptr + slot), position, token + purpose, True)
    has_nan = tl.max((score != score).to(tl.int32), axis=0) > 0
    best, index = tl.max(score, axis=0, return_indices=True)
    out_ptr = partial_ptr + req * 2 * num_blocks + block
    tl.store(out_ptr, tl.where(has_nan, float("nan"), best))
    tl.store(out_ptr + num_blocks, (block * BLOCK + index).to(partial_ptr.dtype.element_ty))


@triton.jit
def _pick_kernel(drawn_ptr, partial_ptr, num_blocks, BLOCK: tl.constexpr):
    req = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    mask = block < num_blocks
    row_ptr = partial_ptr + req * 2 * num_blocks + block
    score = tl.load(row_ptr, mask=mask, other=float("-inf"))
    draft = tl.load(row_ptr + num_blocks, mask=mask, other=0.0)
    has_nan = tl.max((score != score).to(tl.int32), axis=0) > 0
    best = tl.max(score, axis=0)
    winner = tl.min(tl.where(score == best, draft, float("inf")), axis=0)
    none = has_nan | (best == float("-inf"))
    tl.store(drawn_ptr + req, tl.where(none, -1.0, winner).to(tl.int64))


def draw_drafts_triton(
    # [B, V_d] float32 or float64, divided by the temperature and masked
    logits: torch.Tensor,
    # [B] int64, out: draft ids, -1 where a row holds NaN or nothing above -inf
    drawn: torch.Tensor,
    # [>= B] int32
    idx_mapping: torch.Tensor,
    # [R] int32
    total_len: torch.Tensor,
    # [V_d] int64; None = both vocabularies are one
    to_target: torch.Tensor | None,
    # [R] float32, 0 = the likeliest
    temperature: torch.Tensor,
    # [R] int64
    seeds: torch.Tensor,
    *,
    step: int,
    purpose: int,
) -> None:
    """Draw draft number `step` of each request; ties go to the lowest draft id."""
    num_reqs, vocab = logits.shape
    num_blocks = cdiv(vocab, _BLOCK)
    partial = torch.empty(num_reqs, 2, num_blocks, dtype=logits.dtype, device=logits.device)
    _draw_blocks_kernel[(num_reqs, num_blocks)](
        partial,
        logits,
        logits.stride(0),
        idx_mapping,
        total_len,
        drawn if to_target is None else to_target,
        temperature,
        seeds,
        vocab,
        step,
        purpose,
        MAPPED=to_target is not None,
        BLOCK=_BLOCK,
    )
    _pick_kernel[(num_reqs,)](drawn, partial, num_blocks, BLOCK=next_power_of_2(num_blocks), num_warps=1)


def draw_drafts_torch(
    # [B, V_d] float32 or float64
    logits: torch.Tensor,
    # [B] int64, out
    drawn: torch.Tensor,
    # [>= B] int32
    idx_mapping: torch.Tensor,
    # [R] int32
    total_len: torch.Tensor,
    # [V_d] int64
    to_target: torch.Tensor | None,
    # [R] float32
    temperature: torch.Tensor,
    # [R] int64
    seeds: torch.Tensor,
    *,
    step: int,
    purpose: int,
) -> None:
    """Torch reference of `draw_drafts`."""
    num_reqs, vocab = logits.shape
    rows = idx_mapping[:num_reqs]
    tokens = torch.arange(vocab, device=logits.device) if to_target is None else to_target
    words = (tokens + purpose).to(torch.int32).unsqueeze(0)
    noise = gumbel_noise_of_torch(seeds[rows], total_len[rows] - 1 + step, words, logits.dtype)
    score = torch.where(temperature[rows].unsqueeze(1) != 0, logits + noise, logits)
    best, draft = score.max(dim=1)
    drawn.copy_(draft.masked_fill(best.isnan() | (best == float("-inf")), -1))


draw_drafts = dispatch(draw_drafts_triton, draw_drafts_torch)


@triton.jit(do_not_specialize=["step"])
def _keep_probs_kernel(
    kept_ptr,
    kept_slot_stride,
    kept_stride,
    probs_ptr,
    probs_stride,
    drawn_ptr,
    query_start_loc_ptr,
    idx_mapping_ptr,
    temperature_ptr,
    vocab,
    step,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    if tl.load(query_start_loc_ptr + req + 1) > tl.load(query_start_loc_ptr + req):
        draft = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        slot = tl.load(idx_mapping_ptr + req).to(tl.int64)
        probs = tl.load(probs_ptr + req * probs_stride + draft, mask=draft < vocab, other=0.0).to(tl.float32)
        certain = (draft == tl.load(drawn_ptr + req)).to(tl.float32)
        probs = tl.where(tl.load(temperature_ptr + slot) == 0.0, certain, probs)
        tl.store(kept_ptr + slot * kept_slot_stride + step * kept_stride + draft, probs, mask=draft < vocab)


def keep_draft_probs_triton(
    # [R, K_max, V_d] float32, out: column `step` of the batch's rows
    kept: torch.Tensor,
    # [B, V_d]
    probs: torch.Tensor,
    # [B] int64
    drawn: torch.Tensor,
    # [B + 1] int32; a request without tokens is padding
    query_start_loc: torch.Tensor,
    # [>= B] int32
    idx_mapping: torch.Tensor,
    # [R] float32
    temperature: torch.Tensor,
    *,
    step: int,
) -> None:
    """Keep what draft number `step` of each request was drawn from."""
    num_reqs, vocab = probs.shape
    _keep_probs_kernel[(num_reqs, cdiv(vocab, _BLOCK))](
        kept,
        kept.stride(0),
        kept.stride(1),
        probs,
        probs.stride(0),
        drawn,
        query_start_loc,
        idx_mapping,
        temperature,
        vocab,
        step,
        BLOCK=_BLOCK,
    )


def keep_draft_probs_torch(
    # [R, K_max, V_d] float32, out
    kept: torch.Tensor,
    # [B, V_d]
    probs: torch.Tensor,
    # [B] int64
    drawn: torch.Tensor,
    # [B + 1] int32
    query_start_loc: torch.Tensor,
    # [>= B] int32
    idx_mapping: torch.Tensor,
    # [R] float32
    temperature: torch.Tensor,
    *,
    step: int,
) -> None:
    """Torch reference of `keep_draft_probs`."""
    num_reqs, vocab = probs.shape
    is_real = query_start_loc.diff() > 0
    rows = idx_mapping[:num_reqs][is_real].long()
    certain = torch.arange(vocab, device=probs.device) == drawn[is_real].unsqueeze(1)
    greedy = (temperature[rows] == 0).unsqueeze(1)
    kept[rows, step] = torch.where(greedy, certain.to(kept.dtype), probs[is_real].to(kept.dtype))


keep_draft_probs = dispatch(keep_draft_probs_triton, keep_draft_probs_torch)


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    cases = []
    for dtype in ("fp32", "fp64"):
        draw = {"partial_ptr": f"*{dtype}", "logits_ptr": f"*{dtype}", "logits_stride": "i32"}
        draw |= {"idx_mapping_ptr": "*i32", "total_len_ptr": "*i32", "to_target_ptr": "*i64"}
        draw |= {"temperature_ptr": "*fp32", "seeds_ptr": "*i64", "vocab": "i32", "step": "i32", "purpose": "i32"}
        pick = {"drawn_ptr": "*i64", "partial_ptr": f"*{dtype}", "num_blocks": "i32"}
        cases.append(AotCase(_draw_blocks_kernel, draw, {"MAPPED": True, "BLOCK": _BLOCK}))
        cases.append(AotCase(_pick_kernel, pick, {"BLOCK": 16}, num_warps=1))
    keep = {"kept_ptr": "*fp32", "kept_slot_stride": "i32", "kept_stride": "i32", "probs_ptr": "*fp32"}
    keep |= {"probs_stride": "i32", "drawn_ptr": "*i64", "query_start_loc_ptr": "*i32", "idx_mapping_ptr": "*i32"}
    keep |= {"temperature_ptr": "*fp32", "vocab": "i32", "step": "i32"}
    return [*cases, AotCase(_keep_probs_kernel, keep, {"BLOCK": _BLOCK})]
