"""Speculation in the V2 runner: rows for drafts and their verification, all on the device.

    step n     [draft n]: drafts of every row -> draft_tokens [R, K_max]
    step n+1   [prepare]: last sampled token and drafts -> input_ids     (read back from nowhere)
               token_exact:  [sample]: the target's draw of every logits row; [verify]: what is accepted of it
               the others:   [sample]: features and masks; [verify]: acceptance, and one draw a request
               [output copy]; [post-update]: history and lengths by what was accepted; [draft n+1]

Nothing of it visits the host but the output of the step.  The host schedules 1 + K tokens a request
and learns a step later how many were kept.
"""

from __future__ import annotations

from typing import Any

import torch

from mrv2.config import Knobs
from mrv2.device import Stream
from mrv2.instrument import stages
from mrv2.runner.protocol import SchedulerOutput
from mrv2.runner.resources import RunnerResources
from mrv2.runner.v2.draft_distribution import DraftDistribution
from mrv2.runner.v2.request_state import RequestState
from mrv2.runner.v2.sampler import Sampler, SamplingPlan, sample_rows
from mrv2.runner.v2.sampling.context import LogitsHolder
from mrv2.runner.v2.upload import UploadedBatch
from mrv2_kernels._numerics import accumulator_dtype
from mrv2_kernels.spec.accept import Method, accept_drafts
from mrv2_kernels.spec.draft_probs import DraftProbs
from mrv2_kernels.spec.expand import expand_logit_rows
from mrv2_kernels.spec.recover import recover_tokens
from mrv2_kernels.spec.verify import verify_token_exact

# emitted tokens [B, 1 + K] int64, their number [B] int32, and that of rejected drafts [B] int32
Verified = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Speculation:
    """The buffers of a step with drafts, and its stages."""

    def __init__(self, resources: RunnerResources, state: RequestState) -> None:
        self.device, rows = resources.device, resources.max_num_seqs
        device = self.device
        self.state, self.vocab_size = state, resources.vocab_size
        self.width = 1 + resources.max_num_spec_tokens
        # [R] int32 zeros: without drafts a request has one logits row
        self.no_drafts_before = device.zeros((rows,), torch.int32)
        # [R * (1 + K)] int32: logits row -> request row, and its place among the request's
        self.logit_slots = device.zeros((rows * self.width,), torch.int32)
        self.local_positions = device.zeros((rows * self.width,), torch.int32)
        # [K] float32, for verification="synthetic"
        self.rates = device.zeros((max(1, len(resources.synthetic_acceptance)),), torch.float32)
        if resources.synthetic_acceptance:
            device.main.run(stages.UPLOAD, _fill_rates, self.rates, resources.synthetic_acceptance)
        self._draft_probs: dict[str, DraftProbs] = {}
        for drafter in resources.drafters:
            if drafter.distribution is not None:
                self.add_distribution(drafter.method, drafter.distribution)

    def add_distribution(self, spec_method: str, distribution: DraftDistribution) -> None:
        """Drafts of this method are drawn from `distribution`, where verification goes by probabilities."""
        self._draft_probs[spec_method] = distribution.draft_probs(self.device, self.vocab_size)

    def submit_logit_rows(
        self, stream: Stream, scheduled: SchedulerOutput, batch: UploadedBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return, for each logits row, its request row and its place among the request's. ([N], [N])"""
        num_reqs, num_drafts = scheduled.num_reqs, int(scheduled.num_draft_tokens.sum())
        if not num_drafts:
            return batch.idx_mapping, self.no_drafts_before[:num_reqs]
        rows = self.logit_slots[: num_reqs + num_drafts], self.local_positions[: num_reqs + num_drafts]
        max_rows = 1 + int(scheduled.num_draft_tokens.max())
        stream.run(stages.LOGITS, _expand, *rows, batch.idx_mapping, batch.cu_num_logits, max_rows)
        return rows

    def submit(
        self,
        stream: Stream,
        knobs: Knobs,
        scheduled: SchedulerOutput,
        batch: UploadedBatch,
        holder: LogitsHolder,
        sampler: Sampler,
        plan: SamplingPlan,
        # [N, 1] int64, out: the token of each logits row that is emitted; anything, or -1, in the others
        targets: torch.Tensor,
    ) -> Verified:
        """Submit the sample and verify stages of a step with drafts."""
        num_reqs, width = scheduled.num_reqs, 1 + int(scheduled.num_draft_tokens.max())
        verified = (
            self.device.empty((num_reqs, width), torch.int64),
            self.device.empty((num_reqs,), torch.int32),
            self.device.empty((num_reqs,), torch.int32),
        )
        if knobs.verification == "token_exact":
            stream.run(stages.SAMPLE, sample_rows, holder, sampler, plan, targets)
            stream.run(stages.VERIFY, _verify_exact, *verified, targets, self.state, batch)
            return verified
        stream.run(stages.SAMPLE, _apply_features, holder, sampler, plan)
        options = dict(
            method=knobs.verification,
            scaled=plan.draw.is_truncated,
            draft_probs=self._draft_probs.get(knobs.spec_method) if knobs.draft_sampling == "sampled" else None,
            rates=self.rates,
        )
        stream.run(stages.VERIFY, _verify_by_probability, *verified, targets, holder, self.state, batch, options)
        return verified


# Device code: reads nothing but its arguments.


def _fill_rates(rates: torch.Tensor, values: tuple[float, ...]) -> None:
    rates.copy_(torch.tensor(values, dtype=torch.float32))


def _expand(
    # [N] int32, out
    logit_slots: torch.Tensor,
    # [N] int32, out
    local_positions: torch.Tensor,
    # [B] int32
    idx_mapping: torch.Tensor,
    # [B + 1] int32
    cu_num_logits: torch.Tensor,
    max_rows: int,
) -> None:
    expand_logit_rows(logit_slots, local_positions, idx_mapping, cu_num_logits, max_rows=max_rows)


def _apply_features(holder: LogitsHolder, sampler: Sampler, plan: SamplingPlan) -> None:
    holder.target = sampler.target(holder.logits, holder.ctx, plan)


def _verify_exact(
    # [B, 1 + K] int64, [B] int32, [B] int32, out
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    # [N, 1] int64
    targets: torch.Tensor,
    state: RequestState,
    batch: UploadedBatch,
) -> None:
    verify_token_exact(
        sampled,
        num_sampled,
        num_rejected,
        targets.view(-1),
        state.draft_tokens,
        batch.idx_mapping,
        batch.cu_num_logits,
        batch.num_sampled,
    )


def _verify_by_probability(
    # [B, 1 + K] int64, [B] int32, [B] int32, out
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    # [N, 1] int64, out
    row_tokens: torch.Tensor,
    holder: LogitsHolder,
    state: RequestState,
    batch: UploadedBatch,
    options: dict[str, Any],
) -> None:
    logits, ctx = holder.target, holder.ctx
    method: Method = options["method"]
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
        batch.idx_mapping,
        batch.cu_num_logits,
        temperature,
        seeds,
        method=method,
        scaled=options["scaled"],
        draft_probs=options["draft_probs"],
        rates=options["rates"],
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
        batch.idx_mapping,
        batch.cu_num_logits,
        batch.num_sampled,
        temperature,
        seeds,
        scaled=options["scaled"],
        residual=method != "synthetic",
        draft_probs=options["draft_probs"],
    )
