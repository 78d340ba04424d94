"""Int32 arrays of one step, through one pinned slot, to the device."""

from __future__ import annotations

import numpy as np
import torch

from mrv2.device import Device, PinnedRing, Stream
from mrv2.instrument import stages


class StepSender:
    """A ring of pinned slots that grows to the largest step."""

    def __init__(self, device: Device, name: str, *, depth: int) -> None:
        self.device = device
        self.name = name
        self.depth = depth
        self._ring: PinnedRing | None = None
        self._capacity = 0

    def send(self, step: int, parts: list[np.ndarray], stream: Stream) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Submit one copy of all parts; return the device memory, which must be kept, and a view of it a part."""
        size = sum(part.size for part in parts)
        if self._ring is None or size > self._capacity:
            self._capacity = max(1 << 12, 1 << max(size - 1, 1).bit_length())
            self._ring = PinnedRing(self.device, self.depth, (self._capacity,), torch.int32, name=self.name)
        slot = self._ring.acquire(step)
        if parts:
            np.concatenate([part.reshape(-1) for part in parts], out=slot.numpy()[:size])
        words = self.device.empty((size,), torch.int32)
        stream.copy(stages.UPLOAD, words, slot[:size])
        self._ring.release(slot, stream.record_event())
        pieces = words.split_with_sizes([part.size for part in parts])
        return words, [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
