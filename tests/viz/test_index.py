"""What a window shows, against a raster of single nanoseconds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv2.trace.table import TraceError
from mrv2.viz.index import Bands, Row, Ticks, TimelineIndex

SPAN = 60


@st.composite
def rows(draw: st.DrawFn, key: str = "row") -> Row:
    """Intervals that do not overlap, points among them, with hues 0 to 3."""
    edges = sorted(draw(st.lists(st.integers(0, SPAN), min_size=2, max_size=24)))
    pairs = list(zip(edges[::2], edges[1::2]))
    hues = draw(st.lists(st.integers(0, 3), min_size=len(pairs), max_size=len(pairs)))
    start, end = (np.array([pair[i] for pair in pairs], np.int64) for i in (0, 1))
    number = np.arange(len(pairs))
    return Row(key, key, key, start, end, np.array(hues, np.uint8), number, number, number, number)


@given(rows(), st.integers(-5, SPAN), st.integers(1, SPAN), st.integers(1, 40))
def test_density_is_the_busy_share_of_each_cell(row: Row, a: int, width: int, num_bins: int) -> None:
    # cells of a whole number of nanoseconds, so that a raster can be exact
    b = a + width * num_bins
    cells = row.density(a, b, num_bins)
    for i in range(num_bins):
        low, high = a + i * width, a + (i + 1) * width
        busy = dict.fromkeys(range(4), 0)
        for start, end, hue in zip(row.start.tolist(), row.end.tolist(), row.hue.tolist()):
            busy[hue] += sum(1 for ns in range(low, high) if start <= ns < end)
        assert cells.share[i] == pytest.approx(sum(busy.values()) / width, abs=1e-12)
        begins = np.flatnonzero((row.start >= low) & (row.start < high))
        assert cells.events[i] == len(begins)
        assert cells.present[i] == (any(busy.values()) or bool(len(begins)))
        if any(busy.values()):
            assert busy[int(cells.hue[i])] == max(busy.values())
        elif len(begins):
            assert cells.hue[i] in row.hue[begins]


@given(rows(), st.floats(-5, SPAN), st.floats(0.1, SPAN))
def test_touching_is_what_a_scan_finds(row: Row, a: float, width: float) -> None:
    b = a + width
    found = row.touching(a, b)
    scan = [
        i
        for i, (start, end) in enumerate(zip(row.start.tolist(), row.end.tolist()))
        if start < b and (end > a or start >= a)
    ]
    assert list(range(found.start, found.stop)) == scan
    assert row.count(a, b) == len(scan)


@given(rows(), st.integers(1, 300))
def test_nothing_that_happened_is_invisible(row: Row, num_bins: int) -> None:
    levels = row.density(-1, SPAN + 1, num_bins).levels()
    cells = np.searchsorted(np.linspace(-1, SPAN + 1, num_bins + 1), row.start, "right") - 1
    assert (levels[cells] > 0).all()


@given(st.lists(st.integers(0, SPAN), min_size=1, max_size=30), st.integers(1, 20))
def test_ticks_are_counted_and_keep_their_instant(times: list[int], num_bins: int) -> None:
    time = np.sort(np.array(times, np.int64))
    ticks = Ticks(time, np.arange(len(time)))
    drawn = ticks.binned(0, SPAN + 1, num_bins)
    assert drawn.count.sum() == len(time)
    assert np.isin(drawn.time, time).all()
    assert drawn.time[0] == time[0]
    # the first tick of each cell stands for it
    cell = np.floor(drawn.time * num_bins / (SPAN + 1))
    assert len(np.unique(cell)) == len(cell)


def _index(*given_rows: Row, bands: Bands | None = None) -> TimelineIndex:
    none = np.zeros(0, np.int64)
    return TimelineIndex(list(given_rows), Ticks(none, none), bands or Bands(none, none, none))


def _regular(num: int, key: str, period: int = 10) -> Row:
    number = np.arange(num)
    return Row(key, key, key, number * period, number * period + 5, np.zeros(num, np.uint8), *([number] * 4))


@settings(max_examples=30)
@given(st.lists(rows(), min_size=1, max_size=5), st.floats(-10, SPAN), st.floats(1, 2 * SPAN), st.integers(1, 50))
def test_a_tile_draws_every_row_once(some: list[Row], a: float, width: float, width_px: int) -> None:
    if not any(map(len, some)):
        return
    index = _index(*some)
    tile = index.tile(a, a + width, width_px, max_bars=10)
    assert sorted(tile.bar_rows + tile.cell_rows) == list(range(len(index.rows)))
    low, high = tile.covered
    assert low <= tile.window[0] and tile.window[1] <= high
    for number, part in zip(tile.bar_rows, tile.bars):
        seen = index.rows[number].touching(*tile.window)
        assert part.start <= seen.start and seen.stop <= part.stop
    assert sum(index.rows[i].count(*tile.window) for i in tile.bar_rows) <= 10


def test_rows_with_few_events_are_drawn_one_by_one_beside_dense_ones() -> None:
    index = _index(_regular(100_000, "dense"), _regular(20, "sparse", 50_000))
    tile = index.tile(0, 1_000_000, 1000)
    assert [index.rows[i].key for i in tile.bar_rows] == ["sparse"]
    assert [index.rows[i].key for i in tile.cell_rows] == ["dense"]
    near = index.tile(1000, 2000, 1000)
    assert not near.cell_rows


def test_cells_lie_on_the_pixels_of_the_view() -> None:
    index = _index(_regular(100_000, "dense"))
    tile = index.tile(400_000, 600_000, 1000)
    low, high = tile.covered
    assert len(tile.cells[0].share) == 2000
    assert (high - low) / 2000 == pytest.approx(200)
    # at the trace's edge nothing is prepared outside it
    assert len(index.tile(0, 1_000_000, 1000).cells[0].share) == 1000


def test_a_view_beside_a_dense_region_is_not_flooded_by_it() -> None:
    dense, far = _regular(50_000, "dense"), 5_000_000
    row = Row(
        "r", "r", "r", np.append(dense.start, far), np.append(dense.end, far + 5), *([np.zeros(50_001, np.int64)] * 5)
    )
    index = _index(row)
    tile = index.tile(499_900, 1_000_000, 1000)
    assert sum(part.stop - part.start for part in tile.bars) <= 4 * 10 + 64


def test_ticks_get_lines_only_where_there_is_room() -> None:
    none = np.zeros(0, np.int64)
    times = np.arange(0, 1_000_000, 1000)
    index = TimelineIndex([_regular(100_000, "dense")], Ticks(times, np.zeros(1000, np.int64)), Bands(none, none, none))
    assert not index.tile(0, 1_000_000, 1000).has_tick_lines
    near = index.tile(100_000, 200_000, 1000)
    assert near.has_tick_lines and len(near.ticks.time) == 200


def test_cells_of_ticks_are_never_faint() -> None:
    cells = _regular(100, "row").density(0, 1000, 10)
    assert set(cells.levels().tolist()) == {128}
    assert set(cells.levels(is_tick=True).tolist()) == {255}


def test_bands_show_when_they_are_wide_enough() -> None:
    start = np.arange(0, 1_000_000, 1000)
    index = _index(_regular(100_000, "dense"), bands=Bands(start, start + 1500, np.arange(1000)))
    assert not len(index.tile(0, 1_000_000, 1000).bands)
    near = index.tile(100_000, 110_000, 1000, margin=0).bands
    assert index.bands.step[near].tolist() == list(range(99, 110))
    # overlapping steps are shaded up to where the next one starts
    assert index.bands.shade_end[5] == start[6] and index.bands.shade_end[-1] == index.bands.end[-1]


def test_windows_are_kept_sane() -> None:
    index = _index(_regular(100, "row"))
    assert index.clamp(500, 400) == (400, 500)
    a, b = index.clamp(100, 100)
    assert b - a == 1
    a, b = index.clamp(-1e12, 1e12)
    assert b - a == 3 * (index.end - index.origin)


def test_an_empty_trace_has_no_picture() -> None:
    with pytest.raises(TraceError, match="no events"):
        _index()
