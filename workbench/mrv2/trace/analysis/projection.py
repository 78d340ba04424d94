"""The device work of each host range, by launching call.

An operation belongs to a range if the call that submitted it does; when it ran does not matter.  *Inclusive* figures
count everything below a range, *self* figures only what no inner range claims: self figures of all ranges sum to the
total of the attributed operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from mrv2.trace.analysis.frame import Frame
from mrv2.trace.analysis.nesting import Nest, Nests, split_by_thread
from mrv2.trace.columns import Int64, UInt8
from mrv2.trace.intervals import union_measure
from mrv2.trace.table import RangeKind, Trace, TraceError

if TYPE_CHECKING:
    from mrv2.trace.analysis.join import LaunchJoin
    from mrv2.trace.analysis.model import Analysis, Policy

_NOTHING = -1


class Attribution(IntEnum):
    """How the operations of a range were found."""

    # the tree of push/pop ranges of the launching thread
    NESTED = 0
    # a start/end range on one thread: by containment; it may share operations with ranges that it overlaps
    CONTAINED = 1
    # a range that ends on another thread: by its step number
    STEP = 2
    # a range that ends on another thread and has no step number, or a mark: nothing is attributed
    NONE = 3


@dataclass(frozen=True, eq=False, repr=False)
class Projection(Frame):
    """One row for each row of ``ranges``; nanoseconds, summed over devices; -1 where a figure is undefined."""

    # all columns [num_ranges]
    name: list[str]
    # Attribution
    how: UInt8
    # calls and operations; sum of durations; union of the operations; -1 for ranges that claim nothing
    launches: Int64
    ops: Int64
    gpu_sum_ns: Int64
    gpu_busy_ns: Int64
    # start of the first and end of the last operation, -1 without any: a span with its holes
    first_start: Int64
    last_end: Int64
    # only what no inner range claims; -1 where ranges may overlap
    self_launches: Int64
    self_ops: Int64
    self_sum_ns: Int64
    self_busy_ns: Int64
    # time of the launching calls, once each
    api_ns: Int64
    # operations that belong to at least one push/pop range / all operations: by number, and by duration
    _coverage_count: float | None
    _coverage_time: float | None
    _warnings: list[str]

    @property
    def coverage(self) -> tuple[float | None, float | None]:
        """Share of the operations that some range claims: by number, by time."""
        return self._coverage_count, self._coverage_time

    @property
    def warnings(self) -> list[str]:
        """What could not be attributed, and why."""
        return self._warnings

    @property
    def span_ns(self) -> np.ndarray:
        """From the first operation's start to the last one's end; -1 without operations."""
        return np.where(self.first_start >= 0, self.last_end - self.first_start, _NOTHING)

    def by_name(self) -> list[dict[str, Any]]:
        """Return the sums over all ranges of each name, the largest GPU time first."""
        groups: dict[str, list[int]] = {}
        for i, name in enumerate(self.name):
            if self.how[i] != Attribution.NONE:
                groups.setdefault(name, []).append(i)
        columns = ("launches", "ops", "gpu_sum_ns", "gpu_busy_ns", "api_ns")
        out = [
            {"name": name, "ranges": len(rows), **{c: int(getattr(self, c)[rows].sum()) for c in columns}}
            for name, rows in groups.items()
        ]
        return sorted(out, key=lambda row: -row["gpu_busy_ns"])


def project(analysis: Analysis, policy: Policy = "contained", domain: str | None = None) -> Projection | None:
    """Attribute operations to ranges; None if ranges, calls or operations were not collected.

    Args:
        policy: "contained": a range owns the calls wholly inside it (NVIDIA's rule); "start": those that start in it.
        domain: only ranges of this NVTX domain; by default all domains form one tree.

    Raises:
        TraceError: an unknown policy.
    """
    if policy not in ("contained", "start"):
        raise TraceError(f"projection(policy={policy!r}): legal are 'contained' and 'start'")
    trace = analysis.trace
    if not len(trace.ranges) or not len(trace.api) or not len(trace.ops):
        return None
    nests = analysis.nests if domain is None else Nests(trace, trace.ranges.domain == trace.string_id(domain))
    return _Projector(trace, analysis.join, nests, policy).run()


class _Projector:
    def __init__(self, trace: Trace, join: LaunchJoin, nests: Nests, policy: Policy) -> None:
        self.trace, self.join, self.nests, self.policy = trace, join, nests, policy
        size = len(trace.ranges)
        names = ("launches", "ops", "gpu_sum_ns", "gpu_busy_ns", "api_ns")
        names += ("self_launches", "self_ops", "self_sum_ns", "self_busy_ns")
        self.out = {name: np.full(size, _NOTHING, np.int64) for name in (*names, "first_start", "last_end")}
        self.how = np.full(size, Attribution.NONE, np.uint8)
        self.attributed = np.zeros(len(trace.ops), np.bool_)
        api = trace.api
        self.start, self.end = api.start[join.launch], api.end[join.launch]
        process, thread = api.process[join.launch], api.thread[join.launch]
        # launches by thread, in order of time
        self.launches = split_by_thread(process, thread, np.arange(len(self.start)))
        self.warnings: list[str] = []

    def run(self) -> Projection:
        for key in self.nests.threads:
            self._project_nest(self.nests[key], self.launches.get(key, np.empty(0, np.int64)))
        self._project_loose()
        self._project_crossing()
        ops = self.trace.ops
        duration = ops.end - ops.start
        whole = int(duration.sum())
        return Projection(
            name=self.trace.name_of(self.trace.ranges.name).tolist(),
            how=self.how,
            **self.out,
            _coverage_count=float(self.attributed.mean()),
            _coverage_time=float(duration[self.attributed].sum()) / whole if whole else None,
            _warnings=self.warnings,
        )

    def _ops_of(self, launches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the operations of the launches (rows in ``ops``, by start), and the position of each one's launch."""
        owner = self.join.launch_of_op
        if len(launches) == len(self.start):
            rows = np.flatnonzero(owner >= 0)
            return rows, owner[rows]
        position = np.full(len(self.start) + 1, -1, np.int64)
        position[launches] = np.arange(len(launches))
        rows = np.flatnonzero(position[owner] >= 0)
        return rows, position[owner[rows]]

    def _project_nest(self, nest: Nest, launches: np.ndarray) -> None:
        start, end = self.start[launches], self.end[launches]
        node = nest.containing(start, end if self.policy == "contained" else start)
        rows, position = self._ops_of(launches)
        node_of_op = node[position] if len(rows) else position
        inside = node_of_op >= 0
        rows, node_of_op = rows[inside], node_of_op[inside]
        self.attributed[rows] = True
        ops, size = self.trace.ops, len(nest)
        low, high = ops.start[rows], ops.end[rows]
        claimed = node >= 0
        own = {
            "launches": np.bincount(node[claimed], minlength=size),
            "ops": np.bincount(node_of_op, minlength=size),
            "sum_ns": np.bincount(node_of_op, weights=high - low, minlength=size).astype(np.int64),
        }
        api = np.bincount(node[claimed], weights=(end - start)[claimed], minlength=size).astype(np.int64)
        out, at = self.out, nest.row
        self.how[at] = Attribution.NESTED
        for name, values in own.items():
            out[f"self_{name}"][at] = values
            out[{"sum_ns": "gpu_sum_ns"}.get(name, name)][at] = _subtree_sums(nest, values)
        out["api_ns"][at] = _subtree_sums(nest, api)
        out["self_busy_ns"][at] = self._busy(rows, node_of_op, size)
        out["gpu_busy_ns"][at] = self._inclusive_busy(nest, rows, node_of_op)
        out["first_start"][at], out["last_end"][at] = _spans(nest, node_of_op, low, high)

    def _busy(self, rows: np.ndarray, group: np.ndarray, num_groups: int) -> np.ndarray:
        """Return the union of the operations of each group, summed over devices."""
        ops, total = self.trace.ops, np.zeros(num_groups, np.int64)
        device = ops.device[rows]
        for one in np.unique(device).tolist():
            mine = slice(None) if (device == one).all() else device == one
            total += union_measure(ops.start[rows[mine]], ops.end[rows[mine]], group[mine], num_groups)
        return total

    def _inclusive_busy(self, nest: Nest, rows: np.ndarray, node: np.ndarray) -> np.ndarray:
        total = np.zeros(len(nest), np.int64)
        for level in range(int(nest.depth.max(initial=0)), -1, -1):
            deeper = nest.depth[node] > level
            node = np.where(deeper, nest.parent[node], node)
            at_level = nest.depth[node] == level
            mine = slice(None) if at_level.all() else at_level
            total += self._busy(rows[mine], node[mine], len(nest))
        return total

    def _project_one(self, row: int, launches: np.ndarray, how: Attribution) -> None:
        """Fill in the inclusive figures of one range from its launches."""
        ops, out = self.trace.ops, self.out
        rows, _ = self._ops_of(launches)
        low, high = ops.start[rows], ops.end[rows]
        self.how[row] = how
        out["launches"][row], out["ops"][row] = len(launches), len(rows)
        out["gpu_sum_ns"][row] = int((high - low).sum())
        out["gpu_busy_ns"][row] = self._busy(rows, np.zeros(len(rows), np.int64), 1)[0]
        out["api_ns"][row] = int((self.end[launches] - self.start[launches]).sum())
        if len(rows):
            out["first_start"][row], out["last_end"][row] = int(low.min()), int(high.max())

    def _project_loose(self) -> None:
        ranges = self.trace.ranges
        loose = (ranges.kind == RangeKind.START_END) & (ranges.thread == ranges.end_thread)
        for key, rows in split_by_thread(ranges.process, ranges.thread, np.flatnonzero(loose)).items():
            launches = self.launches.get(key, np.empty(0, np.int64))
            starts = self.start[launches]
            for row in rows.tolist():
                first, last = np.searchsorted(starts, [ranges.start[row], ranges.end[row] + 1])
                mine = launches[first:last]
                if self.policy == "contained":
                    mine = mine[self.end[mine] <= ranges.end[row]]
                self._project_one(row, mine, Attribution.CONTAINED)

    def _project_crossing(self) -> None:
        ranges = self.trace.ranges
        rows = np.flatnonzero((ranges.kind == RangeKind.START_END) & (ranges.thread != ranges.end_thread))
        abstained: list[str] = []
        steps: dict[int, dict[int, np.ndarray]] = {}
        for row in rows.tolist():
            domain = int(ranges.domain[row])
            if domain not in steps:
                steps[domain] = self._launches_by_step(domain)
            mine = steps[domain].get(int(ranges.step[row])) if ranges.step[row] >= 0 else None
            if mine is None:
                abstained.append(self.trace.name_of(int(ranges.name[row])))
            else:
                mine = mine[self.trace.api.process[self.join.launch[mine]] == ranges.process[row]]
                self._project_one(row, mine, Attribution.STEP)
        if abstained:
            names = ", ".join(sorted(set(abstained))[:5])
            self.warnings.append(
                f"{len(abstained)} ranges end on another thread and share no step number with ranges there: "
                f"nothing is attributed to them ({names})"
            )

    def _launches_by_step(self, domain: int) -> dict[int, np.ndarray]:
        """Return the launches by the number that the nearest enclosing range of a domain carries."""
        ranges = self.trace.ranges
        number = np.full(len(self.start), -1, np.int64)
        for key, launches in self.launches.items():
            nest = self.nests[key]
            if not len(nest):
                continue
            own = np.where(ranges.domain[nest.row] == domain, ranges.step[nest.row], -1)
            for level in range(1, int(nest.depth.max()) + 1):
                nodes = np.flatnonzero((nest.depth == level) & (own < 0))
                own[nodes] = own[nest.parent[nodes]]
            node = nest.at(self.start[launches])
            number[launches] = np.where(node >= 0, own[node], -1)
        order = np.argsort(number, kind="stable")
        values, first = np.unique(number[order], return_index=True)
        return {int(v): np.sort(part) for v, part in zip(values, np.split(order, first[1:])) if v >= 0}


def _subtree_sums(nest: Nest, values: np.ndarray) -> np.ndarray:
    sums = np.concatenate([[0], np.cumsum(values)])
    return sums[nest.last] - sums[:-1]


def _spans(nest: Nest, node: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return first start and last end of everything below each node, -1 without operations."""
    most = np.iinfo(np.int64).max
    first, last = np.full(len(nest), most), np.full(len(nest), -1, np.int64)
    np.minimum.at(first, node, low)
    np.maximum.at(last, node, high)
    for level in range(int(nest.depth.max(initial=0)), 0, -1):
        nodes = np.flatnonzero(nest.depth == level)
        np.minimum.at(first, nest.parent[nodes], first[nodes])
        np.maximum.at(last, nest.parent[nodes], last[nodes])
    return np.where(first == most, _NOTHING, first), last
