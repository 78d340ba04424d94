"""Drafts on the host, for what must look at them before they are verified: the masks of a grammar.

main    | [draft n] -------- [prepare n+1][forward n+1] ----------- [apply_grammar n+1][sample n+1] ...
grammar |         [draft_copy n]                   [grammar_upload n+1]
host    |          ... E(n+1)  wait drafts(n) -> fill masks of n+1, T(n+1)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mrv2.device import Device, Event
from mrv2.instrument import stages

DRAFTS_WAIT = "drafts"  # of a step whose successor has masks for them, by this name


class DraftMirror:
    """Copies the drafts of every row after a draft stage; the host reads them once, before it launches the next."""

    def __init__(
        self,
        device: Device,
        # [R, K_max] int64, device
        draft_tokens: torch.Tensor,
    ) -> None:
        self.main, self.stream = device.main, device.stream("grammar")
        self.draft_tokens = draft_tokens
        self.pinned = device.pinned(tuple(draft_tokens.shape), draft_tokens.dtype)
        self._copied: Event = device.event()

    def submit(self) -> None:
        """Copy what the draft stage just submitted will have written."""
        self.stream.wait_event(self.main.record_event())
        self.stream.copy(stages.DRAFT_COPY, self.pinned, self.draft_tokens)
        self._copied = self.stream.record_event()

    def before_drafting(self) -> None:
        """Let the main stream's next draft stage wait, on the device, until the copy has read the last one's."""
        self.main.wait_event(self._copied)

    def read(self, rows: Sequence[int]) -> np.ndarray:
        """Wait for the latest copy; return the drafts of request rows. [n, K_max] int64"""
        self._copied.synchronize(DRAFTS_WAIT)
        return self.pinned.numpy()[list(rows)]
