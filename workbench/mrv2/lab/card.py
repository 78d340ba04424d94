"""The workbench where there is no front end: a text, and an HTML card with a picture."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from mrv2.lab.driver import describe_changes
from mrv2.lab.metrics import METRICS, quantile
from mrv2.lab.presets import changed_only

if TYPE_CHECKING:
    from mrv2.lab.workbench import Workbench

_WIDTH, _HEIGHT = 180, 40


def text_card(workbench: Workbench) -> str:
    """Return a few lines about a workbench."""
    view = workbench.view
    state = "closed" if workbench.closed else view.state
    knobs = describe_changes(changed_only(view.snapshot.knobs)) or "defaults"
    lines = [
        f"Workbench({workbench.model_name!r}, engine={workbench.place!r}): {state}, step {view.snapshot.step}",
        f"  knobs: {knobs}",
        f"  {view.num_open} requests open, {view.num_finished} finished, {view.num_tokens} tokens",
    ]
    for metric in METRICS:
        values = view.metrics["series"][metric.key]["v"]
        if values:
            p50 = quantile(values, 0.5)
            lines.append(f"  {metric.label:>16}: {values[-1]:.4g} {metric.unit} (p50 {p50:.4g})")
    return "\n".join(lines)


def html_card(workbench: Workbench) -> str:
    """Return a static card: state, knobs, and a line for each metric; no script."""
    view = workbench.view
    state = "closed" if workbench.closed else view.state
    facts = f"{state}, step {view.snapshot.step}, {view.num_finished} requests finished, {view.num_tokens} tokens"
    knobs = describe_changes(changed_only(view.snapshot.knobs)) or "default knobs"
    return (
        "<div style='font:13px/1.4 system-ui,sans-serif;border:1px solid #8888;border-radius:8px;padding:10px'>"
        f"<b>MRV2 Workbench</b> {html.escape(workbench.model_name)}<br>{html.escape(facts)}<br>{html.escape(knobs)}"
        f"{metric_tiles(view.metrics)}"
        "<small>A picture of the moment: run the cell in JupyterLab for the live panel.</small></div>"
    )


def metric_tiles(metrics: dict[str, Any]) -> str:
    """Return each metric of `Metrics.view` with values as a small line chart; plain HTML and SVG."""
    tiles = []
    for metric in METRICS:
        series = metrics["series"][metric.key]
        if not series["v"]:
            continue
        value = f"{series['v'][-1]:.4g} {metric.unit}"
        line = spark_svg(series["t"], series["v"], metrics["seconds"], metrics["marks"])
        tiles.append(
            "<div style='display:inline-block;margin:6px 10px 0 0;vertical-align:top' "
            f"title='{html.escape(metric.help)}'>"
            f"<small>{html.escape(metric.label)}</small><br><b>{html.escape(value)}</b><br>{line}</div>"
        )
    return f"<div>{''.join(tiles)}</div>"


def spark_svg(t: list[float], v: list[float], seconds: float, marks: list[dict[str, Any]]) -> str:
    """Return a line over the last `seconds` (t from -seconds to 0) as SVG, with a mark for each change."""
    low, high = min(v), max(v)
    span = high - low or abs(high) or 1.0
    base = low - span / 2 if high == low else low

    def x(at: float) -> float:
        return round(_WIDTH * (1 + at / seconds), 1)

    points = " ".join(
        f"{x(at)},{round(_HEIGHT - 3 - (value - base) / span * (_HEIGHT - 6), 1)}"
        for at, value in zip(t, v, strict=True)
    )
    lines = "".join(
        f"<line x1='{x(m['t'])}' x2='{x(m['t'])}' y1='0' y2='{_HEIGHT}' stroke='#d55e00' stroke-dasharray='3 2'>"
        f"<title>{html.escape(m['label'])}</title></line>"
        for m in marks
    )
    return (
        f"<svg width='{_WIDTH}' height='{_HEIGHT}' role='img'>{lines}"
        f"<polyline points='{points}' fill='none' stroke='#0072b2' stroke-width='1.5'/></svg>"
    )
