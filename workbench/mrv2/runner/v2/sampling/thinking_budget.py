"""A limit on the tokens between two markers: the sampler's example of one more feature."""

from __future__ import annotations

import numpy as np
import torch

from mrv2.runner.protocol import RowSampling
from mrv2.runner.v2.arena import DeviceArena
from mrv2.runner.v2.sampling.context import SamplingContext
from mrv2.sampling_params import MAX_MARKER_TOKENS
from mrv2_kernels.sampling.thinking_budget import HEADER_WORDS, apply_thinking_budget, thinking_row

THINKING_ROW_WORDS = HEADER_WORDS + 2 * MAX_MARKER_TOKENS


class ThinkingBudgetState:
    """Budget and markers of a request in the arena's section "thinking" [R, W]; a row of zeros is neutral.

    Nothing else is kept: where the markers stand is read from the token history in every step.
    """

    def __init__(self, arena: DeviceArena, max_num_seqs: int) -> None:
        self.arena = arena
        self.used = np.zeros(max_num_seqs, dtype=np.bool_)

    def add(self, row: int, params: RowSampling, prompt_len: int) -> None:
        thinking = params.thinking
        was_used, self.used[row] = self.used[row], thinking is not None
        if thinking is not None:
            self.arena.stage("thinking", row, thinking_row(thinking.budget, thinking.start, thinking.end))
        elif was_used:
            self.arena.stage("thinking", row, [0] * HEADER_WORDS)

    def plan(self, rows: np.ndarray, num_logits: np.ndarray) -> int:
        return 0

    def apply(self, logits: torch.Tensor, ctx: SamplingContext, planned: int) -> None:
        arena = self.arena
        apply_thinking_budget(
            logits,
            ctx.logit_slots,
            arena["thinking"],
            arena["token_ids"],
            arena["prompt_len"],
            arena["total_len"],
            *ctx.drafts,
        )
