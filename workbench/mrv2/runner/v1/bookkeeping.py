"""After sampling: tokens into Python lists, host rows and the output of the step.

Sync mode waits for the tokens at once; async mode writes placeholders and fills them in when the output
copy has arrived, which the engine waits for one step late.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from mrv2.device import Event, Stream
from mrv2.instrument import stages
from mrv2.runner.async_output import LogprobSlots, OutputSlot, OutputSlots, PendingLogprobs, PinnedOutput
from mrv2.runner.protocol import AsyncOutput, LogprobRows, SchedulerOutput, StepOutput
from mrv2.runner.v1.cached_request import PLACEHOLDER, CachedRequestState
from mrv2.runner.v1.input_batch import InputBatch

TO_LIST_WAIT = "v1: to_list"


class SampledStep(NamedTuple):
    """What a step sampled, on the device, and whose it is."""

    scheduled: SchedulerOutput
    # B ids in batch order
    req_ids: list[str]
    # [B] bool, in batch order
    discard: np.ndarray
    # [B, 1] int64
    sampled: torch.Tensor
    # [B, 1 + k] int64, [B, 1 + k] float32, [B] int64; () = not wanted
    logprobs: tuple[torch.Tensor, ...]


@dataclass(slots=True)
class DoneOutput:
    """The output of a step that was waited for inside `sample_tokens`."""

    step: int
    output: StepOutput

    def get(self) -> StepOutput:
        """Return it; nothing is left to wait for."""
        return self.output


@dataclass(slots=True)
class LateOutput:
    """The output of a step in flight, brought from batch order into scheduling order on arrival."""

    step: int
    pending: PinnedOutput
    sampled_step: SampledStep

    def get(self) -> StepOutput:
        """Wait for the output copy."""
        arrived = self.pending.get()
        return _in_scheduling_order(self.sampled_step, arrived.sampled_token_ids, arrived.logprobs)


class Bookkeeper:
    """Writes sampled tokens to the persistent batch and the cached requests."""

    def __init__(
        self,
        requests: dict[str, CachedRequestState],
        batch: InputBatch,
        slots: OutputSlots,
        logprob_slots: LogprobSlots,
        main: Stream,
        transfer_event: Event,
    ) -> None:
        self.requests = requests
        self.batch = batch
        self.slots = slots
        self.logprob_slots = logprob_slots
        self.main = main
        self.transfer_event = transfer_event

    def settle(self, step: SampledStep) -> AsyncOutput:
        """Sync mode: copy the tokens to the host, wait, and write them to every list.

        The host waits at once, so the copy stays on the main stream whatever the knob `output_copy` says.
        """
        slot = self.slots.take(len(step.req_ids))
        pending = self._copy_out(step, slot, self.main)
        self.transfer_event.record(self.main)
        self.transfer_event.synchronize(TO_LIST_WAIT)
        # [B, 1]
        sampled = slot.sampled.numpy().copy()
        self.slots.give_back(slot)
        logprobs = pending.rows() if pending is not None else None
        token_lists: list[list[int]] = sampled.tolist()
        for row in np.flatnonzero(step.discard).tolist():
            token_lists[row].clear()
        for row, tokens in enumerate(token_lists):
            if tokens:
                self._append(row, step.req_ids[row], tokens)
        return DoneOutput(step.scheduled.step, _in_scheduling_order(step, sampled, logprobs))

    def defer(self, step: SampledStep, stream: Stream) -> AsyncOutput:
        """Async mode: write placeholders, send the tokens on their way on `stream`."""
        discarded = set(np.flatnonzero(step.discard).tolist())
        # the request, and which of its outputs this step samples
        expected: dict[int, tuple[CachedRequestState, int]] = {}
        for row, req_id in enumerate(step.req_ids):
            if row in discarded:
                continue
            state = self.requests[req_id]
            expected[row] = (state, len(state.output_token_ids))
            self._append(row, req_id, [PLACEHOLDER])
        if stream is not self.main:
            stream.wait_event(self.main.record_event())
        slot = self.slots.take(len(step.req_ids))
        logprobs = self._copy_out(step, slot, stream)
        pending = PinnedOutput(
            step=step.scheduled.step,
            req_ids=step.req_ids,
            num_sampled=(~step.discard).astype(np.int32),
            done=stream.record_event(),
            slot=slot,
            slots=self.slots,
            keep_alive=(step.sampled, *step.logprobs),
            logprobs=logprobs,
            on_ready=lambda sampled: self._fill_in(expected, sampled),
        )
        return LateOutput(pending.step, pending, step)

    def _copy_out(
        self,
        step: SampledStep,
        slot: OutputSlot,
        stream: Stream,
    ) -> PendingLogprobs | None:
        """Submit the copies of the tokens and, if wanted, of the log-probabilities."""
        num_reqs = len(step.req_ids)
        stream.copy(stages.OUTPUT_COPY, slot.sampled, step.sampled)
        if not step.logprobs:
            return None
        pending = self.logprob_slots.take(num_reqs, step.logprobs[0].shape[1])
        targets = (pending.token_ids, pending.logprobs, pending.ranks)
        for target, source in zip(targets, step.logprobs, strict=True):
            stream.copy(stages.OUTPUT_COPY, target, source)
        return pending

    def _append(self, row: int, req_id: str, tokens: list[int]) -> None:
        batch = self.batch
        start = int(batch.num_tokens[row])
        end = start + len(tokens)
        limit = batch.token_ids_cpu.shape[1]
        assert end <= limit, f"request {req_id} grows to {end} tokens, its row holds {limit}"
        batch.token_ids_cpu[row, start:end] = tokens
        batch.num_tokens[row] = end
        self.requests[req_id].output_token_ids.extend(tokens)

    def _fill_in(
        self,
        expected: dict[int, tuple[CachedRequestState, int]],
        # [B, 1]
        sampled: np.ndarray,
    ) -> None:
        """Replace placeholders by the tokens that arrived, for requests that are still there."""
        for row, (state, index) in expected.items():
            if self.requests.get(state.req_id) is not state:
                continue
            token = int(sampled[row, 0])
            state.output_token_ids[index] = token
            # it may have moved, or lost its row, since
            row_now = self.batch.req_id_to_index.get(state.req_id)
            if row_now is not None:
                self.batch.token_ids_cpu[row_now, state.num_prompt_tokens + index] = token


def _in_scheduling_order(
    step: SampledStep,
    # [B, 1], in batch order
    sampled: np.ndarray,
    logprobs: LogprobRows | None,
) -> StepOutput:
    index = {req_id: row for row, req_id in enumerate(step.req_ids)}
    order = [index[req_id] for req_id in step.scheduled.req_ids]
    if logprobs is not None:
        logprobs = LogprobRows(logprobs.token_ids[order], logprobs.logprobs[order], logprobs.ranks[order])
    num_sampled = (~step.discard[order]).astype(np.int32)
    return StepOutput(step.scheduled.step, step.scheduled.req_ids, sampled[order], num_sampled, logprobs)
