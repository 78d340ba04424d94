"""Suffix drafts: long matches in the request's own history and in those of requests that have ended.

A row's history is kept as a document when its request leaves it, before the next one is written there.
"""

from __future__ import annotations

import torch

from mrv2.device import Device, Stream
from mrv2.instrument import stages
from mrv2.runner.v2.request_state import RequestState
from mrv2_kernels.spec.suffix import keep_document, propose_suffix

MIN_MATCH, MAX_MATCH = 3, 32
# tokens of a history that are kept
MAX_WIDTH = 4096


class SuffixSpeculator:
    """Drafts what followed the longest match of the request's suffix."""

    def __init__(self, device: Device, num_documents: int, max_model_len: int) -> None:
        width = min(MAX_WIDTH, max_model_len)
        # [A, W], [A], [1] int32
        self.documents = device.zeros((num_documents, width), torch.int32)
        self.lengths = device.zeros((num_documents,), torch.int32)
        self.count = device.zeros((1,), torch.int32)
        self._num_kept = 0

    def submit_keep(self, stream: Stream, state: RequestState, row: int) -> None:
        """Submit the copy of a row's history into the oldest document's place."""
        place = self._num_kept % self.documents.shape[0]
        self._num_kept += 1
        kept = (self.documents, self.lengths, self.count)
        stream.run(stages.DRAFT, _keep, *kept, state.arena["token_ids"], state.arena["total_len"], row, place)

    def propose(
        self,
        state: RequestState,
        # [B] int32
        idx_mapping: torch.Tensor,
        # [B] int32
        num_sampled: torch.Tensor,
        num_draft_tokens: int,
        max_len: int,
    ) -> None:
        """See `propose_suffix`; device code."""
        propose_suffix(
            state.draft_tokens,
            idx_mapping,
            self.documents,
            self.lengths,
            self.count,
            state.arena["token_ids"],
            state.arena["total_len"],
            num_sampled,
            num_draft_tokens=num_draft_tokens,
            min_n=MIN_MATCH,
            max_n=MAX_MATCH,
            max_len=max_len,
        )


def _keep(
    # [A, W] int32
    documents: torch.Tensor,
    # [A] int32
    lengths: torch.Tensor,
    # [1] int32
    count: torch.Tensor,
    # [R, L] int32
    token_ids: torch.Tensor,
    # [R] int32
    total_len: torch.Tensor,
    row: int,
    place: int,
) -> None:
    keep_document(documents, lengths, count, token_ids, total_len, row=row, place=place)
