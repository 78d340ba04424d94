"""From a launch to what it started on the device, and back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mrv2.trace.analysis.model import Analysis
from mrv2.viz.index import Row, TimelineIndex

# a graph launch may own thousands of operations; the picture shows the first of them
MAX_SHOWN = 500


@dataclass(frozen=True)
class Place:
    """An event in the index: number of the row, number in the row, and its time."""

    row: int
    i: int
    start: int
    end: int


@dataclass(frozen=True)
class Links:
    """An event and the events of the same correlation on the other side, by start."""

    chosen: Place
    # API call: its operations; operation: its call
    partners: list[Place]
    # number of partners, also of those that are not listed
    total: int


def links_of(analysis: Analysis, index: TimelineIndex, row: int, i: int) -> Links:
    """Return the partners of event `i` of row `row`; none for ranges, waits and uncorrelated operations."""
    lane, join = index.rows[row], analysis.join
    chosen = Place(row, i, int(lane.start[i]), int(lane.end[i]))
    event = int(lane.event[i])
    if lane.table == "api":
        launch = int(np.searchsorted(join.launch, event))
        owns = launch < len(join.launch) and join.launch[launch] == event
        partners = np.flatnonzero(join.launch_of_op == launch) if owns else np.zeros(0, np.int64)
    elif lane.table == "ops":
        partners = join.call[event : event + 1]
        partners = partners[partners >= 0]
    else:
        return Links(chosen, [], 0)
    other = "ops" if lane.table == "api" else "api"
    places = [found for event in partners[:MAX_SHOWN].tolist() if (found := find(index, other, event)) is not None]
    return Links(chosen, places, len(partners))


def find(index: TimelineIndex, table: str, event: int) -> Place | None:
    """Return where row `event` of a trace's table is drawn, or None when it is merged into an outline."""
    for number, row in enumerate(index.rows):
        if row.table == table and (i := _position(row, event)) is not None:
            return Place(number, i, int(row.start[i]), int(row.end[i]))
    return None


def _position(row: Row, event: int) -> int | None:
    # events of a row keep the order of their table
    i = int(np.searchsorted(row.event, event))
    return i if i < len(row) and row.event[i] == event else None
