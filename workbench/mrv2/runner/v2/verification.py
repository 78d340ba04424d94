"""The two ways of verifying drafts, as device code on what it is handed: eager steps and step graphs share it.

Legend: B = requests (in a graph with padding, of no logits rows), N = logits rows, V = vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mrv2.runner.v2.request_state import RequestState
from mrv2.runner.v2.sampling.context import SamplingContext
from mrv2_kernels._numerics import accumulator_dtype
from mrv2_kernels.spec.accept import Method, accept_drafts
from mrv2_kernels.spec.draft_probs import DraftProbs
from mrv2_kernels.spec.recover import recover_tokens
from mrv2_kernels.spec.verify import verify_token_exact

# emitted tokens [B, 1 + K] int64, their number [B] int32, and that of rejected drafts [B] int32
Verified = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class VerifiedRows(NamedTuple):
    """Which logits rows belong to which request."""

    # [B] int32, batch row -> request row
    idx_mapping: torch.Tensor
    # [>= B + 1] int32
    cu_num_logits: torch.Tensor
    # [>= B] int32: 1 if the request yields a token in this step
    yields: torch.Tensor


class Acceptance(NamedTuple):
    """What verification by probabilities goes by."""

    method: Method
    # the logits are divided by the temperature and masked already
    scaled: bool
    # None = every draft is taken as certain
    draft_probs: DraftProbs | None
    # [>= K] float32, for "synthetic"
    rates: torch.Tensor


def verify_exact(
    # [B, 1 + K] int64, [B] int32, [B] int32, out
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    # [N, 1] int64
    targets: torch.Tensor,
    state: RequestState,
    rows: VerifiedRows,
) -> None:
    """Accept the drafts that the target drew, too."""
    verify_token_exact(
        sampled,
        num_sampled,
        num_rejected,
        targets.view(-1),
        state.draft_tokens,
        rows.idx_mapping,
        rows.cu_num_logits,
        rows.yields,
    )


def verify_by_probability(
    # [B, 1 + K] int64, [B] int32, [B] int32, out
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    # [N, 1] int64, out
    row_tokens: torch.Tensor,
    # [N, V]
    logits: torch.Tensor,
    ctx: SamplingContext,
    state: RequestState,
    rows: VerifiedRows,
    rule: Acceptance,
) -> None:
    """Accept drafts by the target's probabilities, and draw the token behind them."""
    num_accepted = torch.empty_like(num_sampled)
    log_mass = torch.empty(logits.shape[0], dtype=accumulator_dtype(logits.dtype), device=logits.device)
    joint = torch.empty_like(log_mass)
    temperature, seeds = state.arena["temperature"], state.arena["seeds"]
    accept_drafts(
        num_accepted,
        log_mass,
        joint,
        logits,
        ctx.logit_slots,
        ctx.local_positions,
        ctx.positions,
        state.draft_tokens,
        rows.idx_mapping,
        rows.cu_num_logits,
        temperature,
        seeds,
        method=rule.method,
        scaled=rule.scaled,
        draft_probs=rule.draft_probs,
        rates=rule.rates,
    )
    recover_tokens(
        sampled,
        num_sampled,
        num_rejected,
        row_tokens.view(-1),
        num_accepted,
        log_mass,
        joint,
        logits,
        ctx.positions,
        state.draft_tokens,
        rows.idx_mapping,
        rows.cu_num_logits,
        rows.yields,
        temperature,
        seeds,
        scaled=rule.scaled,
        residual=rule.method != "synthetic",
        draft_probs=rule.draft_probs,
    )
