"""How intervals of one lane lie inside each other."""

from __future__ import annotations

import numpy as np


def sweep_order(start: np.ndarray, end: np.ndarray, lane: np.ndarray) -> np.ndarray:
    """Return row numbers by lane, then start, outer intervals before inner ones; int64 [rows]."""
    return np.lexsort((-end, start, lane))


def clamp_children(start: np.ndarray, end: np.ndarray, lane: np.ndarray, tolerance_ns: int) -> np.ndarray:
    """Return ends in which no interval outlives the one it starts in by `tolerance_ns` or less; int64 [rows].

    Rounded times make a child end a little after its parent.  What sticks out by more is left alone: it overlaps.
    """
    out = end.copy()
    order = sweep_order(start, end, lane)
    starts, ends, lanes = start[order].tolist(), end[order].tolist(), lane[order].tolist()
    open_ends: list[int] = []
    last_lane = None
    for i, row in enumerate(order.tolist()):
        if lanes[i] != last_lane:
            open_ends, last_lane = [], lanes[i]
        while open_ends and open_ends[-1] <= starts[i]:
            open_ends.pop()
        mine = ends[i]
        if open_ends and 0 < mine - open_ends[-1] <= tolerance_ns:
            mine = out[row] = open_ends[-1]
        open_ends.append(mine)
    return out


def crossing(start: np.ndarray, end: np.ndarray, lane: np.ndarray) -> np.ndarray:
    """Return which intervals end after one that they start in, so that the lane does not nest; bool [rows].

    Without the intervals marked, every lane nests.
    """
    out = np.zeros(len(start), np.bool_)
    order = sweep_order(start, end, lane)
    starts, ends, lanes = start[order].tolist(), end[order].tolist(), lane[order].tolist()
    open_ends: list[int] = []
    last_lane = None
    for i, row in enumerate(order.tolist()):
        if lanes[i] != last_lane:
            open_ends, last_lane = [], lanes[i]
        while open_ends and open_ends[-1] <= starts[i]:
            open_ends.pop()
        if open_ends and ends[i] > open_ends[-1]:
            out[row] = True
        else:
            open_ends.append(ends[i])
    return out


def sub_lanes(start: np.ndarray, end: np.ndarray, lane: np.ndarray) -> np.ndarray:
    """Return the lowest number for each interval such that equal (lane, number) never overlap; int32 [rows]."""
    out = np.zeros(len(start), np.int32)
    order = sweep_order(start, end, lane)
    starts, ends, lanes = start[order].tolist(), end[order].tolist(), lane[order].tolist()
    free_from: list[int] = []
    last_lane = None
    for i, row in enumerate(order.tolist()):
        if lanes[i] != last_lane:
            free_from, last_lane = [], lanes[i]
        number = next((k for k, free in enumerate(free_from) if free <= starts[i]), len(free_from))
        if number == len(free_from):
            free_from.append(ends[i])
        else:
            free_from[number] = ends[i]
        out[row] = number
    return out


def enclosing(
    start: np.ndarray, end: np.ndarray, lane: np.ndarray, at: np.ndarray, at_lane: np.ndarray
) -> list[list[int]]:
    """Return for each instant the rows of its lane that hold it, innermost first."""
    out: list[list[int]] = [[] for _ in range(len(at))]
    wanted = np.isin(lane, at_lane)
    rows = np.flatnonzero(wanted)
    rows = rows[sweep_order(start[rows], end[rows], lane[rows])]
    starts, ends, lanes = start[rows].tolist(), end[rows].tolist(), lane[rows].tolist()
    asked = np.lexsort((at, at_lane)).tolist()
    stack: list[int] = []
    i, last_lane = 0, None
    for query in asked:
        now, mine = int(at[query]), at_lane[query]
        if mine != last_lane:
            stack, last_lane = [], mine
            i = int(np.searchsorted(lane[rows], mine))
        while i < len(rows) and lanes[i] == mine and starts[i] <= now:
            while stack and ends[stack[-1]] <= starts[i]:
                stack.pop()
            stack.append(i)
            i += 1
        while stack and ends[stack[-1]] <= now:
            stack.pop()
        out[query] = [int(rows[k]) for k in reversed(stack) if ends[k] > now]
    return out
