"""A session as one self-contained HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mrv2.errors import ConfigError
from mrv2.lab.driver import describe_changes
from mrv2.lab.metrics import METRICS
from mrv2.lab.presets import changed_only
from mrv2.lab.session import Session
from mrv2.trace import scrub_trace
from mrv2.viz import Timeline, page, theme
from mrv2.viz.tables import sync_table

MAX_REQUESTS = 50
# points of a line
MAX_POINTS = 400


def save_report(session: Session, path: Path) -> Path:
    """Write the page; raises `ConfigError` unless the name ends in .html."""
    if path.suffix != ".html":
        raise ConfigError(f"{path}: a report is written as .html")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report_html(session), encoding="utf-8")
    return path


def report_html(session: Session) -> str:
    """Return the page: settings, metrics over time, the recorded window, its syncs, the A/B, the requests."""
    about = session.about
    tables: list[dict[str, Any]] = []
    timeline = None
    banners: list[str] = []
    if session.trace is not None:
        drawn = Timeline(scrub_trace(session.trace))
        timeline = drawn.page_data()
        banners = drawn.analysis.banners()
        tables.append(sync_table(drawn.analysis, drawn).spec(drawn.index.origin))
    if about.get("ab"):
        banners = [*banners, "A/B: " + about["ab"]["verdict"]]
        tables.append(_ab_spec(about["ab"]))
    tables.append(_requests_spec(session))
    view = session.metrics_view()
    facts = [("model", about["model"]), ("hardware", about["hardware"])]
    facts.append(("knobs", describe_changes(changed_only(about["knobs"])) or "defaults"))
    for metric in METRICS:
        median = view["series"].get(metric.key, {}).get("p50")
        if median is not None:
            facts.append((f"{metric.label}, median", f"{median:.4g} {metric.unit}".strip()))
    return page.render(
        page.Page(
            f"MRV2 Workbench: {about['model']}",
            banners,
            facts,
            timeline=timeline,
            figures=[("Metrics over time; dashed lines: something was changed", _metrics_figure(session))],
            tables=tables,
            footer="; ".join(
                f"{change['source']}: {describe_changes(change['changes'])}" for change in about["changes"]
            ),
        )
    )


def thinned(points: list[list[float]], most: int = MAX_POINTS) -> list[list[float]]:
    """Return at most `most` of the points, among them the lowest and the highest of every stretch."""
    if len(points) <= most:
        return points
    size = -(-2 * len(points) // most)
    kept: list[list[float]] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        ends = (min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1]))
        kept += sorted(ends)
    return kept


def _metrics_figure(session: Session) -> dict[str, Any]:
    shown = [m for m in METRICS if session.metrics["series"].get(m.key)]
    gap = 0.03
    height = (1 - gap * (len(shown) - 1)) / max(len(shown), 1)
    traces, axes = [], {}
    for i, metric in enumerate(shown):
        points = thinned(session.metrics["series"][metric.key])
        name = "y" if i == 0 else f"y{i + 1}"
        top = 1 - i * (height + gap)
        axes["yaxis" + name[1:]] = {
            "domain": [max(top - height, 0), top],
            "title": {"text": f"{metric.label}<br>{metric.unit}", "font": {"size": 10}},
            "rangemode": "tozero",
        }
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                # a line of 110 pixels shows no more than that
                "x": [round(at, 2) for at, _ in points],
                "y": [float(f"{value:.4g}") for _, value in points],
                "yaxis": name,
                "name": metric.label,
                "line": {"color": theme.HUES[(i % 7) + 1].colour, "width": 1.5},
            }
        )
    marks = [
        {"type": "line", "xref": "x", "yref": "paper", "x0": round(m["t"], 2), "x1": round(m["t"], 2), "y0": 0, "y1": 1,
         "line": {"color": "#d55e00", "dash": "dash", "width": 1}}
        for m in session.metrics["marks"]
    ]  # fmt: skip
    layout = theme.layout(
        theme.theme("light"),
        height=110 * max(len(shown), 1) + 60,
        showlegend=False,
        shapes=marks,
        xaxis={"title": {"text": "seconds"}, "anchor": f"y{len(shown)}" if len(shown) > 1 else "y"},
        **axes,
    )
    return {"data": traces, "layout": layout}


def _ab_spec(ab: dict[str, Any]) -> dict[str, Any]:
    def percent(value: float | None) -> str | None:
        return None if value is None else f"{100 * (value - 1):+.1f} %"

    keys = ["figure", "A", "B", "unit", "change", "from", "to", "pairs"]
    rows = [
        {
            "cells": {
                "figure": row["label"],
                "A": None if row["a"] is None else round(row["a"], 3),
                "B": None if row["b"] is None else round(row["b"], 3),
                "unit": row["unit"],
                "change": percent(row["ratio"]),
                "from": percent(row["low"]),
                "to": percent(row["high"]),
                "pairs": row["n"],
            },
            "start": 0.0,
            "end": 0.0,
        }
        for row in ab["rows"]
    ]
    return {
        "title": f"A/B: {ab['names'][0]} against {ab['names'][1]}",
        "note": ab["verdict"],
        "columns": [{"key": key, "label": key, "unit": ""} for key in keys],
        "rows": rows,
    }


def _requests_spec(session: Session) -> dict[str, Any]:
    keys = [("req_id", "request"), ("tokens", "tokens"), ("ttft", "TTFT, ms"), ("tpot", "TPOT, ms"), ("text", "text")]
    rows = [
        {
            "cells": {
                "req_id": request["req_id"],
                "tokens": len(request["token_ids"]),
                "ttft": None if request["ttft_s"] is None else round(1000 * request["ttft_s"], 1),
                "tpot": None if request["tpot_s"] is None else round(1000 * request["tpot_s"], 2),
                "text": request["text"][:200],
            },
            "start": 0.0,
            "end": 0.0,
        }
        for request in session.requests[-MAX_REQUESTS:]
    ]
    return {
        "title": f"Requests: the last {len(rows)} of {len(session.requests)}",
        "note": "",
        "columns": [{"key": key, "label": label, "unit": ""} for key, label in keys],
        "rows": rows,
    }
