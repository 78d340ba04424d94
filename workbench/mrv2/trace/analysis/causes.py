"""Divides a gap of the GPU among its causes; the parts sum to the gap.

For a gap ``[b, e)`` that ends with operation n, submitted by call a on thread t::

    b ............ a.start ............ a.end ............ e
    | what t did   | launch_api         | submitted in time |

Each part is empty when its end lies before its start: a call that was over before the gap leaves only the last one.
What t did is decided by the first that applies: waiting for the device (``sync``), held by the operating system
(``starved``), by Python's lock (``gil``), managing memory (``alloc``), another launching call (``launch_api``), the
innermost stage (``host:X``), else ``host:unattributed``.  Where t was starved or outside all stages and another thread
worked on the same step, that thread's doings count instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mrv2.trace.analysis.nesting import ThreadKey, split_by_thread
from mrv2.trace.analysis.submission import submissions
from mrv2.trace.columns import Int64
from mrv2.trace.intervals import Intervals, overlap_join, union

if TYPE_CHECKING:
    from mrv2.trace.analysis.model import Analysis

PROFILER, UNKNOWN, DEPENDENCY, COPY, KERNEL_WAIT, UNKNOWN_DEVICE, LAUNCH_API = range(7)
SYNC, STARVED, GIL, ALLOC, UNATTRIBUTED = range(7, 12)
_NAMES = [
    "profiler", "unknown", "dependency", "copy", "kernel_wait", "unknown_device", "launch_api",
    "sync", "starved", "gil", "alloc", "host:unattributed",
]  # fmt: skip


@dataclass
class Division:
    """Pieces of bubbles with their causes, and what is known of each bubble's launch."""

    # [num_pieces]
    bubble: Int64
    start: Int64
    end: Int64
    # index into `causes`
    cause: Int64
    causes: list[str]
    # [num_bubbles]: launching thread, and step number; -1 unknown
    thread: Int64
    step: Int64


@dataclass
class _Pieces:
    """Collects intervals with a cause each."""

    causes: list[str] = field(default_factory=lambda: list(_NAMES))
    starts: list[np.ndarray] = field(default_factory=list)
    ends: list[np.ndarray] = field(default_factory=list)
    what: list[np.ndarray] = field(default_factory=list)

    def add(self, where: Intervals, cause: np.ndarray | int) -> None:
        self.starts.append(where.start)
        self.ends.append(where.end)
        self.what.append(np.array(np.broadcast_to(cause, len(where)), np.int64))


def divide(analysis: Analysis, start: np.ndarray, end: np.ndarray, device: np.ndarray, next_op: np.ndarray) -> Division:
    """Divide the bubbles ``[start, end)``, which are sorted and disjoint within each device.

    Args:
        next_op: row in ``ops`` of the operation that ends each bubble; int64 [num_bubbles].
    """
    submitted = submissions(analysis, next_op)
    known, process, thread = submitted.known, submitted.process, submitted.thread
    step = analysis.step_ids.of_ops[next_op]
    submit, done = np.clip(submitted.start, start, end), np.clip(submitted.end, start, end)
    overhead = union(analysis.trace.overhead.start, analysis.trace.overhead.end)
    causes = list(_NAMES)
    parts: list[tuple[np.ndarray, ...]] = []
    for one in np.unique(device).tolist():
        mine = np.flatnonzero(device == one)
        pieces = _Pieces(causes)
        pieces.add(Intervals(start[mine], end[mine]) & overhead, PROFILER)
        orphan = mine[~known[mine]]
        pieces.add(Intervals(start[orphan], end[orphan]) - overhead, UNKNOWN)
        launched = mine[known[mine]]
        _add_device_part(analysis, pieces, done, end, launched, next_op, overhead)
        pieces.add(_nonempty(submit[launched], done[launched]) - overhead, LAUNCH_API)
        for key, rows in split_by_thread(process, thread, launched).items():
            region = _nonempty(start[rows], submit[rows]) - overhead
            _add_host_part(analysis, pieces, region, key, start[rows], step[rows])
        low, high, what = (np.concatenate(column) for column in (pieces.starts, pieces.ends, pieces.what))
        order = np.argsort(low, kind="stable")
        bubble = mine[np.searchsorted(start[mine], low[order], "right") - 1]
        parts.append((bubble, low[order], high[order], what[order]))
    if not parts:
        empty = np.empty(0, np.int64)
        return Division(empty, empty, empty, empty, causes, thread, step)
    bubble, low, high, what = (np.concatenate(column) for column in zip(*parts))
    return Division(bubble, low, high, what, causes, thread, step)


def _nonempty(start: np.ndarray, end: np.ndarray) -> Intervals:
    """Return sorted disjoint intervals without the empty ones (they may touch)."""
    keep = end > start
    return Intervals(start[keep], end[keep])


def _add_device_part(
    analysis: Analysis,
    pieces: _Pieces,
    done: np.ndarray,
    end: np.ndarray,
    rows: np.ndarray,
    next_op: np.ndarray,
    overhead: Intervals,
) -> None:
    """Add the parts in which the next operation was already submitted."""
    rows = rows[end[rows] > done[rows]]
    region = Intervals(done[rows], end[rows]) - overhead
    is_dependency, is_copy = analysis.stream_order.held_by(next_op[rows])
    short = end[rows] - done[rows] < analysis.kernel_wait_ns
    cause = np.where(short, KERNEL_WAIT, UNKNOWN_DEVICE)
    cause = np.where(is_copy, COPY, np.where(is_dependency, DEPENDENCY, cause))
    pieces.add(region, cause[np.searchsorted(done[rows], region.start, "right") - 1])


def _add_host_part(
    analysis: Analysis, pieces: _Pieces, region: Intervals, key: ThreadKey, start: np.ndarray, step: np.ndarray
) -> None:
    """Add what the launching thread did in `region`; `start` and `step` belong to the bubbles that it is part of."""
    inactive = _add_activity(analysis, pieces, region, key)
    for cause, where in inactive.items():
        left = where
        for other in analysis.step_ids.threads:
            if other == key or not len(left):
                continue
            # where the other thread was inside a range of the very step that ends the bubble
            ranges, ranges_step = analysis.step_ids.ranges(other)
            piece, found = overlap_join(left.start, left.end, ranges)
            bubble_step = step[np.searchsorted(start, left.start[piece], "right") - 1]
            same = (ranges_step[found] == bubble_step) & (bubble_step >= 0)
            shared = Intervals(
                np.maximum(left.start[piece], ranges.start[found])[same],
                np.minimum(left.end[piece], ranges.end[found])[same],
            )
            if len(shared):
                for kind, rest in _add_activity(analysis, pieces, shared, other).items():
                    pieces.add(rest, kind)
                left = left - shared
        pieces.add(left, cause)


def _add_activity(analysis: Analysis, pieces: _Pieces, region: Intervals, key: ThreadKey) -> dict[int, Intervals]:
    """Add what a thread did in `region`; return where it was starved or outside everything, by cause, not added."""
    host = analysis.host
    left, starved = region, Intervals.empty()
    for cause, layer in (
        (SYNC, host.device_waits),
        (STARVED, host.os_waits),
        (GIL, host.gil_waits),
        (ALLOC, host.allocations),
        (LAUNCH_API, host.launches),
    ):
        if not len(left):
            break
        what = layer(key)
        found = left & what
        if cause == STARVED:
            starved = found
        else:
            pieces.add(found, cause)
        left = left - what
    low, high, row = analysis.nests.segments(key)
    segments = Intervals(low, high)
    piece, segment = overlap_join(left.start, left.end, segments)
    inside = Intervals(np.maximum(left.start[piece], low[segment]), np.minimum(left.end[piece], high[segment]))
    pieces.add(inside, _stage_causes(analysis, pieces, analysis.trace.ranges.name[row[segment]]))
    return {STARVED: starved, UNATTRIBUTED: left - segments}


def _stage_causes(analysis: Analysis, pieces: _Pieces, names: np.ndarray) -> np.ndarray:
    """Return the cause ``host:X`` of each name id, extending the list of causes."""
    distinct, where = np.unique(names, return_inverse=True)
    index = np.empty(len(distinct), np.int64)
    for i, name in enumerate(distinct.tolist()):
        text = f"host:{analysis.trace.name_of(name)}"
        if text not in pieces.causes:
            pieces.causes.append(text)
        index[i] = pieces.causes.index(text)
    return index[where]
