"""Speculation the V1 way: drafts in Python lists, looked up and verified by the host, step by step.

    host | propose, update prepare launch sample [wait: v1: to_list] parse, bookkeep, propose | update prepare ...
    main |           [H2D][gather][forward][logits rows 1 + k][sample][D2H]     (idle)        [H2D ...

The host must know the tokens of a step before it can look up the drafts of the next: sync mode only.  The
drafts of a step are verified on the host too, by comparing them with the tokens that came back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class LogitRows:
    """The logits rows of a step: 1 + k of a request with k drafts, in batch order."""

    # of each request: the drafts that its rows verify; -1 = the drafter found none
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

    def places(self) -> list[tuple[int, int]]:
        """Return batch row and drafts before it, of each logits row. N pairs"""
        return [(row, place) for row, mine in enumerate(self.drafts) for place in range(1 + len(mine))]

    def index_arrays(
        self,
        # [B] end of each request's tokens
        ends: np.ndarray,
    ) -> list[np.ndarray]:
        """Return the token and the batch row of each logits row. [N] int32 each"""
        rows = np.repeat(np.arange(len(self.counts), dtype=np.int32), self.counts)
        place = np.arange(self.num_rows, dtype=np.int32) - np.repeat(self.firsts, self.counts)
        return [(ends[rows] - self.counts[rows] + place).astype(np.int32), rows]

    def in_order(self, order: list[int]) -> list[int]:
        """Return the logits rows of the batch rows in `order`."""
        return [int(self.firsts[row]) + place for row in order for place in range(int(self.counts[row]))]


def parse_output(rows: LogitRows, sampled: list[int], discard: list[bool]) -> list[list[int]]:
    """Return each request's new tokens: its draws as long as the drafts equal them, and the first that differs.

    Args:
        sampled: the draw of each logits row. N
        discard: the request yields nothing in this step. B
    """
    tokens = []
    for row, drafts in enumerate(rows.drafts):
        mine = sampled[int(rows.firsts[row]) :]
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == mine[accepted] >= 0:
            accepted += 1
        tokens.append([] if discard[row] else mine[: accepted + 1])
    return tokens


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
