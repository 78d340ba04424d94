"""Clients of an engine that runs on its own; here, on a background thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from mrv2.config import EngineConfig, Knobs
from mrv2.engine.client import EngineClient
from mrv2.engine.messages import CaptureTime, EngineRequest, EngineSnapshot
from mrv2.engine.service import (
    Command,
    CoreFactory,
    EngineInfo,
    EngineMessage,
    Failure,
    Ready,
    Reply,
    make_core,
    run_engine,
)
from mrv2.engine.step_outputs import EngineOutputs
from mrv2.errors import EngineDeadError
from mrv2.instrument import Span

if TYPE_CHECKING:
    from mrv2.engine.inspection import Inspection

_JOIN_SECONDS = 10.0


class Mailbox:
    """Where an engine elsewhere puts its messages, and callers wait for theirs."""

    def __init__(self) -> None:
        self.ready: Future[EngineInfo] = Future()
        self._lock = threading.Lock()
        self._numbers = count()
        self._pending: dict[int, Future[Any]] = {}
        # batches of outputs; None = the engine has stopped
        self._outputs: SimpleQueue[EngineOutputs | None] = SimpleQueue()
        self._dead: str | None = None

    def deliver(self, message: EngineMessage) -> None:
        """Take a message of the engine."""
        if isinstance(message, EngineOutputs):
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

    def take_outputs(self, timeout: float | None) -> EngineOutputs:
        """Return all outputs that are there, waiting up to `timeout` seconds for the first."""
        outputs = EngineOutputs()
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

    def poll(self, timeout: float | None = None) -> EngineOutputs:
        return self._mailbox.take_outputs(timeout)

    def set(self, *, capture: CaptureTime = "now", **changes: Any) -> Knobs:
        return self._call("set", capture=capture, **changes)

    def snapshot(self) -> EngineSnapshot:
        return self._call("snapshot")

    def record(self, on: bool, steps: int | None = None) -> list[Span]:
        return self._call("record", on, steps)

    def inspect(self, steps: int = 0) -> Inspection:
        return self._call("inspect", steps)

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
