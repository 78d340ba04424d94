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

from typing import Literal, NamedTuple

import torch

from mrv2.errors import ConfigError
from mrv2.instrument import stage, stages
from mrv2.runner.async_output import LogprobSlots, OutputSlots
from mrv2.runner.forward import ForwardBuffers
from mrv2.runner.protocol import AsyncOutput, RunnerStats, SchedulerOutput
from mrv2.runner.resources import RunnerResources
from mrv2.runner.v1.bookkeeping import Bookkeeper, SampledStep
from mrv2.runner.v1.cached_request import CachedRequestState
from mrv2.runner.v1.input_batch import InputBatch
from mrv2.runner.v1.prepare import InputPreparer, PreparedStep, SampledOnDevice
from mrv2.runner.v1.sampler import sample
from mrv2.runner.v1.sampling_metadata import SamplingMetadata
from mrv2.runner.v1.update_states import update_states
from mrv2.sampling_params import MAX_LOGPROBS
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

    def __init__(self, resources: RunnerResources) -> None:
        r = self.resources = resources
        model_state = r.forward.model_state
        if type(model_state).add_request is not ModelState.add_request:
            raise ConfigError(
                f"runner='v1' moves requests from row to row, but {type(model_state).__name__} keeps state by row: "
                "use runner='v2'"
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
        slots = OutputSlots(r.device, count=self.max_queue_depth, max_num_seqs=r.max_num_seqs)
        logprob_slots = LogprobSlots(
            r.device,
            count=self.max_queue_depth,
            max_rows=r.max_num_seqs,
            max_num_logprobs=min(MAX_LOGPROBS, r.vocab_size),
        )
        self.bookkeeper = Bookkeeper(self.requests, self.batch, slots, logprob_slots, self.main, r.device.event())
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
            prepared = self.preparer.prepare(self.requests, scheduled, num_scheduled, previous)
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
            )
        self._stats.num_steps += 1
        self._stats.num_graph_replays += replayed
        self._pending = ExecuteModelState(scheduled, self.batch.ids, prepared, self.batch.sampling_metadata, holder)

    def sample_tokens(self) -> AsyncOutput:
        """Sample and keep the books; in sync mode the output is done when this returns."""
        assert self._pending is not None, "sample_tokens needs an execute_model before it"
        (scheduled, req_ids, prepared, metadata, holder), self._pending = self._pending, None
        num_reqs, knobs = len(req_ids), self.resources.knobs
        with stage(stages.V1_SAMPLE, scheduled.step):
            # a fresh tensor a step: the copy stream, and the next step, still read it
            sampled = self.device.empty((num_reqs, 1), torch.int64)
            logprobs = self._logprob_tensors(num_reqs, metadata.max_num_logprobs)
            self.main.run(stages.SAMPLE, _sample, holder, metadata, sampled, logprobs)
        with stage(stages.V1_BOOKKEEP, scheduled.step):
            done = SampledStep(scheduled, req_ids, prepared.discard, sampled, logprobs)
            if not knobs.async_scheduling:
                self._previous = None
                return self.bookkeeper.settle(done)
            discard = prepared.discard.tolist()
            rows = {req_id: row for row, req_id in enumerate(req_ids) if not discard[row]}
            self._previous = SampledOnDevice(sampled, rows)
            stream = self.copy_stream if knobs.output_copy == "side_stream" else self.main
            return self.bookkeeper.defer(done, stream)

    def reset(self) -> None:
        """Forget every request."""
        self.requests.clear()
        self.batch.clear()
        self._previous = None

    def _still_running(self, freed_req_ids: list[str]) -> SampledOnDevice | None:
        """Return the tokens of the step before; one that is freed, and perhaps comes back, has no claim to them."""
        previous = self._previous
        if previous is not None:
            for req_id in freed_req_ids:
                previous.rows.pop(req_id, None)
        return previous

    def _logprob_tensors(self, num_reqs: int, num_logprobs: int) -> tuple[torch.Tensor, ...]:
        """Return device tensors ids [B, 1+k] int64, logprobs [B, 1+k] float32, ranks [B] int64; () for none."""
        if num_logprobs < 0:
            return ()
        wide = (num_reqs, 1 + num_logprobs)
        shapes = ((wide, torch.int64), (wide, torch.float32), ((num_reqs,), torch.int64))
        return tuple(self.device.empty(shape, dtype) for shape, dtype in shapes)


# Device code: reads nothing but its arguments.


def _compute_logits(
    holder: LogitsHolder,
    model: CausalLM,
    buffers: ForwardBuffers,
    # [B + 1] int32
    query_start_loc: torch.Tensor,
) -> None:
    last_tokens = query_start_loc[1:] - 1
    holder.logits = model.compute_logits(buffers.hidden.index_select(0, last_tokens))
    holder.positions = buffers.positions.index_select(0, last_tokens)


def _sample(
    holder: LogitsHolder,
    metadata: SamplingMetadata,
    # [B, 1] int64, out
    sampled: torch.Tensor,
    logprobs: tuple[torch.Tensor, ...],
) -> None:
    sample(holder.logits, holder.positions, metadata, sampled.view(-1), logprobs)
