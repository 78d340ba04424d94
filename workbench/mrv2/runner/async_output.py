"""A step's output on its way to the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from mrv2.device import Device, Event
from mrv2.runner.async_logprobs import StepLogprobs
from mrv2.runner.protocol import StepOutput

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


@dataclass(slots=True)
class PinnedOutput:
    """The output copy of one step: waits once, copies out of the pinned slot, gives the slot back.

    `keep_alive` and `logprobs` hold the device tensors that the copies read on their own stream: dropped
    earlier, their memory could be handed to later work on the main stream.
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
    logprobs: StepLogprobs | None = None
    # batch row -> why its request must end; complete once the copy has arrived
    errors: dict[int, str] = field(default_factory=dict)
    # called once on the host after the wait (V1's bookkeeping)
    on_ready: Callable[[np.ndarray], None] | None = field(default=None)

    def get(self) -> StepOutput:
        """Wait for the copy and return host arrays that nothing rewrites."""
        self.done.synchronize(OUTPUT_WAIT)
        sampled = self.slot[: len(self.req_ids)].numpy().copy()
        output = StepOutput(self.step, self.req_ids, sampled, self.num_sampled, errors=self.errors)
        if self.logprobs is not None:
            self.logprobs.arrive(output)
        self.slots.give_back(self.slot)
        self.keep_alive, self.logprobs = (), None
        if self.on_ready is not None:
            self.on_ready(sampled)
        return output
