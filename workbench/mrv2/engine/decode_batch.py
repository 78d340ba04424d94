"""The requests that only decode, kept from step to step: what stays the same is not built again.

While a request computes one token a step, its next step follows from the last one: each counter moves by one, and
only a request whose block has filled up needs another.  When that is, is known in advance:

    step k of the batch      0    1    2   ...
    blocks full after it     [f]  [c]  []  ...      by the place of each request in its block, with its period
    k = `ends[f]`                       the step with which request f reaches its length

Requests join behind the last member when they need one token a step, and leave when they end, are preempted, or have
launched their last step.  Beside the members a step may compute prompts and whatever else counts for itself; when the
members' order of service or the free blocks do not allow that, all leave, and the scheduler looks at every request.

The batch counts for its members: their own counters and tokens stay behind, and are brought up to date (`show_rows`)
when somebody needs them.  So a step costs the host what changes in it, not a visit to every request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mrv2.engine.grammar.backend import GrammarMatcher
from mrv2.engine.kv_cache_manager import KVCacheManager
from mrv2.engine.request import Request

# up to so many are compared one by one, which is faster than looking them up
_FEW_STOP_IDS = 8
# steps whose tokens there is room for at first, and at most, before they go to the requests
_FIRST_KEPT, _MAX_KEPT = 64, 512
_NO_ROWS = np.zeros(0, dtype=np.intp)


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


class StepRows(NamedTuple):
    """Who computes how much in a step, B requests each: fields of `SchedulerOutput`."""

    req_ids: list[str]
    # [B] int32, [B] int32, [B] bool, [B] int32
    num_scheduled_tokens: np.ndarray
    num_computed_tokens: np.ndarray
    yields_token: np.ndarray
    num_draft_tokens: np.ndarray
    has_grammar: bool

    @classmethod
    def of(cls, entries: list[ScheduledEntry]) -> StepRows:
        """Return the rows of requests that count for themselves."""
        num_scheduled = np.array([e.num_tokens for e in entries], dtype=np.int32)
        return cls(
            [e.request.req_id for e in entries],
            num_scheduled,
            np.array([e.request.num_computed for e in entries], dtype=np.int32) - num_scheduled,
            np.array([e.yields_token for e in entries], dtype=np.bool_),
            np.array([e.num_drafts for e in entries], dtype=np.int32),
            any(e.request.grammar is not None for e in entries),
        )

    def followed_by(self, other: StepRows) -> StepRows:
        """Return both, one behind the other."""
        return StepRows(
            self.req_ids + other.req_ids,
            np.concatenate((self.num_scheduled_tokens, other.num_scheduled_tokens)),
            np.concatenate((self.num_computed_tokens, other.num_computed_tokens)),
            np.concatenate((self.yields_token, other.yields_token)),
            np.concatenate((self.num_draft_tokens, other.num_draft_tokens)),
            self.has_grammar or other.has_grammar,
        )


@dataclass(slots=True)
class StepRecord:
    """A launched step, with what its output will settle."""

    step: int
    # rows of the step whose requests count for themselves
    singles: list[tuple[int, ScheduledEntry]]
    # not None = step `index` of a batch is part of it
    batch: DecodeBatch | None = None
    index: int = 0
    # [n] rows of the step, of the first n members: those who joined later are not in it
    rows: np.ndarray = field(default_factory=lambda: _NO_ROWS)
    # row i of the step is row i of the batch
    in_place: bool = True

    def shares(self) -> Iterator[tuple[int, ScheduledEntry]]:
        """Yield every request's share of the step, with its row."""
        if self.batch is not None:
            yield from zip(self.rows.tolist(), self.batch.entries, strict=False)
        yield from self.singles

    def leave(self, left: list[int], kept: np.ndarray) -> None:
        """Members of the batch leave it, `left` and `kept` [B] bool before they do: here they count for themselves."""
        assert self.batch is not None, f"step {self.step} holds no members"
        num_members = len(self.rows)
        self.singles += [(int(self.rows[row]), self.batch.entries[row]) for row in left if row < num_members]
        self.rows = self.rows[kept[:num_members]]
        self.in_place = False


@dataclass(slots=True, eq=False)
class DecodeBatch:
    """B requests, at most `capacity`, that compute and yield one token a step each; their entries serve every step."""

    capacity: int
    block_size: int

    # B each, in order of service
    entries: list[ScheduledEntry] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    # another list when somebody joins or leaves, else the same one: a runner may know it again
    req_ids: list[str] = field(default_factory=list)
    members: set[Request] = field(default_factory=set)
    # [B], never written again: as in `StepRows`, and 0, 1, 2, ...
    ones: np.ndarray = field(init=False)
    zeros: np.ndarray = field(init=False)
    yields: np.ndarray = field(init=False)
    _rows: np.ndarray = field(init=False)
    # ids that end a request, of all members together; the members by their own ones
    stop_ids: list[int] = field(default_factory=list)
    _stop_sets: Counter[frozenset[int]] = field(default_factory=Counter)
    # rows that follow a grammar
    grammar_rows: list[int] = field(default_factory=list)
    # steps launched and settled
    num_launched: int = 0
    num_settled: int = 0
    # the first step that is the last one of a member
    first_end: int = 0

    # [B] int32: tokens computed before step 0, had the member been there
    _computed_before: np.ndarray = field(init=False)
    # [B] int32: its first step, and its last one
    _joined: np.ndarray = field(init=False)
    _ends: np.ndarray = field(init=False)
    # [B] int32: after step k the member's block is full if k equals this, modulo the block size
    _phases: np.ndarray = field(init=False)
    # rows by phase, as far as they were looked up since somebody joined or left
    _full_after: dict[int, list[int]] = field(default_factory=dict)
    # [B] int32: steps launched, and steps settled, that the member's own counters show
    _launches_shown: np.ndarray = field(init=False)
    _settles_shown: np.ndarray = field(init=False)
    # [B] int32: where in `_kept` the member's tokens are
    _columns: np.ndarray = field(init=False)
    # those are 0, 1, 2, ...
    _is_in_order: bool = True
    # the latest of `_joined`
    _last_join: int = 0
    _free_columns: list[int] = field(init=False)
    # [steps, capacity] int32: the tokens of the newest settled steps, all that some member does not show among them
    _kept: np.ndarray = field(init=False)
    # rows of it that are in use
    _num_kept: int = 0

    def __post_init__(self) -> None:
        none = np.zeros(0, dtype=np.int32)
        self._computed_before = self._joined = self._ends = self._phases = none
        self._launches_shown = self._settles_shown = self._columns = none
        self._free_columns = list(range(self.capacity - 1, -1, -1))
        self._kept = np.empty((_FIRST_KEPT + self.block_size, self.capacity), dtype=np.int32)
        self._count_members()

    def join(self, entries: Sequence[ScheduledEntry]) -> None:
        """Take in requests behind the others; their shares of the step to be launched next are `entries`."""
        step, requests = self.num_launched, [entry.request for entry in entries]
        first_row = len(self.entries)
        self.entries += entries
        self.requests += requests
        self.members.update(requests)
        self.req_ids = [*self.req_ids, *(request.req_id for request in requests)]
        self._stop_sets.update(request.stop_ids for request in requests)
        self.grammar_rows += [row for row, r in enumerate(requests, first_row) if r.grammar is not None]

        def appended(old: np.ndarray, new: Iterable[int]) -> np.ndarray:
            return np.concatenate((old, np.fromiter(new, dtype=np.int32, count=len(requests))))

        self._computed_before = appended(self._computed_before, (r.num_computed - 1 - step for r in requests))
        self._joined = appended(self._joined, (step for _ in requests))
        self._ends = appended(self._ends, (step + r.max_len - r.num_known - r.num_in_flight for r in requests))
        self._phases = appended(self._phases, ((step - r.num_computed) % self.block_size for r in requests))
        self._launches_shown = appended(self._launches_shown, (step + 1 for _ in requests))
        self._settles_shown = appended(self._settles_shown, (step for _ in requests))
        self._columns = appended(self._columns, (self._free_columns.pop() for _ in requests))
        self._count_members()

    def leave(self, rows: list[int], records: Iterable[StepRecord]) -> None:
        """Members count for themselves from now on, in the steps in flight (`records`) too."""
        if not rows:
            return
        self.show_rows(rows)
        kept = np.ones(len(self.entries), dtype=np.bool_)
        kept[rows] = False
        for record in records:
            if record.batch is self:
                record.leave(rows, kept)
        self._free_columns += self._columns[rows].tolist()
        leaving = [self.requests[row] for row in rows]
        self.members.difference_update(leaving)
        self._stop_sets.subtract(request.stop_ids for request in leaving)
        self.req_ids = self.req_ids.copy()
        for row in sorted(rows, reverse=True):
            del self.entries[row], self.requests[row], self.req_ids[row]
        if self.grammar_rows:
            self.grammar_rows = [row for row, r in enumerate(self.requests) if r.grammar is not None]
        self._computed_before, self._joined = self._computed_before[kept], self._joined[kept]
        self._ends, self._phases, self._columns = self._ends[kept], self._phases[kept], self._columns[kept]
        self._launches_shown, self._settles_shown = self._launches_shown[kept], self._settles_shown[kept]
        self._count_members()

    def _count_members(self) -> None:
        num_members = len(self.entries)
        self.ones = np.ones(num_members, dtype=np.int32)
        self.zeros = np.zeros(num_members, dtype=np.int32)
        self.yields = np.ones(num_members, dtype=np.bool_)
        self._rows = np.arange(num_members)
        self._full_after = {}
        self._is_in_order = np.array_equal(self._columns, self._rows)
        self._last_join = int(self._joined.max()) if num_members else 0
        self.first_end = int(self._ends.min()) if num_members else 0
        # without those that no member has any more
        self._stop_sets = +self._stop_sets
        self.stop_ids = sorted(set().union(*self._stop_sets))

    def rows_at_end(self) -> list[int]:
        """Return the members whose last step is launched."""
        return np.flatnonzero(self._ends < self.num_launched).tolist() if self.first_end < self.num_launched else []

    def rows_of(self, requests: Sequence[Request]) -> list[int]:
        """Return the rows of those among `requests` that are members."""
        if len(requests) == 1:
            return [self.requests.index(requests[0])] if requests[0] in self.members else []
        row_of = {request: row for row, request in enumerate(self.requests)}
        return [row_of[request] for request in requests if request in row_of]

    def full_after(self, index: int, num_rows: int | None = None) -> list[int]:
        """Return the members, of the first `num_rows` if given, whose blocks are full once step `index` has run."""
        phase = index % self.block_size
        rows = self._full_after.get(phase)
        if rows is None:
            rows = self._full_after[phase] = np.flatnonzero(self._phases == phase).tolist()
        return rows if num_rows is None or num_rows == len(self.entries) else [row for row in rows if row < num_rows]

    def without_room(self, rows: Sequence[int]) -> list[Request]:
        """Return the requests among some rows whose blocks hold what the launched steps compute, and no token more."""
        if not rows:
            return []
        computed = self._computed_before[rows] + self.num_launched
        requests = [self.requests[row] for row in rows]
        return [r for r, num_tokens in zip(requests, computed.tolist(), strict=True) if r.capacity == num_tokens]

    def launch(self, step: int, singles: list[ScheduledEntry]) -> tuple[StepRows, StepRecord]:
        """Count the next step as launched, the engine's `step`, with `singles` behind the members."""
        computed = self._computed_before + np.int32(self.num_launched)
        rows = StepRows(self.req_ids, self.ones, computed, self.yields, self.zeros, bool(self.grammar_rows))
        record = StepRecord(step, [], self, self.num_launched, self._rows)
        if singles:
            rows = rows.followed_by(StepRows.of(singles))
            record.singles += enumerate(singles, len(self.entries))
        self.num_launched += 1
        return rows, record

    def rows_to_watch(self, index: int, sampled: np.ndarray) -> list[int]:
        """Return the rows of step `index` that end with their token of `sampled` [n] int64: stop, error or length."""
        watched = sampled < 0
        if len(self.stop_ids) > _FEW_STOP_IDS:
            watched |= np.isin(sampled, self.stop_ids)
        else:
            for token in self.stop_ids:
                watched |= sampled == token
        if index >= self.first_end:
            watched |= self._ends[: len(sampled)] == index
        return watched.nonzero()[0].tolist()

    def advance_grammars(self, sampled: np.ndarray, watched: list[int]) -> list[int]:
        """Advance the grammars of rows that are not `watched` over `sampled` [n]; return `watched` with those that end.

        A grammar that does not go on behind its token stays where it was.
        """
        if not self.grammar_rows:
            return watched
        seen, ending = set(watched), []
        for row in self.grammar_rows:
            if row >= len(sampled):
                break
            grammar = self.requests[row].grammar
            if grammar is not None and row not in seen and not _goes_on(grammar, int(sampled[row])):
                ending.append(row)
        return sorted([*watched, *ending]) if ending else watched

    def settle(self, sampled: np.ndarray, watched: list[int]) -> None:
        """Take the tokens of a step, `sampled` [n] int64, of all rows that are not `watched`: those are up to date."""
        self.show_rows(watched)
        if self._num_kept == len(self._kept):
            self._make_room()
        num_rows = len(sampled)
        self._kept[self._num_kept, slice(num_rows) if self._is_in_order else self._columns[:num_rows]] = sampled
        self._num_kept += 1
        self.num_settled += 1
        if watched:
            self._settles_shown[watched] = self.num_settled

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
        return (
            self.num_launched - int(self._launches_shown[row]),
            max(0, self.num_settled - int(self._settles_shown[row])),
        )

    def show_rows(self, rows: Sequence[int]) -> None:
        """Bring the counters and tokens of some requests up to date."""
        if not rows:
            return
        launches = (self.num_launched - self._launches_shown[rows]).tolist()
        # a member's first step may not be settled yet
        settles = np.maximum(self.num_settled - self._settles_shown[rows], 0).tolist()
        # [n, steps]
        tokens = self._kept[self._num_kept - max(settles) : self._num_kept, self._columns[rows]].T.tolist()
        for row, launched, settled, new in zip(rows, launches, settles, tokens, strict=True):
            request = self.requests[row]
            request.num_computed += launched
            request.num_in_flight += launched - settled
            request.num_confirmed += settled
            request.num_known += settled
            request.token_ids += new[len(new) - settled :]
        self._launches_shown[rows] = self.num_launched
        self._settles_shown[rows] = np.maximum(self._settles_shown[rows], self.num_settled)

    def show_all(self) -> None:
        """Bring every member up to date."""
        self.show_rows(range(len(self.requests)))

    def publish(self, kv: KVCacheManager, index: int, num_rows: int, watched: list[int]) -> None:
        """Publish the blocks that the first `num_rows` members have filled with step `index`, the newest settled one.

        Those who are `watched` see to it themselves.
        """
        rows = self.full_after(index, num_rows)
        if watched:
            rows = [row for row in rows if row not in watched]
        if not rows or not kv.enable_prefix_caching:
            return
        # the tokens of some blocks began before their requests joined
        late: list[int] = []
        if self.num_settled - self._last_join <= self.block_size:
            newest = self.num_settled - self.block_size
            late = [row for row in rows if self._joined[row] >= newest]
            rows = [row for row in rows if self._joined[row] < newest]
        unpublished: list[Request] = []
        if rows:
            # what the step yielded lies behind the blocks
            end = self._num_kept - 1
            tokens = np.ascontiguousarray(self._kept[end - self.block_size : end, self._columns[rows]].T)
            unpublished += self._publish_filled(kv, rows, tokens)
        if late:
            self.show_rows(late)
            num_full = (self._computed_before[late] + self.num_settled) // self.block_size
            ends = (num_full * self.block_size).tolist()
            texts = [
                self.requests[row].token_ids[end - self.block_size : end] for row, end in zip(late, ends, strict=True)
            ]
            unpublished += self._publish_filled(kv, late, np.array(texts, dtype=np.int32))
        for request in unpublished:
            kv.publish(request)

    def _publish_filled(self, kv: KVCacheManager, rows: list[int], tokens: np.ndarray) -> list[Request]:
        """Publish a block of each row, `tokens` [n, block_size]; return those of which more blocks are unpublished."""
        num_full = (self._computed_before[rows] + self.num_settled) // self.block_size
        requests = [self.requests[row] for row in rows]
        left = kv.publish_filled(requests, num_full.tolist(), tokens)
        self.show_rows([rows[i] for i in left])
        return [requests[i] for i in left]


def who_may_join(
    batch: DecodeBatch | None, entries: list[ScheduledEntry], *, may_be_drafted: bool
) -> list[ScheduledEntry]:
    """Return the first of `entries`, up to one that has to count for itself: they may join a batch, a new one if None.

    With `may_be_drafted` a grammar may force drafts upon its request.
    """
    newest = batch.requests[-1].key if batch is not None and batch.requests else None
    for count, entry in enumerate(entries):
        request = entry.request
        is_out_of_order = newest is not None and request.key < newest
        if is_out_of_order or not _fits(entry) or (may_be_drafted and request.grammar is not None):
            return entries[:count]
        newest = request.key
    return entries


def _fits(entry: ScheduledEntry) -> bool:
    """Say whether a request can be a member: a plain one, which computes one token and yields one."""
    return (
        entry.num_tokens == 1
        and entry.yields_token
        and not entry.num_drafts
        # the first token of a request brings more than itself
        and entry.request.num_outputs + entry.request.num_in_flight > 1
        and entry.request.is_plain
    )


def _goes_on(grammar: GrammarMatcher, token: int) -> bool:
    """Advance over `token`; return False, and stay, if that is illegal or the end."""
    if not grammar.accept(token):
        return False
    if grammar.terminated:
        grammar.rollback(1)
        return False
    return True
