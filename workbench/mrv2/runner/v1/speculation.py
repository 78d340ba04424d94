"""Speculation the V1 way, the host's part: drafts in Python lists, index arrays, accepted tokens, n-gram look-up.

    host | update prepare launch sample [wait: v1: accepted tokens] parse, bookkeep, propose [wait: v1: draft ids]
    main | [H2D][gather][forward][logits, 1 + k rows][sample][verify][D2H]  (idle)  [draft][D2H]    (idle)  [H2D ...

Sync mode waits twice a step: for the tokens, whose number says what was rejected, before it can prepare the drafter's
inputs; and for the drafts, before it can schedule them.  N-gram drafts come from the host's lists and need no second
wait.  Async mode (draft heads only) keeps tokens and drafts on the device, in the target's shape, and waits for the
accepted tokens of a step after the forward pass of the next one was launched; a request that sits a step out loses
its drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mrv2.runner.v1.cached_request import PLACEHOLDER


class SpecIndices(NamedTuple):
    """Index arrays of a step with N logits rows, M of them before a draft; int32."""

    # [N]: token of each logits row
    logits_indices: np.ndarray
    # [M]: logits rows that verify a draft
    target_logits_indices: np.ndarray
    # [B]: logits row behind the last draft of each request
    bonus_logits_indices: np.ndarray
    # [B]: drafts of the requests up to each of them
    cu_num_draft_tokens: np.ndarray


@dataclass(slots=True)
class LogitRows:
    """The logits rows of a step: 1 + k of a request with k drafts, in batch order."""

    # of each request: the drafts that its rows verify; -1 = the drafter found none, or the host has not seen it
    drafts: list[list[int]]
    # [B] int32: rows of each request, and the first of them
    counts: np.ndarray
    firsts: np.ndarray

    @classmethod
    def of(cls, drafts: list[list[int]]) -> LogitRows:
        counts = np.array([1 + len(mine) for mine in drafts], dtype=np.int32)
        return cls(drafts, counts, np.cumsum(counts, dtype=np.int32) - counts)

    @property
    def num_rows(self) -> int:
        return int(self.counts.sum())

    @property
    def has_drafts(self) -> bool:
        return self.num_rows > len(self.drafts)

    @property
    def width(self) -> int:
        """Most tokens that a request may get."""
        return int(self.counts.max())

    def places(self) -> list[tuple[int, int]]:
        """Return batch row and drafts before it, of each logits row. N pairs"""
        return [(row, place) for row, mine in enumerate(self.drafts) for place in range(1 + len(mine))]

    def indices(
        self,
        # [B] end of each request's tokens
        ends: np.ndarray,
    ) -> SpecIndices:
        """Return the index arrays of the step."""
        rows = np.repeat(np.arange(len(self.counts), dtype=np.int32), self.counts)
        place = np.arange(self.num_rows, dtype=np.int32) - np.repeat(self.firsts, self.counts)
        return SpecIndices(
            logits_indices=(ends[rows] - self.counts[rows] + place).astype(np.int32),
            target_logits_indices=np.flatnonzero(place < self.counts[rows] - 1).astype(np.int32),
            bonus_logits_indices=self.firsts + self.counts - 1,
            cu_num_draft_tokens=np.cumsum(self.counts - 1, dtype=np.int32),
        )

    def in_order(self, order: list[int]) -> list[int]:
        """Return the logits rows of the batch rows in `order`."""
        return [int(self.firsts[row]) + place for row in order for place in range(int(self.counts[row]))]


def parse_output(sampled: list[list[int]], discard: list[bool]) -> list[list[int]]:
    """Return each request's new tokens: what verification left, without the placeholders of rejected drafts.

    A request whose first logits row held NaN keeps one placeholder.

    Args:
        sampled: tokens of each request, `PLACEHOLDER` behind the accepted ones. [B][1 + k]
        discard: the request yields nothing in this step. B
    """
    kept = [[token for token in tokens if token != PLACEHOLDER] or [PLACEHOLDER] for tokens in sampled]
    return [[] if dropped else tokens for tokens, dropped in zip(kept, discard, strict=True)]


def propose_ngram(
    # [T] int32, the request's tokens
    tokens: np.ndarray,
    num_drafts: int,
    *,
    min_n: int,
    max_n: int,
) -> list[int]:
    """Return up to `num_drafts` tokens that followed the longest, then right-most match of the tokens' suffix."""
    for n in range(min(max_n, len(tokens) - 1), min_n - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], n)
        matches = np.flatnonzero((windows == tokens[-n:]).all(axis=1))
        if len(matches):
            end = int(matches[-1]) + n
            return tokens[end : end + num_drafts].tolist()
    return []
