"""What an operation has to wait for on its own stream: its predecessor, and events that the stream waits for."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from mrv2.trace.analysis.join import NEVER, LaunchJoin, Queues
from mrv2.trace.analysis.nesting import split_by_thread
from mrv2.trace.table import OpKind, SyncType, Trace


class StreamOrder:
    """Predecessors in stream order, and the stream waits between them."""

    def __init__(self, trace: Trace, join: LaunchJoin, queues: Queues) -> None:
        self._trace, self._join, self._queues = trace, join, queues
        ops = trace.ops
        self.by_stream = split_by_thread(ops.process, ops.stream, np.arange(len(ops)))

    @cached_property
    def predecessor(self) -> np.ndarray:
        """The operation before each one on its stream, a row in ``ops`` or -1; int64 [num_ops]."""
        out = np.full(len(self._trace.ops), -1, np.int64)
        for rows in self.by_stream.values():
            out[rows[1:]] = rows[:-1]
        return out

    @cached_property
    def earlier_end(self) -> np.ndarray:
        """When everything that started earlier on the stream was done, `NEVER` for the first; int64 ns [num_ops].

        Operations of the same launch do not count: the launch waits for what was there before it.
        """
        ops, launch = self._trace.ops, self._join.launch_of_op
        out = np.full(len(ops), NEVER, np.int64)
        for rows in self.by_stream.values():
            reach = np.maximum.accumulate(ops.end[rows])
            owner = launch[rows]
            # the first operation of the run of its launch; orphans are runs of their own
            opens = np.concatenate([[True], (owner[1:] != owner[:-1]) | (owner[1:] < 0)])
            first = np.maximum.accumulate(np.where(opens, np.arange(len(rows)), 0))
            out[rows] = np.where(first > 0, reach[np.maximum(first - 1, 0)], NEVER)
        return out

    @cached_property
    def _waits(self) -> dict[tuple[int, int], tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Per (process, stream) that was told to wait: when, and until when at least, and for which operation (row)."""
        trace = self._trace
        syncs = trace.syncs
        rows = np.flatnonzero((syncs.sync_type == SyncType.STREAM_WAIT) & (syncs.stream >= 0))
        recorded = self.recording_time(syncs.process[rows], syncs.event_corr[rows], syncs.start[rows])
        finish, row = np.full(len(rows), NEVER, np.int64), np.full(len(rows), -1, np.int64)
        known = np.flatnonzero(syncs.event_stream[rows] >= 0)
        for (process, stream), at in split_by_thread(syncs.process[rows], syncs.event_stream[rows], known).items():
            queue = self._queues.stream(process, stream)
            finish[at], row[at] = queue.finish_before(recorded[at]), queue.last_before(recorded[at])
        out = {}
        for key, at in split_by_thread(syncs.process[rows], syncs.stream[rows], np.arange(len(rows))).items():
            out[key] = (syncs.start[rows[at]], np.maximum.accumulate(finish[at]), row[at])
        return out

    def recording_time(self, process: np.ndarray, corr: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
        """Return when the call of each (process, corr), which recorded an event, began; `otherwise` if unknown."""
        from mrv2.trace.readers.sync_merge import call_rows

        api = self._trace.api
        row = call_rows(process, corr, api)
        return np.where(row >= 0, api.start[row], otherwise) if len(api) else otherwise

    def awaited_end(self, ops_rows: np.ndarray, submitted: np.ndarray) -> np.ndarray:
        """Return when the last event that each operation's stream was told to await was done; `NEVER` if none."""
        out = np.full(len(ops_rows), NEVER, np.int64)
        ops = self._trace.ops
        for key, (start, finish, _) in self._waits.items():
            mine = np.flatnonzero((ops.process[ops_rows] == key[0]) & (ops.stream[ops_rows] == key[1]))
            at = np.searchsorted(start, submitted[mine], "right") - 1
            out[mine] = np.where(at >= 0, finish[np.maximum(at, 0)], NEVER)
        return out

    def held_by(self, ops_rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return whether an event wait, and whether a copy, stands between each operation and its predecessor.

        A wait for an event that follows a copy counts as a copy.  Both bool; at most one is True.
        """
        ops, api, join = self._trace.ops, self._trace.api, self._join
        before = self.predecessor[ops_rows]
        copied = (before >= 0) & (ops.kind[before] == OpKind.MEMCPY)
        waited = np.zeros(len(ops_rows), np.bool_)
        for key, (start, _, row) in self._waits.items():
            mine = np.flatnonzero((ops.process[ops_rows] == key[0]) & (ops.stream[ops_rows] == key[1]))
            call, earlier = join.call[ops_rows[mine]], join.call[before[mine]]
            submitted = np.where(call >= 0, api.start[call], ops.start[ops_rows[mine]])
            since = np.where((before[mine] >= 0) & (earlier >= 0), api.start[earlier], NEVER)
            at = np.searchsorted(start, submitted, "right") - 1
            found = (at >= 0) & (start[np.maximum(at, 0)] >= since)
            awaited = row[np.maximum(at, 0)]
            after_copy = (awaited >= 0) & (ops.kind[awaited] == OpKind.MEMCPY)
            copied[mine] = np.where(found, after_copy, copied[mine])
            waited[mine] = found & ~after_copy
        return waited, copied
