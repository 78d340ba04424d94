"""Presence, frequency and repetition penalties; counts stand beside the token history, not in an [R, V] table."""

from __future__ import annotations

import numpy as np
import torch

from mrv2.device import Device
from mrv2.runner.protocol import RowSampling
from mrv2.runner.v2.arena import DeviceArena
from mrv2.runner.v2.sampling.context import SamplingContext
from mrv2_kernels.sampling.penalties import apply_penalties
from mrv2_kernels.sampling.token_counts import update_token_counts

PENALTY_WORDS = 3


class PenaltyState:
    """Section "penalties" [R, 3]: repetition, frequency, presence (zeros = neutral); "counted_len" [R].

    The counts are the device's own: a new row is counted whole in its first step, then token by token.
    """

    def __init__(self, device: Device, arena: DeviceArena, max_num_seqs: int) -> None:
        self.arena = arena
        self.used = np.zeros(max_num_seqs, dtype=np.bool_)
        # rows whose history has not been counted yet
        self._is_new = np.zeros(max_num_seqs, dtype=np.bool_)
        rows, row_len = arena["token_ids"].shape
        # [R, L]; a count is at most the length of the row
        self.token_counts = device.zeros((rows, row_len), torch.int16 if row_len < 2**15 - 1 else torch.int32)

    def add(self, row: int, params: RowSampling, prompt_len: int) -> None:
        was_used, self.used[row] = self.used[row], params.has_penalty
        self._is_new[row] = params.has_penalty
        if params.has_penalty:
            values = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
            self.arena.stage("penalties", row, np.array(values, dtype=np.float32).view(np.int32))
            self.arena.stage_scalar("counted_len", row, 0)
        elif was_used:
            self.arena.stage("penalties", row, [0] * PENALTY_WORDS)

    def plan(self, rows: np.ndarray, num_logits: np.ndarray) -> int:
        """1 if a row is to be counted whole."""
        has_new = int(self._is_new[rows].any())
        self._is_new[rows] = False
        return has_new

    def apply(self, logits: torch.Tensor, ctx: SamplingContext, planned: int) -> None:
        arena, counts = self.arena, self.token_counts
        history, total_len, penalties = arena["token_ids"], arena["total_len"], arena["penalties"]
        update_token_counts(
            counts,
            arena["counted_len"],
            history,
            arena["prompt_len"],
            total_len,
            penalties,
            ctx.idx_mapping,
            has_new=bool(planned),
        )
        apply_penalties(logits, ctx.logit_slots, penalties, history, counts, total_len, *ctx.drafts)
