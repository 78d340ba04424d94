"""Allowed tokens, logit bias and minimum length: one packed row of lists a request, one launch a step."""

from __future__ import annotations

import numpy as np
import torch

from mrv2.runner.protocol import RowSampling
from mrv2.runner.v2.arena import DeviceArena
from mrv2.runner.v2.sampling.context import SamplingContext
from mrv2.sampling_params import MAX_IDS, MAX_STOP_IDS
from mrv2_kernels.sampling.logit_bias import HEADER_WORDS, apply_logit_bias, bias_words

BIAS_ROW_WORDS = HEADER_WORDS + 3 * MAX_IDS + MAX_STOP_IDS


class LogitBiasState:
    """Lists of a request in the arena's section "logit_bias" [R, W]; a row of zeros is neutral."""

    def __init__(self, arena: DeviceArena, max_num_seqs: int) -> None:
        self.arena = arena
        self.used = np.zeros(max_num_seqs, dtype=np.bool_)

    def add(self, row: int, params: RowSampling, prompt_len: int) -> None:
        was_used, self.used[row] = self.used[row], params.has_bias
        if params.has_bias:
            bias = params.logit_bias
            words = bias_words(
                params.allowed_token_ids,
                list(bias),
                list(bias.values()),
                params.stop_token_ids,
                prompt_len + params.min_tokens,
            )
            self.arena.stage("logit_bias", row, words)
        elif was_used:
            self.arena.stage("logit_bias", row, [0] * HEADER_WORDS)

    def plan(self, rows: np.ndarray, num_logits: np.ndarray) -> int:
        return 0

    def apply(self, logits: torch.Tensor, ctx: SamplingContext, planned: int) -> None:
        apply_logit_bias(logits, ctx.logit_slots, ctx.positions, self.arena["logit_bias"])
