"""Drafting in the V2 runner: who proposes the tokens of the next step, and the stage that runs it.

Drafts stay on the device: `Speculator.propose` writes ``state.draft_tokens``, the next step's input
preparation reads them from there.
"""

from __future__ import annotations

from typing import Protocol

import torch

from mrv2.config import Knobs
from mrv2.device import Stream
from mrv2.instrument import stages
from mrv2.runner.protocol import SchedulerOutput
from mrv2.runner.resources import RunnerResources
from mrv2.runner.v2.drafters.chain import ChainShape, DraftBuffers, DraftChoice, fill_starts, run_chain
from mrv2.runner.v2.request_state import RequestState
from mrv2_kernels.spec.ngram import propose_ngram


class Speculator(Protocol):
    """Proposes drafts for the next step; device code."""

    def propose(
        self,
        state: RequestState,
        # [B] int32
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
        self.state = state
        self.target, self.block_size = resources.forward.buffers, resources.block_size
        # methods that need nothing but the history
        self.speculators: dict[str, Speculator] = {"ngram": NgramSpeculator(*resources.ngram_lengths)}
        self.drafters = {drafter.method: drafter for drafter in resources.drafters}
        self.buffers: DraftBuffers | None = None
        if self.drafters:
            self.buffers = DraftBuffers(
                resources.device,
                max_num_seqs=resources.max_num_seqs,
                max_num_tokens=self.target.input_ids.shape[0],
            )
            resources.device.main.run(stages.UPLOAD, fill_starts, self.buffers)

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
        drafter = self.drafters.get(knobs.spec_method)
        if drafter is not None:
            assert self.buffers is not None, "made with the drafters"
            num_reqs, max_query_len = scheduled.num_reqs, int(scheduled.num_scheduled_tokens.max())
            shape = ChainShape(
                num_tokens=scheduled.total_tokens,
                num_reqs=num_reqs,
                max_query_len=max_query_len,
                uniform=scheduled.total_tokens == num_reqs * max_query_len,
                num_drafts=scheduled.num_next_drafts,
                choice=_choice(knobs),
            )
            stream.run(stages.DRAFT, run_chain, drafter, shape, self.target, self.buffers, self.state, self.block_size)
        elif scheduled.num_next_drafts:
            propose = self.speculators[knobs.spec_method].propose
            max_len = int((scheduled.num_computed_tokens + scheduled.num_scheduled_tokens).max()) + 1
            stream.run(stages.DRAFT, propose, self.state, idx_mapping, num_sampled, scheduled.num_next_drafts, max_len)


def _choice(knobs: Knobs) -> DraftChoice:
    if knobs.draft_sampling == "greedy":
        return "greedy"
    return "own" if knobs.verification in ("standard", "block") else "shared"
