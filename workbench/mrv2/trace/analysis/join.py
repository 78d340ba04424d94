"""Which call submitted which operation, and what each stream still had to do at any instant."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mrv2.trace.columns import Int64
from mrv2.trace.table import Ops, Trace

# earlier than any event: "nothing to wait for"
NEVER = np.iinfo(np.int64).min // 4


@dataclass(frozen=True, eq=False)
class LaunchJoin:
    """Operations and the calls that own them, joined by (process, correlation id)."""

    # row in `Trace.api` for each operation, -1 none; int64 [num_ops]
    call: Int64
    # operations whose correlation id names several calls of their process
    num_ambiguous: int
    # calls that own operations, ascending; int64 [num_launches]
    launch: Int64
    # per launch: its operation that starts first, as a row in `Trace.ops`; int64 [num_launches]
    first_op: Int64
    # row in `launch` for each operation, -1 none; int64 [num_ops]
    launch_of_op: Int64

    @cached_property
    def has_call(self) -> np.ndarray:
        """Whether each operation has a call; bool [num_ops]."""
        return self.call >= 0


def join_launches(trace: Trace) -> LaunchJoin:
    """Join operations to calls.

    A correlation id that several calls carry (ids wrap around) means the latest call that starts no later than the
    operation, or the first of them if all start later.
    """
    ops, api = trace.ops, trace.api
    call, num_ambiguous = _calls_of(ops, trace)
    if not len(ops) or not len(api):
        empty = np.empty(0, np.int64)
        return LaunchJoin(call, num_ambiguous, empty, empty, np.full(len(ops), -1, np.int64))
    owners = np.zeros(len(api), np.bool_)
    owners[call[call >= 0]] = True
    launch = np.flatnonzero(owners)
    rank = np.append(np.cumsum(owners) - 1, -1)
    launch_of_op = np.where(call >= 0, rank[call], -1)
    # operations are sorted by start: the last write, going backwards, is the first operation
    first_op = np.empty(len(launch), np.int64)
    rows = np.flatnonzero(call >= 0)[::-1]
    first_op[launch_of_op[rows]] = rows
    return LaunchJoin(call, num_ambiguous, launch, first_op, launch_of_op)


def _calls_of(ops: Ops, trace: Trace) -> tuple[np.ndarray, int]:
    api = trace.api
    if not len(ops) or not len(api):
        return np.full(len(ops), -1, np.int64), 0
    call_key, wanted = _pair_keys(api.process, api.corr, ops.process, ops.corr)
    order = None
    if np.any(call_key[1:] < call_key[:-1]):
        order = np.argsort(call_key, kind="stable")
        call_key = call_key[order]
    at = np.searchsorted(call_key, wanted, "right") - 1
    found = (at >= 0) & (ops.corr >= 0) & (call_key[np.maximum(at, 0)] == wanted)
    at = np.maximum(at, 0)
    num_ambiguous = 0
    repeats = np.concatenate([[False], call_key[1:] == call_key[:-1]])
    if repeats.any():
        start = api.start if order is None else api.start[order]
        unclear = found & repeats[at]
        num_ambiguous = int(unclear.sum())
        while (back := unclear & (start[at] > ops.start) & repeats[at]).any():
            at = at - back
    return np.where(found, at if order is None else order[at], -1), num_ambiguous


def _pair_keys(
    process: np.ndarray, corr: np.ndarray, other_process: np.ndarray, other_corr: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return one integer for each (process, corr) of both tables, equal exactly for equal pairs."""
    low, high = int(process.min()), int(process.max())
    if low == high == int(other_process.min()) == int(other_process.max()):
        return corr, other_corr
    processes = np.unique(np.concatenate([np.unique(process), np.unique(other_process)]))
    width = np.int64(max(int(corr.max()), int(other_corr.max())) + 2)
    if len(processes) * int(width) >= 2**63:
        # correlation ids as large as addresses: their ranks are as good
        _, ranks = np.unique(np.concatenate([corr, other_corr]), return_inverse=True)
        corr, other_corr, width = ranks[: len(corr)], ranks[len(corr) :], np.int64(len(ranks) + 1)
    mine, others = np.searchsorted(processes, process), np.searchsorted(processes, other_process)
    return mine * width + corr + 1, others * width + other_corr + 1


@dataclass(frozen=True, eq=False)
class Queue:
    """Operations in the order in which they were submitted to one stream (or to all streams of one process)."""

    # when each was submitted: start of its call, or of itself if the call is unknown; sorted, int64 [num_ops]
    submitted: Int64
    # their rows in ``ops``
    row: Int64
    # latest end of this and all earlier ones
    finish: Int64
    # sorted ends
    ends: Int64

    def finish_before(self, times: np.ndarray) -> np.ndarray:
        """Return when all that was submitted before each of `times` is done; `NEVER` if nothing was."""
        if not len(self.submitted):
            return np.full(len(times), NEVER, np.int64)
        row = np.searchsorted(self.submitted, times, "left") - 1
        return np.where(row >= 0, self.finish[row], NEVER)

    def last_before(self, times: np.ndarray) -> np.ndarray:
        """Return the operation (row in ``ops``) submitted last before each of `times`, or -1; int64."""
        at = np.searchsorted(self.submitted, times, "left") - 1
        return np.where(at >= 0, self.row[at], -1) if len(self.row) else np.full(len(times), -1, np.int64)

    def pending_at(self, times: np.ndarray) -> np.ndarray:
        """Return how many operations were submitted before each of `times` and not done by then; int64."""
        pending = np.searchsorted(self.submitted, times, "left") - np.searchsorted(self.ends, times, "right")
        return np.maximum(pending, 0)


class Queues:
    """`Queue` by stream, context and process, built when first asked for."""

    def __init__(self, trace: Trace, join: LaunchJoin) -> None:
        self._ops, self._api, self._join = trace.ops, trace.api, join
        self._built: dict[tuple[int, str, int], Queue] = {}

    @cached_property
    def _submitted(self) -> np.ndarray:
        call = self._join.call
        if not len(self._api):
            return self._ops.start
        return np.where(call >= 0, np.minimum(self._api.start[call], self._ops.start), self._ops.start)

    def stream(self, process: int, stream: int) -> Queue:
        """Return the queue of one stream."""
        return self._get(process, "stream", stream)

    def context(self, process: int, context: int) -> Queue:
        """Return the queue of all streams of a context, or of the whole process for -1."""
        return self._get(process, "context" if context >= 0 else "process", context)

    def _get(self, process: int, scope: str, key: int) -> Queue:
        found = self._built.get((process, scope, key))
        if found is None:
            ops = self._ops
            mine = ops.process == process
            if scope != "process":
                mine &= (ops.stream if scope == "stream" else ops.context) == key
            rows = np.flatnonzero(mine)
            submitted, end = self._submitted[rows], ops.end[rows]
            if np.any(submitted[1:] < submitted[:-1]):
                order = np.argsort(submitted, kind="stable")
                rows, submitted, end = rows[order], submitted[order], end[order]
            ends = end if np.all(end[1:] >= end[:-1]) else np.sort(end)
            found = self._built[(process, scope, key)] = Queue(submitted, rows, np.maximum.accumulate(end), ends)
        return found
