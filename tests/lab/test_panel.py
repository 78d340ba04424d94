"""The panel's widget without a kernel or a browser: what a page sends, and what the painter writes."""

from __future__ import annotations

import gc
import json
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.benches import make_bench, until
from mrv2.config import Knobs
from mrv2.engine.messages import CaptureProgress
from mrv2.lab import Load, Workbench, open_session
from mrv2.lab.panel import Panel

pytest.importorskip("anywidget")
pytest.importorskip("plotly")
KNOBS = dict.fromkeys(Knobs().as_dict(), list)


@pytest.fixture(scope="module")
def bench() -> Iterator[Workbench]:
    with make_bench(name="panel") as made:
        yield made


@pytest.fixture
def panel(bench: Workbench) -> Iterator[Panel]:
    bench.set_load(Load(users=3, max_tokens=24, ignore_eos=True))
    bench.start()
    yield bench.panel
    bench.stop()
    bench.preset("V2 async")
    bench.errors.dismiss()


def say(panel: Panel, **content: Any) -> None:
    """Send a message as a page does."""
    panel.widget._handle_custom_msg(content, [])


def choose(panel: Panel, name: str, value: Any) -> None:
    (spec,) = (spec for spec in panel.widget.spec["knobs"] if spec["name"] == name)
    say(panel, kind="set", changes={name: spec["values"].index(value)})


def test_the_page_gets_every_knob_and_preset_with_what_it_says(panel: Panel) -> None:
    spec = panel.widget.spec
    assert {knob["name"] for knob in spec["knobs"]} == set(Knobs().as_dict())
    assert any(preset["reason"] for preset in spec["presets"])
    assert json.dumps(spec)


def test_a_choice_becomes_an_intent_that_is_pending_and_then_applied(panel: Panel) -> None:
    bench = panel.workbench
    bench.wait(tokens=5)
    gate = threading.Event()
    bench.driver.call(lambda: gate.wait(20))
    choose(panel, "async_scheduling", False)
    until(lambda: panel.widget.knobs["intents"].get("async_scheduling", {}).get("state") == "pending")
    assert panel.widget.knobs["values"]["async_scheduling"] is True
    gate.set()
    shown = until(
        lambda: panel.widget.knobs["intents"]["async_scheduling"]["state"] == "applied" and panel.widget.knobs
    )
    assert shown["values"]["async_scheduling"] is False
    assert shown["intents"]["async_scheduling"]["step"] == bench.snapshot().knobs_since
    assert shown["preset"] == "V2 sync"
    until(lambda: any("async_scheduling=off" in m["label"] for m in panel.widget.metrics["marks"]))


def test_the_capture_of_graphs_is_shown_and_what_the_change_took(panel: Panel) -> None:
    bench = panel.workbench
    bench.wait(tokens=5)
    driver, snapshot = bench.driver, bench.snapshot()
    halfway = replace(
        snapshot, capture=CaptureProgress(num_captured=3, num_graphs=8, upcoming="whole step, 4 requests")
    )

    def show() -> None:
        # the driver rests meanwhile: this is the last that it saw
        driver.view = replace(driver.view, snapshot=halfway)
        seen.wait(20)

    seen = threading.Event()
    driver.call(show)
    until(lambda: panel.widget.status["capture"])
    assert panel.widget.status["capture"] == {"num_captured": 3, "num_graphs": 8, "upcoming": "whole step, 4 requests"}
    seen.set()
    until(lambda: panel.widget.status["capture"] is None)
    choose(panel, "cuda_graphs", "step")
    shown = until(
        lambda: (found := panel.widget.knobs["intents"].get("cuda_graphs", {})).get("capture_ms") is not None and found
    )
    assert shown["state"] == "applied" and shown["recomputed"] == 0
    intent = next(i for i in bench.intents if i.number == shown["number"])
    assert intent.change is not None and shown["graphs"] == intent.change.num_graphs


def test_a_refusal_is_shown_with_its_reason_beside_the_knob(panel: Panel) -> None:
    bench = panel.workbench
    bench.set(runner="v1", sampler="softmax_race")
    until(lambda: panel.widget.knobs["values"]["runner"] == "v1")
    values = next(spec for spec in panel.widget.spec["knobs"] if spec["name"] == "queue_depth")["values"]
    assert "queue_depth <= 2" in panel.widget.knobs["why"]["queue_depth"][values.index(4)]
    choose(panel, "queue_depth", 4)
    shown = until(
        lambda: panel.widget.knobs["intents"].get("queue_depth", {}).get("state") == "refused" and panel.widget.knobs
    )
    assert "queue_depth <= 2" in shown["intents"]["queue_depth"]["reason"]
    assert bench.knobs["queue_depth"] == 2
    # a refusal is no failure of the panel
    bench.check()


def test_presets_loads_and_the_three_buttons(panel: Panel) -> None:
    bench = panel.workbench
    say(panel, kind="preset", name="V1 as it was")
    until(lambda: panel.widget.knobs["preset"] == "V1 as it was")
    say(panel, kind="load", changes={"users": 2, "seed": None})
    until(lambda: panel.widget.status["load"]["users"] == 2)
    assert bench.load.seed is None
    say(panel, kind="pause")
    until(lambda: panel.widget.status["state"] == "paused")
    say(panel, kind="start")
    until(lambda: panel.widget.status["state"] == "running")
    say(panel, kind="stop")
    until(lambda: panel.widget.status["state"] == "paused" and not panel.widget.status["running"])


def test_tokens_metrics_and_timeline_come_by_themselves(panel: Panel) -> None:
    panel.workbench.wait(tokens=60)
    until(lambda: any(stream["tokens"] for stream in panel.widget.streams))
    until(lambda: panel.widget.metrics["series"]["tok_s"]["v"])
    number = until(lambda: panel.widget.window.get("number"))
    assert panel.timeline is not None and panel.widget.timeline == panel.timeline.widget().model_id
    until(lambda: panel.widget.window["number"] > number)
    # a page that is reloaded finds all of it
    state = panel.widget.get_state()
    assert state["window"]["syncs"]["rows"] and state["streams"] and state["knobs"]["values"]


def test_a_chosen_sync_is_centred_and_the_window_stays_until_the_reader_goes_on(panel: Panel) -> None:
    until(lambda: panel.widget.window.get("number"))
    say(panel, kind="hold")
    until(lambda: panel.widget.status["hold"])
    number = panel.widget.window["number"]
    assert panel.timeline is not None
    start, end = panel._places[1]
    say(panel, kind="sync", row=1, window=number)
    widget = panel.timeline.widget()
    origin = panel.timeline.index.origin
    until(lambda: widget.centre[:2] == [start - origin, end - origin])
    window = panel.workbench.driver.window
    until(lambda: panel.workbench.driver.window is not window)
    assert panel.widget.window["number"] == number
    say(panel, kind="follow")
    until(lambda: panel.widget.window["number"] > number)
    assert not panel.hold


@pytest.mark.parametrize(
    "tab, message, key",
    [
        ("batch", {"kind": "inspect", "steps": 4}, "blocks"),
        ("inspector", {"kind": "inspect", "steps": 3}, "tokens"),
        ("speculation", None, "drafted"),
        ("sampler", {"kind": "draw", "prompt": "one two", "draws": 40}, "counts"),
        ("ab", {"kind": "run", "a": "V2 sync", "b": "V2 async", "requests": 2, "repetitions": 1}, "result"),
        ("session", None, "code"),
    ],
)
def test_each_tab_shows_what_it_is_for(panel: Panel, tab: str, message: dict[str, Any] | None, key: str) -> None:
    panel.widget.set_state({"tab": tab})
    say(panel, kind="tab")
    if message is not None:
        say(panel, tab=tab, **message)

    def shown() -> dict[str, Any] | None:
        detail = panel.widget.detail
        # nothing was drafted: an empty list is an answer
        return detail if detail.get("tab") == tab and (detail.get(key) or tab == "speculation") else None

    detail = until(shown)
    assert json.dumps(detail)
    panel.widget.set_state({"tab": "timeline"})
    panel.workbench.check()


def test_the_session_is_saved_beside_the_notebook(
    panel: Panel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    panel.widget.set_state({"tab": "session"})
    for kind, said in (("save", "saved "), ("report", "wrote ")):
        say(panel, tab="session", kind=kind)
        until(lambda said=said: panel.widget.detail.get("saved", "").startswith(said))
    panel.widget.set_state({"tab": "timeline"})
    (folder,) = tmp_path.glob("mrv2-session-*[0-9]")
    (page,) = tmp_path.glob("mrv2-session-*.html")
    assert open_session(folder).knobs == panel.workbench.knobs
    assert "tiny-llama" in page.read_text(encoding="utf-8")


def test_an_error_of_a_button_reaches_the_banner_and_check(panel: Panel) -> None:
    say(panel, kind="load", changes={"users": 0})
    error = until(lambda: panel.widget.status["error"])
    assert "users=0" in error["summary"]
    with pytest.raises(ValueError, match="users=0"):
        panel.workbench.check()
    say(panel, kind="nonsense")
    until(lambda: "nonsense" in (panel.widget.status["error"] or {}).get("summary", ""))
    say(panel, kind="dismiss")
    until(lambda: panel.widget.status["error"] is None)


def test_the_heart_beats_while_nothing_else_happens(panel: Panel) -> None:
    panel.workbench.stop()
    beat = panel.widget.beat
    until(lambda: panel.widget.beat > beat)


def test_a_paint_that_takes_too_long_lowers_the_rate(panel: Panel, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = threading.Event()

    def paint() -> None:
        slow.wait(0.2)

    monkeypatch.setattr(panel, "paint", paint)
    until(lambda: panel.period >= 0.4)
    slow.set()
    until(lambda: panel.period == pytest.approx(0.1))
    assert panel.cost["share"] > 0


def test_only_the_painter_writes_the_widget(panel: Panel) -> None:
    writers: set[str] = set()
    names = ("status", "knobs", "metrics", "streams", "window", "detail", "beat")
    panel.widget.observe(lambda _: writers.add(threading.current_thread().name), list(names))
    panel.workbench.set(queue_depth=1)
    choose(panel, "queue_depth", 3)
    panel.workbench.wait(tokens=30, seconds=1.0)
    until(lambda: writers)
    assert writers == {"lab-painter"}


@pytest.mark.serial
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_engines_in_child_processes_leave_neither_process_nor_open_file() -> None:
    def children() -> set[str]:
        found = (Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")).read_text().split()
        # the one that looks after the semaphores of all stays until the end
        return {pid for pid in found if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()}

    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    make_bench(name="children", engine="process").close()
    before, files, threads = children(), open_files(), threading.active_count()
    for _ in range(10):
        with make_bench(name="children", engine="process", load=Load(users=2, max_tokens=8), start=True) as bench:
            bench.panel  # noqa: B018  # it opens
            bench.wait(requests=1)
            assert len(children() - before) == 1
    del bench
    until(lambda: children() <= before)
    until(lambda: threading.active_count() <= threads)
    until(lambda: gc.collect() >= 0 and open_files() <= files)


@pytest.mark.serial
def test_ten_panels_leave_no_figure_thread_or_engine() -> None:
    make_bench(name="leaks").close()
    gc.collect()
    from ipywidgets.widgets.widget import _instances

    threads, widgets = threading.active_count(), len(_instances)
    left: list[weakref.ref[Any]] = []
    for _ in range(10):
        bench = make_bench(name="leaks", load=Load(users=2, max_tokens=8), start=True)
        panel = bench.panel
        until(lambda panel=panel: panel.timeline is not None)
        left += [weakref.ref(thing) for thing in (bench, panel, panel.widget, panel.timeline, bench.driver.client)]
        bench.close()
        del bench, panel
    until(lambda: threading.active_count() <= threads)
    # the thread that analyses recordings rests a while before it ends
    until(lambda: gc.collect() >= 0 and all(reference() is None for reference in left))
    assert len(_instances) <= widgets
