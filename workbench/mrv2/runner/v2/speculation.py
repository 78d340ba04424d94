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
from mrv2.runner.v2.verification import (
    Acceptance,
    Verified,
    VerifiedRows,
    verify_by_probability,
    verify_exact,
)
from mrv2_kernels.spec.draft_probs import DraftProbs
from mrv2_kernels.spec.expand import expand_logit_rows


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
        rows = VerifiedRows(batch.idx_mapping, batch.cu_num_logits, batch.num_sampled)
        if knobs.verification == "token_exact":
            stream.run(stages.SAMPLE, sample_rows, holder, sampler, plan, targets)
            stream.run(stages.VERIFY, verify_exact, *verified, targets, self.state, rows)
            return verified
        stream.run(stages.SAMPLE, _apply_features, holder, sampler, plan)
        rule = self.acceptance(knobs, scaled=plan.draw.is_truncated)
        stream.run(stages.VERIFY, _verify_by_probability, *verified, targets, holder, self.state, rows, rule)
        return verified

    def acceptance(self, knobs: Knobs, *, scaled: bool) -> Acceptance:
        """Return what verification by probabilities goes by; `scaled` logits are divided by the temperature already."""
        assert knobs.verification != "token_exact", "token_exact compares tokens"
        draft_probs = self._draft_probs.get(knobs.spec_method) if knobs.draft_sampling == "sampled" else None
        return Acceptance(knobs.verification, scaled, draft_probs, self.rates)


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


def _verify_by_probability(
    # [B, 1 + K] int64, [B] int32, [B] int32, out
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    # [N, 1] int64, out
    row_tokens: torch.Tensor,
    holder: LogitsHolder,
    state: RequestState,
    rows: VerifiedRows,
    rule: Acceptance,
) -> None:
    verified = sampled, num_sampled, num_rejected
    verify_by_probability(*verified, row_tokens, holder.target, holder.ctx, state, rows, rule)
