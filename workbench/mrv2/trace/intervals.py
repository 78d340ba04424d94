"""Sets of half-open time intervals as sorted, disjoint NumPy columns; every operation is vectorised."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False, repr=False)
class Intervals:
    """A set of instants: sorted, disjoint, non-empty intervals that do not touch.

    Build one with `union`; ``a & b``, ``a | b`` and ``a - b`` are intersection, union and difference.
    """

    # [num_intervals] int64 ns
    start: np.ndarray
    end: np.ndarray

    @classmethod
    def empty(cls) -> Intervals:
        """Return the empty set."""
        return cls(np.empty(0, np.int64), np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self.start)

    def __repr__(self) -> str:
        return f"Intervals({len(self)} intervals, {self.measure} ns)"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Intervals):
            return NotImplemented
        return np.array_equal(self.start, other.start) and np.array_equal(self.end, other.end)

    __hash__ = None  # type: ignore[assignment]  # columns are not hashable

    def __and__(self, other: Intervals) -> Intervals:
        left, right = overlap_join(self.start, self.end, other)
        return Intervals(np.maximum(self.start[left], other.start[right]), np.minimum(self.end[left], other.end[right]))

    def __or__(self, other: Intervals) -> Intervals:
        return union(np.concatenate([self.start, other.start]), np.concatenate([self.end, other.end]))

    def __sub__(self, other: Intervals) -> Intervals:
        if not len(self) or not len(other):
            return self
        return self & other.complement(int(self.start[0]), int(self.end[-1]))

    @property
    def measure(self) -> int:
        """Summed length in nanoseconds."""
        return int((self.end - self.start).sum())

    def clip(self, start: int, end: int) -> Intervals:
        """Return the part inside ``[start, end)``."""
        first = np.searchsorted(self.end, start, "right")
        last = max(first, np.searchsorted(self.start, end, "left")) if end > start else first
        return Intervals(np.maximum(self.start[first:last], start), np.minimum(self.end[first:last], end))

    def complement(self, start: int, end: int) -> Intervals:
        """Return the part of ``[start, end)`` that lies outside the set."""
        if end <= start:
            return Intervals.empty()
        inside = self.clip(start, end)
        lows, highs = np.concatenate([[start], inside.end]), np.concatenate([inside.start, [end]])
        keep = highs > lows
        return Intervals(lows[keep], highs[keep])

    def before(self, times: np.ndarray) -> np.ndarray:
        """Return how much of the set lies before each of `times`; int64 ns."""
        if not len(self):
            return np.zeros(len(times), np.int64)
        ends_at = np.cumsum(self.end - self.start)
        # the interval that starts at or before the time, if any
        row = np.searchsorted(self.start, times, "right") - 1
        beyond = np.maximum(self.end[row] - times, 0)
        return np.where(row >= 0, ends_at[row] - beyond, 0)

    def within(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Return how much of the set lies in each window ``[start, end)``; int64 ns [num_windows]."""
        return self.before(end) - self.before(start)

    def contains(self, times: np.ndarray) -> np.ndarray:
        """Return whether each of `times` lies in the set; bool."""
        if not len(self):
            return np.zeros(len(times), np.bool_)
        row = np.searchsorted(self.start, times, "right") - 1
        return (row >= 0) & (times < self.end[row])


def union(start: np.ndarray, end: np.ndarray) -> Intervals:
    """Return the union of intervals in any order; those that touch merge, empty and negative ones vanish."""
    start, end = np.asarray(start, np.int64), np.asarray(end, np.int64)
    valid = end > start
    if not valid.all():
        start, end = start[valid], end[valid]
    if not len(start):
        return Intervals.empty()
    if np.any(start[1:] < start[:-1]):
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    opens = np.flatnonzero(np.concatenate([[True], start[1:] > reach[:-1]]))
    return Intervals(start[opens], reach[np.append(opens[1:], len(start)) - 1])


def union_measure(start: np.ndarray, end: np.ndarray, group: np.ndarray, num_groups: int) -> np.ndarray:
    """Return the measure of the union inside each group; int64 ns [num_groups].

    Args:
        start, end: intervals, sorted by start; int64 [n].
        group: 0 <= group < num_groups; int64 [n].
    """
    out = np.zeros(num_groups, np.int64)
    if not len(start):
        return out
    if np.any(group[1:] < group[:-1]):
        order = np.argsort(group, kind="stable")
        start, end, group = start[order], end[order], group[order]
    origin = int(start.min())
    span = max(int(end.max()) - origin, 1) + 1
    # every group gets a stretch of the time axis of its own, as many at a time as int64 has room for
    groups_at_once = max(1, (2**62) // span)
    for low in range(0, num_groups, groups_at_once):
        first, last = np.searchsorted(group, [low, low + groups_at_once])
        if first == last:
            continue
        shift = (group[first:last] - low) * np.int64(span) - origin
        lows, reach = start[first:last] + shift, np.maximum.accumulate(end[first:last] + shift)
        previous = np.concatenate([[np.iinfo(np.int64).min], reach[:-1]])
        # what each interval adds beyond all earlier ones
        added = np.maximum(reach - np.maximum(lows, previous), 0)
        opens = np.flatnonzero(np.concatenate([[True], group[first + 1 : last] != group[first : last - 1]]))
        out[group[first:last][opens]] = np.add.reduceat(added, opens)
    return out


def overlap_join(start: np.ndarray, end: np.ndarray, other: Intervals) -> tuple[np.ndarray, np.ndarray]:
    """Return all pairs (row of the given intervals, row of `other`) that share more than a point; int64 each.

    Pairs are ordered by the first row, then the second.
    """
    first = np.searchsorted(other.end, start, "right")
    last = np.searchsorted(other.start, end, "left")
    counts = np.maximum(last - first, 0)
    counts[end <= start] = 0
    left = np.repeat(np.arange(len(start)), counts)
    offsets = np.cumsum(counts) - counts
    right = np.arange(len(left)) - np.repeat(offsets - first, counts)
    return left, right
