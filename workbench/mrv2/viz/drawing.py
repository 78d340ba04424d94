"""A tile as a plotly figure: the printed form of the timeline, for pictures, notebooks without a kernel, and tests."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from mrv2.trace.table import Trace, TraceError
from mrv2.viz import theme as themes
from mrv2.viz.index import TICK_TABLE, Row, Tile, TimelineIndex
from mrv2.viz.names import format_bytes, format_ns, short_name, shortened

ROW_PX = 20
_GROUP_GAP_PX = 7
# empty pixels between two rows of one group
_INSET_PX = 1
# one hover point for this many pixels of a bar
_HOVER_PX = 40
_LABEL_PX_PER_CHAR = 6.6
_MAX_LABELS = 400
# seconds, written as 12.5ms
TIME_AXIS = {
    "ticksuffix": "s", "exponentformat": "SI", "minexponent": 1, "showexponent": "all", "nticks": 10,
    "automargin": False,
}  # fmt: skip
_TICK_COLOUR = themes.HUES[themes.HUE_ID["wait"]].colour


def plotly(what: str = "figures") -> ModuleType:
    """Return ``plotly.graph_objects``.

    Raises:
        TraceError: plotly is not installed.
    """
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise TraceError(f"{what} need plotly: pip install 'mrv2-workbench[notebook]'") from error
    return go


@dataclass(frozen=True)
class Geometry:
    """Where the rows lie, in pixels from the top of the plot."""

    # top and bottom of each row
    boxes: list[tuple[float, float]]
    # label and middle of each group
    labels: list[tuple[str, float]]
    height: float


def geometry(rows: list[Row]) -> Geometry:
    """Stack the rows, with a gap between groups; a group's label stands at its middle."""
    boxes: list[tuple[float, float]] = []
    groups: dict[str, list[int]] = {}
    y = 0.0
    for i, row in enumerate(rows):
        if i and row.group != rows[i - 1].group:
            y += _GROUP_GAP_PX
        boxes.append((y + _INSET_PX, y + row.height * ROW_PX - _INSET_PX))
        y += row.height * ROW_PX
        groups.setdefault(row.group, []).append(i)
    labels = [(rows[g[0]].label, (boxes[g[0]][0] + boxes[g[-1]][1]) / 2) for g in groups.values()]
    return Geometry(boxes, labels, y)


def seconds(index: TimelineIndex, ns: Any) -> Any:
    """Return instants as the axis shows them: seconds from the start of the trace."""
    return (np.asarray(ns, np.float64) - index.origin) * 1e-9


def figure_parts(
    trace: Trace, index: TimelineIndex, tile: Tile, *, theme: str = "light", title: str = ""
) -> dict[str, Any]:
    """Return the tile as a plotly figure: a dictionary with "data" and "layout", made without plotly.

    The list of traces is always the same: "cells" (heat map), one outline trace for each hue, "host syncs", "labels",
    "events" (invisible points that carry the hover text).

    Raises:
        TraceError: there is no such theme.
    """
    of = themes.theme(theme)
    where = geometry(index.rows)
    traces = tile_traces(trace, index, tile, where, of)
    return {"data": traces, "layout": _layout(index, tile, where, of, title)}


def tile_traces(
    trace: Trace, index: TimelineIndex, tile: Tile, where: Geometry, of: themes.Theme
) -> list[dict[str, Any]]:
    """Return the plotly traces of a tile as dictionaries, see `figure_parts`."""
    bars = _Bars.of(trace, index, tile)
    return [
        _cells(index, tile, where, of),
        *_outlines(bars, where, index, tile),
        _ticks(trace, index, tile, where),
        _labels(bars, where, index, tile),
        _events(bars, where, index, tile),
    ]


@dataclass(frozen=True, eq=False)
class _Bars:
    """All bars of a tile."""

    # all [num_bars]
    row: np.ndarray
    start: np.ndarray
    end: np.ndarray
    hue: np.ndarray
    # texts for people, one a bar
    label: list[str]
    hover: list[str]

    @classmethod
    def of(cls, trace: Trace, index: TimelineIndex, tile: Tile) -> _Bars:
        """Collect the bars of `tile`, row by row."""
        row, start, end, hue = [], [], [], []
        label: list[str] = []
        hover: list[str] = []
        for number, part in zip(tile.bar_rows, tile.bars):
            lane = index.rows[number]
            row.append(np.full(part.stop - part.start, number))
            start.append(lane.start[part])
            end.append(lane.end[part])
            hue.append(lane.hue[part])
            for i in range(part.start, part.stop):
                label.append(event_label(trace, lane, i))
                hover.append("<br>".join(event_lines(trace, index, lane, i)))
        if not row:
            none = np.zeros(0, np.int64)
            return cls(none, none, none, none, [], [])
        return cls(np.concatenate(row), np.concatenate(start), np.concatenate(end), np.concatenate(hue), label, hover)


def event_label(trace: Trace, row: Row, i: int) -> str:
    """Return the short text on a bar."""
    if row.table == "steps":
        return str(row.step[i])
    return short_name(trace.name_of(int(row.name[i])))


def event_lines(trace: Trace, index: TimelineIndex, row: Row, i: int) -> list[str]:
    """Return what hovering says: name, duration, place, step, correlation, bytes."""
    start, end = int(row.start[i]), int(row.end[i])
    name = f"step {row.step[i]}" if row.table == "steps" else trace.name_of(int(row.name[i]))
    lines = [
        f"<b>{_wrapped(name)}</b>",
        f"{format_ns(end - start)} at {(start - index.origin) / 1e6:.6f} ms",
        row.label,
    ]
    if row.step[i] >= 0 and row.table != "steps":
        lines.append(f"step {row.step[i]}")
    if row.corr[i] >= 0:
        lines.append(f"correlation {row.corr[i]}")
    if row.table == "ops" and (captured := int(trace.ops.captured[row.event[i]])) >= 0:
        lines.append(f"captured under {_wrapped(trace.name_of(captured))}")
    if row.table == "ops" and (size := int(trace.ops.bytes[row.event[i]])) >= 0:
        rate = f", {size / (end - start):.3g} GB/s" if end > start else ""
        lines.append(f"{format_bytes(size)}{rate}")
    return lines


def _wrapped(name: str, width: int = 90, most: int = 4) -> str:
    text = name.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    parts = [text[i : i + width] for i in range(0, len(text), width)]
    return "<br>".join(parts[:most]) + (" ..." if len(parts) > most else "")


def _cells(index: TimelineIndex, tile: Tile, where: Geometry, of: themes.Theme) -> dict[str, Any]:
    """Return the heat map: one line a row and one for each gap, so that edges need no overlap."""
    low, high = seconds(index, tile.covered[0]), seconds(index, tile.covered[1])
    num_bins = len(tile.cells[0].share) if tile.cells else 1
    edges, z, text = [0.0], [], []
    for number, cell in zip(tile.cell_rows, tile.cells):
        top, bottom = where.boxes[number]
        if top > edges[-1]:
            z.append(np.full(num_bins, np.nan))
            text.append([""] * num_bins)
            edges.append(top)
        row = index.rows[number]
        levels = cell.levels(row.table == TICK_TABLE)
        z.append(np.where(cell.present, cell_codes(levels, cell.hue), np.nan))
        text.append([f"{row.label}: {100 * s:.1f} % busy, {n} begin here" for s, n in zip(cell.share, cell.events)])
        edges.append(bottom)
    return {
        "type": "heatmap",
        "name": "cells",
        "x0": low,
        "dx": (high - low) / num_bins,
        "y": edges if z else [0.0, 1.0],
        "z": np.array(z, np.float32) if z else np.full((1, 1), np.nan, np.float32),
        "zmin": 0,
        "zmax": len(themes.HUES) * themes.LEVELS,
        "colorscale": themes.density_colours(of),
        "showscale": False,
        "showlegend": False,
        "text": text or [[""]],
        "hovertemplate": "%{text}<extra></extra>",
        "visible": bool(z),
    }


def cell_codes(levels: np.ndarray, hue: np.ndarray) -> np.ndarray:
    """Return the colour code of cells from `Density.levels`: the middle of step ``hue * LEVELS + brightness``."""
    return hue * float(themes.LEVELS) + np.floor((levels - 1.0) * themes.LEVELS / 255) + 0.5


def _outlines(bars: _Bars, where: Geometry, index: TimelineIndex, tile: Tile) -> list[dict[str, Any]]:
    """Return one trace of closed outlines for each hue."""
    boxes = np.array(where.boxes)
    # shorter than a pixel would not be seen
    pixel = (tile.window[1] - tile.window[0]) / tile.width_px * 1e-9
    out = []
    for number, hue in enumerate(themes.HUES):
        mine = bars.hue == number
        x0 = seconds(index, bars.start[mine])
        x1 = np.maximum(seconds(index, bars.end[mine]), x0 + pixel)
        top, bottom = boxes[bars.row[mine]].T
        gap = np.full(len(x0), np.nan)
        out.append(
            {
                "type": "scatter",
                "name": hue.label,
                "x": np.stack([x0, x1, x1, x0, x0, gap], 1).ravel(),
                "y": np.stack([top, top, bottom, bottom, top, gap], 1).ravel(),
                # with lines, however thin, each outline would become an element of its own
                "mode": "none",
                "fill": "toself",
                "fillcolor": hue.colour,
                "hoverinfo": "skip",
                "legendgroup": hue.key,
                "showlegend": bool(mine.any()),
            }
        )
    return out


def _ticks(trace: Trace, index: TimelineIndex, tile: Tile, where: Geometry) -> dict[str, Any]:
    """Return the synchronisation ticks: lines over the full height at exact instants, where there is room for them."""
    at = seconds(index, tile.ticks.time if tile.has_tick_lines else tile.ticks.time[:0])
    num = len(at)
    texts = [
        f"<b>{trace.name_of(int(name))}</b>" if n == 1 else f"<b>{n} host syncs</b>, first {trace.name_of(int(name))}"
        for n, name in zip(tile.ticks.count[:num], tile.ticks.name[:num])
    ]
    return {
        "type": "scatter",
        "name": "host syncs",
        "x": np.stack([at, at, np.full(num, np.nan)], 1).ravel(),
        "y": np.tile([0.0, where.height, np.nan], num),
        "mode": "lines",
        "line": {"width": 1, "color": _TICK_COLOUR, "dash": "dot"},
        "text": [text for text in texts for _ in range(3)],
        "hovertemplate": "%{text}<extra></extra>",
        "showlegend": bool(num),
    }


def _on_screen(bars: _Bars, index: TimelineIndex, tile: Tile) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the visible part of each bar, seconds, and its width in pixels."""
    a, b = tile.window
    low, high = seconds(index, np.maximum(bars.start, a)), seconds(index, np.minimum(bars.end, b))
    return low, high, (high - low) * 1e9 * tile.width_px / (b - a)


def _labels(bars: _Bars, where: Geometry, index: TimelineIndex, tile: Tile) -> dict[str, Any]:
    """Return the texts of the bars that have room for one."""
    low, high, width = _on_screen(bars, index, tile)
    room = ((width - 4) / _LABEL_PX_PER_CHAR).astype(np.int64)
    chosen = np.flatnonzero(room >= 3)
    # the widest bars first, when there are too many
    chosen = np.sort(chosen[np.argsort(-width[chosen], kind="stable")][:_MAX_LABELS])
    boxes = np.array(where.boxes)
    hues = [themes.HUES[int(h)] for h in bars.hue[chosen]]
    return {
        "type": "scatter",
        "name": "labels",
        "x": (low[chosen] + high[chosen]) / 2,
        "y": boxes[bars.row[chosen]].mean(axis=1) if len(chosen) else [],
        "mode": "text",
        "text": [shortened(bars.label[i], int(room[i])) for i in chosen.tolist()],
        "textfont": {"size": 11, "color": [themes.text_on(hue.colour) for hue in hues]},
        "hoverinfo": "skip",
        "showlegend": False,
        "cliponaxis": True,
    }


def _events(bars: _Bars, where: Geometry, index: TimelineIndex, tile: Tile) -> dict[str, Any]:
    """Return invisible points along the visible part of each bar, which carry its hover text."""
    low, high, width = _on_screen(bars, index, tile)
    num = np.where(width >= 0, np.ceil(np.maximum(width, 1) / _HOVER_PX), 0).astype(np.int64)
    bar = np.repeat(np.arange(len(num)), num)
    nth = np.arange(len(bar)) - np.repeat(np.cumsum(num) - num, num)
    boxes = np.array(where.boxes)
    return {
        "type": "scatter",
        "name": "events",
        "x": low[bar] + (high - low)[bar] * (nth + 0.5) / num[bar],
        "y": boxes[bars.row[bar]].mean(axis=1) if len(bar) else [],
        "mode": "markers",
        "marker": {"size": ROW_PX - 4, "opacity": 0, "symbol": "square"},
        "hovertext": [bars.hover[i] for i in bar.tolist()],
        "customdata": bar,
        "hoverinfo": "text",
        "showlegend": False,
    }


def band_shapes(index: TimelineIndex, tile: Tile, of: themes.Theme) -> list[dict[str, Any]]:
    """Return every other step of the tile as a shaded band over the full height."""
    bands = index.bands
    return [
        {
            "type": "rect",
            "x0": float(seconds(index, bands.start[i])),
            "x1": float(seconds(index, bands.shade_end[i])),
            "yref": "paper",
            "y0": 0,
            "y1": 1,
            "fillcolor": of.band,
            "line": {"width": 0},
            "layer": "below",
        }
        for i in tile.bands.tolist()
        if i % 2 == 0
    ]


def _layout(index: TimelineIndex, tile: Tile, where: Geometry, of: themes.Theme, title: str) -> dict[str, Any]:
    left = 16 + 6.5 * max(len(text) for text, _ in where.labels)
    # the legend stands above the plot, in two lines where it must, and the title above the legend
    top = 88 if title else 48
    return themes.layout(
        of,
        title={
            "text": title,
            "x": 0.0,
            "xref": "paper",
            "y": 1.0,
            "yref": "container",
            "yanchor": "top",
            "pad": {"t": 12},
            "font": {"size": 14},
            "automargin": False,
        },
        width=round(tile.width_px + left + 16),
        height=round(where.height + top + 44),
        margin={"l": left, "r": 16, "t": top, "b": 44},
        hovermode="closest",
        dragmode="pan",
        shapes=band_shapes(index, tile, of),
        xaxis={
            "range": [float(seconds(index, edge)) for edge in tile.window],
            **TIME_AXIS,
            "title": {"text": "time from the start of the trace"},
        },
        yaxis={
            "range": [where.height, 0],
            "tickvals": [y for _, y in where.labels],
            "ticktext": [text for text, _ in where.labels],
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
            "automargin": False,
        },
    )
