"""Which ranges a host thread is inside of, and which of them is innermost."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mrv2.trace.columns import Int64
from mrv2.trace.intervals import Intervals, overlap_join, union
from mrv2.trace.table import RangeKind, Trace

ThreadKey = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Nest:
    """The push/pop ranges of one thread as a tree, over all domains together.

    Nodes are in preorder: a parent comes before its children, and the subtree of node i is ``i .. last[i]``.
    """

    # all [num_nodes]; row in `Trace.ranges`
    row: Int64
    # a child that outlives its parent is cut at the parent's end
    start: Int64
    end: Int64
    # node, or -1
    parent: Int64
    depth: Int64
    # one past the last node of the subtree
    last: Int64
    # True if some range had to be cut
    was_crossed: bool

    def __len__(self) -> int:
        return len(self.row)

    @cached_property
    def _edges(self) -> tuple[np.ndarray, np.ndarray]:
        """When the innermost node changes, and to which node (-1 none)."""
        # ends before starts; at one instant the deepest ends first and the outermost starts first
        times = np.concatenate([self.end[::-1], self.start])
        node = np.concatenate([self.parent[::-1], np.arange(len(self))])
        order = np.argsort(times, kind="stable")
        times, node = times[order], node[order]
        keep = np.concatenate([times[1:] != times[:-1], [True]])[: len(times)]
        return times[keep], node[keep]

    def at(self, times: np.ndarray) -> np.ndarray:
        """Return the innermost node at each of `times`, or -1; int64."""
        edges, node = self._edges
        if not len(edges):
            return np.full(len(times), -1, np.int64)
        found = np.searchsorted(edges, times, "right") - 1
        return np.where(found >= 0, node[found], -1)

    def containing(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Return the innermost node that holds each ``[start, end]`` whole, or -1; int64."""
        node = self.at(start)
        while (held := np.flatnonzero(node >= 0)).size:
            straddles = held[self.end[node[held]] < end[held]]
            if not len(straddles):
                break
            node[straddles] = self.parent[node[straddles]]
        return node

    def segments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return sorted disjoint ``start, end`` with the innermost range (row) of each; gaps are left out."""
        edges, node = self._edges
        inside = np.flatnonzero(node[:-1] >= 0)
        return edges[inside], edges[inside + 1], self.row[node[inside]]


def build_nest(row: np.ndarray, start: np.ndarray, end: np.ndarray) -> Nest:
    """Build the tree from non-empty ranges of one thread, sorted by (start, -end)."""
    size = len(row)
    order = np.arange(size)
    # ranges before this one that are over when it starts are not its ancestors
    depth = order - np.searchsorted(np.sort(end), start, "right")
    crossed = bool(np.any(depth < 0))
    parent = np.full(size, -1, np.int64)
    if not crossed:
        for level in range(1, int(depth.max(initial=0)) + 1):
            outer, inner = np.flatnonzero(depth == level - 1), np.flatnonzero(depth == level)
            found = np.searchsorted(outer, inner) - 1
            parent[inner] = np.where(found >= 0, outer[found], -1)
        has_parent = parent >= 0
        crossed = bool(np.any(end[has_parent] > end[parent[has_parent]]) or np.any((parent < 0) != (depth == 0)))
    if crossed:
        start, end, parent, depth = _sweep(start.tolist(), end.tolist())
    return Nest(row, start, end, parent, depth, _subtree_ends(depth), crossed)


def _sweep(starts: list[int], ends: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Build the tree with an explicit stack, cutting what outlives its parent."""
    parent, depth, stack = [], [], []
    for i, start in enumerate(starts):
        while stack and ends[stack[-1]] <= start:
            stack.pop()
        parent.append(stack[-1] if stack else -1)
        depth.append(len(stack))
        if stack:
            ends[i] = min(ends[i], ends[stack[-1]])
        stack.append(i)
    columns = (starts, ends, parent, depth)
    return tuple(np.array(column, np.int64) for column in columns)  # type: ignore[return-value]  # four of them


def _subtree_ends(depth: np.ndarray) -> np.ndarray:
    """Return for each node the next one that is not deeper; int64."""
    size = len(depth)
    last = np.full(size, size, np.int64)
    for level in range(int(depth.max(initial=-1)) + 1):
        # the subtree of a node ends where the next node of its level or above begins
        at = np.flatnonzero(depth <= level)
        follower = np.append(at[1:], size)
        mine = depth[at] == level
        last[at[mine]] = follower[mine]
    return last


class Nests:
    """The `Nest` of each thread of a trace, built when it is first asked for."""

    def __init__(self, trace: Trace, keep: np.ndarray | None = None) -> None:
        """Take the rows of ``ranges`` that `keep` (bool mask) selects, by default all."""
        self._trace = trace
        self._built: dict[ThreadKey, Nest] = {}
        ranges = trace.ranges
        real = ranges.end > ranges.start
        if keep is not None:
            real &= keep
        plain = real & (ranges.kind == RangeKind.PUSH_POP)
        self._rows = split_by_thread(ranges.process, ranges.thread, np.flatnonzero(plain))
        # start/end ranges that stay on their thread; they need not nest
        loose = real & (ranges.kind == RangeKind.START_END) & (ranges.thread == ranges.end_thread)
        self._loose_rows = split_by_thread(ranges.process, ranges.thread, np.flatnonzero(loose))

    @property
    def threads(self) -> list[ThreadKey]:
        """Threads that have push/pop ranges."""
        return list(self._rows)

    def __getitem__(self, key: ThreadKey) -> Nest:
        if key not in self._built:
            rows = self._rows.get(key, np.empty(0, np.int64))
            ranges = self._trace.ranges
            self._built[key] = build_nest(rows, ranges.start[rows], ranges.end[rows])
        return self._built[key]

    def segments(self, key: ThreadKey) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return sorted disjoint ``start, end`` with the innermost range of each (row in ``ranges``).

        Start/end ranges count only where the thread is in no push/pop range.
        """
        start, end, row = self[key].segments()
        loose = self._loose_rows.get(key)
        if loose is None:
            return start, end, row
        ranges = self._trace.ranges
        low, high, owner = build_nest(loose, ranges.start[loose], ranges.end[loose]).segments()
        free = union(low, high) - union(start, end)
        piece, segment = overlap_join(free.start, free.end, Intervals(low, high))
        start = np.concatenate([start, np.maximum(free.start[piece], low[segment])])
        end = np.concatenate([end, np.minimum(free.end[piece], high[segment])])
        order = np.argsort(start, kind="stable")
        return start[order], end[order], np.concatenate([row, owner[segment]])[order]

    def path(self, key: ThreadKey, node: int) -> str:
        """Return the names from the outermost range to `node`, joined by " > "; an empty string for -1."""
        nest, names = self[key], []
        while node >= 0:
            names.append(self._trace.name_of(int(self._trace.ranges.name[nest.row[node]])))
            node = int(nest.parent[node])
        return " > ".join(reversed(names))


def split_by_thread(process: np.ndarray, thread: np.ndarray, rows: np.ndarray) -> dict[ThreadKey, np.ndarray]:
    """Return `rows` by (process, thread), in their order."""
    if not len(rows):
        return {}
    process, thread = process[rows], thread[rows]
    if process.min() == process.max() and thread.min() == thread.max():
        return {(int(process[0]), int(thread[0])): rows}
    order = np.lexsort((thread, process))
    changes = (np.diff(process[order]) != 0) | (np.diff(thread[order]) != 0)
    parts = np.split(order, np.flatnonzero(changes) + 1)
    # lexsort is stable: each part is in the order of `rows`
    return {(int(process[part[0]]), int(thread[part[0]])): rows[part] for part in parts}
