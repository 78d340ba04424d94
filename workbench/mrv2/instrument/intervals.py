"""Arithmetic on half-open time intervals, kept as sorted disjoint lists of ``(start_ns, end_ns)``."""

from __future__ import annotations

from collections.abc import Iterable

Intervals = list[tuple[int, int]]


def merge(intervals: Iterable[tuple[int, int]]) -> Intervals:
    """Return the union, sorted and disjoint; empty intervals vanish."""
    out: Intervals = []
    for start, end in sorted(i for i in intervals if i[1] > i[0]):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Return the times that lie in both merged lists."""
    out: Intervals = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if end > start:
            out.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return out


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Return the times that lie in merged `a` and not in merged `b`."""
    out: Intervals = []
    j = 0
    for start, end in a:
        while j < len(b) and b[j][1] <= start:
            j += 1
        k = j
        while k < len(b) and b[k][0] < end:
            if b[k][0] > start:
                out.append((start, b[k][0]))
            start = max(start, b[k][1])
            k += 1
        if end > start:
            out.append((start, end))
    return out


def total(intervals: Intervals) -> int:
    """Return the summed length of a merged list, in nanoseconds."""
    return sum(end - start for start, end in intervals)
