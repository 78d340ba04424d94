"""Masks of many xgrammar matchers: cheap ones one after the other, dear ones on threads.

A fill copies a mask that was computed with the grammar and then tries the tokens of which the mask was not certain:
a microsecond or two where there are none, milliseconds where there are thousands.  To wake a thread takes longer than
the former, so each compiled grammar remembers what its fills took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import xgrammar

# a fill beyond this is dear
_DEAR_NS = 30_000
# dear fills of less than this together are not worth threads
_WORTH_THREADS_NS = 300_000
# weight of the newest fill in what is remembered
_WEIGHT = 0.25


@dataclass(slots=True)
class FillCost:
    """What the fills of one compiled grammar took lately, in ns; shared by its matchers."""

    ns: float = 0.0

    def add(self, ns: float) -> None:
        """Remember one more."""
        self.ns += _WEIGHT * (ns - self.ns)


class MaskFiller:
    """Fills masks, with up to `max_threads` threads of the library; one caller at a time."""

    def __init__(self, library: Any, max_threads: int) -> None:
        self.max_threads = max_threads
        self._batch: Any = library.BatchGrammarMatcher(max_threads=max_threads) if max_threads > 1 else None

    def fill(
        self,
        matchers: Sequence[xgrammar.GrammarMatcher],
        costs: Sequence[FillCost],
        # [rows, W] int32, C-contiguous, written in place
        bits: np.ndarray,
        rows: Sequence[int],
    ) -> None:
        """Fill row ``rows[i]`` from ``matchers[i]``, whose grammar's cost is ``costs[i]``."""
        batch, dear = self._batch, [i for i, cost in enumerate(costs) if cost.ns > _DEAR_NS]
        if batch is None or len(dear) < 2 or sum(costs[i].ns for i in dear) < _WORTH_THREADS_NS:
            dear = []
        is_dear = set(dear)
        for i, matcher in enumerate(matchers):
            if i not in is_dear:
                start = perf_counter_ns()
                matcher.fill_next_token_bitmask(bits, rows[i])
                costs[i].add(perf_counter_ns() - start)
        if batch is not None and dear:
            start = perf_counter_ns()
            batch.batch_fill_next_token_bitmask([matchers[i] for i in dear], bits, [rows[i] for i in dear])
            # of one fill, were the threads busy all the time
            ns = (perf_counter_ns() - start) * min(self.max_threads, len(dear)) / len(dear)
            for cost in {id(costs[i]): costs[i] for i in dear}.values():
                cost.add(ns)
