"""The V1-style runner: a dense persistent batch, prepared by the host, step by step.

    sync    host | update prepare launch sample [wait: v1: to_list] bookkeep | update prepare ...
            main |          [H2D x 8][gather][forward][logits][sample][D2H]   (idle)          [H2D ...
    async   host | [wait: barrier] update prepare launch sample bookkeep | [wait: barrier] ... | output n
            main |       [H2D x 8][gather][scatter][forward][logits][sample] [H2D x 8] ...
            copy |                                                            [D2H n]

The pinned buffers of input preparation are shared by all steps.  Sync mode may rewrite them because it
has waited for the step before; async mode waits for an event behind that step's copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch

from mrv2.errors import ConfigError
from mrv2.instrument import stage, stages
from mrv2.runner.async_logprobs import StepLogprobs
from mrv2.runner.async_output import OutputSlots
from mrv2.runner.forward import ForwardBuffers
from mrv2.runner.grammar_masks import GrammarMasks
from mrv2.runner.protocol import AsyncOutput, GrammarMask, GraphSet, RunnerStats, SchedulerOutput
from mrv2.runner.resources import RunnerResources
from mrv2.runner.v1.bookkeeping import Bookkeeper, SampledStep
from mrv2.runner.v1.cached_request import PLACEHOLDER, CachedRequestState
from mrv2.runner.v1.features import FeatureBuilder, FeatureTensors
from mrv2.runner.v1.input_batch import InputBatch
from mrv2.runner.v1.logprobs import PROMPT_WAIT, LogprobKeeper, LogprobWork, gather_prompts
from mrv2.runner.v1.prepare import InputPreparer, PreparedStep, SampledOnDevice
from mrv2.runner.v1.sampler import sample
from mrv2.runner.v1.sampling_metadata import SamplingMetadata
from mrv2.runner.v1.speculation import LogitRows, propose_ngram
from mrv2.runner.v1.update_states import update_states
from mrv2_models.causal_lm import CausalLM
from mrv2_models.model_state import ModelState

BARRIER_WAIT = "v1: prepare_inputs barrier"


class LogitsHolder:
    """Carries the logits from one device stage to the next; filled and read in stream order."""

    __slots__ = ("logits", "positions")

    # [B, V]
    logits: torch.Tensor
    # [B] int32
    positions: torch.Tensor


class ExecuteModelState(NamedTuple):
    """The hand-over from `execute_model` to `sample_tokens`."""

    scheduled: SchedulerOutput
    # B ids in batch order
    req_ids: list[str]
    prepared: PreparedStep
    metadata: SamplingMetadata
    holder: LogitsHolder


class ModelRunnerV1:
    """Host-side input preparation, a probability-tensor sampler, Python bookkeeping."""

    name: Literal["v1", "v2"] = "v1"
    max_queue_depth = 2
    graph_sets: Sequence[GraphSet] = ()

    def __init__(self, resources: RunnerResources) -> None:
        r = self.resources = resources
        model_state = r.forward.model_state
        if type(model_state).add_request is not ModelState.add_request:
            raise ConfigError(
                f"runner='v1' moves requests from row to row, but {type(model_state).__name__} keeps state by row: "
                "use runner='v2'"
            )
        if r.processors:
            raise ConfigError(
                f"runner='v1' moves requests from row to row, but the logits processors "
                f"{', '.join(type(p).__name__ for p in r.processors)} keep state by row: use runner='v2', or load the "
                "engine without them"
            )
        self.device = r.device
        self.main = r.device.stream("main")
        self.copy_stream = r.device.stream("copy")
        self.requests: dict[str, CachedRequestState] = {}
        self.batch = InputBatch(
            r.device,
            max_num_seqs=r.max_num_seqs,
            max_model_len=r.max_model_len,
            block_tables=r.forward.buffers.block_tables,
        )
        self.preparer = InputPreparer(r, self.batch, self.main)
        width = 1 + r.max_num_spec_tokens
        slots = OutputSlots(r.device, count=self.max_queue_depth, max_num_seqs=r.max_num_seqs, max_width=width)
        self.bookkeeper = Bookkeeper(self.requests, self.batch, slots, self.main, r.device.event())
        self.logprobs = LogprobKeeper(r, count=self.max_queue_depth)
        self.features = FeatureBuilder(r.device, r.vocab_size, depth=self.max_queue_depth + 1)
        # on the main stream: this runner has no other for inputs
        self.grammar_masks = GrammarMasks(
            r.device,
            self.main,
            depth=self.max_queue_depth + 1,
            max_num_masks=r.max_num_seqs * width,
            vocab_size=r.vocab_size,
        )
        # passed once the copies out of the shared pinned buffers have run
        self.prepare_inputs_event = r.device.event()
        self._stats = RunnerStats()
        self._previous: SampledOnDevice | None = None
        self._pending: ExecuteModelState | None = None

    @property
    def stats(self) -> RunnerStats:
        """Counters; `extra` holds row moves, metadata refreshes, and how sampled ids reached the inputs."""
        self._stats.extra = {
            "row_moves": self.batch.num_moves,
            "metadata_refreshes": self.batch.num_refreshes,
            "token_slices": self.preparer.num_slices,
            "token_scatters": self.preparer.num_scatters,
        }
        return self._stats

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        """Update the batch, prepare its inputs on the host, submit the forward pass and the logits."""
        assert self._pending is None, "execute_model was called twice without sample_tokens"
        step, forward, knobs = scheduled.step, self.resources.forward, self.resources.knobs
        with stage(stages.V1_PREPROCESS, step):
            if knobs.async_scheduling:
                self.prepare_inputs_event.synchronize(BARRIER_WAIT)
            num_scheduled = dict(zip(scheduled.req_ids, scheduled.num_scheduled_tokens.tolist(), strict=True))
            previous = self._still_running(scheduled.freed_req_ids)
            update_states(self.requests, self.batch, scheduled, num_scheduled, self.main)
            rows = LogitRows.of(self._drafts_of(scheduled))
            prepared = self.preparer.prepare(self.requests, scheduled, num_scheduled, previous, rows)
            if knobs.async_scheduling:
                self.prepare_inputs_event.record(self.main)
        with stage(stages.V1_FORWARD, step):
            replayed = forward.run(prepared.key, prepared.batch, self.main, knobs)
        with stage(stages.V1_POSTPROCESS, step):
            holder = LogitsHolder()
            self.main.run(
                stages.LOGITS,
                _compute_logits,
                holder,
                self.resources.model,
                forward.buffers,
                prepared.batch.query_start_loc[: self.batch.num_reqs + 1],
                prepared.row_tokens,
            )
        self._stats.num_steps += 1
        self._stats.num_graph_replays += replayed
        self._pending = ExecuteModelState(scheduled, self.batch.ids, prepared, self.batch.sampling_metadata, holder)

    def sample_tokens(self, grammar: GrammarMask | None = None) -> AsyncOutput:
        """Sample and keep the books; in sync mode the output is done when this returns."""
        assert self._pending is not None, "sample_tokens needs an execute_model before it"
        (scheduled, req_ids, prepared, metadata, holder), self._pending = self._pending, None
        knobs = self.resources.knobs
        with stage(stages.V1_SAMPLE, scheduled.step):
            if grammar is not None:
                self._apply_grammar(grammar, scheduled, req_ids, prepared.rows, holder)
            # a fresh tensor a step: the copy stream, and the next step, still read it
            sampled = self.device.empty((prepared.rows.num_rows, 1), torch.int64)
            logprobs, work = self._logprobs(scheduled.step, prepared)
            if self.batch.history_reqs and knobs.async_scheduling:
                self.bookkeeper.catch_up()
            features = self.features.build(scheduled.step, self.batch, self.requests, prepared.rows, self.main)
            self.main.run(stages.SAMPLE, _sample, holder, metadata, prepared.row_owners, sampled, work, features)
        with stage(stages.V1_BOOKKEEP, scheduled.step):
            done = SampledStep(scheduled, req_ids, prepared.discard, sampled, logprobs, prepared.rows)
            if not knobs.async_scheduling:
                self._previous = None
                output = self.bookkeeper.settle(done)
                self._propose(req_ids, scheduled.num_next_drafts)
                return output
            discard = prepared.discard.tolist()
            rows = {req_id: row for row, req_id in enumerate(req_ids) if not discard[row]}
            self._previous = SampledOnDevice(sampled, rows)
            stream = self.copy_stream if knobs.output_copy == "side_stream" else self.main
            return self.bookkeeper.defer(done, stream)

    def _apply_grammar(
        self,
        grammar: GrammarMask,
        scheduled: SchedulerOutput,
        req_ids: list[str],
        logit_rows: LogitRows,
        holder: LogitsHolder,
    ) -> None:
        """Bring the masks from scheduling order into batch order and apply them at sampling time."""
        row_of = {req_id: row for row, req_id in enumerate(req_ids)}
        rows = [row_of[scheduled.req_ids[index]] for index in grammar.batch_rows.tolist()]
        self.grammar_masks.submit(logit_rows.firsts[rows] + grammar.places, holder)
        self.grammar_masks.release(self.main.record_event())

    def take_drafts(self, req_ids: list[str]) -> np.ndarray:
        """Return the drafts of requests, which the host knows; -1 behind them. [n, K] int64"""
        drafts = np.full((len(req_ids), self.resources.max_num_spec_tokens), PLACEHOLDER, dtype=np.int64)
        for row, req_id in enumerate(req_ids):
            mine = self.requests[req_id].draft_token_ids
            drafts[row, : len(mine)] = mine
        return drafts

    def reset(self) -> None:
        """Forget every request."""
        self.requests.clear()
        self.batch.clear()
        self.bookkeeper.forget()
        self._previous = None

    def _drafts_of(self, scheduled: SchedulerOutput) -> list[list[int]]:
        """Return the drafts that each request of the batch has verified in this step, -1 for those not found."""
        wanted = dict(zip(scheduled.req_ids, scheduled.num_draft_tokens.tolist(), strict=True))
        drafts = []
        for req_id in self.batch.ids:
            count, mine = wanted[req_id], self.requests[req_id].draft_token_ids
            drafts.append((mine + [PLACEHOLDER] * count)[:count])
        return drafts

    def _propose(self, req_ids: list[str], num_drafts: int) -> None:
        """Look up the drafts of the next step, request by request."""
        if not num_drafts:
            return
        with stage(stages.V1_PROPOSE):
            min_n, max_n = self.resources.ngram_lengths
            for row, req_id in enumerate(req_ids):
                tokens = self.batch.token_ids_cpu[row, : self.batch.num_tokens[row]]
                drafts = propose_ngram(tokens, num_drafts, min_n=min_n, max_n=max_n)
                self.requests[req_id].draft_token_ids = drafts

    def _still_running(self, freed_req_ids: list[str]) -> SampledOnDevice | None:
        """Return the tokens of the step before; one that is freed, and perhaps comes back, has no claim to them."""
        previous = self._previous
        if previous is not None:
            for req_id in freed_req_ids:
                previous.rows.pop(req_id, None)
        return previous

    def _logprobs(self, step: int, prepared: PreparedStep) -> tuple[StepLogprobs | None, LogprobWork | None]:
        """Find out which log-probabilities are wanted, and compute those of prompts."""
        query_start_loc = prepared.batch.query_start_loc_np
        assert query_start_loc is not None, "input preparation fills query_start_loc_np"
        logprobs = self.logprobs.transfers(self.batch, self.requests, prepared.discard, query_start_loc, prepared.rows)
        if logprobs is None:
            return None, None
        work = self.logprobs.work(step, logprobs, self.batch, self.requests, prepared.rows, self.main)
        if work.prompts:
            hidden = self.resources.forward.buffers.hidden
            self.main.run(stages.PROMPT_LOGPROBS, gather_prompts, self.resources.model, hidden, work)
            if self.logprobs.finishes_prompt(logprobs, self.batch):
                self.device.synchronize(PROMPT_WAIT)
        return logprobs, work


# Device code: reads nothing but its arguments.


def _compute_logits(
    holder: LogitsHolder,
    model: CausalLM,
    buffers: ForwardBuffers,
    # [B + 1] int32
    query_start_loc: torch.Tensor,
    # [N] int32; None = the last token of each request
    row_tokens: torch.Tensor | None,
) -> None:
    last_tokens = query_start_loc[1:] - 1 if row_tokens is None else row_tokens
    holder.logits = model.compute_logits(buffers.hidden.index_select(0, last_tokens))
    holder.positions = buffers.positions.index_select(0, last_tokens)


def _sample(
    holder: LogitsHolder,
    metadata: SamplingMetadata,
    # [N] int32: batch row of each logits row; None = one a request
    row_owners: torch.Tensor | None,
    # [N, 1] int64, out
    sampled: torch.Tensor,
    logprobs: LogprobWork | None,
    features: FeatureTensors | None,
) -> None:
    if row_owners is not None:
        metadata = metadata.expanded(row_owners)
    sample(holder.logits, holder.positions, metadata, sampled.view(-1), logprobs, features)
