"""A step's output on its way to the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from mrv2.device import Device, Event
from mrv2.runner.protocol import LogprobRows, StepOutput

OUTPUT_WAIT = "output"  # the one wait of a step, by this name


@dataclass(slots=True)
class OutputSlot:
    """One step's pinned destination."""

    # [B, 1+K] int64
    sampled: torch.Tensor
    # [B] int32
    num_sampled: torch.Tensor
    buffers: tuple[torch.Tensor, torch.Tensor]


class OutputSlots:
    """Pinned destinations of output copies; one per step in flight, taken and given back on the host."""

    def __init__(self, device: Device, *, count: int, max_num_seqs: int, max_width: int = 1) -> None:
        self._free: deque[tuple[torch.Tensor, torch.Tensor]] = deque(
            (device.pinned((max_num_seqs * max_width,), torch.int64), device.pinned((max_num_seqs,), torch.int32))
            for _ in range(count)
        )

    def take(self, num_reqs: int, width: int = 1) -> OutputSlot:
        """Return contiguous pinned tensors for `num_reqs` rows of `width` tokens."""
        assert self._free, "every output slot is in flight: the queue is deeper than the slots that were made for it"
        buffers = self._free.popleft()
        return OutputSlot(buffers[0][: num_reqs * width].view(num_reqs, width), buffers[1][:num_reqs], buffers)

    def give_back(self, slot: OutputSlot) -> None:
        self._free.append(slot.buffers)


class LogprobSlots:
    """Pinned destinations of log-probabilities, one set per step in flight, of the widest row a request may ask for."""

    def __init__(self, device: Device, *, count: int, max_rows: int, max_num_logprobs: int) -> None:
        self.device = device
        self._max_rows, self._max_width = max_rows, 1 + max_num_logprobs
        self._free = [self._make() for _ in range(count)]

    def take(self, num_rows: int, width: int) -> PendingLogprobs:
        """Return contiguous pinned tensors for `num_rows` rows of `width` columns."""
        assert width <= self._max_width, f"{width - 1} logprobs asked for, the slots hold {self._max_width - 1}"
        assert self._free, "every logprob slot is in flight: the queue is deeper than the slots that were made for it"
        buffers = self._free.pop()
        ids, logprobs, ranks = buffers
        size = num_rows * width
        return PendingLogprobs(
            ids[:size].view(num_rows, width), logprobs[:size].view(num_rows, width), ranks[:num_rows], buffers, self
        )

    def give_back(self, buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        self._free.append(buffers)

    def _make(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        size = self._max_rows * self._max_width
        return (
            self.device.pinned((size,), torch.int64),
            self.device.pinned((size,), torch.float32),
            self.device.pinned((self._max_rows,), torch.int64),
        )


@dataclass(slots=True)
class PendingLogprobs:
    """Pinned destinations of one step's log-probabilities."""

    # [B, 1+k] int64, [B, 1+k] float32, [B] int64
    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    # the slot to give back, if the tensors came from one
    buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    slots: LogprobSlots | None = None

    def rows(self) -> LogprobRows:
        """Copy the arrived values out and give the slot back."""
        rows = LogprobRows(self.token_ids.numpy().copy(), self.logprobs.numpy().copy(), self.ranks.numpy().copy())
        if self.slots is not None and self.buffers is not None:
            self.slots.give_back(self.buffers)
        return rows


@dataclass(slots=True)
class PinnedOutput:
    """The output copy of one step: waits once, copies out of the pinned slot, gives the slot back.

    `keep_alive` holds the device tensors that the copy reads on its own stream: dropped earlier,
    their memory could be handed to later work on the main stream.
    """

    step: int
    req_ids: list[str]
    # [B] int32; None = it arrives with the tokens
    num_sampled: np.ndarray | None
    done: Event
    slot: OutputSlot
    slots: OutputSlots
    keep_alive: tuple[torch.Tensor, ...] = ()
    logprobs: PendingLogprobs | None = None
    # [B]: first logits row of each request
    logprob_starts: np.ndarray | None = None
    # called once on the host after the wait (V1's bookkeeping)
    on_ready: Callable[[np.ndarray], None] | None = field(default=None)

    def get(self) -> StepOutput:
        """Wait for the copy and return host arrays that nothing rewrites."""
        self.done.synchronize(OUTPUT_WAIT)
        sampled = self.slot.sampled.numpy().copy()
        num_sampled = self.slot.num_sampled.numpy().copy() if self.num_sampled is None else self.num_sampled
        logprobs = self.logprobs.rows() if self.logprobs is not None else None
        self.slots.give_back(self.slot)
        self.keep_alive = ()
        if self.on_ready is not None:
            self.on_ready(sampled)
        return StepOutput(self.step, self.req_ids, sampled, num_sampled, logprobs, self.logprob_starts)
