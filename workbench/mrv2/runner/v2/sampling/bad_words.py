"""Token sequences that must not be generated."""

from __future__ import annotations

import numpy as np
import torch

from mrv2.runner.protocol import RowSampling
from mrv2.runner.v2.arena import DeviceArena
from mrv2.runner.v2.sampling.context import SamplingContext
from mrv2.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from mrv2_kernels.sampling.bad_words import apply_bad_words, bad_words_row

BAD_WORDS_ROW_WORDS = 1 + MAX_BAD_WORDS + MAX_BAD_WORD_TOKENS


class BadWordsState:
    """Sequences of a request, packed in the arena's section "bad_words" [R, W]; a row that begins with 0 is neutral."""

    def __init__(self, arena: DeviceArena, max_num_seqs: int) -> None:
        self.arena = arena
        self.used = np.zeros(max_num_seqs, dtype=np.bool_)
        self._num_words = np.zeros(max_num_seqs, dtype=np.int32)

    def add(self, row: int, params: RowSampling, prompt_len: int) -> None:
        was_used, self.used[row] = self.used[row], bool(params.bad_words)
        self._num_words[row] = len(params.bad_words)
        if params.bad_words:
            self.arena.stage("bad_words", row, bad_words_row(params.bad_words))
        elif was_used:
            self.arena.stage("bad_words", row, [0])

    def plan(self, rows: np.ndarray, num_logits: np.ndarray) -> int:
        """Most words of a row."""
        return int(self._num_words[rows].max())

    def apply(self, logits: torch.Tensor, ctx: SamplingContext, planned: int) -> None:
        arena = self.arena
        apply_bad_words(
            logits,
            ctx.logit_slots,
            arena["bad_words"],
            arena["token_ids"],
            arena["prompt_len"],
            arena["total_len"],
            *ctx.drafts,
            max_words=planned,
        )
