"""Drafts in the V1 runner, from their proposal to their verification: n-gram look-up, draft heads, and the stages.

Sync mode keeps drafts in Python lists.  Async mode (heads only) leaves them on the device, where the next step
finds them by the row that a request had; the host reads them only if a grammar or a feature asks for them.
"""

from __future__ import annotations

import numpy as np
import torch

from mrv2.device import Stream
from mrv2.instrument import stage, stages
from mrv2.runner.protocol import SchedulerOutput
from mrv2.runner.resources import RunnerResources
from mrv2.runner.v1.cached_request import PLACEHOLDER, CachedRequestState
from mrv2.runner.v1.features import FeatureTensors
from mrv2.runner.v1.input_batch import InputBatch
from mrv2.runner.v1.logprobs import LogprobWork
from mrv2.runner.v1.prepare import PreparedStep, SampledOnDevice
from mrv2.runner.v1.proposer import HeadProposer, PaddedStep, keep_valid, num_rejected_of
from mrv2.runner.v1.rejection_sampler import SpecDecodeMetadata, Verification, VerifiedRows, sample_rows, verify_rows
from mrv2.runner.v1.sampling_metadata import SamplingMetadata
from mrv2.runner.v1.speculation import LogitRows, propose_ngram
from mrv2_kernels.spec.draft_probs import DraftProbs


class LogitsHolder:
    """Carries the logits from one device stage to the next; filled and read in stream order."""

    __slots__ = ("logits", "positions")

    # [N, V]
    logits: torch.Tensor
    # [N] int32
    positions: torch.Tensor


class Drafting:
    """Who drafts, and where the drafts of the last step are."""

    def __init__(
        self,
        resources: RunnerResources,
        requests: dict[str, CachedRequestState],
        batch: InputBatch,
        main: Stream,
    ) -> None:
        r = self.resources = resources
        self.requests, self.batch, self.main = requests, batch, main
        self.proposer = HeadProposer(r, batch, main)
        # id -> row in the batch that was drafted for last
        self.drafted_rows: dict[str, int] = {}
        # [B, K], its drafts, if they are to reach the host; then the copy, once it was waited for
        self._on_way: torch.Tensor | None = None
        self._arrived: np.ndarray | None = None
        # [K] float32, for verification="synthetic"
        self.rates = r.device.zeros((max(1, len(r.synthetic_acceptance)),), torch.float32)
        if r.synthetic_acceptance:
            main.run(stages.UPLOAD, _fill_rates, self.rates, r.synthetic_acceptance)

    @property
    def follows(self) -> bool:
        """True while a head takes in every step."""
        return self.proposer.is_on(self.resources.knobs)

    def is_uncertain(self, previous: SampledOnDevice | None) -> bool:
        """Say whether only verification knows how many tokens the step before yielded."""
        return previous is not None and previous.num_rejected is not None and not previous.arrived

    def scheduled(self, scheduled: SchedulerOutput) -> list[list[int]]:
        """Return the drafts that each request of the batch has verified in this step, -1 for those not known here."""
        wanted = dict(zip(scheduled.req_ids, scheduled.num_draft_tokens.tolist(), strict=True))
        # the probabilities of drafts lie where the last proposal wrote them
        needs_row = self.proposer.draft_probs(self.resources.knobs) is not None
        drafts = []
        for req_id in self.batch.ids:
            count, mine = wanted[req_id], self.requests[req_id].draft_token_ids
            if needs_row and req_id not in self.drafted_rows:
                mine = []
            drafts.append((mine + [PLACEHOLDER] * count)[:count])
        return drafts

    def send_inputs(self, prepared: PreparedStep) -> None:
        """Async mode: send the drafter's share of the step's inputs with the others."""
        if self.follows and self.resources.knobs.async_scheduling:
            self.proposer.send_padded(len(prepared.computed), prepared.computed + prepared.num_scheduled)

    def verify(
        self,
        holder: LogitsHolder,
        metadata: SamplingMetadata,
        prepared: PreparedStep,
        # [B] bool
        discard: torch.Tensor,
        # [B, 1 + K] int64, out
        sampled: torch.Tensor,
        logprobs: LogprobWork | None,
        features: FeatureTensors | None,
    ) -> None:
        """Submit the sample and verify stages of a step with drafts."""
        spec, knobs = prepared.spec, self.resources.knobs
        assert spec is not None, "the step has drafts"
        carried, verification = VerifiedRows(), knobs.verification
        assert verification != "block", "the knobs refuse it beside runner v1"
        row_tokens = self.resources.device.empty((prepared.rows.num_rows,), torch.int64)
        self.main.run(
            stages.SAMPLE,
            _sample_rows,
            holder,
            metadata,
            spec,
            verification,
            prepared.rows.width,
            row_tokens,
            carried,
            features,
            logprobs is not None,
        )
        self.main.run(
            stages.VERIFY,
            _verify_rows,
            sampled,
            row_tokens,
            holder,
            metadata,
            spec,
            verification,
            discard,
            carried,
            self.proposer.draft_probs(knobs),
            self.rates,
            logprobs,
        )

    def propose(
        self, scheduled: SchedulerOutput, req_ids: list[str], prepared: PreparedStep, token_lists: list[list[int]]
    ) -> None:
        """Sync mode: find the drafts of the next step, from tokens that the host has."""
        num_drafts = scheduled.num_next_drafts
        self._on_way = self._arrived = None
        if self.follows:
            with stage(stages.V1_PROPOSE, scheduled.step):
                self._propose_by_head(scheduled.step, req_ids, prepared, token_lists, num_drafts)
        elif num_drafts:
            with stage(stages.V1_PROPOSE, scheduled.step):
                min_n, max_n = self.resources.ngram_lengths
                for row, req_id in enumerate(req_ids):
                    tokens = self.batch.token_ids_cpu[row, : self.batch.num_tokens[row]]
                    drafts = propose_ngram(tokens, num_drafts, min_n=min_n, max_n=max_n)
                    self.requests[req_id].draft_token_ids = drafts

    def propose_padded(
        self,
        scheduled: SchedulerOutput,
        prepared: PreparedStep,
        # [B] bool
        discard: torch.Tensor,
        step: SampledOnDevice,
        # stream of the copy to the host; None = nobody there asks for the drafts
        copy_stream: Stream | None,
    ) -> None:
        """Async mode: let the head follow the step on the device, and note in `step` what is where."""
        device, proposer = self.resources.device, self.proposer
        num_reqs, num_drafts = discard.shape[0], scheduled.num_next_drafts
        with stage(stages.V1_PROPOSE, scheduled.step):
            next_tokens = device.empty((num_reqs,), torch.int64)
            num_rejected = device.empty((num_reqs,), torch.int32)
            cu_num_draft_tokens = None if prepared.spec is None else prepared.spec.cu_num_draft_tokens
            self.main.run(stages.DRAFT, keep_valid, next_tokens, num_rejected, step.tokens, cu_num_draft_tokens)
            num_computed = self.batch.num_computed_tokens.gpu[:num_reqs]
            backup = proposer.backup_tokens.gpu[:num_reqs]
            proposer.prepare_padded(prepared.key, PaddedStep(next_tokens, num_rejected, discard, backup, num_computed))
            drafts = proposer.submit("padded", prepared.key, num_reqs, num_drafts)
            step.tokens = next_tokens.unsqueeze(1)
            step.num_rejected = None if prepared.spec is None else num_rejected
            step.drafts = drafts if num_drafts else None
        self.drafted_rows = dict(self.batch.req_id_to_index)
        for req_id in self.drafted_rows:
            self.requests[req_id].draft_token_ids = []
        self._on_way = self._arrived = None
        if copy_stream is not None and num_drafts:
            self._on_way = drafts
            proposer.submit_copy(drafts, copy_stream)

    def take(self, req_ids: list[str]) -> np.ndarray:
        """Return the drafts of requests, -1 behind them; waits for those that are on their way. [n, K] int64"""
        found = np.full((len(req_ids), self.resources.max_num_spec_tokens), PLACEHOLDER, dtype=np.int64)
        arrived = self._wait()
        for row, req_id in enumerate(req_ids):
            mine = self.requests[req_id].draft_token_ids
            if arrived is not None and req_id in self.drafted_rows:
                mine = arrived[self.drafted_rows[req_id]].tolist()
            found[row, : len(mine)] = mine
        return found

    def fill_in(self, rows: LogitRows, req_ids: list[str]) -> None:
        """Put the drafts that are on their way into a step's lists, for features that read them."""
        if not rows.has_drafts:
            return
        arrived = self._wait()
        if arrived is None:
            return
        for mine, req_id in zip(rows.drafts, req_ids, strict=True):
            row = self.drafted_rows.get(req_id)
            if mine and row is not None:
                mine[:] = arrived[row, : len(mine)].tolist()

    def forget(self) -> None:
        """Every request is gone."""
        self.drafted_rows = {}
        self._on_way = self._arrived = None

    def _wait(self) -> np.ndarray | None:
        if self._arrived is None and self._on_way is not None:
            self._arrived = self.proposer.wait(*self._on_way.shape)
            self._on_way = None
        return self._arrived

    def _propose_by_head(
        self, step: int, req_ids: list[str], prepared: PreparedStep, token_lists: list[list[int]], num_drafts: int
    ) -> None:
        with stage(stages.V1_PREPARE_DRAFT, step):
            rejected = num_rejected_of(prepared.rows.counts - 1, token_lists)
            key = self.proposer.prepare_kept(prepared.num_scheduled, rejected, prepared.computed)
        drafts = self.proposer.submit("kept", key, len(req_ids), num_drafts)
        found = self.proposer.read(drafts).tolist() if num_drafts else [[] for _ in req_ids]
        for req_id, mine in zip(req_ids, found, strict=True):
            self.requests[req_id].draft_token_ids = mine
        self.drafted_rows = dict(self.batch.req_id_to_index)


# Device code: reads nothing but its arguments.


def _fill_rates(rates: torch.Tensor, values: tuple[float, ...]) -> None:
    rates.copy_(torch.tensor(values, dtype=torch.float32))


def _sample_rows(
    holder: LogitsHolder,
    metadata: SamplingMetadata,
    spec: SpecDecodeMetadata,
    verification: Verification,
    width: int,
    # [N] int64
    row_tokens: torch.Tensor,
    carried: VerifiedRows,
    features: FeatureTensors | None,
    wants_logprobs: bool,
) -> None:
    sample_rows(
        holder.logits,
        holder.positions,
        metadata,
        spec,
        verification,
        width,
        row_tokens,
        carried,
        features,
        wants_logprobs,
    )


def _verify_rows(
    # [B, 1 + K] int64, out
    sampled: torch.Tensor,
    # [N] int64
    row_tokens: torch.Tensor,
    holder: LogitsHolder,
    metadata: SamplingMetadata,
    spec: SpecDecodeMetadata,
    verification: Verification,
    # [B] bool
    discard: torch.Tensor,
    carried: VerifiedRows,
    draft_probs: DraftProbs | None,
    # [K] float32
    rates: torch.Tensor,
    logprobs: LogprobWork | None,
) -> None:
    verify_rows(
        sampled,
        row_tokens,
        holder.positions,
        metadata,
        spec,
        verification,
        discard,
        carried,
        draft_probs,
        rates,
        logprobs,
    )
