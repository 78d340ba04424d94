"""A batch that only decodes, kept from step to step: what stays the same is not built again.

While every scheduled request computes one token a step, the next step follows from the last one: each counter
moves by one, and only requests whose block has filled up need another.  When that is, is known in advance:

    step k of the batch      0    1    2   ...
    blocks full after it     [f]  [c]  []  ...      by the place of each request in its block, with its period
    k = `last`                         the step with which the first request reaches its length

A batch is left for good when a member ends or is preempted, when another request may be admitted, or when its
last step is launched; then the scheduler looks at every request again.

Until then the batch counts for all its members: their own counters and tokens stay behind, and are brought up to date
(`show_rows`) when somebody needs them.  So a step costs the host what changes in it, not a visit to every request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mrv2.engine.grammar.backend import GrammarMatcher
from mrv2.engine.kv_cache_manager import KVCacheManager
from mrv2.engine.request import Request

# up to so many are compared one by one, which is faster than looking them up
_FEW_STOP_IDS = 8
# steps whose tokens there is room for at first, and at most, before they go to the requests
_FIRST_KEPT, _MAX_KEPT = 64, 512


@dataclass(slots=True)
class ScheduledEntry:
    """One request's share of a step, kept until its output arrives."""

    request: Request
    epoch: int
    num_tokens: int
    yields_token: bool
    num_drafts: int = 0
    # the first of them that a grammar forced
    num_forced: int = 0


@dataclass(slots=True)
class StepRecord:
    """A launched step, with what its output will settle."""

    step: int
    entries: list[ScheduledEntry]
    # not None = it is step `index` of a batch that only decodes
    batch: DecodeBatch | None = None
    index: int = 0


@dataclass(slots=True, eq=False)
class DecodeBatch:
    """B requests that compute and yield one token a step each; their entries serve every step."""

    entries: list[ScheduledEntry]
    # one list for all steps of the batch: a runner may know it again
    req_ids: list[str]
    # [B] int32: tokens computed before step 0, which was scheduled the long way
    computed_before: np.ndarray
    block_size: int

    requests: list[Request] = field(init=False)
    members: set[Request] = field(init=False)
    # [B], never written again
    ones: np.ndarray = field(init=False)
    zeros: np.ndarray = field(init=False)
    yields: np.ndarray = field(init=False)
    # ids that end a request, of all members together
    stop_ids: list[int] = field(init=False)
    # rows that follow a grammar
    grammar_rows: list[int] = field(init=False)
    # rows by the step after which their blocks are full, modulo the block size
    _full_after: list[list[int]] = field(init=False)
    # steps launched and settled, and the number of the last one that may be launched
    num_launched: int = 1
    num_settled: int = 0
    last: int = field(init=False)
    # [B] each: how many of the launched and settled steps the members' own counters show
    _launches_shown: list[int] = field(init=False)
    _settles_shown: list[int] = field(init=False)
    # [steps, B] int32: the tokens of the newest settled steps, all that some member does not show among them
    _kept: np.ndarray = field(init=False)
    # rows of it that are in use
    _num_kept: int = 0
    # rows that reach their length with the last step
    _ending: list[int] = field(init=False)
    # False once its members count for themselves
    intact: bool = True

    def __post_init__(self) -> None:
        requests = self.requests = [entry.request for entry in self.entries]
        self.members = set(requests)
        self.ones = np.ones(len(requests), dtype=np.int32)
        self.zeros = np.zeros(len(requests), dtype=np.int32)
        self.yields = np.ones(len(requests), dtype=np.bool_)
        self.stop_ids = sorted(set().union(*{request.stop_ids for request in requests}))
        self.grammar_rows = [row for row, request in enumerate(requests) if request.grammar is not None]
        self._full_after = [[] for _ in range(self.block_size)]
        for row, request in enumerate(requests):
            self._full_after[-request.num_computed % self.block_size].append(row)
        self._kept = np.empty((_FIRST_KEPT + self.block_size, len(requests)), dtype=np.int32)
        self._launches_shown, self._settles_shown = [1] * len(requests), [0] * len(requests)
        left = [request.max_len - request.num_known - request.num_in_flight for request in requests]
        self.last = min(left)
        self._ending = [row for row, steps in enumerate(left) if steps == self.last]

    @staticmethod
    def fits(entries: Iterable[ScheduledEntry]) -> bool:
        """Say whether these requests can make a batch: plain ones, each with one token."""
        return all(
            entry.num_tokens == 1
            and entry.yields_token
            and not entry.num_drafts
            # the first token of a request brings more than itself
            and entry.request.num_outputs + entry.request.num_in_flight > 1
            and entry.request.is_plain
            for entry in entries
        )

    @property
    def may_go_on(self) -> bool:
        return self.intact and self.num_launched <= self.last

    def full_after(self, index: int) -> list[int]:
        """Return the rows whose blocks are full once step `index` has run."""
        return self._full_after[index % self.block_size]

    def without_room(self, rows: Sequence[int]) -> list[Request]:
        """Return the requests among some rows whose blocks hold what the launched steps compute, and no token more."""
        if not rows:
            return []
        computed = self.computed_before[rows] + self.num_launched
        requests = [self.requests[row] for row in rows]
        return [r for r, num_tokens in zip(requests, computed.tolist(), strict=True) if r.capacity == num_tokens]

    def launch(self) -> np.ndarray:
        """Count the next step as launched; return the tokens computed before it. [B] int32"""
        computed = self.computed_before + np.int32(self.num_launched)
        self.num_launched += 1
        return computed

    def rows_to_watch(self, index: int, sampled: np.ndarray) -> list[int]:
        """Return the rows of step `index` that end with their token of `sampled` [B] int64: stop, error or length."""
        watched = sampled < 0
        if len(self.stop_ids) > _FEW_STOP_IDS:
            watched |= np.isin(sampled, self.stop_ids)
        else:
            for token in self.stop_ids:
                watched |= sampled == token
        if index == self.last:
            watched[self._ending] = True
        return watched.nonzero()[0].tolist()

    def advance_grammars(self, sampled: np.ndarray, watched: list[int]) -> list[int]:
        """Advance the grammars of rows that are not `watched` over `sampled` [B]; return `watched` with those that end.

        A grammar that does not go on behind its token stays where it was.
        """
        if not self.grammar_rows:
            return watched
        seen, ending = set(watched), []
        for row in self.grammar_rows:
            grammar = self.requests[row].grammar
            if grammar is not None and row not in seen and not _goes_on(grammar, int(sampled[row])):
                ending.append(row)
        return sorted([*watched, *ending]) if ending else watched

    def settle(self, sampled: np.ndarray, watched: list[int]) -> None:
        """Take the tokens of a step, `sampled` [B] int64, of all rows that are not `watched`: those are up to date."""
        self.show_rows(watched)
        if self._num_kept == len(self._kept):
            self._make_room()
        self._kept[self._num_kept] = sampled
        self._num_kept += 1
        self.num_settled += 1
        for row in watched:
            self._settles_shown[row] = self.num_settled

    def _make_room(self) -> None:
        """Keep more tokens, or once they are many only as many as a block holds."""
        if len(self._kept) < _MAX_KEPT:
            self._kept = np.concatenate((self._kept, np.empty_like(self._kept)))
            return
        self.show_all()
        self._num_kept = self.block_size
        self._kept[: self._num_kept] = self._kept[-self._num_kept :].copy()

    def pending(self, row: int) -> tuple[int, int]:
        """Return how many launched and how many settled steps a request's own counters do not show."""
        return self.num_launched - self._launches_shown[row], self.num_settled - self._settles_shown[row]

    def show_rows(self, rows: Sequence[int]) -> None:
        """Bring the counters and tokens of some requests up to date."""
        if not rows:
            return
        since = min([self._settles_shown[row] for row in rows])
        # [n, steps]
        tokens = self._kept[self._num_kept - (self.num_settled - since) : self._num_kept, rows].T.tolist()
        for row, new in zip(rows, tokens, strict=True):
            launched, settled = self.pending(row)
            request = self.requests[row]
            request.num_computed += launched
            request.num_in_flight += launched - settled
            request.num_confirmed += settled
            request.num_known += settled
            request.token_ids += new[len(new) - settled :]
            self._launches_shown[row], self._settles_shown[row] = self.num_launched, self.num_settled

    def show_all(self) -> None:
        """Bring every member up to date."""
        self.show_rows(range(len(self.requests)))

    def publish(self, kv: KVCacheManager, index: int) -> None:
        """Publish the blocks that step `index`, the newest settled one, has filled."""
        rows = self.full_after(index)
        if not rows or not kv.enable_prefix_caching:
            return
        # what the step yielded lies behind the blocks
        end, late = self._num_kept - 1, rows
        if end >= self.block_size:
            num_full = (self.computed_before[rows] + self.num_settled) // self.block_size
            tokens = np.ascontiguousarray(self._kept[end - self.block_size : end, rows].T)
            late = [rows[i] for i in kv.publish_filled([self.requests[row] for row in rows], num_full.tolist(), tokens)]
        self.show_rows(late)
        for row in late:
            kv.publish(self.requests[row])

    def dissolve(self) -> None:
        """From now on every member counts for itself."""
        if self.intact:
            self.show_all()
            self.intact = False


def _goes_on(grammar: GrammarMatcher, token: int) -> bool:
    """Advance over `token`; return False, and stay, if that is illegal or the end."""
    if not grammar.accept(token):
        return False
    if grammar.terminated:
        grammar.rollback(1)
        return False
    return True
