"""One HTML file that needs nothing else: plotly, program, data and tables inside."""

from __future__ import annotations

import gzip
import html
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrv2.viz import browser, payload, theme


@dataclass
class Page:
    """What stands on a page, top to bottom: banners, facts, timeline, figures, tables, footer."""

    title: str
    # what a reader of any figure must know first
    banners: Sequence[str] = ()
    # name and value
    facts: Sequence[tuple[str, str]] = ()
    # from `payload.whole`, with an optional "window"
    timeline: tuple[dict[str, Any], bytes] | None = None
    # plotly figures as dictionaries, each with a heading
    figures: Sequence[tuple[str, dict[str, Any]]] = ()
    # see assets/table.js
    tables: Sequence[dict[str, Any]] = ()
    footer: str = ""
    # None: what the reader prefers
    theme: str | None = None


def render(page: Page) -> str:
    """Return the page as HTML.

    Raises:
        TraceError: plotly is not installed, or there is no such theme.
    """
    if page.theme is not None:
        theme.theme(page.theme)
    version, plotly = payload.plotly_version(), payload.plotly_source()
    data: dict[str, Any] = {
        "themes": theme.spec()["themes"],
        "theme": page.theme,
        # it shares the page's themes
        "timeline": {k: v for k, v in page.timeline[0].items() if k != "themes"} if page.timeline else None,
        "tables": list(page.tables),
        "figures": [figure for _, figure in page.figures],
    }
    text = html.escape
    body = [
        f"<header><h1>{text(page.title)}</h1><button id='mrv2-theme' type='button'>light / dark</button></header>",
        *(f"<p class='banner'>{text(line)}</p>" for line in page.banners),
        _facts(page.facts),
        "<div id='mrv2-timeline'></div>" if page.timeline else "",
        "<p class='mrv2-note'>Drag to move, wheel or + and - to zoom, arrow keys to move, 0 shows all, n and p go from "
        "sync to sync, a click on a launch shows what it started.</p>"
        if page.timeline
        else "",
        _figures(page.figures),
        *(f"<div id='mrv2-table-{i}'></div>" for i in range(len(page.tables))),
        f"<footer>{text(page.footer)}</footer>" if page.footer else "",
    ]
    columns = payload.packed(page.timeline[1]) if page.timeline else ""
    program = payload.assets(
        "format.js", "theme.js", "local_source.js", "traces.js", "timeline.js", "table.js", "page.js"
    )
    return "\n".join(
        [
            "<!doctype html>",
            f"<html lang='en'><head><meta charset='utf-8'><title>{text(page.title)}</title>",
            "<meta name='viewport' content='width=device-width, initial-scale=1'>",
            f"<style>{payload.assets('style.css', 'page.css')}</style></head><body>",
            *filter(None, body),
            f"<script type='text/plain' id='mrv2-data'>{payload.packed(_json(data).encode())}</script>",
            f"<script type='text/plain' id='mrv2-columns'>{columns}</script>",
            f"<script type='text/plain' id='mrv2-plotly' data-version='{version}'>{payload.as_base85(plotly)}</script>",
            f"<script type='module'>{program}</script>",
            "</body></html>",
        ]
    )


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    cards = "".join(f"<div><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>" for name, value in facts)
    return f"<section class='facts'>{cards}</section>" if cards else ""


def _figures(figures: Sequence[tuple[str, dict[str, Any]]]) -> str:
    cards = "".join(
        f"<section><h2>{html.escape(heading)}</h2><div id='mrv2-figure-{i}'></div></section>"
        for i, (heading, _) in enumerate(figures)
    )
    return f"<div class='figures'>{cards}</div>" if cards else ""


def _json(data: Any) -> str:
    # a name with "</script>" in it must not end the element
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def screenshot_figure(figure: Any, picture: Path) -> None:
    """Write a plotly figure as PNG with an installed browser.

    Raises:
        TraceError: no browser is installed, or it failed.
    """
    parts = json.loads(figure.to_json())
    width, height = int(figure.layout.width or 1000), int(figure.layout.height or 500)
    plotly = payload.plotly_source()
    draw = f"Plotly.newPlot('figure', {_json(parts)}, undefined, {{staticPlot: true}})"
    text = gzip.decompress(plotly).decode()
    body = f"<body style='margin:0'><div id='figure'></div><script>{text}</script><script>{draw}</script></body>"
    with tempfile.TemporaryDirectory(prefix="mrv2-figure-") as folder:
        file = Path(folder) / "figure.html"
        file.write_text(f"<!doctype html><meta charset='utf-8'>{body}", encoding="utf-8")
        browser.screenshot(file, picture, width, height)
