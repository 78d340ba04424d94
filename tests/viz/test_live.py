"""The widgets without a browser: the messages that a page sends, and what comes back."""

from __future__ import annotations

import gc
import gzip
import weakref
from typing import Any

import numpy as np
import pytest

from mrv2.trace.analysis.model import Analysis
from mrv2.viz import Timeline, payload
from mrv2.viz.live import LiveTimeline
from mrv2.viz.tables import sync_table
from viz.traces import NUM_STEPS, STEP_NS, big_trace, small_trace

pytest.importorskip("plotly")
pytest.importorskip("anywidget")
ORIGIN = 1_000_000


class Page:
    """Stands in for the browser: sends messages to a widget and keeps what it sends."""

    def __init__(self, timeline: Timeline, monkeypatch: pytest.MonkeyPatch) -> None:
        self.widget = timeline.widget()
        self.live: LiveTimeline = timeline._live  # type: ignore[assignment]  # the widget has just made it
        self.sent: list[tuple[dict[str, Any], Any]] = []
        monkeypatch.setattr(self.widget, "send", lambda content, buffers=None: self.sent.append((content, buffers)))

    def say(self, **content: Any) -> None:
        self.widget._handle_custom_msg(content, [])
        assert self.live.worker.settle(10)


def test_a_page_gets_the_tile_that_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline(small_trace())
    page = Page(timeline, monkeypatch)
    page.say(kind="tile", view="v", serial=3, window=[0, 10_000], width=500)
    tile = page.widget.tile
    assert (tile["view"], tile["serial"], tile["window"], tile["width"]) == ("v", 3, [0, 10_000], 500)
    assert timeline.window == (ORIGIN, ORIGIN + 10_000)
    assert page.widget.error == ""


def test_a_page_that_is_reloaded_finds_the_current_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page(Timeline(small_trace()), monkeypatch)
    first = page.widget.get_state()["tile"]["window"]
    page.say(kind="tile", view="v", serial=1, window=[5000, 9000], width=500)
    state = page.widget.get_state()
    assert first == [0, NUM_STEPS * STEP_NS - 200]
    assert state["tile"]["window"] == [5000, 9000]
    assert {"spec", "view", "theme", "plotly_version"} <= set(state)


def test_plotly_travels_only_when_a_page_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page(Timeline(small_trace()), monkeypatch)
    state = page.widget.get_state()
    assert len(state["_esm"]) < 60_000
    page.say(kind="plotly")
    content, buffers = page.sent[0]
    assert content == {"kind": "plotly"}
    assert gzip.decompress(buffers[0]) == gzip.decompress(payload.plotly_source())


def test_a_chosen_launch_is_answered_with_its_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline(small_trace())
    page = Page(timeline, monkeypatch)
    row = [row.key for row in timeline.index.rows].index("api:1:5:0")
    page.say(kind="select", row=row, index=0)
    links = page.sent[0][0]["links"]
    assert links["from"] == [row, 2000, 2500]
    assert [start for _, start, _ in links["to"]] == [3000, 5500]
    assert links["total"] == 2


def test_the_next_sync_is_found_in_either_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page(Timeline(small_trace()), monkeypatch)
    for at, direction in ((8000, 1), (8000, -1), (20_000, -1), (1e9, 1)):
        page.say(kind="tick", at=at, direction=direction)
    assert [content["at"] for content, _ in page.sent] == [18_000, None, 18_000, None]


def test_an_error_is_shown_on_the_page_and_the_next_tile_clears_it(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page(Timeline(small_trace()), monkeypatch)
    page.say(kind="tile", view="v", serial=1, window=["x", 1], width=500)
    assert "ValueError" in page.widget.error
    page.say(kind="tile", view="v", serial=2, window=[0, 1000], width=500)
    assert page.widget.error == ""


def test_centring_twice_on_one_place_is_two_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline(small_trace())
    page = Page(timeline, monkeypatch)
    wishes = []
    page.widget.observe(lambda change: wishes.append(change["new"]), "centre")
    timeline.center_on(ORIGIN + 100, ORIGIN + 200)
    timeline.center_on(ORIGIN + 100, ORIGIN + 200)
    assert [wish[:2] for wish in wishes] == [[100, 200], [100, 200]]


def test_a_chosen_row_of_the_sync_table_centres_the_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = small_trace()
    timeline = Timeline(trace)
    page = Page(timeline, monkeypatch)
    table = sync_table(Analysis(trace), timeline)
    table.widget()._handle_custom_msg({"kind": "row", "row": 2}, [])
    start, end = table.places[2]
    assert page.widget.centre[:2] == [start - ORIGIN, end - ORIGIN]
    assert table.widget().selected == 2


def test_another_trace_is_drawn_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline(small_trace())
    page = Page(timeline, monkeypatch)
    timeline.update(big_trace(2_000))
    assert page.widget is timeline.widget()
    assert page.widget.spec["span"] == timeline.index.end - timeline.index.origin
    assert page.widget.tile["window"] == page.widget.view == [0, page.widget.spec["span"]]


def test_a_closed_timeline_is_collected() -> None:
    timeline = Timeline(small_trace())
    seen = [weakref.ref(timeline), weakref.ref(timeline.widget()), weakref.ref(timeline.index)]
    timeline.close()
    del timeline
    gc.collect()
    assert [ref() for ref in seen] == [None, None, None]


def test_a_widget_that_is_shown_keeps_its_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    # as in a cell that ends with `Timeline(trace).widget()`
    page = Page(Timeline(small_trace()), monkeypatch)
    gc.collect()
    page.say(kind="tile", view="v", serial=1, window=[0, 1000], width=100)
    assert page.widget.tile["serial"] == 1


def test_many_requests_end_with_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline(big_trace(20_000))
    page = Page(timeline, monkeypatch)
    for serial in range(200):
        page.widget._handle_custom_msg(
            {
                "kind": "tile",
                "view": "v",
                "serial": serial,
                "window": [serial * 1000, serial * 1000 + 50_000],
                "width": 900,
            },
            [],
        )
    assert page.live.worker.settle(30)
    assert page.widget.tile["serial"] == 199
    assert page.live.worker.num_done + page.live.worker.num_dropped == 200
    assert np.frombuffer(page.widget.tile["bars"]["row"], "u2").size
