"""Block tables as dense rows: NumPy in pinned memory, copied whole into what attention reads.

Legend: R rows, MB blocks a row, G KV cache groups.
"""

from __future__ import annotations

import numpy as np
import torch

from mrv2.device import Device, Stream
from mrv2.runner.v1.cpu_gpu_buffer import CpuGpuBuffer


class BlockTable:
    """The table of one KV cache group; row i belongs to batch row i."""

    def __init__(
        self,
        device: Device,
        # [R, MB] int32
        gpu: torch.Tensor,
    ) -> None:
        self.buffer = CpuGpuBuffer(device, tuple(gpu.shape), torch.int32, gpu)
        # [R]
        self.num_blocks = np.zeros(gpu.shape[0], dtype=np.int32)

    def append_row(self, row: int, block_ids: list[int]) -> None:
        """Extend a row."""
        start, count = int(self.num_blocks[row]), len(block_ids)
        self.buffer.np[row, start : start + count] = block_ids
        self.num_blocks[row] = start + count

    def add_row(self, row: int, block_ids: list[int]) -> None:
        """Start a row anew; what is left of its last owner lies behind every sequence length."""
        self.num_blocks[row] = 0
        self.append_row(row, block_ids)

    def move_row(self, source: int, target: int) -> None:
        """Copy the used part of a row over another."""
        count = int(self.num_blocks[source])
        self.buffer.np[target, :count] = self.buffer.np[source, :count]
        self.num_blocks[target] = count

    def swap_row(self, a: int, b: int) -> None:
        """Exchange two rows."""
        self.buffer.np[[a, b]] = self.buffer.np[[b, a]]
        self.num_blocks[[a, b]] = self.num_blocks[[b, a]]


class MultiGroupBlockTable:
    """One table per KV cache group, with the same verbs."""

    def __init__(
        self,
        device: Device,
        # G x [R, MB] int32
        gpu_tables: list[torch.Tensor],
    ) -> None:
        self.tables = [BlockTable(device, gpu) for gpu in gpu_tables]

    def append_row(self, row: int, block_ids: tuple[list[int], ...]) -> None:
        for table, group in zip(self.tables, block_ids, strict=True):
            table.append_row(row, group)

    def add_row(self, row: int, block_ids: tuple[list[int], ...]) -> None:
        for table, group in zip(self.tables, block_ids, strict=True):
            table.add_row(row, group)

    def move_row(self, source: int, target: int) -> None:
        for table in self.tables:
            table.move_row(source, target)

    def swap_row(self, a: int, b: int) -> None:
        for table in self.tables:
            table.swap_row(a, b)

    def commit(self, stream: Stream, num_reqs: int) -> None:
        """Submit the copy of every used row, changed or not."""
        for table in self.tables:
            table.buffer.copy_to_gpu(stream, num_reqs)
