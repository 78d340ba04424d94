"""What every sampler feature is given, and what it must be able to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from mrv2.runner.protocol import RowSampling


@dataclass(slots=True)
class SamplingContext:
    """Where each logits row comes from; request state itself is never expanded per row."""

    # [B] int32, batch row -> request row
    idx_mapping: torch.Tensor
    # [N] int32, logits row -> request row
    logit_slots: torch.Tensor
    # [N] int32, position of the input token that produced the row
    positions: torch.Tensor
    # [N] int32, place of the row in its request = drafts before it
    local_positions: torch.Tensor
    # [N] int32, index of the row's input token in `input_ids`
    logits_indices: torch.Tensor
    # [T] int32, tokens of the step; drafts k = 1, 2, ... of a request stand k places behind its first logits row
    input_ids: torch.Tensor

    @property
    def drafts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what a kernel needs to see the drafts before a row."""
        return self.local_positions, self.logits_indices, self.input_ids

    def row(self, index: int) -> SamplingContext:
        """Return the context of one logits row."""
        one = slice(index, index + 1)
        return SamplingContext(
            self.idx_mapping,
            self.logit_slots[one],
            self.positions[one],
            self.local_positions[one],
            self.logits_indices[one],
            self.input_ids,
        )


class LogitsHolder:
    """Carries the logits from one device stage to the next; filled and read in stream order."""

    __slots__ = ("ctx", "logits", "target")

    # [N, V]: raw; and as verification reads them, with every feature applied
    logits: torch.Tensor
    target: torch.Tensor
    ctx: SamplingContext


class SamplerFeature(Protocol):
    """One feature: host parameters in, logits changed in place on the device.

    `plan` runs on the host for every batch in which a row uses the feature; what it returns is handed
    to `apply`, which is device code and must read nothing else that the host changes.
    """

    # [R] bool, host: the row uses this feature
    used: np.ndarray

    def add(self, row: int, params: RowSampling, prompt_len: int) -> None:
        """Stage a request's parameters; what the row's last owner left behind becomes neutral."""
        ...

    def plan(self, rows: np.ndarray, num_logits: np.ndarray) -> Any:
        """Return what `apply` needs to know of the batch `rows` [B], with `num_logits` [B] logits rows each."""
        ...

    def apply(self, logits: torch.Tensor, ctx: SamplingContext, planned: Any) -> None:
        """Change `logits` [N, V] in place; device code."""
        ...
