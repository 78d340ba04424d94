"""`Timeline`: the picture of a trace, in a notebook, as a page, as an image."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from mrv2.trace.analysis.model import Analysis
from mrv2.trace.table import Trace, TraceError
from mrv2.viz import browser, drawing, page, payload, widgets
from mrv2.viz import theme as themes
from mrv2.viz.index import Tile, TimelineIndex
from mrv2.viz.lanes import analysis_of, build_index
from mrv2.viz.links import Links, links_of
from mrv2.viz.live import LiveTimeline

# beyond this a page takes longer to open than anybody waits
MAX_PAGE_EVENTS = 3_000_000


class Timeline:
    """Rows of host threads, synchronisation and device streams over time, with steps as bands.

    Show it as the last line of a notebook cell, or save it.  Windows are ``(start, end)`` in nanoseconds of the trace's
    clock, or any object with `start` and `end` (numbers or arrays: a step, a bubble, a table of them).

    Args:
        trace: what to draw; an `Analysis` also says what its steps are.
        window: what to show first; default: all.
        width_px: width of the plot in pictures; widgets and pages take the width they are given.
        theme: "light" or "dark"; None: what fits the page.
        title: stands above pictures and pages.

    Raises:
        TraceError: the trace has no events, or there is no such theme.
    """

    def __init__(
        self,
        trace: Trace | Analysis,
        *,
        window: Any = None,
        width_px: int = 1100,
        theme: str | None = None,
        title: str = "",
    ) -> None:
        if theme is not None:
            themes.theme(theme)
        self._open(trace)
        self.width_px = width_px
        self.theme = theme
        self.title = title
        self.window: tuple[float, float] = self._as_window(window)
        self._live: LiveTimeline | None = None

    def _open(self, trace: Trace | Analysis) -> None:
        analysis = analysis_of(trace)
        # one assignment: a worker that draws meanwhile sees either the old pair or the new one
        self.drawn: tuple[Analysis, TimelineIndex] = (analysis, build_index(analysis))

    @property
    def analysis(self) -> Analysis:
        """The analysis of the trace that is drawn."""
        return self.drawn[0]

    @property
    def trace(self) -> Trace:
        """The trace that is drawn."""
        return self.drawn[0].trace

    @property
    def index(self) -> TimelineIndex:
        """The rows that are drawn."""
        return self.drawn[1]

    def __repr__(self) -> str:
        counts = self.index.describe()
        return f"Timeline({counts['events']} events in {counts['rows']} rows, {counts['ticks']} host syncs)"

    # pictures

    def tile(self, window: Any = None, width_px: int | None = None) -> Tile:
        """Return what is drawn for a window, by default the current one."""
        a, b = self.window if window is None else self._as_window(window)
        return self.index.tile(a, b, width_px or self.width_px)

    def figure(self, window: Any = None, width_px: int | None = None) -> Any:
        """Return a window, by default the current one, as a plotly figure of its own (no kernel, no zoom into detail).

        Raises:
            TraceError: plotly is not installed.
        """
        return drawing.plotly().Figure(self._figure_parts(window, width_px))

    def _figure_parts(self, window: Any = None, width_px: int | None = None) -> dict[str, Any]:
        tile = self.tile(window, width_px)
        return drawing.figure_parts(self.trace, self.index, tile, theme=self.theme or "light", title=self.title)

    def html(self, window: Any = None) -> str:
        """Return one self-contained page that zooms down to single events without a kernel.

        Raises:
            TraceError: plotly is not installed, or the trace is too large for a page.
        """
        title = self.title or Path(str(self.trace.meta.get("path") or "timeline")).name
        parts = page.Page(title, self.analysis.banners(), timeline=self.page_data(window), theme=self.theme)
        return page.render(parts)

    def page_data(self, window: Any = None) -> tuple[dict[str, Any], bytes]:
        """Return the whole trace as `page.Page.timeline` takes it, opened at `window`.

        Raises:
            TraceError: the trace is too large for a page.
        """
        if self.index.num_events > MAX_PAGE_EVENTS:
            raise TraceError(
                f"{self.index.num_events} events are too many for a page (at most {MAX_PAGE_EVENTS}): "
                "save a part, Timeline(trace.window(start, end)).save(path)"
            )
        spec, blob = payload.whole(self.trace, self.index)
        a, b = self.window if window is None else self._as_window(window)
        return {**spec, "window": [a - self.index.origin, b - self.index.origin]}, blob

    def save(self, path: str | Path, window: Any = None) -> Path:
        """Write to ``.html`` (self-contained, zooms without a kernel), ``.png`` or ``.json`` (plotly figure).

        Raises:
            TraceError: another ending, a missing package or browser, or the file cannot be written.
        """
        path = Path(path)
        if path.suffix not in (".html", ".png", ".json"):
            raise TraceError(f"{path}: a timeline is saved as .html, .png or .json")
        try:
            if path.suffix == ".html":
                path.write_text(self.html(window), encoding="utf-8")
            elif path.suffix == ".json":
                path.write_text(json.dumps(_plain(self._figure_parts(window))), encoding="utf-8")
            else:
                save_png(self.figure(window), path)
        except OSError as error:
            raise TraceError(f"{path}: cannot be written ({error.strerror or error})") from error
        return path

    # the notebook

    def widget(self) -> Any:
        """Return the widget: it asks for tiles as its reader moves; the same one each time.

        Raises:
            TraceError: plotly, ipywidgets or anywidget is not installed.
        """
        if self._live is None:
            self._live = LiveTimeline(self)
        return self._live.widget

    def center_on(self, start: float, end: float) -> None:
        """Show ``[start, end)`` with its surroundings and mark it, in the widget and in later pictures."""
        length = max(end - start, 1)
        half = min(max(self.window[1] - self.window[0], 4 * length), max(40 * length, 50_000)) / 2
        middle = (start + end) / 2
        self.window = (middle - half, middle + half)
        if self._live is not None:
            self._live.centre(start, end)

    def update(self, trace: Trace | Analysis) -> None:
        """Draw another trace in place, for example more of a run that goes on; shows all of it."""
        self._open(trace)
        self.window = self._as_window(None)
        if self._live is not None:
            self._live.refresh()

    def links(self, row: int, i: int) -> Links:
        """Return what event `i` of row `row` launched, or what launched it."""
        return links_of(self.analysis, self.index, row, i)

    def close(self) -> None:
        """Take the widget off its pages; a later `widget()` is a new one."""
        if self._live is not None:
            self._live.close()
            self._live = None

    def _repr_mimebundle_(self, **_: Any) -> Any:
        # readers of a notebook without its kernel see the figure
        static = {"text/plain": repr(self), "application/vnd.plotly.v1+json": _plain(self._figure_parts())}
        return widgets.bundle(self.widget, static) if widgets.has_front_end() else static

    def _as_window(self, window: Any) -> tuple[float, float]:
        if window is None:
            return float(self.index.origin), float(self.index.end)
        start, end = (window.start, window.end) if hasattr(window, "start") else window
        start, end = float(np.min(start)), float(np.max(end))
        if not end >= start:
            raise TraceError(f"window ({start:.0f}, {end:.0f}): the end lies before the start")
        return self.index.clamp(start, end)


def _plain(value: Any) -> Any:
    """Return nested dictionaries and arrays as JSON takes them: lists, and None for gaps."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, np.ndarray):
        return [_plain(line) for line in value] if value.ndim > 1 else _without_gaps(value)
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value.item() if isinstance(value, np.generic) else value


def _without_gaps(column: np.ndarray) -> list[Any]:
    if column.dtype.kind != "f" or not np.isnan(column).any():
        return column.tolist()
    return [None if gap else x for x, gap in zip(column.tolist(), np.isnan(column).tolist())]


def save_png(figure: Any, path: Path) -> None:
    """Write a plotly figure as PNG, with kaleido or else with an installed browser.

    Raises:
        TraceError: there is neither, or drawing failed.
    """
    buffer = io.BytesIO()
    try:
        figure.write_image(buffer, format="png", scale=2)
    except Exception as error:  # kaleido's own errors, and ValueError without it
        if browser.find_browser() is None:
            raise TraceError(
                "a PNG needs a browser (Chromium or Chrome), and with it optionally kaleido: pip install "
                f"'mrv2-workbench[notebook]', or save as .html, which needs neither ({type(error).__name__})"
            ) from error
        page.screenshot_figure(figure, path)
        return
    path.write_bytes(buffer.getvalue())
