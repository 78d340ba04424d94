"""The printed timeline says what the trace says: outlines, cells, ticks, labels and hover texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mrv2.trace.analysis.model import Analysis
from mrv2.viz import Timeline, drawing, theme
from mrv2.viz.lanes import build_index
from viz.traces import NUM_STEPS, STEP_NS, big_trace, small_trace

pytest.importorskip("plotly")
ORIGIN = 1_000_000


def _named(figure: Any, name: str) -> Any:
    return next(trace for trace in figure.data if trace.name == name)


def _ns(x: np.ndarray) -> np.ndarray:
    """Axis values (seconds from the start) as nanoseconds of the trace's clock, rounded: they must be exact."""
    return np.rint(np.asarray(x, np.float64) * 1e9).astype(np.int64) + ORIGIN


def _rectangles(trace: Any) -> list[tuple[int, int, float, float]]:
    """The closed outlines of a trace as (start, end, top, bottom)."""
    x, y = np.array(trace.x, np.float64).reshape(-1, 6), np.array(trace.y, np.float64).reshape(-1, 6)
    assert np.isnan(x[:, 5]).all()
    assert (x[:, [0, 1]] == x[:, [3, 2]]).all()
    return list(zip(*_ns(x[:, :2]).T.tolist(), y[:, 0].tolist(), y[:, 2].tolist()))


def test_every_event_has_its_outline_at_exact_times_in_its_row() -> None:
    trace = small_trace()
    timeline = Timeline(trace)
    index, where = timeline.index, drawing.geometry(timeline.index.rows)
    tile = timeline.tile()
    assert not tile.cell_rows
    figure = timeline.figure()
    drawn = {hue.label: _rectangles(_named(figure, hue.label)) for hue in theme.HUES}
    for row, (top, bottom) in zip(index.rows, where.boxes):
        for start, end, hue in zip(row.start.tolist(), row.end.tolist(), row.hue.tolist()):
            assert (start, end, top, bottom) in drawn[theme.HUES[hue].label]
    assert sum(map(len, drawn.values())) == index.num_events


def test_rows_do_not_touch_and_labels_stand_at_their_groups() -> None:
    rows = build_index(Analysis(small_trace())).rows
    where = drawing.geometry(rows)
    for (_, bottom), (top, _) in zip(where.boxes, where.boxes[1:]):
        assert top > bottom
    groups = list(dict.fromkeys(row.group for row in rows))
    assert len(where.labels) == len(groups)
    for (label, y), group in zip(where.labels, groups):
        boxes = [box for row, box in zip(rows, where.boxes) if row.group == group]
        assert boxes[0][0] < y < boxes[-1][1]
        assert label == next(row.label for row in rows if row.group == group)


def test_ticks_stand_at_the_exact_instant_of_every_sync() -> None:
    trace = small_trace()
    ticks = _named(Timeline(trace).figure(), "host syncs")
    x = np.array(ticks.x, np.float64).reshape(-1, 3)
    assert _ns(x[:, 0]).tolist() == _ns(x[:, 1]).tolist() == trace.syncs.start.tolist()


def test_no_sync_is_lost_among_a_hundred_thousand_kernels() -> None:
    trace = big_trace(100_000)
    timeline = Timeline(trace)
    tile = timeline.tile(width_px=200)
    assert tile.ticks.count.sum() == len(trace.syncs) > 200 >= len(tile.ticks.count)
    # too dense for lines, they fill their row at full strength
    assert not len(_named(timeline.figure(width_px=200), "host syncs").x)
    row = [row.key for row in timeline.index.rows].index("syncs:0")
    cells = _named(timeline.figure(width_px=200), "cells")
    line = np.array(cells.z, np.float64)[list(cells.y).index(drawing.geometry(timeline.index.rows).boxes[row][0])]
    assert (line == (theme.HUE_ID["wait"] + 1) * theme.LEVELS - 0.5).all()
    near = timeline.figure(window=(timeline.index.origin, timeline.index.origin + 4_000_000), width_px=1000)
    assert any(text == "<b>cudaEventSynchronize</b>" for text in _named(near, "host syncs").text)


def test_cells_show_the_exact_share_in_the_hue_of_the_most_time() -> None:
    timeline = Timeline(big_trace(100_000))
    tile = timeline.tile(width_px=300)
    figure = timeline.figure(width_px=300)
    cells = _named(figure, "cells")
    z = np.array(cells.z, np.float64)
    edges = list(cells.y)
    where = drawing.geometry(timeline.index.rows)
    for number, density in zip(tile.cell_rows, tile.cells):
        if timeline.index.rows[number].key == "syncs:0":
            continue
        top, bottom = where.boxes[number]
        line = z[edges.index(top)]
        assert edges[edges.index(top) + 1] == bottom
        assert (np.isnan(line) == ~density.present).all()
        seen = density.present
        assert (line[seen] // theme.LEVELS == density.hue[seen]).all()
        brightness = np.floor(line[seen] % theme.LEVELS)
        assert (np.abs(brightness - (density.share[seen] * theme.LEVELS - 0.5)) <= 0.6).all()
    assert cells.zmax == len(theme.HUES) * theme.LEVELS
    assert z.shape[1] * cells.dx == pytest.approx((tile.covered[1] - tile.covered[0]) * 1e-9)


def test_what_is_shorter_than_a_pixel_is_drawn_a_pixel_wide() -> None:
    timeline = Timeline(small_trace())
    figure = timeline.figure(width_px=20)
    pixel = (timeline.index.end - timeline.index.origin) / 20
    for hue in theme.HUES:
        for start, end, _, _ in _rectangles(_named(figure, hue.label)):
            assert end - start >= pixel - 1


def test_hover_says_name_duration_step_correlation_and_bandwidth() -> None:
    timeline = Timeline(small_trace())
    texts = set(_named(timeline.figure(), "events").hovertext)
    copy = next(text for text in texts if text.startswith("<b>Memcpy DtoH</b>") and "correlation 4" in text)
    assert "1.4 us at 0.017600 ms" in copy
    assert "step 1" in copy
    # 1400 bytes in 1400 ns
    assert "1.4 kB, 1 GB/s" in copy
    assert any(text.startswith("<b>step 2</b>") for text in texts)


def test_hover_points_lie_on_their_bars_and_wide_bars_have_several() -> None:
    timeline = Timeline(small_trace())
    points = _named(timeline.figure(width_px=2000), "events")
    kernel = [x for x, text in zip(points.x, points.hovertext) if "_decode_kernel" in text and "step 0" in text]
    # 2000 of 39800 ns on 2000 pixels
    assert len(kernel) == 3
    assert all(ORIGIN + 3000 < at < ORIGIN + 5000 for at in _ns(np.array(kernel)).tolist())


def test_labels_fit_their_bars_and_are_readable() -> None:
    timeline = Timeline(small_trace(), window=(ORIGIN, ORIGIN + STEP_NS))
    labels = _named(timeline.figure(), "labels")
    assert {"0", "execute_model", "forward", "_decode_kernel", "cudaEventSynchronize"} <= set(labels.text)
    for colour in set(labels.textfont.color):
        assert colour in ("#000000", "#ffffff")
    narrow = _named(timeline.figure(width_px=120), "labels")
    assert all(text in ("0",) or text.endswith("\u2026") or len(text) < 9 for text in narrow.text)


def test_names_cannot_smuggle_markup_into_the_hover_text() -> None:
    trace = small_trace()
    trace.strings = ["<img src=x>" if text == "nvjet_gemm" else text for text in trace.strings]
    texts = _named(Timeline(trace).figure(), "events").hovertext
    assert any("&lt;img src=x&gt;" in text for text in texts)
    assert not any("<img" in text for text in texts)


def test_every_other_step_is_shaded() -> None:
    shapes = Timeline(small_trace()).figure().layout.shapes
    assert [_ns(np.array([shape.x0, shape.x1])).tolist() for shape in shapes] == [
        [ORIGIN + step * STEP_NS, ORIGIN + (step + 1) * STEP_NS] for step in range(0, NUM_STEPS, 2)
    ]


def test_the_axis_shows_the_window_and_the_rows_by_name() -> None:
    figure = Timeline(small_trace(), window=(ORIGIN + 100, ORIGIN + 20_100), theme="dark", title="a run").figure()
    assert _ns(np.array(figure.layout.xaxis.range)).tolist() == [ORIGIN + 100, ORIGIN + 20_100]
    assert list(figure.layout.yaxis.ticktext)[:2] == ["steps", "engine (5)"]
    assert figure.layout.yaxis.range[0] > figure.layout.yaxis.range[1] == 0
    assert figure.layout.paper_bgcolor == theme.THEMES["dark"].background
    assert figure.layout.title.text == "a run"
