"""Level "stages": the package's own recorder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mrv2.engine.recording import StageRecording
from mrv2.instrument import Recorder, Span
from mrv2.record.backend import Backend, RecordError
from mrv2.record.target import Target

if TYPE_CHECKING:
    from mrv2.trace import Trace


class _NoEngine:
    """Stands in for a core where only host spans, or the stages of a device, are wanted."""

    def __init__(self, device: Any) -> None:
        self.device = device


class _NoDevice:
    """A device with nothing to record."""

    def start_recording(self, rec: Recorder) -> None:
        pass

    def stop_recording(self) -> None:
        pass

    def synchronize(self, reason: str) -> None:
        pass


class StageBackend(Backend):
    """Host spans and device stages; the engine may run on the caller's thread, another one, or in a child process."""

    def __init__(self, target: Target, steps: int | None) -> None:
        self._target = target
        self._steps = steps
        self._spans: list[Span] = []
        self._is_on = False
        self._dropped = 0
        self._local: StageRecording | None = None
        if target.client is None:
            core = target.core or _NoEngine(target.device or _NoDevice())
            if steps is not None and target.core is None:
                raise RecordError("steps needs an engine: give llm, engine or core, or leave steps out")
            self._local = StageRecording(core, steps)

    def start(self) -> None:
        if self._local is not None:
            self._local.start()
        else:
            assert self._target.client is not None, "without a local recording there is a client"
            self._target.client.record(True, self._steps)
            self._is_on = True

    def stop(self) -> None:
        if self._local is not None:
            self._local.stop()
        elif self._is_on:
            assert self._target.client is not None, "without a local recording there is a client"
            self._is_on = False
            self._spans = self._target.client.record(False)

    def trace(self) -> Trace:
        from mrv2.trace.readers import recorder as reader

        if self._local is not None:
            trace = reader.read(self._local.recorder)
            trace.meta["capture_start_ns"], trace.meta["capture_end_ns"] = self._local.start_ns, self._local.end_ns
        else:
            # the engine kept the ring; what it sent is all there is
            copy = Recorder(max(1, len(self._spans)))
            for span in self._spans:
                copy.add(span.kind, span.lane, span.name, span.start_ns, span.end_ns, span.step)
            trace = reader.read(copy)
        return trace
