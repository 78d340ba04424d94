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
        self._free: deque[torch.Tensor] = deque(
            device.pinned((max_num_seqs, 1), torch.int64) for _ in range(count)
        )

    def take(self) -> torch.Tensor:
        """Return a slot [R, 1] int64."""
        assert self._free, "every output slot is in flight: the queue is deeper than the slots that were made for it"
        return self._free.popleft()

    def give_back(self, slot: torch.Tensor) -> None:
        self._free.append(slot)


@dataclass(slots=True)
class PendingLogprobs:
    """Pinned destinations of a step's log-probabilities."""

    # [B, 1+k] int64, [B, 1+k] float32, [B] int64
    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor

    def rows(self) -> LogprobRows:
        return LogprobRows(self.token_ids.numpy().copy(), self.logprobs.numpy().copy(), self.ranks.numpy().copy())


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
