"""Which step a range, a call or an operation belongs to."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from mrv2.trace.analysis.join import LaunchJoin
from mrv2.trace.analysis.nesting import Nests, ThreadKey, split_by_thread
from mrv2.trace.analysis.windows import StepWindows, outermost
from mrv2.trace.intervals import Intervals
from mrv2.trace.table import RangeKind, Trace


class StepIds:
    """Step numbers: the payload of the outermost range that carries one, else the step's window by time."""

    def __init__(self, trace: Trace, join: LaunchJoin, nests: Nests, windows: StepWindows, domain: str | None) -> None:
        self._trace, self._join, self._nests, self._windows = trace, join, nests, windows
        ranges = trace.ranges
        carries = (ranges.step >= 0) & (ranges.kind != RangeKind.MARK)
        if domain is not None:
            carries &= ranges.domain == trace.string_id(domain)
        self._carries = carries
        self._by_thread = split_by_thread(ranges.process, ranges.thread, np.flatnonzero(carries))

    @property
    def threads(self) -> list[ThreadKey]:
        """Threads with ranges that carry a step number."""
        return list(self._by_thread)

    def ranges(self, key: ThreadKey) -> tuple[Intervals, np.ndarray]:
        """Return the outermost ranges of a thread that carry a step number, and the numbers."""
        table, rows = self._trace.ranges, self._by_thread.get(key, np.empty(0, np.int64))
        rows = outermost(table, rows)
        rows = rows[table.end[rows] > table.start[rows]]
        return Intervals(table.start[rows], table.end[rows]), table.step[rows]

    @cached_property
    def of_ranges(self) -> np.ndarray:
        """Step number of each range, -1 unknown; int64 [num_ranges]."""
        table = self._trace.ranges
        out = np.where(self._carries, table.step, -1)
        for key in self._nests.threads:
            nest = self._nests[key]
            step = out[nest.row]
            for level in range(1, int(nest.depth.max(initial=0)) + 1):
                nodes = np.flatnonzero(nest.depth == level)
                inherited = step[nest.parent[nodes]]
                step[nodes] = np.where(inherited >= 0, inherited, step[nodes])
            out[nest.row] = step
        missing = np.flatnonzero(out < 0)
        out[missing] = self._at(table.start[missing])
        return out

    @cached_property
    def of_calls(self) -> np.ndarray:
        """Step number of each launching call, -1 unknown; int64 [num_launches]."""
        api, launch = self._trace.api, self._join.launch
        out = np.full(len(launch), -1, np.int64)
        for key, rows in split_by_thread(api.process[launch], api.thread[launch], np.arange(len(launch))).items():
            nest = self._nests[key]
            node = nest.at(api.start[launch[rows]])
            if len(nest):
                out[rows] = np.where(node >= 0, self.of_ranges[nest.row[node]], -1)
        missing = np.flatnonzero(out < 0)
        out[missing] = self._at(api.start[launch[missing]])
        return out

    @cached_property
    def of_ops(self) -> np.ndarray:
        """Step number of each operation, -1 unknown; int64 [num_ops]."""
        ops, owner = self._trace.ops, self._join.launch_of_op
        if not len(self.of_calls):
            return ops.step.copy()
        return np.where(ops.step >= 0, ops.step, np.where(owner >= 0, self.of_calls[owner], -1))

    def _at(self, times: np.ndarray) -> np.ndarray:
        row = self._windows.index_at(times)
        return np.where(row >= 0, self._windows.step[row], -1) if len(self._windows) else row
