"""A persistent pinned tensor and its device twin: one of each, whatever the number of steps in flight."""

from __future__ import annotations

import torch

from mrv2.device import Device, Stream
from mrv2.device.base import Shape
from mrv2.instrument import stages


class CpuGpuBuffer:
    """Written by the host through `np`, sent with `copy_to_gpu`.

    The pinned half is shared by all steps: before it is rewritten, the copy of the step before must have
    run.  Sync mode has waited for that step's output; async mode waits for the barrier event.
    """

    def __init__(
        self,
        device: Device,
        shape: Shape,
        dtype: torch.dtype,
        # same shape and dtype; None = make one
        gpu: torch.Tensor | None = None,
    ) -> None:
        self.cpu = device.pinned(shape, dtype)
        self.np = self.cpu.numpy()
        self.np.fill(0)
        self.gpu = device.zeros(shape, dtype) if gpu is None else gpu
        assert self.gpu.shape == self.cpu.shape and self.gpu.dtype == dtype, (
            f"the device twin is {tuple(self.gpu.shape)} {self.gpu.dtype}, the pinned one "
            f"{tuple(self.cpu.shape)} {dtype}"
        )

    def copy_to_gpu(self, stream: Stream, count: int) -> torch.Tensor:
        """Submit the copy of the first `count` rows and return their device view."""
        stream.copy(stages.UPLOAD, self.gpu[:count], self.cpu[:count])
        return self.gpu[:count]
