"""Figures of an `Analysis`: overlap per step, stages, bubbles by cause, kernels.

A figure without evidence says "not collected" and why; it never shows a zero.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import numpy as np

from mrv2.trace.analysis.model import Analysis
from mrv2.trace.analysis.overlap import percent
from mrv2.trace.analysis.quantiles import MIN_SAMPLES, StageSamples
from mrv2.viz import theme as themes
from mrv2.viz.drawing import plotly
from mrv2.viz.kernels import Kernels, kernel_table
from mrv2.viz.names import format_bytes, format_ns, host_hue, shortened

# more bars than this are too thin to read: neighbouring steps are averaged
MAX_BARS = 150
_MAX_CAUSES = 9
# told apart also where two share a hue, or without colour
_PATTERNS = ("", "/", "\\", "x", ".", "+", "-", "|")
_HUE = {hue.key: hue.colour for hue in themes.HUES}


def overlap_bars(analysis: Analysis, *, theme: str = "light") -> Any:
    """Return each step's time divided into: both work, GPU alone, CPU alone (exposed), neither; they sum to the step.

    Raises:
        TraceError: plotly is not installed.
    """
    steps, overview = analysis.steps(), analysis.overview()
    if not len(steps):
        return empty("Overlap per step", steps.source, theme=theme)
    if steps.cpu_ns is None or steps.gpu_busy_ns is None or steps.exposed_ns is None or steps.idle_both_ns is None:
        missing = "host ranges" if steps.cpu_ns is None else "GPU operations"
        return empty("Overlap per step", f"not collected: {missing}", theme=theme)
    both = steps.cpu_ns - steps.exposed_ns
    parts = (
        ("CPU and GPU work", both, _HUE["prepare"]),
        ("GPU alone", steps.gpu_busy_ns - both, _HUE["forward"]),
        ("CPU alone: exposed", steps.exposed_ns, _HUE["wait"]),
        ("neither", steps.idle_both_ns, _HUE["other"]),
    )
    size, x = _grouping(steps.step)
    traces = [
        _bar(name, x, _mean(values, size) / 1e3, colour, _PATTERNS[i]) for i, (name, values, colour) in enumerate(parts)
    ]
    bound = ", GPU busy is an upper bound" if overview.busy_is_upper_bound else ""
    title = f"Overlap per step: {percent(overview.overlap_cpu)} of the CPU work is hidden behind the GPU{bound}"
    return _stacked(traces, title, "us a step", size, theme)


def bubble_stack(analysis: Analysis, *, theme: str = "light") -> Any:
    """Return the GPU's gaps in each step, divided by cause; see `Bubbles` for what the causes mean.

    Raises:
        TraceError: plotly is not installed.
    """
    bubbles = analysis.bubbles()
    if bubbles is None:
        return empty("Bubbles by cause", "not collected: GPU operations", theme=theme)
    if not len(analysis.windows):
        return empty("Bubbles by cause", analysis.windows.source, theme=theme)
    by_step, names = bubbles.by_step(analysis.windows)
    totals = bubbles.by_cause()
    shown = list(totals)[:_MAX_CAUSES]
    columns = {name: by_step[:, names.index(name)] for name in shown}
    rest = [i for i, name in enumerate(names) if name not in columns]
    if by_step[:, rest].any():
        columns["other causes"] = by_step[:, rest].sum(axis=1)
    size, x = _grouping(analysis.windows.step)
    traces = [
        _bar(name, x, _mean(values, size) / 1e3, colour, pattern)
        for (name, values), (colour, pattern) in zip(columns.items(), cause_looks(list(columns)))
    ]
    low, high = analysis.window
    share = bubbles.total_ns / (high - low) if high > low else None
    title = f"Bubbles by cause: {len(bubbles)} gaps, {format_ns(bubbles.total_ns)}, {percent(share)} of the window"
    return _stacked(traces, title, "us of gap a step", size, theme)


def cause_looks(causes: list[str]) -> list[tuple[str, str]]:
    """Return colour and pattern of each cause; no two are alike."""
    used: dict[str, int] = {}
    out = []
    for cause in causes:
        colour = cause_colour(cause)
        out.append((colour, _PATTERNS[used.get(colour, 0) % len(_PATTERNS)]))
        used[colour] = used.get(colour, 0) + 1
    return out


def cause_colour(cause: str) -> str:
    """Return the colour of a bubble's cause: the stage's own for ``host:stage``."""
    name = cause.removeprefix("host:")
    special = {"launch_api": "schedule", "kernel_wait": "attention", "sync": "wait", "starved": "wait", "gil": "wait"}
    return _HUE[special[name]] if name in special else themes.HUES[host_hue(name)].colour


def stage_box(analysis: Analysis, *, theme: str = "light") -> Any:
    """Return the stages' durations per step: box from quartile to quartile, whiskers from 5 to 95 per cent.

    Below 20 samples there are only the median and, as whiskers, the extremes.

    Raises:
        TraceError: plotly is not installed.
    """
    stages = analysis.stages()
    known = [row for row in stages if len(row.samples)]
    if not known:
        return empty("Stages", "not collected: host ranges", theme=theme)
    traces = []
    for where, colour, label in (("host", _HUE["schedule"], "host"), ("gpu", _HUE["attention"], "GPU")):
        mine = [row for row in known if row.where == where]
        if mine:
            traces.append(_boxes(label, mine, colour))
    missing = [row.name for row in stages if not len(row.samples) and row.where == "gpu"]
    lines = [f"Stages, per {stages.per} (first {stages.warmup} left out)"]
    if missing:
        lines += textwrap.wrap(f"GPU time not collected: {', '.join(missing)}", 72)
    order = list(dict.fromkeys(row.name for row in known))
    of = themes.theme(theme)
    top = 54 + 18 * len(lines)
    layout = themes.layout(
        of,
        title=headline("<br>".join(lines)),
        height=top + 50 + 30 * len(order),
        margin={"l": 60, "r": 16, "t": top, "b": 40},
        boxmode="group",
        xaxis={"title": {"text": "us"}, "rangemode": "tozero"},
        yaxis={"autorange": "reversed", "categoryorder": "array", "categoryarray": order},
    )
    return plotly().Figure(data=traces, layout=layout)


def _boxes(label: str, rows: list[StageSamples], colour: str) -> dict[str, Any]:
    columns: dict[str, list[float]] = {"lowerfence": [], "q1": [], "median": [], "q3": [], "upperfence": []}
    for row in rows:
        few = len(row.samples) < MIN_SAMPLES
        at = (0, 0.5, 0.5, 0.5, 1) if few else (0.05, 0.25, 0.5, 0.75, 0.95)
        for column, value in zip(columns.values(), np.quantile(row.samples, at).tolist()):
            column.append(value / 1e3)
    return {
        "type": "box",
        "name": label,
        "orientation": "h",
        "y": [row.name for row in rows],
        **columns,
        "marker": {"color": colour},
        "line": {"width": 1.5},
        "hovertext": [f"{len(row.samples)} samples. {row.note}" for row in rows],
    }


def kernel_bars(
    analysis: Analysis,
    *,
    top: int = 15,
    bytes_per_call: Mapping[str, float] | None = None,
    kernels: Kernels | None = None,
    theme: str = "light",
) -> Any:
    """Return the operations with the most time, each with its share, count and, where bytes are known, bandwidth.

    Raises:
        TraceError: plotly is not installed.
    """
    kernels = kernel_table(analysis, bytes_per_call) if kernels is None else kernels
    if kernels is None:
        return empty("Kernels", "not collected: GPU operations", theme=theme)
    rows = kernels.take(slice(0, top)).rows()
    hues = [themes.HUES[int(i)] for i in kernels.hue[:top]]
    texts = []
    for row in rows:
        rate = f", {row['gb_per_s']:.3g} GB/s" if row["gb_per_s"] is not None else ""
        texts.append(f"{percent(row['share'])}, {row['count']} x {format_ns(row['median_ns'])}{rate}")
    full = [f"{row['full_name'][:200]}<br>{_moved(row['bytes'])}" for row in rows]
    bar = {
        "type": "bar",
        "orientation": "h",
        # a number before each name keeps kernels of one short name apart
        "y": [f"{shortened(row['name'], 42)} #{i + 1}" for i, row in enumerate(rows)],
        "x": [row["total_ns"] / 1e3 for row in rows],
        "marker": {"color": [hue.colour for hue in hues]},
        "text": texts,
        "textposition": "auto",
        "insidetextfont": {"color": [themes.text_on(hue.colour) for hue in hues]},
        "hovertext": full,
        "hoverinfo": "text",
    }
    note = f"<br>{kernels.note}" if kernels.note else ""
    layout = themes.layout(
        themes.theme(theme),
        title=headline(f"Kernels and copies by GPU time: {min(top, len(kernels))} of {len(kernels)}{note}"),
        height=100 + 26 * len(rows),
        margin={"l": 60, "r": 16, "t": 64, "b": 40},
        showlegend=False,
        xaxis={"title": {"text": "us in the window, sum of durations"}},
        yaxis={"autorange": "reversed"},
    )
    return plotly().Figure(data=[bar], layout=layout)


def empty(title: str, reason: str, *, theme: str = "light") -> Any:
    """Return a figure that says why it shows nothing.

    Raises:
        TraceError: plotly is not installed.
    """
    note = {"text": reason, "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5, "showarrow": False}
    hidden = {"visible": False}
    layout = themes.layout(
        themes.theme(theme), title=headline(title), height=180, xaxis=hidden, yaxis=hidden, annotations=[note]
    )
    return plotly().Figure(layout=layout)


def _moved(size: float | None) -> str:
    return "bytes not known" if size is None else format_bytes(size)


def _grouping(steps: np.ndarray) -> tuple[int, list[str]]:
    """Return how many neighbouring steps one bar stands for, and the labels of the bars."""
    size = -(-len(steps) // MAX_BARS)
    return size, [str(step) for step in steps[::size].tolist()]


def _mean(values: np.ndarray, size: int) -> np.ndarray:
    """Return the mean of each `size` neighbouring values; the last group may be smaller."""
    at = np.arange(0, len(values), size)
    return np.add.reduceat(values.astype(np.float64), at) / np.diff(np.append(at, len(values)))


def _bar(name: str, x: list[str], y: np.ndarray, colour: str, pattern: str) -> dict[str, Any]:
    return {
        "type": "bar",
        "name": name,
        "x": x,
        "y": y,
        "marker": {"color": colour, "pattern": {"shape": pattern, "size": 5, "fgcolor": themes.text_on(colour)}},
        "hovertemplate": "step %{x}<br>%{y:.1f} us " + name + "<extra></extra>",
    }


def _stacked(traces: list[dict[str, Any]], title: str, unit: str, size: int, theme: str) -> Any:
    steps = "step" if size == 1 else f"step (each bar is the mean of {size})"
    layout = themes.layout(
        themes.theme(theme),
        title=headline(title),
        barmode="stack",
        bargap=0.08,
        height=340,
        margin={"l": 60, "r": 16, "t": 48, "b": 44},
        # beside the plot: above it, it would grow into the title
        legend={"orientation": "v", "x": 1.01, "y": 1.0, "yanchor": "top", "traceorder": "reversed"},
        xaxis={"title": {"text": steps}, "type": "category"},
        yaxis={"title": {"text": unit}},
    )
    return plotly().Figure(data=traces, layout=layout)


def headline(text: str) -> dict[str, Any]:
    """Return a figure's title, at the left; lines are parted by ``<br>``."""
    return {
        "text": text,
        "font": {"size": 14},
        "x": 0.0,
        "xref": "container",
        "xanchor": "left",
        "pad": {"l": 12, "t": 14},
        "y": 1.0,
        "yanchor": "top",
    }
