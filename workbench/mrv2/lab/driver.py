"""The driver: the one thread that talks to the engine; everybody else hands it work and reads what it publishes.

```
cells, buttons -> call() --+
load generator ------------+-> driver thread -> EngineClient -> engine (thread or child process)
                               |  publishes `View`s, at most ten a second
painter, sessions <------------+
```
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from mrv2.engine.client import EngineClient
from mrv2.engine.messages import EngineRequest, EngineSnapshot
from mrv2.errors import EngineDeadError, MRV2Error, RequestError
from mrv2.lab.errors import ErrorStore
from mrv2.lab.intents import Intent, IntentLog
from mrv2.lab.load import Due, Load, LoadGenerator
from mrv2.lab.metrics import Metrics
from mrv2.lab.packs import encode
from mrv2.lab.requests import LabRequest, RequestBook
from mrv2.lab.windows import Window, WindowRecorder
from mrv2.sampling_params import SamplingParams
from mrv2.tokenizer import Tokenizer

_T = TypeVar("_T")
_CLOSED = "the workbench is closed; make a new one"
POLL_S = 0.03
VIEW_S = 0.1
SAMPLE_S = 0.5
METRICS_S = 0.4
SHOWN_REQUESTS = 6


@dataclass(frozen=True)
class View:
    """What the driver last saw; plain values that nobody changes any more."""

    number: int
    at: float
    state: str
    snapshot: EngineSnapshot
    load: Load
    num_open: int
    num_finished: int
    num_tokens: int
    metrics: dict[str, Any] = field(default_factory=dict)
    streams: list[dict[str, Any]] = field(default_factory=list)


class Driver:
    """Serves a load on an engine, applies intents between two steps, records windows, publishes views."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer | None,
        load: Load,
        errors: ErrorStore,
        *,
        eos_token_ids: tuple[int, ...] = (),
        window_steps: int = 16,
        paused: bool = False,
    ) -> None:
        self.client, self.tokenizer, self.errors = client, tokenizer, errors
        self.intents = IntentLog()
        self.metrics = Metrics(time.monotonic())
        self.book = RequestBook(tokenizer)
        self.windows = WindowRecorder(client, self._on_window, errors.add, steps=window_steps)
        self.window: Window | None = None
        self.paused = paused
        # an experiment drives the load itself
        self.busy_with = ""
        self._eos = eos_token_ids
        self._generator = LoadGenerator(load)
        self._commands: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._numbers = count()
        self._view_numbers = count()
        self._load_ids: set[str] = set()
        # windows cross from the analysing thread
        self._found: deque[Window] = deque(maxlen=4)
        self._stop = threading.Event()
        self._next_view = self._next_sample = float("-inf")
        self.snapshot = client.snapshot()
        # applied intents whose graphs are being captured, and since when
        self._capturing: deque[tuple[Intent, float]] = deque()
        # when, with how many marks, what
        self._drawn_metrics: tuple[float, int, dict[str, Any]] = (float("-inf"), 0, {})
        self.view = self._make_view(time.monotonic())
        self._thread = threading.Thread(target=self._run, name="lab-driver", daemon=True)
        self._thread.start()

    # for any thread

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def load(self) -> Load:
        return self._generator.load

    def call(self, work: Callable[[], _T]) -> Future[_T]:
        """Run `work` on the driver's thread, between two rounds; what it raises is the future's."""
        future: Future[_T] = Future()
        if self._stop.is_set() or not self._thread.is_alive():
            future.set_exception(EngineDeadError(_CLOSED))
            return future
        self._commands.put((work, future))
        return future

    def intend(self, changes: dict[str, Any], source: str) -> Intent:
        """Ask for a change of knobs; it is applied between two steps, in the order of asking."""
        intent = self.intents.add(changes, source, time.monotonic())
        self.call(lambda: self._apply(intent))
        return intent

    def close(self, timeout: float = 10.0) -> None:
        """End the thread; waiting callers get an error."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        self._fail_commands()

    # on the driver's thread

    def set_load(self, load: Load) -> None:
        """Exchange the load; requests that run go on."""
        self._generator = LoadGenerator(load, first_index=self._generator.next_index if load.mode != "replay" else 0)
        self.metrics.mark(time.monotonic(), self.snapshot.step, _describe_load(load))

    def submit(self, prompt: str, token_ids: list[int], params: SamplingParams, user: int | None = None) -> LabRequest:
        """Hand one request to the engine; raises `RequestError` if it can never be served."""
        request = LabRequest(f"lab-{next(self._numbers)}", prompt, token_ids, params, time.monotonic(), user)
        self.book.add(request)
        try:
            self.client.submit(
                [
                    EngineRequest(
                        req_id=request.req_id, prompt_token_ids=token_ids, params=params, eos_token_ids=self._eos
                    )
                ]
            )
        except BaseException:
            self.book.withdraw(request)
            raise
        return request

    def drain(self, abort: bool = False) -> None:
        """Serve until no request is open; with `abort` end them now."""
        if abort and self.book.open:
            self.client.abort(list(self.book.open))
        while self.book.open and not self._stop.is_set():
            self.round(serve_load=False)

    def round(self, *, serve_load: bool = True) -> None:
        """Send what is due, take what came, look at the engine; raises `EngineDeadError` once it is being closed."""
        if self._stop.is_set():
            raise EngineDeadError(_CLOSED)
        now = time.monotonic()
        if serve_load and not self.paused:
            self._serve(now)
        for output in self.client.poll(POLL_S):
            now = time.monotonic()
            request = self.book.take(output, now)
            if request is None:
                continue
            if request.first_token == now:
                self.metrics.first_token(now, request)
            if request.finished:
                self._load_ids.discard(request.req_id)
                self.metrics.finished(now, request)
                if request.error:
                    self.errors.note(f"request {request.req_id}: {request.error}")
        self._look(time.monotonic())

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._take_commands()
                self.round()
        except BaseException as error:
            # what was interrupted by closing is no failure
            if not self._stop.is_set():
                self.errors.add(error)
        finally:
            self._stop.set()
            self._fail_commands()
            self.view = self._make_view(time.monotonic())

    def _take_commands(self) -> None:
        while True:
            try:
                work, future = self._commands.get_nowait()
            except Empty:
                return
            try:
                future.set_result(work())
            except EngineDeadError as error:
                future.set_exception(error)
                raise
            except Exception as error:  # it belongs to whoever waits
                future.set_exception(error)

    def _fail_commands(self) -> None:
        while True:
            try:
                _, future = self._commands.get_nowait()
            except Empty:
                break
            future.set_exception(EngineDeadError(_CLOSED))
        self.intents.refuse_pending("the engine has stopped")

    def _apply(self, intent: Intent) -> None:
        began = time.monotonic()
        try:
            self.client.set(capture="between_steps", **intent.changes)
        except MRV2Error as error:
            intent.refuse(str(error))
            if isinstance(error, EngineDeadError):
                raise
            return
        self.snapshot = self.client.snapshot()
        now = time.monotonic()
        self.metrics.mark(now, self.snapshot.knobs_since, describe_changes(intent.changes))
        # whoever sees it applied sees the new knobs too
        self.view = self._make_view(now)
        intent.apply(self.snapshot.change, now - began)
        if intent.lacks_graphs:
            self._capturing.append((intent, now))

    def _serve(self, now: float) -> None:
        for due in self._generator.due(now, len(self._load_ids)):
            try:
                self._load_ids.add(self.send(due).req_id)
            except RequestError as error:
                # the same load would be refused for ever
                self.errors.add(error)
                self.paused = True
                return

    def send(self, due: Due, load: Load | None = None) -> LabRequest:
        """Submit a request of a load."""
        load, info = load or self._generator.load, self.client.info
        room = max(1, info.max_model_len - load.max_tokens - 1)
        prompt = encode(due.item, self.tokenizer, info.model_config.vocab_size, room)
        return self.submit(prompt.text, prompt.token_ids, load.params(due.index, prompt.json_schema), due.user)

    def _look(self, now: float) -> None:
        while self._found:
            self.window = window = self._found.popleft()
            self.metrics.window(now, window.overlap, window.idle)
        if now < self._next_view:
            return
        self._next_view = now + VIEW_S
        self.snapshot = snapshot = self.client.snapshot()
        while self._capturing and snapshot.capture is None:
            intent, applied = self._capturing.popleft()
            intent.complete(now - applied)
        busy = bool(snapshot.num_running or snapshot.num_waiting or snapshot.steps_in_flight)
        self.windows.tick(now, snapshot.step, busy)
        if now >= self._next_sample:
            self._next_sample = now + SAMPLE_S
            self.metrics.sample(now, self.book.num_tokens, snapshot)
        self.view = self._make_view(now)

    def _metrics_view(self, now: float) -> dict[str, Any]:
        at, num_marks, _ = self._drawn_metrics
        # a change is seen at once, a line may wait
        if now - at >= METRICS_S or num_marks != len(self.metrics.marks):
            self._drawn_metrics = now, len(self.metrics.marks), self.metrics.view(now)
        return self._drawn_metrics[2]

    def _on_window(self, window: Window) -> None:
        self._found.append(window)

    def _make_view(self, now: float) -> View:
        if self.errors.fatal is not None:
            state = "failed"
        elif self._stop.is_set():
            state = "closed"
        elif self.busy_with:
            state = self.busy_with
        else:
            idle = not self.book.open
            state = ("paused" if self.paused else "idle") if idle else ("draining" if self.paused else "running")
        return View(
            number=next(self._view_numbers),
            at=now,
            state=state,
            snapshot=self.snapshot,
            load=self._generator.load,
            num_open=len(self.book.open),
            num_finished=self.book.num_finished,
            num_tokens=self.book.num_tokens,
            metrics=self._metrics_view(now),
            streams=[stream_view(request) for request in self.book.newest(SHOWN_REQUESTS)],
        )


def stream_view(request: LabRequest, last: int = 160) -> dict[str, Any]:
    """Return the last tokens of a request as the panel shows them."""
    first = max(0, len(request.token_ids) - last)
    return {
        "id": request.req_id,
        "user": request.user,
        "prompt": request.prompt[:160],
        "state": request.finish_reason or ("waiting" if request.first_token is None else "running"),
        "num": len(request.token_ids),
        "ttft": None if request.ttft is None else round(1000 * request.ttft, 1),
        "tpot": None if request.tpot is None else round(1000 * request.tpot, 1),
        "first": first,
        # piece, step, origin, log-probability
        "tokens": [
            [request.pieces[i], request.steps[i], request.origins[i], request.logprobs[i]]
            for i in range(first, len(request.token_ids))
        ],
        "rejected": {str(i): n for i, n in request.rejected.items() if i >= first},
    }


def describe_changes(changes: dict[str, Any]) -> str:
    """Return changes as a short text: ``runner=v1, queue_depth=2``."""
    return ", ".join(f"{name}={'on' if v is True else 'off' if v is False else v}" for name, v in changes.items())


def _describe_load(load: Load) -> str:
    rate = f"{load.rate:g}/s" if load.mode == "poisson" else f"{load.users} users"
    return f"load: {load.pack}, {load.mode}" + ("" if load.mode == "off" else f", {rate}")
