"""`EngineClient`: what LLM, notebooks and servers talk to, wherever the engine runs.

```
InprocClient    poll() runs the steps, on the caller's thread
ThreadClient    a background thread runs them; commands and outputs pass through queues
ProcessClient   a child process runs them; the same messages pass through a pipe
```
"""

from __future__ import annotations

import threading
import time
import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, Literal

from mrv2.config import EngineConfig, Knobs
from mrv2.engine.interrupt import InterruptAfter
from mrv2.engine.messages import EngineOutput, EngineRequest, EngineSnapshot
from mrv2.engine.service import (
    Command,
    CoreFactory,
    EngineInfo,
    EngineMessage,
    EngineService,
    Failure,
    Ready,
    Reply,
    make_core,
    run_engine,
)
from mrv2.errors import ConfigError, EngineDeadError, nearest
from mrv2.instrument import Span

EnginePlace = Literal["inproc", "thread", "process"]

_JOIN_SECONDS = 10.0


class EngineClient(ABC):
    """One engine; every method may be called from any thread.

    All methods raise `EngineDeadError` once the engine has stopped, with its last error.
    """

    info: EngineInfo

    @abstractmethod
    def submit(self, requests: list[EngineRequest]) -> None:
        """Admit all sequences or none; raises `RequestError` if one can never be served."""

    @abstractmethod
    def abort(self, req_ids: list[str]) -> None:
        """End sequences; unknown and finished ids are ignored."""

    @abstractmethod
    def poll(self, timeout: float | None = None) -> list[EngineOutput]:
        """Return the next outputs, waiting up to `timeout` seconds for them (None = no limit).

        An empty list means that the time is over or, in-process, that no sequence is unfinished.
        """

    @abstractmethod
    def set(self, **changes: Any) -> Knobs:
        """Change knobs between two steps; returns all knobs; raises `ConfigError` for an illegal change."""

    @abstractmethod
    def snapshot(self) -> EngineSnapshot:
        """Return a consistent picture between two steps."""

    @abstractmethod
    def record(self, on: bool) -> list[Span]:
        """Start recording stages (returns nothing), or stop and return the recorded spans."""

    @abstractmethod
    def close(self) -> None:
        """Stop the engine; may be called again."""

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


class InprocClient(EngineClient):
    """The engine on the caller's thread: `poll` runs steps until there are outputs."""

    def __init__(self, config: EngineConfig, factory: CoreFactory = make_core) -> None:
        self._service = EngineService(factory(config))
        self.info = self._service.info
        self._lock = threading.RLock()
        self._dead: str | None = None
        # outputs of a step that an interrupt followed
        self._kept: list[EngineOutput] = []
        self._finalizer = weakref.finalize(self, self._service.shutdown)

    def submit(self, requests: list[EngineRequest]) -> None:
        self._call(self._service.submit, requests)

    def abort(self, req_ids: list[str]) -> None:
        self._call(self._service.abort, req_ids)

    def poll(self, timeout: float | None = None) -> list[EngineOutput]:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            outputs, self._kept = self._kept, []
            while not outputs and self._call(self._has_unfinished):
                with InterruptAfter() as interrupt:
                    outputs = self._step()
                if interrupt.pending:
                    self._kept = outputs
                    raise KeyboardInterrupt
                if deadline is not None and time.monotonic() >= deadline:
                    break
        return outputs

    def set(self, **changes: Any) -> Knobs:
        return self._call(self._service.set, **changes)

    def snapshot(self) -> EngineSnapshot:
        return self._call(self._service.snapshot)

    def record(self, on: bool) -> list[Span]:
        return self._call(self._service.record, on)

    def close(self) -> None:
        with self._lock:
            self._dead = self._dead or "it was closed"
            self._finalizer()

    def _has_unfinished(self) -> bool:
        return self._service.core.has_unfinished

    def _call(self, verb: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            if self._dead is not None:
                raise EngineDeadError(f"the engine has stopped: {self._dead}")
            return verb(*args, **kwargs)

    def _step(self) -> list[EngineOutput]:
        try:
            return self._service.core.step()
        except BaseException as error:
            self._dead = "".join(traceback.format_exception(error)).rstrip()
            if isinstance(error, Exception):
                raise EngineDeadError(f"the engine has stopped: {self._dead}") from error
            raise


class Mailbox:
    """Where an engine elsewhere puts its messages, and callers wait for theirs."""

    def __init__(self) -> None:
        self.ready: Future[EngineInfo] = Future()
        self._lock = threading.Lock()
        self._numbers = count()
        self._pending: dict[int, Future[Any]] = {}
        # batches of outputs; None = the engine has stopped
        self._outputs: SimpleQueue[list[EngineOutput] | None] = SimpleQueue()
        self._dead: str | None = None

    def deliver(self, message: EngineMessage) -> None:
        """Take a message of the engine."""
        if isinstance(message, list):
            self._outputs.put(message)
        elif isinstance(message, Reply):
            with self._lock:
                future = self._pending.pop(message.number, None)
            if future is not None and message.error is not None:
                future.set_exception(message.error)
            elif future is not None:
                future.set_result(message.value)
        elif isinstance(message, Ready):
            self.ready.set_result(message.info)
        else:
            self.fail(message)

    def fail(self, failure: Failure) -> None:
        """The engine has stopped: wake every waiting caller. The first failure stays."""
        with self._lock:
            if self._dead is not None:
                return
            self._dead = failure.text
            pending, self._pending = list(self._pending.values()), {}
        if not self.ready.done():
            # a bad option or model file reads best as the error that it is
            self.ready.set_exception(failure.error or self.dead_error())
        for future in pending:
            future.set_exception(self.dead_error())
        self._outputs.put(None)

    def dead_error(self) -> EngineDeadError:
        return EngineDeadError(f"the engine has stopped: {self._dead}")

    def expect(self) -> tuple[int, Future[Any]]:
        """Return the number of a new command and the future of its reply."""
        with self._lock:
            if self._dead is not None:
                raise self.dead_error()
            number, future = next(self._numbers), Future[Any]()
            self._pending[number] = future
            return number, future

    def take_outputs(self, timeout: float | None) -> list[EngineOutput]:
        """Return all outputs that are there, waiting up to `timeout` seconds for the first."""
        outputs: list[EngineOutput] = []
        try:
            batch = self._outputs.get(timeout=timeout)
            while batch is not None:
                outputs += batch
                batch = self._outputs.get_nowait()
        except Empty:
            return outputs
        # the engine has stopped: leave the mark for the next call
        self._outputs.put(None)
        if not outputs:
            raise self.dead_error()
        return outputs


class RemoteClient(EngineClient):
    """An engine that runs on its own and is reached by messages."""

    def __init__(self, mailbox: Mailbox, send: Callable[[Command], None]) -> None:
        """Wait until the engine is loaded; raises what its loading raised."""
        self._mailbox = mailbox
        self._send = send
        self.info = mailbox.ready.result()

    def submit(self, requests: list[EngineRequest]) -> None:
        self._call("submit", requests)

    def abort(self, req_ids: list[str]) -> None:
        self._call("abort", req_ids)

    def poll(self, timeout: float | None = None) -> list[EngineOutput]:
        return self._mailbox.take_outputs(timeout)

    def set(self, **changes: Any) -> Knobs:
        return self._call("set", **changes)

    def snapshot(self) -> EngineSnapshot:
        return self._call("snapshot")

    def record(self, on: bool) -> list[Span]:
        return self._call("record", on)

    def _call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        number, future = self._mailbox.expect()
        self._send(Command(number, verb, args, kwargs))
        return future.result()


class ThreadClient(RemoteClient):
    """The engine on a background thread of this process."""

    def __init__(self, config: EngineConfig, factory: CoreFactory = make_core) -> None:
        mailbox, commands = Mailbox(), SimpleQueue[Command]()
        # neither the thread nor the finalizer may refer to this object, or it would never be collected
        thread = threading.Thread(
            target=run_engine,
            args=(config, factory, _receive_from(commands), mailbox.deliver),
            name="engine",
            daemon=True,
        )
        thread.start()
        super().__init__(mailbox, commands.put)
        self._finalizer = weakref.finalize(self, _stop_thread, mailbox, commands, thread)

    def close(self) -> None:
        self._finalizer()


def _receive_from(commands: SimpleQueue[Command]) -> Callable[[bool], Command | None]:
    def receive(wait: bool) -> Command | None:
        try:
            return commands.get(wait)
        except Empty:
            return None

    return receive


def _stop_thread(mailbox: Mailbox, commands: SimpleQueue[Command], thread: threading.Thread) -> None:
    commands.put(Command(-1, "close"))
    thread.join(_JOIN_SECONDS)
    mailbox.fail(Failure("it was closed"))


def make_client(config: EngineConfig, place: str = "inproc", factory: CoreFactory = make_core) -> EngineClient:
    """Load an engine in the caller's thread ("inproc"), a background "thread" or a child "process"."""
    if place == "inproc":
        return InprocClient(config, factory)
    if place == "thread":
        return ThreadClient(config, factory)
    if place == "process":
        from mrv2.engine.process_client import ProcessClient

        return ProcessClient(config, factory)
    legal = ("inproc", "thread", "process")
    raise ConfigError(f"engine={place!r}{nearest(str(place), legal)}; legal values are {', '.join(map(repr, legal))}")
