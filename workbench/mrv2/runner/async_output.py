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


class OutputSlots:
    """Pinned destinations of output copies; one per step in flight, taken and given back on the host."""

    def __init__(self, device: Device, *, count: int, max_num_seqs: int) -> None:
        self._free: deque[torch.Tensor] = deque(device.pinned((max_num_seqs, 1), torch.int64) for _ in range(count))

    def take(self) -> torch.Tensor:
        """Return a slot [R, 1] int64."""
        assert self._free, "every output slot is in flight: the queue is deeper than the slots that were made for it"
        return self._free.popleft()

    def give_back(self, slot: torch.Tensor) -> None:
        self._free.append(slot)


class LogprobSlots:
    """Pinned destinations of log-probabilities, one set per step in flight, of the widest row a request may ask for."""

    def __init__(self, device: Device, *, count: int, max_num_seqs: int, max_num_logprobs: int) -> None:
        self.device = device
        self._max_num_seqs, self._max_width = max_num_seqs, 1 + max_num_logprobs
        self._free = [self._make() for _ in range(count)]

    def take(self, num_reqs: int, width: int) -> PendingLogprobs:
        """Return contiguous pinned tensors for `num_reqs` rows of `width` columns."""
        assert width <= self._max_width, f"{width - 1} logprobs asked for, the slots hold {self._max_width - 1}"
        assert self._free, "every logprob slot is in flight: the queue is deeper than the slots that were made for it"
        buffers = self._free.pop()
        ids, logprobs, ranks = buffers
        size = num_reqs * width
        return PendingLogprobs(
            ids[:size].view(num_reqs, width), logprobs[:size].view(num_reqs, width), ranks[:num_reqs], buffers, self
        )

    def give_back(self, buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        self._free.append(buffers)

    def _make(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        size = self._max_num_seqs * self._max_width
        return (
            self.device.pinned((size,), torch.int64),
            self.device.pinned((size,), torch.float32),
            self.device.pinned((self._max_num_seqs,), torch.int64),
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
    # [B] int32
    num_sampled: np.ndarray
    done: Event
    # [R, 1] int64, pinned
    slot: torch.Tensor
    slots: OutputSlots
    keep_alive: tuple[torch.Tensor, ...] = ()
    logprobs: PendingLogprobs | None = None
    # called once on the host after the wait (V1's bookkeeping)
    on_ready: Callable[[np.ndarray], None] | None = field(default=None)

    def get(self) -> StepOutput:
        """Wait for the copy and return host arrays that nothing rewrites."""
        self.done.synchronize(OUTPUT_WAIT)
        sampled = self.slot[: len(self.req_ids)].numpy().copy()
        logprobs = self.logprobs.rows() if self.logprobs is not None else None
        self.slots.give_back(self.slot)
        self.keep_alive = ()
        if self.on_ready is not None:
            self.on_ready(sampled)
        return StepOutput(self.step, self.req_ids, sampled, self.num_sampled, logprobs)
