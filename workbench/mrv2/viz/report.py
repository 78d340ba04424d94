"""`report(trace)`: one self-contained page that answers what a recording is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from mrv2.trace.analysis.model import Analysis
from mrv2.trace.analysis.overlap import percent
from mrv2.trace.table import Trace, TraceError
from mrv2.viz import figures, page, tables
from mrv2.viz.lanes import analysis_of
from mrv2.viz.names import format_ns
from mrv2.viz.timeline import Timeline


def report(trace: Trace | Analysis, *, title: str = "", window: Any = None, theme: str | None = None) -> str:
    """Return a page with banners, key figures, timeline, overlap, bubbles, stages, kernels and the sync table.

    Args:
        trace: what to report on; an `Analysis` also says for which window and with which steps.
        title: default: the name of the recording's file.
        window: what the timeline shows first, see `Timeline`.
        theme: "light" or "dark"; None: what the reader prefers.

    Raises:
        TraceError: plotly is not installed, the trace has no events, or more than a page can hold.
    """
    analysis = analysis_of(trace)
    timeline = Timeline(analysis, window=window, theme=theme)
    shades = theme or "light"
    drawn = (
        ("Overlap", figures.overlap_bars(analysis, theme=shades)),
        ("Bubbles", figures.bubble_stack(analysis, theme=shades)),
        ("Stages", figures.stage_box(analysis, theme=shades)),
        ("Kernels", figures.kernel_bars(analysis, theme=shades)),
    )
    rows = (tables.sync_table(analysis), tables.bubble_table(analysis), tables.kernel_rows(analysis))
    return page.render(
        page.Page(
            title or recording_name(analysis.trace),
            analysis.banners(),
            key_figures(analysis),
            timeline.page_data(),
            [(heading, json.loads(figure.to_json())) for heading, figure in drawn],
            [table.spec(timeline.index.origin) for table in rows],
            provenance(analysis.trace),
            theme,
        )
    )


def save_report(trace: Trace | Analysis, path: str | Path, **options: Any) -> Path:
    """Write `report` to a file; `options` are its keyword arguments.

    Raises:
        TraceError: as `report`, or the file cannot be written.
    """
    path = Path(path)
    text = report(trace, **options)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TraceError(f"{path}: cannot be written ({error.strerror or error})") from error
    return path


def key_figures(analysis: Analysis) -> list[tuple[str, str]]:
    """Return the names and values of the figures that a reader looks for first; n/a where there is no evidence."""
    overview, steps = analysis.overview(), analysis.steps()
    bound = " (upper bound)" if overview.busy_is_upper_bound else ""
    low, high = overview.window
    bubble = overview.mean("bubble_ns")
    exposed = overview.mean("exposed_ns")
    num = len(steps)
    return [
        ("CPU work hidden behind the GPU", percent(overview.overlap_cpu)),
        (f"GPU busy{bound}", percent(overview.utilization)),
        ("GPU idle in bubbles", percent(None if bubble is None or high <= low else bubble / (high - low))),
        ("exposed CPU time a step", _ns(exposed / num if exposed is not None and num else None)),
        ("host syncs a step", _number(steps.syncs)),
        ("steps", str(num) if num else "not marked"),
        ("median step", _ns(float(np.median(steps.wall_ns)) if num else None)),
        ("run-ahead, median steps", _number(steps.run_ahead, median=True)),
        ("window", format_ns(high - low)),
    ]


def recording_name(trace: Trace) -> str:
    """Return the name of the recording's file, or what kind of recording it is."""
    path = trace.meta.get("path")
    return Path(str(path)).name if path else f"{trace.meta.get('source', 'unknown')} recording"


def provenance(trace: Trace) -> str:
    """Return how the trace was recorded, in one line."""
    meta = trace.meta
    versions = ", ".join(f"{name} {version}" for name, version in (meta.get("versions") or {}).items() if version)
    parts = (
        meta.get("recorded_by"),
        meta.get("gpu_name"),
        versions,
        f"granularity of CUDA graphs: {meta['granularity']}",
    )
    return " \u00b7 ".join(str(part) for part in parts if part)


def _ns(value: float | None) -> str:
    return "n/a" if value is None else format_ns(value)


def _number(values: np.ndarray | None, *, median: bool = False) -> str:
    known = np.zeros(0) if values is None else values[~np.isnan(values.astype(np.float64))]
    if not len(known):
        return "n/a"
    return f"{np.median(known) if median else known.mean():.3g}"
