"""`Workbench`: an engine that serves a load in the background, and the panel that shows and steers it."""

from __future__ import annotations

import asyncio
import atexit
import time
import weakref
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mrv2.engine.inspection import Inspection
from mrv2.engine.messages import EngineSnapshot
from mrv2.errors import ConfigError, EngineDeadError
from mrv2.lab.ab import ABResult, run_ab
from mrv2.lab.driver import Driver, View
from mrv2.lab.errors import ErrorStore
from mrv2.lab.intents import Intent
from mrv2.lab.load import Load
from mrv2.lab.places import check_params, hardware_name, on_cuda, place_of
from mrv2.lab.presets import Preset, find_preset, presets, setting_of
from mrv2.lab.requests import LabRequest
from mrv2.llm import LLM
from mrv2.prompts import PromptType, match_params, parse_prompts
from mrv2.record import record
from mrv2.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mrv2.lab.panel import Panel
    from mrv2.trace import Trace

WAIT_S = 120.0
_DEFAULT_MODEL = "smollm2-135m-instruct"
# one workbench a name: making another one closes it
_SERIALS = count()
_OPEN: weakref.WeakValueDictionary[str, Workbench] = weakref.WeakValueDictionary()


class Workbench:
    """A model being served, and the panel that shows it; a context manager.

    Show it as the last line of a cell.  Every method may be called while requests run, from any thread.

    Args:
        model: as for `LLM`.
        engine: "process" (a child process; what plotting costs the kernel does not touch it), "thread", or "auto" =
            a process on a GPU, else a thread.
        load: what the load generator does; a `Load`, or the name of a prompt pack.
        knobs: knobs to begin with, by name.
        name: a second workbench of the same name closes the first, so that a cell can be run again.
        start: serve the load at once; otherwise `start()` does it.
        window_steps: steps of each recorded window.
        options: as for `LLM`.

    Raises:
        ConfigError: an unknown option, knob, pack or place.
    """

    def __init__(
        self,
        model: str | Path = _DEFAULT_MODEL,
        *,
        engine: Literal["auto", "thread", "process"] = "auto",
        load: Load | str = "chat",
        knobs: dict[str, Any] | None = None,
        name: str = "workbench",
        start: bool = True,
        window_steps: int = 16,
        **options: Any,
    ) -> None:
        if (old := _OPEN.pop(name, None)) is not None:
            old.close()
        self.name = name
        self.serial = next(_SERIALS)
        self.errors = ErrorStore()
        first_load = load if isinstance(load, Load) else Load(pack=load)
        self.options = dict(options)
        self.place = place_of(engine, options.get("device", "auto"))
        self._llm = LLM(model, engine=self.place, **{"warm_up": "all", **(knobs or {}), **options})
        info = self._llm.client.info
        own = self._llm.tokenizer.eos_token_ids if self._llm.tokenizer is not None else ()
        self.on_cuda = on_cuda(info.config.device)
        self.driver = Driver(
            self._llm.client,
            self._llm.tokenizer,
            first_load,
            self.errors,
            eos_token_ids=tuple(dict.fromkeys((*own, *info.model_config.eos_token_ids))),
            window_steps=window_steps,
            paused=not start,
        )
        self.presets: list[Preset] = presets(info.config, self.on_cuda)
        self.last_ab: ABResult | None = None
        self._panel: Panel | None = None
        self._closed = False
        _OPEN[name] = self
        atexit.register(_close_at_exit, weakref.ref(self))

    # ---- settings

    @property
    def knobs(self) -> dict[str, Any]:
        """All knobs in force."""
        return dict(self.driver.snapshot.knobs)

    def set(self, *, wait: bool = True, timeout: float = WAIT_S, **changes: Any) -> Intent:
        """Change knobs between two steps while requests run; return what became of it.

        With `wait` it is applied when this returns (`Intent.step` is the first step with it), and a refusal raises
        `ConfigError` with the reason.
        """
        self._require_open()
        if not changes:
            raise ConfigError(f"set() needs at least one knob; knobs are {', '.join(self.knobs)}")
        intent = self.driver.intend(changes, "cell")
        return intent.wait(timeout) if wait else intent

    def preset(self, name: str, *, wait: bool = True) -> Intent:
        """Set every knob as a named preset does; raises `ConfigError` for one that is unknown or unavailable here."""
        found = find_preset(self.presets, name)
        self._require_open()
        intent = self.driver.intend(found.knobs, f"preset {name}")
        return intent.wait(WAIT_S) if wait else intent

    def code(self) -> str:
        """Return Python that makes a workbench like this one, settings included."""
        from mrv2.lab.code import as_code

        return as_code(self)

    # ---- load

    @property
    def load(self) -> Load:
        """What the load generator does."""
        return self.driver.load

    def set_load(self, load: Load | str | None = None, **changes: Any) -> Load:
        """Exchange the load (a `Load`, or the name of a prompt pack), or change parts of it; running requests stay."""
        if isinstance(load, str):
            load, changes = None, {"pack": load, **changes}
        new = (load or self.load).with_changes(**changes)
        self.call(lambda: self.driver.set_load(new))
        return new

    def start(self) -> None:
        """Serve the load; a replayed pack begins anew."""
        self.call(self._start)

    def pause(self) -> None:
        """Send no further requests; those that run go on to their end."""
        self.driver.paused = True

    def stop(self) -> None:
        """Send no further requests, and end those that run."""
        self.driver.paused = True
        self.call(lambda: self.driver.drain(abort=True))

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float = WAIT_S,
    ) -> list[LabRequest]:
        """Serve prompts beside the load and return them with their tokens, steps and times.

        Raises `RequestError` for a request that can never be served, and for ``n > 1``, stop strings and bad words
        given as text, which only `LLM` serves.
        """
        parsed = parse_prompts(prompts, self._llm.tokenizer)
        params = match_params(sampling_params or SamplingParams(max_tokens=64), len(parsed))
        for each in params:
            check_params(each)

        def submit() -> list[LabRequest]:
            return [self.driver.submit(p.text or "", p.token_ids, each) for p, each in zip(parsed, params, strict=True)]

        found = self.call(submit)
        self.wait_until(lambda: all(request.finished for request in found), timeout, "the requests are not done")
        return found

    # ---- looking

    @property
    def view(self) -> View:
        """What the driver last saw; at most a tenth of a second old while it runs."""
        return self.driver.view

    def snapshot(self) -> EngineSnapshot:
        """Return a picture of the engine between two steps."""
        return self.call(self.driver.client.snapshot)

    def metrics(self, since: float | None = None) -> dict[str, dict[str, float | None]]:
        """Return last value, p50 and p99 of each metric, over the last `since` seconds or all the time."""
        start = float("-inf") if since is None else time.monotonic() - since
        return self.call(lambda: self.driver.metrics.summary(start))

    @property
    def requests(self) -> list[LabRequest]:
        """The last finished requests, oldest first."""
        return self.call(lambda: list(self.driver.book.finished))

    @property
    def intents(self) -> list[Intent]:
        """Every change that was asked for, and what became of it."""
        return self.driver.intents.all()

    @property
    def trace(self) -> Trace | None:
        """The newest recorded window of the live timeline; None if there is none yet."""
        return None if self.driver.window is None else self.driver.window.trace

    def record(self, steps: int = 30, timeout: float = WAIT_S) -> Trace:
        """Record the next `steps` steps of the load and return the trace.

        Raises `ConfigError` if nothing runs within `timeout` seconds.
        """

        def work() -> Trace:
            driver = self.driver
            driver.windows.collect()
            deadline = time.monotonic() + timeout
            driver.windows.enabled, before = False, driver.windows.enabled
            try:
                with record(steps, "stages", engine=driver.client) as recording:
                    first = driver.client.snapshot().step
                    while driver.client.snapshot().step < first + steps + 1:
                        if time.monotonic() > deadline or (driver.paused and not driver.book.open):
                            raise ConfigError(
                                f"record(steps={steps}): the engine is idle; call start(), or generate(...) meanwhile"
                            )
                        driver.round()
                return recording.trace()
            finally:
                driver.windows.enabled = before

        return self.call(work, timeout + 10)

    def inspect(self, steps: int = 0, timeout: float = WAIT_S) -> Inspection:
        """Return the inputs of the next `steps` steps (0 = those inspected last) and every request's blocks.

        While a step is inspected it is waited for, so nothing overlaps with it; other steps cost nothing.
        """
        found = self.call(lambda: self.driver.client.inspect(steps))
        deadline = time.monotonic() + timeout
        while found.num_left and time.monotonic() < deadline and self.driver.book.open:
            time.sleep(0.02)
            found = self.call(self.driver.client.inspect)
        return found

    def ab(
        self,
        a: str | dict[str, Any],
        b: str | dict[str, Any],
        *,
        load: Load | None = None,
        requests: int = 8,
        repetitions: int = 4,
        recorded: bool = True,
        timeout: float = 600.0,
    ) -> ABResult:
        """Serve the same requests under two settings in alternation and compare; the knobs are put back afterwards.

        Args:
            a, b: names of presets, or changes of knobs against the defaults.
            load: pack, users and sampling of the requests; by default those of the load that runs.
            recorded: record one more pass of each side, for `ABResult.side_by_side`.

        Raises `ConfigError` for a setting that this engine cannot honour.
        """
        work = self.ab_work(a, b, load=load, requests=requests, repetitions=repetitions, recorded=recorded)
        return self.call(work, timeout)

    def ab_work(
        self,
        a: str | dict[str, Any],
        b: str | dict[str, Any],
        *,
        load: Load | None = None,
        requests: int = 8,
        repetitions: int = 4,
        recorded: bool = True,
    ) -> Callable[[], ABResult]:
        """Check the arguments of `ab` and return what the driver's thread has to do."""
        left, right = (setting_of(self.presets, self.llm_info.config, each) for each in (a, b))
        if requests < 1 or repetitions < 1:
            raise ConfigError(f"ab(requests={requests}, repetitions={repetitions}): both must be at least 1")
        chosen = load or self.load

        def work() -> ABResult:
            self.last_ab = run_ab(
                self.driver, left, right, chosen, requests=requests, repetitions=repetitions, recorded=recorded
            )
            return self.last_ab

        return work

    # ---- waiting

    def wait(self, *, requests: int = 0, tokens: int = 0, seconds: float = 0.0, timeout: float = WAIT_S) -> View:
        """Wait until so many more requests have finished, so many tokens have come and so much time has passed."""
        start, began = self.view, time.monotonic()

        def done() -> bool:
            view = self.view
            return (
                view.num_finished >= start.num_finished + requests
                and view.num_tokens >= start.num_tokens + tokens
                and time.monotonic() >= began + seconds
            )

        self.wait_until(done, timeout, f"waiting for {requests} requests, {tokens} tokens, {seconds} s")
        return self.view

    async def wait_async(self, **conditions: Any) -> View:
        """`wait` for a cell that awaits: the panel's controls stay alive meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(None, lambda: self.wait(**conditions))

    def wait_until(self, done: Any, timeout: float, what: str) -> None:
        """Wait until `done()` is true; raises `TimeoutError`, or the engine's error if it has stopped."""
        deadline = time.monotonic() + timeout
        while not done():
            self._require_open()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {timeout} s; state: {self.view.state}")
            time.sleep(0.01)

    # ---- saving

    def save(self, folder: str | Path) -> Path:
        """Write a session directory: settings, metrics, tokens, trace, versions. `open_session` reads it anywhere."""
        from mrv2.lab.session import capture

        return capture(self).save(Path(folder))

    def report(self, path: str | Path) -> Path:
        """Write one self-contained HTML page: settings, metrics, timeline, syncs, tokens, the last A/B."""
        from mrv2.lab.report import save_report
        from mrv2.lab.session import capture

        return save_report(capture(self), Path(path))

    # ---- life

    def check(self) -> None:
        """Raise the first error of a button or background thread that was not dismissed."""
        error = self.errors.first_exception
        if error is not None:
            self.errors.dismiss()
            raise error
        if not self._closed and not self.driver.is_alive:
            raise EngineDeadError("the driver of the workbench has ended")

    def close(self) -> None:
        """Stop the load, the engine and every thread, and grey the panel; may be called again."""
        if self._closed:
            return
        self._closed = True
        self.driver.close()
        if self._panel is not None:
            self._panel.close()
            self._panel = None
        self._llm.close()
        if _OPEN.get(self.name) is self:
            del _OPEN[self.name]

    @property
    def closed(self) -> bool:
        return self._closed

    def __enter__(self) -> Workbench:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        from mrv2.lab.card import text_card

        return text_card(self)

    @property
    def panel(self) -> Panel:
        """The panel; the same one each time."""
        if self._panel is None:
            from mrv2.lab.panel import Panel

            self._require_open()
            self._panel = Panel(self)
        return self._panel

    def _repr_mimebundle_(self, **_: Any) -> Any:
        from mrv2.lab.card import html_card, text_card
        from mrv2.viz import widgets

        static = {"text/plain": text_card(self), "text/html": html_card(self)}
        if self._closed or not widgets.has_front_end():
            return static
        return widgets.bundle(lambda: self.panel.widget, static)

    @property
    def model_name(self) -> str:
        return Path(self._llm.config.model).name

    @property
    def hardware(self) -> str:
        """The GPU's name, or the processor's."""
        return hardware_name(self.on_cuda)

    @property
    def llm_info(self) -> Any:
        """What is fixed since the load (`EngineInfo`)."""
        return self._llm.client.info

    def _start(self) -> None:
        if self.driver.load.mode == "replay":
            self.driver.set_load(self.driver.load)
        self.driver.paused = False

    def call(self, work: Any, timeout: float = WAIT_S) -> Any:
        """Run `work` on the driver's thread between two rounds, and return what it returns."""
        self._require_open()
        future: Future[Any] = self.driver.call(work)
        try:
            return future.result(timeout)
        except FutureTimeout:
            if future.done():
                raise
            raise TimeoutError(f"the engine did not answer within {timeout} s; state: {self.view.state}") from None

    def _require_open(self) -> None:
        if self.errors.fatal is not None:
            raise EngineDeadError(self.errors.fatal.detail)
        if self._closed:
            raise EngineDeadError("the workbench is closed; make a new one")


def open_workbench() -> Workbench:
    """Return the workbench that was opened last and is not closed; raises `ConfigError` if there is none."""
    found = [workbench for workbench in _OPEN.values() if not workbench.closed]
    if not found:
        raise ConfigError("no workbench is open: make one with Workbench(...)")
    return max(found, key=lambda workbench: workbench.serial)


def _close_at_exit(reference: weakref.ref[Workbench]) -> None:
    workbench = reference()
    if workbench is not None:
        workbench.close()
