"""After sampling: tokens into Python lists, host rows and the output of the step.

Sync mode waits for the tokens at once; async mode writes placeholders and fills them in when the output
copy has arrived, which the engine waits for one step late.  A step with drafts gives a request as many tokens as
verification left: sync mode learns the number with the wait, async mode writes one placeholder and corrects the
lists after the forward pass of the next step was launched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from mrv2.device import Event, Stream
from mrv2.instrument import stage, stages
from mrv2.runner.async_logprobs import StepLogprobs
from mrv2.runner.async_output import OutputSlot, OutputSlots, PinnedOutput
from mrv2.runner.protocol import AsyncOutput, LogprobRows, SchedulerOutput, StepOutput
from mrv2.runner.v1.cached_request import PLACEHOLDER, CachedRequestState
from mrv2.runner.v1.input_batch import InputBatch
from mrv2.runner.v1.speculation import LogitRows, parse_output

TO_LIST_WAIT = "v1: to_list"
# sync mode: how many drafts of the step were accepted; async mode: of the step before the one just launched
ACCEPTED_WAIT = "v1: accepted tokens"
TOKENS_WAIT = "v1: output tokens for penalties"


class SampledStep(NamedTuple):
    """What a step sampled, on the device, and whose it is."""

    scheduled: SchedulerOutput
    # B ids in batch order
    req_ids: list[str]
    # [B] bool, in batch order
    discard: np.ndarray
    # [B, 1 + K] int64, -1 in place of rejected drafts
    sampled: torch.Tensor
    logprobs: StepLogprobs | None
    rows: LogitRows


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
        if self.sampled_step.rows.has_drafts:
            lists = parse_output(arrived.sampled_token_ids.tolist(), self.sampled_step.discard.tolist())
            arrived.num_sampled = np.array([len(tokens) for tokens in lists], dtype=np.int32)
        return _in_scheduling_order(self.sampled_step, arrived)


class Bookkeeper:
    """Writes sampled tokens to the persistent batch and the cached requests."""

    def __init__(
        self,
        requests: dict[str, CachedRequestState],
        batch: InputBatch,
        slots: OutputSlots,
        main: Stream,
        transfer_event: Event,
    ) -> None:
        self.requests = requests
        self.batch = batch
        self.slots = slots
        self.main = main
        self.transfer_event = transfer_event
        # async mode: the output of the last step, and the requests whose placeholders it will fill, by row
        self._last: tuple[PinnedOutput, dict[int, CachedRequestState]] | None = None

    @property
    def is_behind(self) -> bool:
        """True while placeholders stand for tokens of the last step."""
        return self._last is not None and bool(self._last[1])

    def settle(self, step: SampledStep) -> tuple[AsyncOutput, list[list[int]]]:
        """Sync mode: copy the tokens to the host, wait, and write them to every list; return them by batch row too.

        The host waits at once, so the copy stays on the main stream whatever the knob `output_copy` says.
        """
        slot = self.slots.take(*step.sampled.shape)
        self._copy_out(step, slot, self.main)
        self.transfer_event.record(self.main)
        self.transfer_event.synchronize(ACCEPTED_WAIT if step.rows.has_drafts else TO_LIST_WAIT)
        arrived = slot.sampled_np.copy()
        self.slots.give_back(slot)
        with stage(stages.V1_PARSE_OUTPUT, step.scheduled.step):
            token_lists = parse_output(arrived.tolist(), step.discard.tolist())
        counts = np.array([len(tokens) for tokens in token_lists], dtype=np.int32)
        output = StepOutput(step.scheduled.step, step.req_ids, arrived, counts)
        if step.logprobs is not None:
            step.logprobs.arrive(output)
        for row, tokens in enumerate(token_lists):
            if tokens:
                self._append(row, step.req_ids[row], tokens)
        return DoneOutput(step.scheduled.step, _in_scheduling_order(step, output)), token_lists

    def defer(self, step: SampledStep, stream: Stream) -> AsyncOutput:
        """Async mode: write placeholders, send the tokens on their way on `stream`."""
        discarded = set(np.flatnonzero(step.discard).tolist())
        expected: dict[int, CachedRequestState] = {}
        for row, req_id in enumerate(step.req_ids):
            if row in discarded:
                continue
            expected[row] = self.requests[req_id]
            self._append(row, req_id, [PLACEHOLDER])
            expected[row].num_placeholders += 1
        if stream is not self.main:
            stream.wait_event(self.main.record_event())
        slot = self.slots.take(*step.sampled.shape)
        self._copy_out(step, slot, stream)
        pending = PinnedOutput(
            step=step.scheduled.step,
            req_ids=step.req_ids,
            num_sampled=(~step.discard).astype(np.int32),
            done=stream.record_event(),
            slot=slot,
            slots=self.slots,
            keep_alive=(step.sampled,),
            logprobs=step.logprobs,
            on_ready=lambda sampled: self._fill_in(expected, sampled),
        )
        self._last = (pending, expected)
        return LateOutput(pending.step, pending, step)

    def catch_up(self, reason: str = TOKENS_WAIT) -> None:
        """Async mode: wait for the tokens of the step before, if placeholders stand for them, and fill them in.

        Penalties, bad words and thinking budget are computed from the host's lists, before sampling: the overlap is
        lost.  With drafts the lists are corrected in every step.
        """
        if self._last is not None and self._last[1]:
            pending, expected = self._last
            pending.done.synchronize(reason)
            self._fill_in(expected, pending.slot.sampled_np)
        self._last = None

    def forget(self) -> None:
        """No placeholder is waited for any more: every request is gone."""
        self._last = None

    def _copy_out(
        self,
        step: SampledStep,
        slot: OutputSlot,
        stream: Stream,
    ) -> None:
        """Submit the copies of the tokens and, if wanted, of the log-probabilities."""
        stream.copy(stages.OUTPUT_COPY, slot.sampled, step.sampled)
        if step.logprobs is not None:
            step.logprobs.submit_copies(stream)

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
        expected: dict[int, CachedRequestState],
        # [B, 1 + K]
        sampled: np.ndarray,
    ) -> None:
        """Replace placeholders by the tokens that arrived, for requests that are still there."""
        arrived = parse_output(sampled.tolist(), [False] * len(sampled))
        for row, state in expected.items():
            if self.requests.get(state.req_id) is not state:
                continue
            outputs, tokens = state.output_token_ids, arrived[row]
            # of several placeholders the first: outputs arrive in order
            first = len(outputs) - state.num_placeholders
            outputs[first : first + 1] = tokens
            state.num_placeholders -= 1
            # it may have moved, or lost its row, since
            row_now = self.batch.req_id_to_index.get(state.req_id)
            if row_now is not None:
                start = state.num_prompt_tokens + first
                self.batch.num_tokens[row_now] = state.num_tokens
                self.batch.token_ids_cpu[row_now, start : state.num_tokens] = outputs[first:]
        expected.clear()


def _in_scheduling_order(step: SampledStep, arrived: StepOutput) -> StepOutput:
    """Return the output with its rows in the order of `SchedulerOutput.req_ids`."""
    index = {req_id: row for row, req_id in enumerate(step.req_ids)}
    order = [index[req_id] for req_id in step.scheduled.req_ids]
    place = {row: at for at, row in enumerate(order)}
    logprobs = arrived.logprobs
    if logprobs is not None:
        rows = step.rows.in_order(order)
        logprobs = LogprobRows(logprobs.token_ids[rows], logprobs.logprobs[rows], logprobs.ranks[rows])
    return StepOutput(
        step.scheduled.step,
        step.scheduled.req_ids,
        arrived.sampled_token_ids[order],
        arrived.num_sampled[order],
        logprobs,
        wide_logprobs={place[row]: rows for row, rows in arrived.wide_logprobs.items()},
        prompt_logprobs={place[row]: runs for row, runs in arrived.prompt_logprobs.items()},
    )
