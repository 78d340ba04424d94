"""The timeline in a notebook: what its widget asks, answered from the index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mrv2.viz import payload, widgets
from mrv2.viz.latest import LatestWins
from mrv2.viz.links import Links, Place

if TYPE_CHECKING:
    from mrv2.viz.timeline import Timeline

Message = dict[str, Any]


class LiveTimeline:
    """One widget of one timeline.

    Messages of the page: ``tile`` (window, width, view, serial), ``select`` (row, index), ``tick`` (at, direction) and
    ``plotly``; times are nanoseconds from the start of the trace.  Tiles are made on a thread of their own, where only
    the newest question counts; the others are answered at once.

    Raises:
        TraceError: plotly, ipywidgets or anywidget is not installed.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._num_centred = 0
        plotly = payload.plotly_version()
        self.widget: Any = widgets.timeline_class()(theme=timeline.theme or "", plotly_version=plotly)
        self.worker: LatestWins[Message] = LatestWins(self._serve, self._show_error)
        self.widget.on_msg(self._receive)
        self.refresh()

    def refresh(self) -> None:
        """Send rows, window and tile of the timeline as it is now."""
        timeline = self._timeline
        analysis, index = timeline.drawn
        with self.widget.hold_sync():
            self.widget.tile = payload.tile_message(analysis.trace, index, timeline.tile())
            self.widget.view = [edge - index.origin for edge in timeline.window]
            self.widget.spec = payload.describe(index)

    def centre(self, start: float, end: float) -> None:
        """Show ``[start, end)`` of the trace's clock with its surroundings."""
        # the number makes the same place twice two wishes
        self._num_centred += 1
        origin = self._timeline.index.origin
        self.widget.centre = [float(start - origin), float(end - origin), self._num_centred]

    def close(self) -> None:
        """Take the widget off its pages."""
        self.widget.on_msg(self._receive, remove=True)
        self.widget.layout.close()
        self.widget.close()

    def _receive(self, _widget: Any, content: Message, _buffers: Any) -> None:
        kind, index = content.get("kind"), self._timeline.index
        if kind == "tile":
            self.worker.submit(content)
        elif kind == "plotly":
            self.widget.send({"kind": "plotly"}, [payload.plotly_source(1)])
        elif kind == "select":
            found = self._timeline.links(int(content["row"]), int(content["index"]))
            self.widget.send({"kind": "links", "links": _links_message(found, index.origin)})
        elif kind == "tick":
            times = index.ticks.time - index.origin
            self.widget.send({"kind": "tick", "at": _next(times, float(content["at"]), int(content["direction"]))})

    def _serve(self, request: Message) -> None:
        analysis, index = self._timeline.drawn
        a, b = (float(edge) + index.origin for edge in request["window"])
        tile = index.tile(a, b, int(request["width"]))
        message = payload.tile_message(analysis.trace, index, tile)
        self._timeline.window = tile.window
        self.widget.tile = {**message, "view": request["view"], "serial": request["serial"]}
        self.widget.error = ""

    def _show_error(self, error: BaseException) -> None:
        self.widget.error = f"the timeline could not be drawn: {type(error).__name__}: {error}"


def _links_message(found: Links, origin: int) -> Message:
    def relative(place: Place) -> list[float]:
        return [place.row, float(place.start - origin), float(place.end - origin)]

    return {"from": relative(found.chosen), "to": [relative(place) for place in found.partners], "total": found.total}


def _next(times: np.ndarray, at: float, direction: int) -> float | None:
    """Return the first of the sorted `times` after `at`, or the last one before it; None if there is none."""
    i = int(np.searchsorted(times, at + 1) if direction > 0 else np.searchsorted(times, at) - 1)
    return float(times[i]) if 0 <= i < len(times) else None
