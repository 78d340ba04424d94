"""Probabilities of drafts and of the target, as verification reads them: gathered, never expanded."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mrv2_kernels._triton import tl, triton


class DraftProbs(NamedTuple):
    """What the drafts were drawn from."""

    # [R, K, V_d] float32
    probs: torch.Tensor
    # [V] int32, target id -> draft id, -1 = the drafter does not know the token; None = one vocabulary
    from_target: torch.Tensor | None = None


@triton.jit
def draft_prob(probs_ptr, from_target_ptr, token, mask, MAPPED: tl.constexpr):
    """Return q of target ids (any shape) from the row at `probs_ptr`, 0 where the drafter does not know them."""
    if MAPPED:
        token = tl.load(from_target_ptr + token, mask=mask, other=-1)
        mask = mask & (token >= 0)
    return tl.load(probs_ptr + token, mask=mask, other=0.0)


@triton.jit
def scaled_logit(logits, temperature, SCALED: tl.constexpr):
    """Return logits / T in float32 or float64; greedy rows, and `SCALED` ones, are left as they are."""
    if not SCALED:
        divisor = tl.where(temperature == 0.0, 1.0, temperature)
        if logits.dtype == tl.float64:
            logits = logits / divisor.to(tl.float64)
        else:
            logits = tl.div_rn(logits, divisor)
    return logits


def scaled_torch(logits: torch.Tensor, temperature: torch.Tensor, scaled: bool, acc: torch.dtype) -> torch.Tensor:
    """Return logits / T [B, V] in `acc`; greedy and `scaled` rows as they are."""
    logits = logits.to(acc)
    return logits if scaled else logits / torch.where(temperature == 0, 1.0, temperature).to(acc).unsqueeze(1)


def target_probs_torch(draft_probs: DraftProbs, slots: torch.Tensor, column: int, vocab: int) -> torch.Tensor:
    """Return q of every target id for one draft of each request. [B, V]"""
    probs = draft_probs.probs[slots, column]
    if draft_probs.from_target is None:
        return probs
    index = draft_probs.from_target[:vocab].long()
    return torch.where(index >= 0, probs[:, index.clamp(min=0)], 0.0)
