"""Drafting in the V2 runner: who proposes the tokens of the next step, and the stage that runs it.

Drafts stay on the device: `Speculator.propose` writes ``state.draft_tokens``, the next step's input
preparation reads them from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch

from mrv2.config import Knobs
from mrv2.device import Stream
from mrv2.instrument import stages
from mrv2.runner.forward import padded_query_len
from mrv2.runner.protocol import SchedulerOutput
from mrv2.runner.resources import RunnerResources
from mrv2.runner.v2.drafters.chain import DraftBuffers, fill_starts, run_chain, run_missed
from mrv2.runner.v2.drafters.graphs import DraftGraphs, DraftKey, draft_choice
from mrv2.runner.v2.drafters.suffix import SuffixSpeculator
from mrv2.runner.v2.request_state import RequestState
from mrv2_kernels.spec.ngram import propose_ngram


class Speculator(Protocol):
    """Proposes drafts for the next step; device code."""

    def propose(
        self,
        state: RequestState,
        # [B] int32; a negative entry is skipped
        idx_mapping: torch.Tensor,
        # [B] int32
        num_sampled: torch.Tensor,
        num_draft_tokens: int,
        # bound of every history of the batch, in tokens
        max_len: int,
    ) -> None:
        """Rewrite the batch's rows of ``state.draft_tokens``; -1 = no draft."""
        ...


class NgramSpeculator:
    """Drafts what followed the last occurrence of the request's own suffix (prompt lookup)."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self.min_n = min_n
        self.max_n = max_n

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
        """See `propose_ngram`."""
        propose_ngram(
            state.draft_tokens,
            idx_mapping,
            state.arena["token_ids"],
            state.arena["total_len"],
            num_sampled,
            num_draft_tokens=num_draft_tokens,
            min_n=self.min_n,
            max_n=self.max_n,
            max_len=max_len,
        )


class Drafting:
    """The methods that the engine was loaded with, and the draft stage."""

    def __init__(self, resources: RunnerResources, state: RequestState) -> None:
        self.state, self.forward, self.block_size = state, resources.forward, resources.block_size
        # methods that need nothing but the history
        self.speculators: dict[str, Speculator] = {"ngram": NgramSpeculator(*resources.ngram_lengths)}
        self.suffix: SuffixSpeculator | None = None
        if resources.suffix_documents:
            device, max_model_len = resources.device, resources.max_model_len
            self.suffix = SuffixSpeculator(device, resources.suffix_documents, max_model_len)
            self.speculators["suffix"] = self.suffix
        self.drafters = {drafter.method: drafter for drafter in resources.drafters}
        buffers = DraftBuffers(
            resources.device,
            max_num_seqs=resources.max_num_seqs if self.drafters else 0,
            max_num_tokens=resources.forward.buffers.input_ids.shape[0] if self.drafters else 0,
        )
        resources.device.main.run(stages.UPLOAD, fill_starts, buffers)
        self.graphs = DraftGraphs(resources, state, buffers, self.drafters)

    def remove_request(self, stream: Stream, row: int) -> None:
        """A request leaves its row; what it said may help others."""
        if self.suffix is not None:
            self.suffix.submit_keep(stream, self.state, row)

    def catch_up(self, stream: Stream, method: str, num_computed: Mapping[str, int]) -> None:
        """Let a draft model read what requests have computed without it; no step is in flight.

        `num_computed` maps request ids to tokens.
        """
        drafter, chunk = self.drafters[method], self.forward.buffers.input_ids.shape[0]
        for req_id, length in num_computed.items():
            row = self.state.row_of[req_id]
            for start in range(0, length, chunk):
                missed = range(start, min(start + chunk, length))
                stream.run(stages.DRAFT, run_missed, drafter, self.state, row, missed, self.block_size)

    def bind(
        self,
        key: DraftKey,
        # [B_pad] int32, -1 in padding
        live_rows: torch.Tensor,
        # [B_pad] int32
        num_sampled: torch.Tensor,
    ) -> Callable[[], None] | None:
        """Return the draft stage of a step that is padded to ``key.shape``, as device code; None = nobody drafts."""
        if key.method in self.drafters:
            return partial(run_chain, *self.graphs.arguments(key))
        if not key.num_drafts:
            return None
        longest = self.state.arena["token_ids"].shape[1]
        return partial(
            self.speculators[key.method].propose, self.state, live_rows, num_sampled, key.num_drafts, longest
        )

    def submit_drafts(
        self,
        stream: Stream,
        knobs: Knobs,
        scheduled: SchedulerOutput,
        # [B] int32
        idx_mapping: torch.Tensor,
        # [B] int32
        num_sampled: torch.Tensor,
    ) -> None:
        """Submit the draft stage, if the knobs ask for drafts, or for a drafter that must keep step."""
        if knobs.spec_method in self.drafters:
            query_len = padded_query_len(scheduled, knobs)
            shape = self.forward.buckets.key(scheduled.total_tokens, scheduled.num_reqs, query_len)
            self.graphs.submit(
                stream, DraftKey(knobs.spec_method, shape, scheduled.num_next_drafts, draft_choice(knobs))
            )
        elif scheduled.num_next_drafts:
            propose = self.speculators[knobs.spec_method].propose
            max_len = int((scheduled.num_computed_tokens + scheduled.num_scheduled_tokens).max()) + 1
            stream.run(stages.DRAFT, propose, self.state, idx_mapping, num_sampled, scheduled.num_next_drafts, max_len)
