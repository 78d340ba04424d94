"""What a window of a trace looks like at a given width, found without touching the events outside it.

A `Row` is one drawn line: intervals that never overlap.  From running sums of their lengths follows the exact busy
share of any pixel of any window in two binary searches, so no zoom level is ever precomputed or averaged.  Rows with
room for it are drawn event by event, the others as one coloured cell a pixel.  Synchronisation is a channel of its own:
a pixel with one sync among a million kernels still gets its tick, with the count.

Times are int64 nanoseconds; windows may lie between them (float).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from mrv2.trace.table import TraceError

# events drawn one by one in a view, over all rows; a polygon in the page is what costs
MAX_BARS = 1500
# a row is drawn event by event when it has at most this many events a pixel
BARS_PER_PIXEL = 0.5
# ticks run over the full height when on average this many pixels lie between two; else their own row shows them
TICK_PIXELS = 8
# the row of what the ticks stand for; its cells are never faint
TICK_TABLE = "host_syncs"
# windows prepared on either side of the view, for dragging
MARGIN = 0.5
_COLUMNS = ("start", "end", "hue", "name", "step", "corr", "event")


@dataclass(frozen=True, eq=False)
class Row:
    """One drawn line of the timeline."""

    # identity across traces: "stream:0:7:0"
    key: str
    label: str
    # rows of one group stand together under one label
    group: str
    # all [num_events], sorted; end[i] <= start[i + 1]
    start: np.ndarray
    end: np.ndarray
    # [num_events] uint8, number of the hue
    hue: np.ndarray
    # all [num_events]: string id, step and correlation (-1 none), row in the trace's table `table`
    name: np.ndarray
    step: np.ndarray
    corr: np.ndarray
    event: np.ndarray
    table: str = "ops"
    # -1: the events belong to no process, or to several
    process: int = -1
    # depth inside the group: 0 outermost
    depth: int = 0
    # height relative to an outermost row
    height: float = 1.0

    def __len__(self) -> int:
        return len(self.start)

    @cached_property
    def _by_hue(self) -> list[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
        """Return (hue, starts, lengths, running sum of lengths) for each hue of the row."""
        out = []
        for hue in np.unique(self.hue).tolist():
            mine = self.hue == hue
            length = (self.end - self.start)[mine]
            out.append((hue, self.start[mine], length, np.concatenate([[0], np.cumsum(length)])))
        return out

    def touching(self, a: float, b: float) -> slice:
        """Return the events that touch ``[a, b)``; a point counts where it lies."""
        first = int(np.searchsorted(self.start, a, "left"))
        # at most one event starts before and reaches in
        if first and self.end[first - 1] > a:
            first -= 1
        return slice(first, max(first, int(np.searchsorted(self.start, b, "left"))))

    def count(self, a: float, b: float) -> int:
        """Return how many events touch ``[a, b)``."""
        found = self.touching(a, b)
        return found.stop - found.start

    def take(self, part: slice) -> Row:
        """Return the row with only the events of `part`."""
        return replace(self, **{name: getattr(self, name)[part] for name in _COLUMNS})

    def density(self, a: float, b: float, num_bins: int) -> Density:
        """Return the exact busy share of each of `num_bins` equal parts of ``[a, b)``."""
        edges = np.linspace(a, b, num_bins + 1)
        width = (b - a) / num_bins
        total = np.zeros(num_bins)
        best = np.zeros(num_bins)
        events = np.zeros(num_bins, np.int64)
        hue_of = np.zeros(num_bins, np.uint8)
        for hue, start, length, running in self._by_hue:
            begun = np.searchsorted(start, edges, "left")
            last = np.maximum(begun - 1, 0)
            inside = np.clip(edges - start[last], 0, length[last])
            busy = np.diff(np.where(begun > 0, running[last] + inside, 0))
            begins = np.diff(begun)
            events += begins
            total += busy
            # a point has no length, but its hue must show where nothing else does
            weight = np.where((busy <= 0) & (begins > 0), 1e-9, busy)
            wins = weight > best
            best[wins] = weight[wins]
            hue_of[wins] = hue
        return Density(np.clip(total / width, 0, 1), hue_of, events, best > 0)


@dataclass(frozen=True, eq=False)
class Density:
    """A row as cells."""

    # [num_bins] busy share, 0 to 1
    share: np.ndarray
    # [num_bins] uint8, the hue with the most time
    hue: np.ndarray
    # [num_bins] events that begin in the cell
    events: np.ndarray
    # [num_bins] whether anything is there, be it too short to be a share
    present: np.ndarray

    def levels(self, is_tick: bool = False) -> np.ndarray:
        """Return the busy share in 255ths, rounded up: 0 only where nothing is; uint8 [num_bins].

        With `is_tick` whatever is there is full.
        """
        if is_tick:
            return np.where(self.present, 255, 0).astype(np.uint8)
        return np.where(self.present, np.clip(np.ceil(self.share * 255), 1, 255), 0).astype(np.uint8)


@dataclass(frozen=True, eq=False)
class Ticks:
    """Instants that must never vanish: host synchronisations."""

    # both [num_ticks], sorted by time; `name` is a string id
    time: np.ndarray
    name: np.ndarray

    def binned(self, a: float, b: float, num_bins: int) -> BinnedTicks:
        """Return one tick for each of `num_bins` parts of ``[a, b)`` that holds any, at its first instant."""
        edges = np.searchsorted(self.time, np.linspace(a, b, num_bins + 1), "left")
        counts = np.diff(edges)
        some = np.flatnonzero(counts)
        first = edges[some]
        return BinnedTicks(self.time[first], counts[some], self.name[first])


@dataclass(frozen=True, eq=False)
class BinnedTicks:
    """Ticks to draw, each for a group of neighbours."""

    # all [num_drawn]: exact instant of the first, how many there are, string id of the first
    time: np.ndarray
    count: np.ndarray
    name: np.ndarray


@dataclass(frozen=True, eq=False)
class Tile:
    """What to draw for a window: every row is in `bars` or in `cells`, never in both."""

    # the window that was asked for, and the range that was filled: some more on either side
    window: tuple[float, float]
    covered: tuple[float, float]
    width_px: int
    # numbers of the rows drawn event by event, and of those drawn as cells
    bar_rows: list[int]
    cell_rows: list[int]
    # for each of `bar_rows`: its events
    bars: list[slice]
    # for each of `cell_rows`
    cells: list[Density]
    ticks: BinnedTicks
    # whether there is room for a line over the full height for each tick
    has_tick_lines: bool
    # numbers of the step bands that touch the range; empty when they would be too thin to tell apart
    bands: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # [num_bands]


@dataclass(frozen=True, eq=False)
class Bands:
    """Steps, sorted by start; they may overlap when steps run ahead."""

    # all [num_steps]
    start: np.ndarray
    end: np.ndarray
    step: np.ndarray

    @cached_property
    def shade_end(self) -> np.ndarray:
        """Return where the band of each step ends: where the step does, at the latest where the next one starts."""
        return np.minimum(self.end, np.append(self.start[1:], self.end[-1:]))


class TimelineIndex:
    """Rows, ticks and step bands of one trace.

    Raises:
        TraceError: the trace has no events.
    """

    def __init__(self, rows: list[Row], ticks: Ticks, bands: Bands) -> None:
        filled = [row for row in rows if len(row)]
        if not filled:
            raise TraceError("nothing to draw: the trace has no events")
        self.rows = filled
        self.ticks = ticks
        self.bands = bands
        # what the profiler did before and after the recording would stretch the axis
        timed = [row for row in filled if row.table != "overhead"] or filled
        self.origin = int(min(row.start[0] for row in timed))
        self.end = max(int(row.end[-1]) for row in timed)
        if self.end == self.origin:
            self.end += 1

    @property
    def num_events(self) -> int:
        """Return the number of events over all rows."""
        return sum(map(len, self.rows))

    def clamp(self, a: float, b: float) -> tuple[float, float]:
        """Return ``[a, b)`` as a window that is not empty and not wider than three times the trace."""
        a, b = min(a, b), max(a, b)
        span = self.end - self.origin
        width = min(max(b - a, 1.0), 3.0 * span)
        middle = min(max((a + b) / 2, self.origin - span), self.end + span)
        return middle - width / 2, middle + width / 2

    def tile(self, a: float, b: float, width_px: int, *, margin: float = MARGIN, max_bars: int = MAX_BARS) -> Tile:
        """Return what to draw for ``[a, b)`` on `width_px` pixels, and `margin` windows more on either side."""
        a, b = self.clamp(a, b)
        width_px = max(int(width_px), 1)
        side = margin * (b - a)
        # nothing lies outside the trace, so nothing is prepared there; a whole number of pixels keeps cells on pixels
        pixel = (b - a) / width_px
        left = int(min(side, max(a - self.origin, 0.0)) / pixel)
        right = int(min(side, max(self.end - b, 0.0)) / pixel)
        num_bins = width_px + left + right
        low, high = a - left * pixel, b + right * pixel
        bar_rows, cell_rows = self._split(a, b, width_px, max_bars)
        ticks = self.ticks.binned(low, high, num_bins)
        return Tile(
            window=(a, b),
            covered=(low, high),
            width_px=width_px,
            bar_rows=bar_rows,
            cell_rows=cell_rows,
            bars=[self._with_margin(self.rows[i], a, b, low, high) for i in bar_rows],
            cells=[self.rows[i].density(low, high, num_bins) for i in cell_rows],
            ticks=ticks,
            has_tick_lines=len(ticks.time) * TICK_PIXELS <= num_bins,
            bands=self._bands(low, high, pixel),
        )

    def _split(self, a: float, b: float, width_px: int, max_bars: int) -> tuple[list[int], list[int]]:
        """Return the rows to draw event by event, rows with few events first, and the others."""
        counts = [row.count(a, b) for row in self.rows]
        bars: list[int] = []
        room = max_bars
        for i in sorted(range(len(counts)), key=lambda i: (counts[i], i)):
            if counts[i] > room or counts[i] > max(BARS_PER_PIXEL * width_px, 1):
                break
            bars.append(i)
            room -= counts[i]
        chosen = set(bars)
        return sorted(bars), [i for i in range(len(counts)) if i not in chosen]

    def _with_margin(self, row: Row, a: float, b: float, low: float, high: float) -> slice:
        """Return the events of ``[low, high)``, or of the view alone when the surroundings are much denser."""
        view, wide = row.touching(a, b), row.touching(low, high)
        return wide if wide.stop - wide.start <= 4 * (view.stop - view.start) + 64 else view

    def _bands(self, low: float, high: float, pixel: float) -> np.ndarray:
        # overlapping bands: the latest end so far tells where the first that reaches in can stand
        first = int(np.searchsorted(self._band_reach, low, "right"))
        last = int(np.searchsorted(self.bands.start, high, "left"))
        found = np.arange(first, max(first, last))
        found = found[self.bands.end[found] > low]
        # thinner than some pixels a band is noise
        return found if len(found) * 12 * pixel <= high - low else found[:0]

    @cached_property
    def _band_reach(self) -> np.ndarray:
        return np.maximum.accumulate(self.bands.end)

    def describe(self) -> dict[str, Any]:
        """Return counts for people and tests."""
        return {"rows": len(self.rows), "events": self.num_events, "ticks": len(self.ticks.time)}
