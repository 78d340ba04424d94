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
from typing import TYPE_CHECKING, Any

from mrv2.config import EngineConfig, Knobs
from mrv2.engine.interrupt import InterruptAfter
from mrv2.engine.messages import CaptureTime, EngineRequest, EngineSnapshot
from mrv2.engine.service import Core, CoreFactory, EngineInfo, EngineService, make_core
from mrv2.engine.step_outputs import EngineOutputs
from mrv2.errors import EngineDeadError
from mrv2.instrument import Span

if TYPE_CHECKING:
    from mrv2.engine.inspection import Inspection


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
    def poll(self, timeout: float | None = None) -> EngineOutputs:
        """Return the next outputs, waiting up to `timeout` seconds for them (None = no limit).

        No outputs mean that the time is over or, in-process, that no sequence is unfinished.
        """

    @abstractmethod
    def set(self, *, capture: CaptureTime = "now", **changes: Any) -> Knobs:
        """Change knobs between two steps; returns all knobs; raises `ConfigError` for an illegal change.

        Graphs that are missing are captured before this returns, or with capture="between_steps" afterwards, a few
        at a time, while steps run without them; `EngineSnapshot.capture` shows how far that is.
        """

    @abstractmethod
    def snapshot(self) -> EngineSnapshot:
        """Return a consistent picture between two steps."""

    @abstractmethod
    def record(self, on: bool, steps: int | None = None) -> list[Span]:
        """Start recording stages (returns nothing), or stop and return the recorded spans.

        With `steps` the recording stops by itself after that many turns of the engine's loop.
        """

    @abstractmethod
    def inspect(self, steps: int = 0) -> Inspection:
        """Return the inputs of the steps inspected last, and every request's blocks; inspect the next `steps` steps.

        An inspected step is waited for, so nothing overlaps with it; other steps cost nothing.
        """

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
        self._kept = EngineOutputs()
        self._finalizer = weakref.finalize(self, self._service.shutdown)

    @property
    def core(self) -> Core:
        """The engine core, for recorders that look inside this process."""
        return self._service.core

    def submit(self, requests: list[EngineRequest]) -> None:
        self._call(self._service.submit, requests)

    def abort(self, req_ids: list[str]) -> None:
        self._call(self._service.abort, req_ids)

    def poll(self, timeout: float | None = None) -> EngineOutputs:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            outputs, self._kept = self._kept, EngineOutputs()
            while not outputs and self._call(self._has_unfinished):
                with InterruptAfter() as interrupt:
                    outputs = self._step()
                if interrupt.pending:
                    self._kept = outputs
                    raise KeyboardInterrupt
                if deadline is not None and time.monotonic() >= deadline:
                    break
        return outputs

    def set(self, *, capture: CaptureTime = "now", **changes: Any) -> Knobs:
        return self._call(self._service.set, capture=capture, **changes)

    def snapshot(self) -> EngineSnapshot:
        return self._call(self._service.snapshot)

    def record(self, on: bool, steps: int | None = None) -> list[Span]:
        return self._call(self._service.record, on, steps)

    def inspect(self, steps: int = 0) -> Inspection:
        return self._call(self._service.inspect, steps)

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

    def _step(self) -> EngineOutputs:
        try:
            return self._service.core.step()
        except BaseException as error:
            self._dead = "".join(traceback.format_exception(error)).rstrip()
            if isinstance(error, Exception):
                raise EngineDeadError(f"the engine has stopped: {self._dead}") from error
            raise
