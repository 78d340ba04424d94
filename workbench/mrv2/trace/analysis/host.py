"""What a host thread did with its time: inside stages, waiting, working."""

from __future__ import annotations

import numpy as np

from mrv2.trace.analysis.calls import is_allocation, rows_named
from mrv2.trace.analysis.join import LaunchJoin
from mrv2.trace.analysis.nesting import ThreadKey, split_by_thread
from mrv2.trace.analysis.sync_rows import Columns, SyncKind
from mrv2.trace.intervals import Intervals, union
from mrv2.trace.table import RangeKind, Trace, WaitKind


class HostTime:
    """Interval sets by thread, built when first asked for.

    Args:
        syncs: rows of `find_host_syncs`.
    """

    def __init__(self, trace: Trace, join: LaunchJoin, syncs: Columns) -> None:
        self._trace, self._join, self._syncs = trace, join, syncs
        self._cache: dict[tuple[str, ThreadKey], Intervals] = {}
        ranges, waits, api = trace.ranges, trace.waits, trace.api
        real = (ranges.kind != RangeKind.MARK) & (ranges.thread == ranges.end_thread)
        self._stage_rows = split_by_thread(ranges.process, ranges.thread, np.flatnonzero(real))
        self._wait_rows = split_by_thread(waits.process, waits.thread, np.arange(len(waits)))
        self._call_rows = split_by_thread(api.process, api.thread, np.arange(len(api)))
        self._sync_rows = split_by_thread(syncs["process"], syncs["thread"], np.arange(len(syncs["start"])))
        self._is_allocation = rows_named(api.name, trace.strings, is_allocation)
        self._is_launch = np.zeros(len(api), np.bool_)
        self._is_launch[join.launch] = True

    @property
    def stage_threads(self) -> list[ThreadKey]:
        """Threads that have ranges."""
        return list(self._stage_rows)

    def stages(self, key: ThreadKey) -> Intervals:
        """Return when the thread was inside at least one range; ranges that end on another thread do not count."""
        return self._get("stages", key)

    def device_waits(self, key: ThreadKey) -> Intervals:
        """Return when the thread waited for the device: synchronisation, polling, blocking copies, named waits."""
        return self._get("device_waits", key)

    def os_waits(self, key: ThreadKey) -> Intervals:
        """Return when the thread was held by the operating system."""
        return self._get("os_waits", key)

    def gil_waits(self, key: ThreadKey) -> Intervals:
        """Return when the thread waited for Python's global lock."""
        return self._get("gil_waits", key)

    def waits(self, key: ThreadKey) -> Intervals:
        """Return when the thread was held by anything."""
        return self._get("waits", key)

    def work(self, key: ThreadKey) -> Intervals:
        """Return when the thread was inside a range and not held."""
        return self._get("work", key)

    def allocations(self, key: ThreadKey) -> Intervals:
        """Return when the thread was inside calls that manage memory or load code."""
        return self._get("allocations", key)

    def launches(self, key: ThreadKey) -> Intervals:
        """Return when the thread was inside calls that submit device work."""
        return self._get("launches", key)

    def _get(self, what: str, key: ThreadKey) -> Intervals:
        found = self._cache.get((what, key))
        if found is None:
            found = self._cache[what, key] = getattr(self, f"_make_{what}")(key)
        return found

    def _make_stages(self, key: ThreadKey) -> Intervals:
        rows = self._stage_rows.get(key, [])
        return union(self._trace.ranges.start[rows], self._trace.ranges.end[rows]) if len(rows) else Intervals.empty()

    def _make_device_waits(self, key: ThreadKey) -> Intervals:
        rows = self._sync_rows.get(key, np.empty(0, np.int64))
        start, end = self._syncs["start"][rows], self._syncs["end"][rows].copy()
        # a call that only may wait held the thread no longer than its own copy ran
        may = self._syncs["kind"][rows] == SyncKind.IMPLICIT
        op, ops = self._syncs["op"][rows], self._trace.ops
        if may.any():
            op_end = np.where(op >= 0, ops.end[op], start) if len(ops) else start
            end = np.where(may, np.where(op_end <= end, np.maximum(op_end, start), start), end)
        return union(start, end) | self._waits_of(key, WaitKind.NAMED)

    def _make_os_waits(self, key: ThreadKey) -> Intervals:
        return self._waits_of(key, WaitKind.OS)

    def _make_gil_waits(self, key: ThreadKey) -> Intervals:
        return self._waits_of(key, WaitKind.GIL)

    def _make_waits(self, key: ThreadKey) -> Intervals:
        return self.device_waits(key) | self.os_waits(key) | self.gil_waits(key)

    def _make_work(self, key: ThreadKey) -> Intervals:
        return self.stages(key) - self.waits(key)

    def _make_allocations(self, key: ThreadKey) -> Intervals:
        return self._calls_of(key, self._is_allocation)

    def _make_launches(self, key: ThreadKey) -> Intervals:
        return self._calls_of(key, self._is_launch)

    def _waits_of(self, key: ThreadKey, kind: WaitKind) -> Intervals:
        waits, rows = self._trace.waits, self._wait_rows.get(key)
        if rows is None:
            return Intervals.empty()
        rows = rows[waits.kind[rows] == kind]
        return union(waits.start[rows], waits.end[rows])

    def _calls_of(self, key: ThreadKey, wanted: np.ndarray) -> Intervals:
        rows = self._call_rows.get(key)
        if rows is None:
            return Intervals.empty()
        rows = rows[wanted[rows]]
        return union(self._trace.api.start[rows], self._trace.api.end[rows])
