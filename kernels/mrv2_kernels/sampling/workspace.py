"""Memory by which the programs of one launch find out which of them is the last of its row."""

from __future__ import annotations

from typing import NamedTuple

import torch


class DrawWorkspace(NamedTuple):
    """Zero before and after every launch; launches that share it must not overlap."""

    # [N] int64: the key of the row's best token so far
    best: torch.Tensor
    # [N] int32: programs that are done with the row
    arrived: torch.Tensor

    @classmethod
    def make(cls, num_rows: int, device: torch.device | str) -> DrawWorkspace:
        """Return a workspace for up to `num_rows` logits rows: 12 bytes a row."""
        return cls(
            torch.zeros(num_rows, dtype=torch.int64, device=device),
            torch.zeros(num_rows, dtype=torch.int32, device=device),
        )

    def check(self, num_rows: int) -> None:
        """Refuse a workspace that is too small."""
        assert self.best.shape[0] >= num_rows, f"workspace of {self.best.shape[0]} rows, logits of {num_rows}"
