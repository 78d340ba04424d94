"""An engine's stages recorded from its own side, and a limit on the number of steps of any recording."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, Protocol

from mrv2.errors import ConfigError
from mrv2.instrument import Recorder, sync_allowed

END_OF_RECORDING = "end of recording"


class RecordedDevice(Protocol):
    """What a recording needs of a device."""

    def start_recording(self, rec: Recorder, /) -> None: ...
    def stop_recording(self) -> None: ...
    def synchronize(self, reason: str, /) -> None: ...


class StepLimit:
    """Calls `on_done` once, on the stepping thread, right after `steps` more turns of an engine core's loop.

    While it waits it stands in front of ``core.step``.  Raises `ConfigError` for a number below 1.
    """

    def __init__(self, core: Any, steps: int, on_done: Callable[[], object]) -> None:
        if steps < 1:
            raise ConfigError(f"steps={steps} must be at least 1")
        self._core = core
        self._original: Callable[[], Any] = core.step
        self._on_done = on_done
        self._left = steps
        self.num_steps = 0
        # the one object that `remove` must find again
        self._mine = self._step
        core.step = self._mine

    def remove(self) -> None:
        """Step aside; `on_done` is not called any more."""
        self._left = 0
        if self._core.__dict__.get("step") is self._mine:
            del self._core.step

    def _step(self) -> Any:
        outputs = self._original()
        if self._left:
            self.num_steps += 1
            self._left -= 1
            if not self._left:
                self.remove()
                self._on_done()
        return outputs


class StageRecording:
    """Records host spans of all threads and the stages of a core's device, until `stop` or for `steps` turns."""

    def __init__(self, core: Any, steps: int | None = None) -> None:
        self.recorder = Recorder()
        # on the recorder's clock; None = not yet
        self.start_ns: int | None = None
        self.end_ns: int | None = None
        self._core = core
        self._device: Any = core.device
        self._limit: StepLimit | None = None
        self._steps = steps

    def start(self) -> None:
        """Begin; raises `MRV2Error` if a recording is running already."""
        if self._steps is not None:
            self._limit = StepLimit(self._core, self._steps, self.stop)
        try:
            self.recorder.start(self._device)
        except BaseException:
            if self._limit is not None:
                self._limit.remove()
            raise
        self.start_ns = perf_counter_ns()

    @property
    def is_running(self) -> bool:
        return self.start_ns is not None and self.end_ns is None

    def stop(self) -> None:
        """End, and wait until the device stages that were submitted are done; a second call does nothing."""
        if not self.is_running:
            return
        # the wait below is not part of what was recorded
        self.recorder.stop(self._device)
        self.end_ns = perf_counter_ns()
        if self._limit is not None:
            self._limit.remove()
        with sync_allowed(END_OF_RECORDING):
            self._device.synchronize(END_OF_RECORDING)

    def abandon(self) -> None:
        """End without waiting, for a device that is going away."""
        if self.is_running:
            self.recorder.stop(self._device)
            self.end_ns = perf_counter_ns()
            if self._limit is not None:
                self._limit.remove()
