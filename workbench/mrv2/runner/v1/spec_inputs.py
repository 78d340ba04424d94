"""What a step with drafts is verified by: index arrays and draft ids, built on the host and sent one by one.

Legend: B requests, N logits rows, M of them before a draft, K most drafts, R rows.
"""

from __future__ import annotations

import numpy as np
import torch

from mrv2.device import Stream
from mrv2.instrument import stages
from mrv2.runner.resources import RunnerResources
from mrv2.runner.v1.cached_request import PLACEHOLDER
from mrv2.runner.v1.cpu_gpu_buffer import CpuGpuBuffer
from mrv2.runner.v1.rejection_sampler import SpecDecodeMetadata
from mrv2.runner.v1.speculation import LogitRows


class SpecInputs:
    """Owns the pinned buffers of `SpecDecodeMetadata`; one set for all steps."""

    def __init__(self, resources: RunnerResources, main: Stream) -> None:
        self.main = main
        device, rows = resources.device, resources.max_num_seqs
        self.num_columns = max(1, resources.max_num_spec_tokens)
        width = 1 + resources.max_num_spec_tokens
        # [R * (1 + K)], [R * K], [R], [R]
        self.logits_indices = CpuGpuBuffer(device, rows * width, torch.int32)
        self.target_logits_indices = CpuGpuBuffer(device, rows * self.num_columns, torch.int32)
        self.bonus_logits_indices = CpuGpuBuffer(device, rows, torch.int32)
        self.cu_num_draft_tokens = CpuGpuBuffer(device, rows, torch.int32)
        # [R, K]
        self.draft_token_ids = CpuGpuBuffer(device, (rows, self.num_columns), torch.int64)
        # [R]; the others: rows whose drafts the host has not seen, and where these lie
        self.draft_rows = CpuGpuBuffer(device, rows, torch.int64)
        self.targets = CpuGpuBuffer(device, rows, torch.int64)
        self.sources = CpuGpuBuffer(device, rows, torch.int64)

    def send(
        self,
        rows: LogitRows,
        # [B] end of each request's tokens
        ends: np.ndarray,
        # B rows in which the requests were drafted for; anything where there are no drafts
        draft_rows: list[int],
        # drafts of the step before that never left the device [B', K'], and batch row -> row of them
        unseen: torch.Tensor | None,
        unseen_rows: dict[int, int],
    ) -> SpecDecodeMetadata:
        """Build and submit everything; the step has a draft."""
        main, num_reqs = self.main, len(rows.drafts)
        buffers = (self.logits_indices, self.target_logits_indices, self.bonus_logits_indices, self.cu_num_draft_tokens)
        indices = rows.indices(ends)
        for buffer, array in zip(buffers, indices, strict=True):
            buffer.np[: len(array)] = array
        drafts = self.draft_token_ids.np
        drafts[:num_reqs] = PLACEHOLDER
        for row, mine in enumerate(rows.drafts):
            drafts[row, : len(mine)] = mine
        self.draft_rows.np[:num_reqs] = draft_rows
        metadata = SpecDecodeMetadata(
            self.logits_indices.copy_to_gpu(main, rows.num_rows),
            self.target_logits_indices.copy_to_gpu(main, len(indices.target_logits_indices)),
            self.bonus_logits_indices.copy_to_gpu(main, num_reqs),
            self.cu_num_draft_tokens.copy_to_gpu(main, num_reqs),
            self.draft_token_ids.copy_to_gpu(main, num_reqs),
            self.draft_rows.copy_to_gpu(main, num_reqs),
        )
        count = len(unseen_rows)
        if unseen is not None and count:
            self.targets.np[:count] = list(unseen_rows)
            self.sources.np[:count] = list(unseen_rows.values())
            main.run(
                stages.PREPARE_INPUTS,
                _insert,
                metadata.draft_token_ids,
                unseen,
                self.targets.copy_to_gpu(main, count),
                self.sources.copy_to_gpu(main, count),
            )
        return metadata


# Device code: reads nothing but its arguments.


def _insert(
    # [B, K] int64, in and out
    draft_token_ids: torch.Tensor,
    # [B', K'] int64
    unseen: torch.Tensor,
    # [n] int64 each: rows of the two
    targets: torch.Tensor,
    sources: torch.Tensor,
) -> None:
    width = unseen.shape[1]
    draft_token_ids[:, :width].index_copy_(0, targets, unseen.index_select(0, sources))
