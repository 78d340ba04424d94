"""Speculation in the V2 runner: rows for drafts and their verification, all on the device.

    step n     [draft n]: drafts of every row -> draft_tokens [R, K_max]
    step n+1   [prepare]: last sampled token and drafts -> input_ids     (read back from nowhere)
               [sample]: the target's draw of every logits row; [verify]: what is accepted of it
               [output copy]; [post-update]: history and lengths by what was accepted; [draft n+1]

Nothing of it visits the host but the output of the step.  The host schedules 1 + K tokens a request
and learns a step later how many were kept.
"""

from __future__ import annotations

import torch

from mrv2.device import Stream
from mrv2.instrument import stages
from mrv2.runner.protocol import SchedulerOutput
from mrv2.runner.resources import RunnerResources
from mrv2.runner.v2.request_state import RequestState
from mrv2.runner.v2.upload import UploadedBatch
from mrv2_kernels.spec.expand import expand_logit_rows
from mrv2_kernels.spec.verify import verify_token_exact


class Speculation:
    """The buffers of a step with drafts, and its two stages."""

    def __init__(self, resources: RunnerResources, state: RequestState) -> None:
        self.device, rows = resources.device, resources.max_num_seqs
        device = self.device
        self.state = state
        self.width = 1 + resources.max_num_spec_tokens
        # [R] int32 zeros: without drafts a request has one logits row
        self.no_drafts_before = device.zeros((rows,), torch.int32)
        # [R * (1 + K)] int32: logits row -> request row, and its place among the request's
        self.logit_slots = device.zeros((rows * self.width,), torch.int32)
        self.local_positions = device.zeros((rows * self.width,), torch.int32)

    def submit_logit_rows(
        self, stream: Stream, scheduled: SchedulerOutput, batch: UploadedBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return, for each logits row, its request row and its place among the request's. ([N], [N])"""
        num_reqs, num_drafts = scheduled.num_reqs, int(scheduled.num_draft_tokens.sum())
        if not num_drafts:
            return batch.idx_mapping, self.no_drafts_before[:num_reqs]
        rows = self.logit_slots[: num_reqs + num_drafts], self.local_positions[: num_reqs + num_drafts]
        max_rows = 1 + int(scheduled.num_draft_tokens.max())
        stream.run(stages.LOGITS, self.expand, *rows, batch.idx_mapping, batch.cu_num_logits, max_rows)
        return rows

    def submit_verification(
        self,
        stream: Stream,
        scheduled: SchedulerOutput,
        batch: UploadedBatch,
        # [N, 1] int64: the target's draw of every logits row
        targets: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Submit the verify stage; return sampled [B, 1+K], num_sampled [B], num_rejected [B]."""
        num_reqs, width = scheduled.num_reqs, 1 + int(scheduled.num_draft_tokens.max())
        sampled = self.device.empty((num_reqs, width), torch.int64)
        num_sampled = self.device.empty((num_reqs,), torch.int32)
        num_rejected = self.device.empty((num_reqs,), torch.int32)
        stream.run(
            stages.VERIFY,
            self.verify,
            sampled,
            num_sampled,
            num_rejected,
            targets.view(-1),
            self.state,
            batch.idx_mapping,
            batch.cu_num_logits,
            batch.num_sampled,
        )
        return sampled, num_sampled, num_rejected

    # Device code.

    @staticmethod
    def expand(
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

    @staticmethod
    def verify(
        # [B, 1 + K] int64, out
        sampled: torch.Tensor,
        # [B] int32, out
        num_sampled: torch.Tensor,
        # [B] int32, out
        num_rejected: torch.Tensor,
        # [N] int64
        targets: torch.Tensor,
        state: RequestState,
        # [B] int32
        idx_mapping: torch.Tensor,
        # [B + 1] int32
        cu_num_logits: torch.Tensor,
        # [B] int32
        yields: torch.Tensor,
    ) -> None:
        verify_token_exact(
            sampled, num_sampled, num_rejected, targets, state.draft_tokens, idx_mapping, cu_num_logits, yields
        )
