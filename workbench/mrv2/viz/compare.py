"""Two traces side by side: what changed, by how much, and how the same step looks in both."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np

from mrv2.trace.analysis.model import Analysis
from mrv2.trace.compare import Comparison, Delta
from mrv2.trace.table import Trace, TraceError
from mrv2.viz import drawing
from mrv2.viz import theme as themes
from mrv2.viz.figures import empty, headline
from mrv2.viz.lanes import analysis_of, build_index

_COLOURS = {"less": "#009E73", "more": "#D55E00", "unclear": "#999999"}
_SYMBOLS = {"less": "triangle-left", "more": "triangle-right", "unclear": "circle-open"}
_BETWEEN_PX = 34


def delta_plot(comparison: Comparison, *, theme: str = "light") -> Any:
    """Return the differences in time, b - a, with their 95 % intervals; hollow grey where the interval holds 0.

    Raises:
        TraceError: plotly is not installed.
    """
    known = [d for d in comparison.deltas if d.delta is not None and _is_time(d)]
    a, b = comparison.names
    if not known:
        return empty(f"{b} against {a}", comparison.verdict, theme=theme)
    of = themes.theme(theme)
    kinds = ["unclear" if not d.is_clear else "less" if (d.delta or 0) < 0 else "more" for d in known]
    delta = np.array([d.delta for d in known], np.float64) / 1e3
    low = np.array([d.low for d in known], np.float64) / 1e3
    high = np.array([d.high for d in known], np.float64) / 1e3
    points = {
        "type": "scatter",
        "mode": "markers",
        "x": delta,
        "y": [f"{d.name}: {d.what.removesuffix('_ns')} {_percent(d)}" for d in known],
        "error_x": {"array": high - delta, "arrayminus": delta - low, "width": 3, "color": of.text, "type": "data"},
        "marker": {
            "color": [_COLOURS[kind] for kind in kinds],
            "symbol": [_SYMBOLS[kind] for kind in kinds],
            "size": 10,
        },
        "hovertext": [f"{_us(d.a)} to {_us(d.b)}, {d.count} steps" for d in known],
        "hoverinfo": "text",
    }
    lines = [line for text in (comparison.verdict, *comparison.notes) for line in textwrap.wrap(text, 110)]
    layout = themes.layout(
        of,
        title=headline("<br>".join(lines)),
        height=100 + 18 * len(lines) + 24 * len(known),
        margin={"l": 60, "r": 16, "t": 24 + 18 * len(lines), "b": 44},
        showlegend=False,
        xaxis={"title": {"text": f"us a step, {b} - {a}"}, "zeroline": True, "zerolinecolor": of.text},
        yaxis={"autorange": "reversed"},
    )
    return drawing.plotly().Figure(data=[points], layout=layout)


def step_times(
    a: Trace | Analysis, b: Trace | Analysis, *, names: tuple[str, str] = ("a", "b"), theme: str = "light"
) -> Any:
    """Return the duration of the steps of both traces, by position.

    Raises:
        TraceError: plotly is not installed.
    """
    sides = [analysis_of(x) for x in (a, b)]
    if not all(len(side.windows) for side in sides):
        return empty("Step times", next(s.windows.source for s in sides if not len(s.windows)), theme=theme)
    traces = []
    for side, name, colour, dash in zip(sides, names, ("#0072B2", "#E69F00"), ("solid", "dash")):
        wall = (side.windows.end - side.windows.start) / 1e3
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(wall) <= 100 else "lines",
                "name": f"{name}: median {np.median(wall):.0f} us",
                "x": np.arange(len(wall), dtype=np.int32),
                "y": wall,
                "line": {"color": colour, "dash": dash},
                "customdata": side.windows.step.astype(np.float64),
                "hovertemplate": "step %{customdata}: %{y:.1f} us<extra></extra>",
            }
        )
    layout = themes.layout(
        themes.theme(theme),
        title=headline("Step times"),
        height=320,
        margin={"l": 60, "r": 16, "t": 64, "b": 44},
        xaxis={"title": {"text": "step, counted from the first"}},
        yaxis={"title": {"text": "us"}, "rangemode": "tozero"},
    )
    return drawing.plotly().Figure(data=traces, layout=layout)


def side_by_side(
    a: Trace | Analysis,
    b: Trace | Analysis,
    position: int = 10,
    *,
    num_steps: int = 2,
    names: tuple[str, str] = ("a", "b"),
    width_px: int = 1100,
    theme: str = "light",
) -> Any:
    """Return the timelines of the same steps of both traces, one above the other, both from the start of the step.

    Args:
        position: the first step shown, counted from the first of each trace; negative: from the last.
        num_steps: how many steps.

    Raises:
        TraceError: plotly is not installed, or a trace has no such step.
    """
    sides = [analysis_of(x) for x in (a, b)]
    windows = [_steps_window(side, position, num_steps, name) for side, name in zip(sides, names)]
    width = max(end - start for start, end in windows)
    of = themes.theme(theme)
    traces: list[dict[str, Any]] = []
    shapes: list[dict[str, Any]] = []
    notes: list[dict[str, Any]] = []
    labels: list[tuple[str, float]] = []
    top = 0.0
    for side, name, (start, end) in zip(sides, names, windows):
        index = build_index(side)
        where = drawing.geometry(index.rows)
        tile = index.tile(start, start + width, width_px, margin=0)
        shift = float(drawing.seconds(index, start))
        top += _BETWEEN_PX
        for drawn in drawing.tile_traces(side.trace, index, tile, where, of):
            traces.append(
                _moved(drawn, shift, top, shown=not traces or drawn["name"] not in {t["name"] for t in traces})
            )
        labels += [(text, y + top) for text, y in where.labels]
        text = f"<b>{name}</b>: {num_steps} steps in {(end - start) / 1e3:.0f} us"
        notes.append({"text": text, "x": 0, "y": top - 6, "xanchor": "left", "yanchor": "bottom", "showarrow": False})
        edge = (end - start) * 1e-9
        line = {"color": of.accent, "width": 2}
        shapes.append({"type": "line", "x0": edge, "x1": edge, "y0": top, "y1": top + where.height, "line": line})
        top += where.height
    left = 16 + 6.5 * max(len(text) for text, _ in labels)
    layout = themes.layout(
        of,
        width=round(width_px + left + 16),
        height=round(top + 100),
        margin={"l": left, "r": 16, "t": 48, "b": 52},
        hovermode="closest",
        dragmode="pan",
        shapes=shapes,
        annotations=notes,
        xaxis={
            "range": [0, width * 1e-9],
            **drawing.TIME_AXIS,
            "title": {"text": "time from the start of the first step shown; the line marks the end of the last"},
        },
        yaxis={
            "range": [top, 0],
            "tickvals": [y for _, y in labels],
            "ticktext": [text for text, _ in labels],
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
            "automargin": False,
        },
    )
    return drawing.plotly().Figure(data=traces, layout=layout)


def _steps_window(side: Analysis, position: int, num_steps: int, name: str) -> tuple[int, int]:
    found = side.windows
    at = position if position >= 0 else len(found) + position
    if not (0 <= at < len(found)) or num_steps < 1:
        raise TraceError(
            f"{name} has {len(found)} steps: position {position} with {num_steps} steps is not among them"
            + (f" ({found.source})" if not len(found) else "")
        )
    last = min(at + num_steps, len(found)) - 1
    return int(found.start[at]), int(found.end[last])


def _moved(drawn: dict[str, Any], shift: float, top: float, *, shown: bool) -> dict[str, Any]:
    """Return a plotly trace moved left by `shift` seconds and down by `top` pixels; one legend entry a name."""
    out = {**drawn, "y": np.asarray(drawn["y"], np.float64) + top}
    if "x0" in drawn:
        out["x0"] = drawn["x0"] - shift
    else:
        out["x"] = np.asarray(drawn["x"], np.float64) - shift
    out["showlegend"] = bool(drawn.get("showlegend")) and shown
    return out


def _is_time(delta: Delta) -> bool:
    return delta.what.endswith("_ns") or delta.what in ("host", "gpu")


def _percent(delta: Delta) -> str:
    return "" if delta.relative is None else f"{100 * delta.relative:+.0f} %"


def _us(value: float | None) -> str:
    return "n/a" if value is None else f"{value / 1e3:.1f} us"
