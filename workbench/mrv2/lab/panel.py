"""The panel: one widget, one painter thread that writes it, and messages that become intents."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrv2.errors import ConfigError
from mrv2.lab.details import DETAILS
from mrv2.lab.intents import Intent
from mrv2.lab.load import MODE_HELP
from mrv2.lab.metrics import METRICS
from mrv2.lab.packs import load_pack, pack_names
from mrv2.lab.presets import effect_of, knob_specs, why_not
from mrv2.viz import Timeline, payload, theme
from mrv2.viz import widgets as viz_widgets

if TYPE_CHECKING:
    from mrv2.lab.workbench import Workbench

PERIOD_S = 0.1
SLOWEST_S = 1.0
BEAT_S = 2.0
_ASSETS = Path(__file__).parent / "assets"
Message = dict[str, Any]


@cache
def panel_class() -> type[Any]:
    """Return the class of the panel's widget.

    Its traits hold what is current, so a page that is reloaded shows it; its program is text, so a closed widget can
    be collected.

    Raises:
        TraceError: ipywidgets or anywidget is not installed.
    """
    _, traitlets = viz_widgets.modules()
    parts = [(_ASSETS / name).read_text(encoding="utf-8") for name in ("charts.js", "details.js", "panel.js")]

    class PanelWidget(viz_widgets.widget_class()):
        _esm = "\n".join([payload.assets("format.js", "theme.js"), *parts, "export default { render: renderPanel };"])
        _css = (_ASSETS / "panel.css").read_text(encoding="utf-8")
        # what never changes: knobs, presets, packs, metrics, themes
        spec = traitlets.Dict().tag(sync=True)
        status = traitlets.Dict().tag(sync=True)
        knobs = traitlets.Dict().tag(sync=True)
        metrics = traitlets.Dict().tag(sync=True)
        streams = traitlets.List().tag(sync=True)
        window = traitlets.Dict().tag(sync=True)
        # what the open tab shows
        detail = traitlets.Dict().tag(sync=True)
        tab = traitlets.Unicode("timeline").tag(sync=True)
        # model id of the timeline's widget, once there is one
        timeline = traitlets.Unicode("").tag(sync=True)
        # counts up while the kernel lives
        beat = traitlets.Int(0).tag(sync=True)

    return PanelWidget


class Panel:
    """The panel of one workbench.

    Messages of the page: ``set`` (changes), ``preset`` (name), ``load`` (changes), ``start``, ``pause``, ``stop``,
    ``sync`` (row, window), ``follow``, ``hold``, ``dismiss``, and those of the tabs (see `mrv2.lab.details`).  Each is
    handed on and answered at once; only the painter writes the widget.
    """

    def __init__(self, workbench: Workbench, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.workbench = workbench
        self.widget: Any = panel_class()(spec=self._spec())
        self.timeline: Timeline | None = None
        self.hold = False
        self.period = PERIOD_S
        self.num_paints = 0
        # seconds spent painting, of all and of the last
        self.spent = self.last_cost = 0.0
        self.started = clock()
        self._clock = clock
        self._shown_view = -1
        self._shown_window = 0
        self._knob_state: tuple[Any, ...] = ()
        self._next_slow = float("-inf")
        self._todo: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._receive = workbench.errors.guarded(self._take)
        self.widget.on_msg(self._receive)
        self.details = {name: make(workbench) for name, make in DETAILS.items()}
        self.paint()
        self._thread = threading.Thread(target=self._run, name="lab-painter", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the painter and take the widgets off their pages."""
        self._stop.set()
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(10)
        if self.timeline is not None:
            self.timeline.close()
            self.timeline = None
        self.widget.on_msg(self._receive, remove=True)
        # a widget's layout is a widget too, and does not go with it
        self.widget.layout.close()
        self.widget.close()

    @property
    def cost(self) -> dict[str, float]:
        """What the panel takes: paints a second, milliseconds of the last paint, share of the time since it opened."""
        age = max(self._clock() - self.started, 1e-9)
        return {
            "hz": round(1 / self.period, 1),
            "paint_ms": round(1000 * self.last_cost, 2),
            "share": round(self.spent / age, 4),
        }

    # ---- the painter's thread

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                self.paint()
            except Exception as error:
                self.workbench.errors.add(error)
                self._stop.wait(SLOWEST_S)
            self.last_cost = time.monotonic() - began
            self.spent += self.last_cost
            # a paint that takes more than half of its time halves the rate
            if self.last_cost > self.period / 2:
                self.period = min(2 * self.period, SLOWEST_S)
            elif self.last_cost < self.period / 8:
                self.period = max(self.period / 2, PERIOD_S)
            self._wake.wait(max(0.0, self.period - self.last_cost))
            self._wake.clear()

    def paint(self) -> None:
        """Write what has changed; one message."""
        while self._todo:
            self._todo.popleft()()
        workbench, widget, now = self.workbench, self.widget, self._clock()
        # before the view: an intent that is applied here has its knobs there
        log, by_knob = workbench.intents[-8:], workbench.driver.intents.by_knob()
        view = workbench.view
        with widget.hold_sync():
            widget.beat = int((now - self.started) / BEAT_S)
            self._paint_status(view)
            self._paint_knobs(view, log, by_knob)
            if view.number != self._shown_view:
                self._shown_view = view.number
                widget.streams = view.streams
            if now >= self._next_slow:
                self._next_slow = now + 4 * PERIOD_S
                widget.metrics = view.metrics
                shown = self.details.get(widget.tab)
                widget.detail = {"tab": widget.tab, **shown.paint(self)} if shown is not None else {}
            self._paint_window()
        self.num_paints += 1

    def _paint_status(self, view: Any) -> None:
        error, snapshot = self.workbench.errors.latest, view.snapshot
        self.widget.status = {
            "state": view.state,
            "step": snapshot.step,
            "running": snapshot.num_running,
            "queue": snapshot.num_waiting,
            "tokens": view.num_tokens,
            "finished": view.num_finished,
            "depth": snapshot.effective_depth,
            "grammars": snapshot.num_grammar_running,
            "capture": None if snapshot.capture is None else asdict(snapshot.capture),
            "load": vars(view.load),
            "paused": self.workbench.driver.paused,
            "error": None
            if error is None
            else {"number": error.number, "summary": error.summary, "detail": error.detail},
            "hold": self.hold,
        }

    def _paint_knobs(self, view: Any, log: list[Intent], by_knob: dict[str, Any]) -> None:
        state = (tuple(view.snapshot.knobs.items()), tuple((i.number, i.state, i.lacks_graphs) for i in log))
        if state == self._knob_state:
            return
        self._knob_state = state
        values, config = view.snapshot.knobs, self.workbench.llm_info.config
        why = {
            spec["name"]: [why_not(values, spec["name"], value, config) for value in spec["values"]]
            for spec in knob_specs()
        }
        effects = {
            spec["name"]: [effect_of(values, spec["name"], value) for value in spec["values"]] for spec in knob_specs()
        }
        match = next((p.name for p in self.workbench.presets if p.knobs == values), "")
        self.widget.knobs = {
            "values": values,
            "why": why,
            "effects": effects,
            "preset": match,
            "intents": by_knob,
            "log": [intent.as_dict() for intent in reversed(log)],
        }

    def _paint_window(self) -> None:
        window = self.workbench.driver.window
        if window is None or window.number == self._shown_window or self.hold:
            return
        self._shown_window = window.number
        if self.timeline is None:
            self.timeline = Timeline(window.analysis)
            self.widget.timeline = self.timeline.widget().model_id
        else:
            self.timeline.update(window.analysis)
        self._places = window.places
        self.widget.window = {
            "number": window.number,
            "first": window.first_step,
            "steps": window.num_steps,
            "overlap": window.overlap,
            "idle": window.idle,
            "syncs": window.syncs,
        }

    # ---- messages of the page, on whatever thread the kernel takes them

    def _take(self, _widget: Any, content: Message, _buffers: Any) -> None:
        workbench, kind = self.workbench, content.get("kind")
        if kind == "set":
            changes = {name: _as_value(name, value) for name, value in content["changes"].items()}
            workbench.driver.intend(changes, "panel")
        elif kind == "preset":
            workbench.preset(content["name"], wait=False)
        elif kind == "load":
            load = workbench.load.with_changes(**content["changes"])
            workbench.driver.call(lambda: workbench.driver.set_load(load))
        elif kind == "start":
            workbench.driver.call(workbench._start)
        elif kind == "pause":
            workbench.pause()
        elif kind == "stop":
            workbench.driver.paused = True
            workbench.driver.call(lambda: workbench.driver.drain(abort=True))
        elif kind == "sync":
            self._later(lambda: self._centre(int(content["row"]), int(content["window"])))
        elif kind in ("hold", "follow"):
            self._later(self._follow if kind == "follow" else self._hold_now)
        elif kind == "dismiss":
            workbench.errors.dismiss()
        elif kind == "tab":
            self._next_slow = float("-inf")
        elif (handler := self.details.get(str(content.get("tab")))) is not None:
            handler.take(content)
        else:
            raise ConfigError(f"the page sent a message of unknown kind {kind!r}")
        self._wake.set()

    def _later(self, work: Callable[[], None]) -> None:
        self._todo.append(work)

    def _centre(self, row: int, number: int) -> None:
        if self.timeline is not None and number == self._shown_window and 0 <= row < len(self._places):
            self.hold = True
            self.timeline.center_on(*self._places[row])

    def _hold_now(self) -> None:
        self.hold = True

    def _follow(self) -> None:
        self.hold = False
        if self.timeline is not None:
            # shows all of it again
            self.timeline.update(self.timeline.analysis)

    def _spec(self) -> dict[str, Any]:
        workbench = self.workbench
        info = workbench.llm_info
        return {
            "model": workbench.model_name,
            "device": info.config.device if info.config.device != "auto" else ("cuda" if workbench.on_cuda else "host"),
            "place": workbench.place,
            "hardware": workbench.hardware,
            "knobs": knob_specs(),
            "presets": [vars(preset) for preset in workbench.presets],
            "packs": [
                {"name": pack.name, "title": pack.title, "about": pack.about} for pack in map(load_pack, pack_names())
            ],
            "modes": MODE_HELP,
            "metrics": [vars(metric) for metric in METRICS],
            "themes": theme.spec()["themes"],
            "beat": BEAT_S,
        }


def _as_value(name: str, value: Any) -> Any:
    """Return a value of the page as the knob takes it: its place among the legal values."""
    for spec in knob_specs():
        if spec["name"] == name:
            values = spec["values"]
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < len(values):
                raise ConfigError(f"knob {name}: the page sent the value number {value!r} of {len(values)}")
            return values[value]
    raise ConfigError(f"the page sent an unknown knob {name!r}")
