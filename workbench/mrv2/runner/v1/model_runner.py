"""The V1-style runner: a dense persistent batch, prepared by the host, step by step.

    sync    host | update prepare launch sample [wait: v1: to_list] bookkeep | update prepare ...
            main |          [H2D x 8][gather][forward][logits][sample][D2H]   (idle)          [H2D ...
    async   host | [wait: barrier] update prepare launch sample bookkeep | [wait: barrier] ... | output n
            main |       [H2D x 8][gather][scatter][forward][logits][sample] [H2D x 8] ...
            copy |                                                            [D2H n]

The pinned buffers of input preparation are shared by all steps.  Sync mode may rewrite them because it
has waited for the step before; async mode waits for an event behind that step's copies.  With drafts the host
waits once more a step: see `speculation` and `proposer`.
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
from mrv2.runner.v1.bookkeeping import ACCEPTED_WAIT, Bookkeeper, SampledStep
from mrv2.runner.v1.cached_request import CachedRequestState
from mrv2.runner.v1.drafting import Drafting, LogitsHolder
from mrv2.runner.v1.features import FeatureBuilder, FeatureTensors
from mrv2.runner.v1.input_batch import InputBatch
from mrv2.runner.v1.logprobs import PROMPT_WAIT, LogprobKeeper, LogprobWork, gather_prompts
from mrv2.runner.v1.prepare import InputPreparer, PreparedStep, SampledOnDevice
from mrv2.runner.v1.sampler import sample
from mrv2.runner.v1.sampling_metadata import SamplingMetadata
from mrv2.runner.v1.speculation import LogitRows
from mrv2.runner.v1.update_states import update_states
from mrv2_models.causal_lm import CausalLM
from mrv2_models.model_state import ModelState

BARRIER_WAIT = "v1: prepare_inputs barrier"


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
            # acceptance is drawn for greedy requests too
            always_seeds=r.max_num_spec_tokens > 0,
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
        self.drafting = Drafting(r, self.requests, self.batch, self.main)
        self.graph_sets: Sequence[GraphSet] = (self.drafting.proposer.passes,)
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
            rows = LogitRows.of(self.drafting.scheduled(scheduled))
            prepared = self.preparer.prepare(
                self.requests, scheduled, num_scheduled, previous, rows, self.drafting.drafted_rows
            )
            self.drafting.send_inputs(prepared)
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
                None if prepared.spec is None else prepared.spec.logits_indices,
            )
        if knobs.async_scheduling and self.drafting.is_uncertain(previous):
            # how many tokens the step before yielded, while this one runs
            self.bookkeeper.catch_up(ACCEPTED_WAIT)
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
            # fresh tensors a step: the copy stream, and the next step, still read them
            sampled = self.device.empty((len(req_ids), prepared.rows.width), torch.int64)
            logprobs, work = self._logprobs(scheduled.step, prepared)
            if self.batch.history_reqs:
                if knobs.async_scheduling:
                    self.bookkeeper.catch_up()
                self.drafting.fill_in(prepared.rows, req_ids)
            features = self.features.build(scheduled.step, self.batch, self.requests, prepared.rows, self.main)
            if prepared.spec is None:
                self.main.run(stages.SAMPLE, _sample, holder, metadata, sampled, work, features)
            else:
                discard = self.preparer.discard.gpu[: len(req_ids)]
                self.drafting.verify(holder, metadata, prepared, discard, sampled, work, features)
        done = SampledStep(scheduled, req_ids, prepared.discard, sampled, logprobs, prepared.rows)
        if not knobs.async_scheduling:
            with stage(stages.V1_BOOKKEEP, scheduled.step):
                self._previous = None
                output, token_lists = self.bookkeeper.settle(done)
            # what drafts must have the tokens on the host: it comes behind the books
            self.drafting.propose(scheduled, req_ids, prepared, token_lists)
            return output
        stream = self.copy_stream if knobs.output_copy == "side_stream" else self.main
        with stage(stages.V1_BOOKKEEP, scheduled.step):
            output = self.bookkeeper.defer(done, stream)
            discarded = prepared.discard.tolist()
            rows = {req_id: row for row, req_id in enumerate(req_ids) if not discarded[row]}
            self._previous = SampledOnDevice(sampled, rows)
        if self.drafting.follows:
            discard = self.preparer.discard.gpu[: len(req_ids)]
            needs_host = bool(self.batch.history_reqs) or scheduled.has_grammar
            self.drafting.propose_padded(
                scheduled, prepared, discard, self._previous, self.copy_stream if needs_host else None
            )
        return output

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
        """Return the drafts of requests; async mode waits for them. -1 behind them. [n, K] int64"""
        return self.drafting.take(req_ids)

    def reset(self) -> None:
        """Forget every request."""
        self.requests.clear()
        self.batch.clear()
        self.bookkeeper.forget()
        self.drafting.forget()
        self._previous = None

    def _still_running(self, freed_req_ids: list[str]) -> SampledOnDevice | None:
        """Return the tokens of the step before; one that is freed, and perhaps comes back, has no claim to them."""
        previous = self._previous
        if previous is not None:
            previous.arrived = not self.bookkeeper.is_behind
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
    # [B, 1] int64, out
    sampled: torch.Tensor,
    logprobs: LogprobWork | None,
    features: FeatureTensors | None,
) -> None:
    sample(holder.logits, holder.positions, metadata, sampled.view(-1), logprobs, features)
