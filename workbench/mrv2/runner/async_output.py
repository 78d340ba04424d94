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


@dataclass(slots=True, eq=False)
class OutputSlot:
    """One step's pinned destination."""

    # which of the slots it is
    index: int
    # [B, 1+K] int64
    sampled: torch.Tensor
    # [B] int32
    num_sampled: torch.Tensor
    # [B, 1+K] int64 and [B] int32: the same memory
    sampled_np: np.ndarray = field(init=False)
    num_sampled_np: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        # views are made once, not in every step
        self.sampled_np, self.num_sampled_np = self.sampled.numpy(), self.num_sampled.numpy()


class OutputSlots:
    """Pinned destinations of output copies; one per step in flight, taken and given back on the host."""

    def __init__(self, device: Device, *, count: int, max_num_seqs: int, max_width: int = 1) -> None:
        # [R * (1+K)] int64, [R] int32 each
        self._buffers = [
            (device.pinned((max_num_seqs * max_width,), torch.int64), device.pinned((max_num_seqs,), torch.int32))
            for _ in range(count)
        ]
        self._free = deque(range(count))
        # slots are cut to size once: (index, requests, width) -> slot
        self._slots: dict[tuple[int, int, int], OutputSlot] = {}

    @property
    def count(self) -> int:
        return len(self._buffers)

    def take(self, num_reqs: int, width: int = 1) -> OutputSlot:
        """Return contiguous pinned tensors for `num_reqs` rows of `width` tokens."""
        assert self._free, "every output slot is in flight: the queue is deeper than the slots that were made for it"
        key = self._free.popleft(), num_reqs, width
        slot = self._slots.get(key)
        if slot is None:
            sampled, num_sampled = self._buffers[key[0]]
            slot = OutputSlot(key[0], sampled[: num_reqs * width].view(num_reqs, width), num_sampled[:num_reqs])
            self._slots[key] = slot
        return slot

    def give_back(self, slot: OutputSlot) -> None:
        self._free.append(slot.index)


@dataclass(slots=True)
class PinnedOutput:
    """The output copy of one step: waits once, copies out of the pinned slot, gives the slot back.

    `keep_alive` and `logprobs` hold the device tensors that the copies read on their own stream: dropped
    earlier, their memory could be handed to later work on the main stream.
    """

    step: int
    req_ids: list[str]
    # [B] int32; None = it arrives with the tokens
    num_sampled: np.ndarray | None
    done: Event
    slot: OutputSlot
    slots: OutputSlots
    keep_alive: tuple[torch.Tensor, ...] = ()
    logprobs: StepLogprobs | None = None
    # batch row -> why its request must end; complete once the copy has arrived
    errors: dict[int, str] = field(default_factory=dict)
    # called once on the host after the wait, while the slot still holds the output (bookkeeping on the host)
    on_ready: Callable[[np.ndarray], None] | None = field(default=None)

    def get(self) -> StepOutput:
        """Wait for the copy and return host arrays that nothing rewrites."""
        self.done.synchronize(OUTPUT_WAIT)
        sampled = self.slot.sampled_np.copy()
        num_sampled = self.slot.num_sampled_np.copy() if self.num_sampled is None else self.num_sampled
        output = StepOutput(self.step, self.req_ids, sampled, num_sampled, errors=self.errors)
        if self.logprobs is not None:
            self.logprobs.arrive(output)
        self.keep_alive, self.logprobs = (), None
        if self.on_ready is not None:
            self.on_ready(sampled)
        self.slots.give_back(self.slot)
        return output
