"""Verification of drafts the V1 way: rows before drafts and rows behind the last ones are split and drawn apart.

    token_exact           targets [M, V] and bonuses [B, V] gathered, a draw of each row; drafts kept while equal
    standard, synthetic   parameters expanded to rows, probabilities of all of them; drafts accepted by chance

What comes out is one row of tokens a request, -1 in place of what was rejected; the host takes the -1 out.

Legend: B requests, N logits rows, M of them before a draft, K drafts at most, V vocabulary.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, cast

import torch

from mrv2.runner.v1.features import FeatureTensors
from mrv2.runner.v1.logprobs import LogprobWork
from mrv2.runner.v1.sampler import draw, gather_all, log_softmax, process, shape
from mrv2.runner.v1.sampling_metadata import SamplingMetadata
from mrv2_kernels.spec.accept import accept_drafts
from mrv2_kernels.spec.draft_probs import DraftProbs
from mrv2_kernels.spec.expand import expand_logit_rows
from mrv2_kernels.spec.recover import recover_tokens
from mrv2_kernels.spec.verify import verify_token_exact

Verification = Literal["token_exact", "standard", "synthetic"]


class SpecDecodeMetadata(NamedTuple):
    """What a step with drafts is verified by; device tensors."""

    # as in `SpecIndices`: [N], [M], [B], [B] int32
    logits_indices: torch.Tensor
    target_logits_indices: torch.Tensor
    bonus_logits_indices: torch.Tensor
    cu_num_draft_tokens: torch.Tensor
    # [B, K] int64, -1 = none
    draft_token_ids: torch.Tensor
    # [B] int64: row in which each request was when it was drafted for
    draft_rows: torch.Tensor


class VerifiedRows:
    """Carries what the sample stage leaves to the verify stage; filled and read in stream order."""

    __slots__ = ("cu_num_logits", "owners", "places", "processed", "raw_logprobs")

    # [B + 1] int32
    cu_num_logits: torch.Tensor
    # [N] int32: batch row of each logits row, and drafts of the request before it
    owners: torch.Tensor
    places: torch.Tensor
    # [N, V] float32 or float64
    processed: torch.Tensor
    # [N, V]; None = no request wants any
    raw_logprobs: torch.Tensor | None


# Device code: reads nothing but its arguments.


def sample_rows(
    # [N, V], raw; not changed
    logits: torch.Tensor,
    # [N] int32
    positions: torch.Tensor,
    metadata: SamplingMetadata,
    spec: SpecDecodeMetadata,
    verification: Verification,
    width: int,
    # [N] int64, out under token_exact
    row_tokens: torch.Tensor,
    carried: VerifiedRows,
    features: FeatureTensors | None,
    wants_logprobs: bool,
) -> None:
    """Expand the requests to rows, apply the features, and draw (token_exact) or scale and mask (the others)."""
    num_reqs, num_rows, device = spec.cu_num_draft_tokens.shape[0], logits.shape[0], logits.device
    rows = metadata.rows
    assert rows is not None, "every batch has rows"
    carried.cu_num_logits = torch.zeros(num_reqs + 1, dtype=torch.int32, device=device)
    torch.add(spec.cu_num_draft_tokens, rows + 1, out=carried.cu_num_logits[1:])
    carried.owners = torch.empty(num_rows, dtype=torch.int32, device=device)
    carried.places = torch.empty_like(carried.owners)
    expand_logit_rows(carried.owners, carried.places, rows, carried.cu_num_logits, max_rows=width)
    carried.raw_logprobs = log_softmax(logits) if wants_logprobs else None
    carried.processed = process(logits, features)
    if verification != "token_exact":
        if not metadata.all_greedy:
            shape(carried.processed, metadata.expanded(carried.owners))
        return
    for indices in (spec.target_logits_indices, spec.bonus_logits_indices):
        mine = metadata.expanded(carried.owners.index_select(0, indices))
        drawn = draw(carried.processed.index_select(0, indices), positions.index_select(0, indices), mine)
        row_tokens.index_copy_(0, indices.long(), drawn)


def verify_rows(
    # [B, 1 + K] int64, out: the tokens of each request, -1 behind them
    sampled: torch.Tensor,
    # [N] int64, in under token_exact, else out: the token of each logits row that is emitted
    row_tokens: torch.Tensor,
    # [N] int32
    positions: torch.Tensor,
    metadata: SamplingMetadata,
    spec: SpecDecodeMetadata,
    verification: Verification,
    # [B] bool
    discard: torch.Tensor,
    carried: VerifiedRows,
    # what drafts were drawn from, by the row of then; None = they are certain
    draft_probs: DraftProbs | None,
    # [K] float32, for synthetic
    rates: torch.Tensor,
    logprobs: LogprobWork | None,
) -> None:
    """Keep the leading drafts that are accepted and the token behind them."""
    num_reqs, device = sampled.shape[0], sampled.device
    rows = cast(torch.Tensor, metadata.rows)
    num_sampled = torch.empty(num_reqs, dtype=torch.int32, device=device)
    num_rejected = torch.empty_like(num_sampled)
    yields = (~discard).to(torch.int32)
    if verification == "token_exact":
        verify_token_exact(
            sampled,
            num_sampled,
            num_rejected,
            row_tokens,
            spec.draft_token_ids,
            rows,
            carried.cu_num_logits,
            yields,
        )
    else:
        logits = carried.processed
        log_mass = torch.empty(logits.shape[0], dtype=logits.dtype, device=device)
        joint, num_accepted = torch.empty_like(log_mass), torch.empty_like(num_sampled)
        temperature, seeds = metadata.temperature, metadata.seeds
        assert seeds is not None, "a batch that may have drafts has seeds"
        if temperature is None:
            temperature = torch.zeros(num_reqs, dtype=torch.float32, device=device)
        if draft_probs is not None:
            draft_probs = DraftProbs(draft_probs.probs.index_select(0, spec.draft_rows), draft_probs.from_target)
        accept_drafts(
            num_accepted,
            log_mass,
            joint,
            logits,
            carried.owners,
            carried.places,
            positions,
            spec.draft_token_ids,
            rows,
            carried.cu_num_logits,
            temperature,
            seeds,
            method=verification,
            scaled=True,
            draft_probs=draft_probs,
            rates=rates,
        )
        recover_tokens(
            sampled,
            num_sampled,
            num_rejected,
            row_tokens,
            num_accepted,
            log_mass,
            joint,
            logits,
            positions,
            spec.draft_token_ids,
            rows,
            carried.cu_num_logits,
            yields,
            temperature,
            seeds,
            scaled=True,
            residual=verification != "synthetic",
            draft_probs=draft_probs,
        )
    if logprobs is not None and carried.raw_logprobs is not None:
        gather_all(carried.raw_logprobs, row_tokens, logprobs)
