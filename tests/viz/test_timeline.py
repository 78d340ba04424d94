"""The timeline object: windows, centring, files, and what it says when something is missing."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mrv2.trace.table import Trace, TraceError
from mrv2.viz import Timeline, browser, payload, timeline, widgets
from viz.traces import NUM_STEPS, STEP_NS, big_trace, small_trace

pytest.importorskip("plotly")
ORIGIN = 1_000_000


class Links(HTMLParser):
    """Collects whatever would make a browser fetch something, and the text of each script."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.scripts: dict[str, str] = {}
        self._script = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.fetched += [str(found[key]) for key in ("src", "href", "action", "data", "poster") if key in found]
        self._script = str(found.get("id") or found.get("type")) if tag == "script" else ""

    def handle_data(self, data: str) -> None:
        if self._script:
            self.scripts[self._script] = self.scripts.get(self._script, "") + data


def parse(text: str) -> Links:
    """Return what a page would fetch and its scripts."""
    parser = Links()
    parser.feed(text)
    return parser


def test_windows_come_in_several_forms() -> None:
    trace = small_trace()
    steps = SimpleNamespace(
        start=np.array([ORIGIN, ORIGIN + STEP_NS]), end=np.array([ORIGIN + 5, ORIGIN + 2 * STEP_NS])
    )
    assert Timeline(trace).window == (ORIGIN, ORIGIN + NUM_STEPS * STEP_NS - 200)
    assert Timeline(trace, window=(ORIGIN + 10, ORIGIN + 20)).window == (ORIGIN + 10, ORIGIN + 20)
    assert Timeline(trace, window=steps).window == (ORIGIN, ORIGIN + 2 * STEP_NS)
    with pytest.raises(TraceError, match="end lies before the start"):
        Timeline(trace, window=(20, 10))


def test_centring_shows_the_place_with_its_surroundings() -> None:
    picture = Timeline(small_trace())
    picture.center_on(ORIGIN + 8000, ORIGIN + 9500)
    a, b = picture.window
    assert (a + b) / 2 == ORIGIN + 8750
    assert 4 * 1500 <= b - a <= 50_000
    labels = next(trace for trace in picture.figure().data if trace.name == "labels")
    assert "cuda\u2026" in labels.text


def test_links_lead_from_a_launch_to_its_work_and_back() -> None:
    picture = Timeline(small_trace())
    row = {row.key: i for i, row in enumerate(picture.index.rows)}
    links = picture.links(row["api:1:5:0"], 0)
    assert links.total == 2
    assert [(place.row, place.start) for place in links.partners] == [
        (row["stream:0:7:0"], ORIGIN + 3000), (row["stream:0:7:0"], ORIGIN + 5500)
    ]  # fmt: skip
    back = picture.links(row["stream:0:7:0"], 1)
    assert [(place.row, place.start) for place in back.partners] == [(row["api:1:5:0"], ORIGIN + 2000)]
    # the wait launched nothing, a range has no correlation
    assert picture.links(row["api:1:5:0"], 2).total == 0
    assert picture.links(row["ranges:1:5:0"], 0).total == 0


def test_a_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    path = Timeline(small_trace(), title="<b>run</b>").save(tmp_path / "timeline.html")
    text = path.read_text(encoding="utf-8")
    page = parse(text)
    assert page.fetched == []
    assert "@import" not in text and not re.search(r"url\(", text)
    own = page.scripts["module"]
    assert "import " not in own and not re.search(r"https?://", own)
    assert "<title>&lt;b&gt;run&lt;/b&gt;</title>" in text
    data = json.loads(payload.unpacked(page.scripts["mrv2-data"]))
    assert data["timeline"]["window"] == [0, NUM_STEPS * STEP_NS - 200]


def test_a_name_cannot_break_out_of_the_page() -> None:
    trace = small_trace()
    trace.strings = ["</script><script>alert(1)" if text == "nvjet_gemm" else text for text in trace.strings]
    page = parse(Timeline(trace).html())
    assert len(page.scripts) == 4
    assert "</script><script>alert(1)" in json.loads(payload.unpacked(page.scripts["mrv2-data"]))["timeline"]["names"]


def test_a_figure_file_can_be_read_back(tmp_path: Path) -> None:
    picture = Timeline(big_trace(4_000))
    path = picture.save(tmp_path / "timeline.json")
    parts = json.loads(path.read_text(encoding="utf-8"))
    drawn = picture.figure()
    assert [trace["name"] for trace in parts["data"]] == [trace.name for trace in drawn.data]
    for said, trace in zip(parts["data"], drawn.data):
        for axis in {"x", "y", "z"} & set(said):
            column = np.array(said[axis], np.float64)
            assert column == pytest.approx(np.array(trace[axis], np.float64), nan_ok=True)


def test_other_endings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"saved as \.html, \.png or \.json"):
        Timeline(small_trace()).save(tmp_path / "timeline.pdf")


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be written"):
        Timeline(small_trace()).save(tmp_path / "none" / "timeline.html")


def test_without_a_browser_a_png_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kaleido", None)
    monkeypatch.setattr(browser, "find_browser", lambda: None)
    with pytest.raises(TraceError, match=r"needs a browser.*save as \.html"):
        Timeline(small_trace()).save(tmp_path / "timeline.png")


@pytest.mark.parametrize("act", ["figure", "html"])
def test_without_plotly_the_extra_is_named(act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = Timeline(small_trace())
    for name in ("plotly", "plotly.graph_objects"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(timeline.payload, "find_spec", lambda name: None)
    timeline.payload.plotly_source.cache_clear()
    with pytest.raises(TraceError, match=r"mrv2-workbench\[notebook\]"):
        getattr(picture, act)()


def test_without_widgets_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "anywidget", None)
    monkeypatch.setattr(widgets, "timeline_class", widgets.timeline_class.__wrapped__)
    with pytest.raises(TraceError, match=r"mrv2-workbench\[notebook\]"):
        Timeline(small_trace()).widget()


def test_where_there_is_no_notebook_the_picture_is_static() -> None:
    shown = Timeline(small_trace())._repr_mimebundle_()
    assert "application/vnd.plotly.v1+json" in shown
    assert shown["text/plain"].startswith("Timeline(")
    json.dumps(shown)


def test_too_many_events_for_a_page_name_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MAX_PAGE_EVENTS", 10)
    with pytest.raises(TraceError, match=r"trace\.window\(start, end\)"):
        Timeline(small_trace()).html()


def test_an_empty_trace_says_so() -> None:
    with pytest.raises(TraceError, match="no events"):
        Timeline(Trace())
