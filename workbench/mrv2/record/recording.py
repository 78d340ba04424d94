"""`record(...)`: one interface to the recorders."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, get_args

from mrv2.errors import ConfigError, MRV2Error, nearest
from mrv2.record.backend import Backend, Level, RecordError
from mrv2.record.target import Target
from mrv2.record.verify import check_capture

if TYPE_CHECKING:
    from mrv2.device.base import Device
    from mrv2.engine.client import EngineClient
    from mrv2.llm import LLM
    from mrv2.trace import Trace


def record(
    steps: int | None = None,
    level: Level = "stages",
    *,
    llm: LLM | None = None,
    engine: EngineClient | None = None,
    core: Any = None,
    device: Device | None = None,
    with_stack: bool = False,
) -> Recording:
    """Return a context manager that records what runs inside its block.

    Args:
        steps: stop after that many turns of the engine's loop, even inside the block; None = at its end.
        level: "stages" = this package's recorder, near-free; "kernels" = the torch profiler: operators, CUDA calls,
            kernels (on the host: operators only); "nsight" = Nsight Systems, in a process started under
            ``nsys launch`` or by ``mrv2 record``.
        llm, engine, core, device: what to record, one of them; without any, the host spans of this process.
        with_stack: Python stacks of operators; level "kernels" only.

    Raises:
        ConfigError: an unknown level, a number of steps below 1, or several targets.
        RecordError: the level cannot record this target here; the message says why.
    """
    legal = get_args(Level)
    if level not in legal:
        raise ConfigError(f"level={level!r}{nearest(str(level), legal)}; legal values: {', '.join(map(repr, legal))}")
    if steps is not None and steps < 1:
        raise ConfigError(f"steps={steps} must be at least 1")
    if with_stack and level != "kernels":
        raise ConfigError(f"with_stack=True needs level='kernels', not {level!r}")
    target = Target.of(llm=llm, engine=engine, core=core, device=device)
    return Recording(level, target, _make_backend(level, target, steps, with_stack))


def _make_backend(level: Level, target: Target, steps: int | None, with_stack: bool) -> Backend:
    if level == "stages":
        from mrv2.record.stages import StageBackend

        return StageBackend(target, steps)
    target.require_here(level, with_steps=steps is not None)
    if steps is not None and target.core is None:
        raise RecordError("steps needs an engine: give llm, engine or core, or leave steps out")
    if level == "kernels":
        from mrv2.record.kernels import KernelBackend

        return KernelBackend(target, steps, with_stack=with_stack)
    from mrv2.record.nsight import NsightBackend

    return NsightBackend(target, steps)


class Recording:
    """A capture that is being made or has been made; a context manager, used once."""

    def __init__(self, level: Level, target: Target, backend: Backend) -> None:
        self.level: Level = level
        self._target = target
        self._backend = backend
        self._about: dict[str, Any] = {}
        self._state = "new"
        self._trace: Trace | None = None

    def annotate(self, **about: Any) -> None:
        """Add to `Trace.meta`, for example what was served; values that JSON knows."""
        self._about |= about
        if self._trace is not None:
            self._trace.meta |= about

    def start(self) -> Recording:
        """Begin; entering the block does it."""
        if self._state != "new":
            raise RecordError("a recording is used once; call record(...) again")
        self._about |= {**self._target.describe(), "level": self.level, "command": command_line()}
        self._backend.start()
        self._state = "running"
        return self

    def stop(self) -> None:
        """End, also before the block does; a second call does nothing.

        Raises `RecordError` if what should be in the capture is not, with the reason.
        """
        if self._state != "running":
            return
        self._state = "stopped"
        self._backend.stop()
        device = self._target.device
        check_capture(
            self.trace(),
            self.level,
            has_engine=self._target.core is not None or self._target.client is not None,
            on_cuda=device is not None and device.type == "cuda",
        )

    def trace(self) -> Trace:
        """Return what was recorded; raises `RecordError` while the recording still runs."""
        if self._state != "stopped":
            hint = "leave the block or call stop() first" if self._state == "running" else "it has not begun"
            raise RecordError(f"the recording is not finished: {hint}")
        if self._trace is None:
            trace = self._backend.trace()
            # what the file says wins over what this process knows, except for the engine's own settings
            versions = {**self._about.get("versions", {}), **trace.meta.get("versions", {})}
            gpu = trace.meta.get("gpu_name") or self._about.get("gpu_name")
            trace.meta |= {**self._about, "versions": versions, "gpu_name": gpu}
            trace.meta.pop("path", None)
            self._trace = trace
        return self._trace

    def save(self, path: str | Path) -> Path:
        """Write the capture: scrubbed, in the format that the name asks for.

        ``.npz`` or a folder = this package's format; ``.json`` or ``.json.gz`` = torch profiler (level "kernels");
        ``.sqlite`` or ``.sqlite.gz`` = Nsight Systems (level "nsight").  Raises `RecordError` for another format of
        the level, `TraceError` if the file cannot be written.
        """
        path = Path(path).expanduser()
        trace = self.trace()
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._backend.save_native(path, trace.meta):
            return path
        plain = path.with_suffix("") if path.suffix == ".gz" else path
        if plain.suffix in (".json", ".sqlite", ".gz"):
            natives = {"kernels": ".json", "nsight": ".sqlite"}
            own = f"{natives[self.level]}, {natives[self.level]}.gz, " if self.level in natives else ""
            raise RecordError(f"{path}: a recording of level {self.level!r} is saved as {own}.npz or a folder")
        from mrv2.trace.readers import own as own_format
        from mrv2.trace.scrub import scrub_trace

        own_format.save(scrub_trace(trace), path)
        return path

    def __enter__(self) -> Recording:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self.stop()
            return
        try:
            self.stop()
        except MRV2Error:
            pass  # what went wrong in the block matters more


def command_line() -> str:
    """Return how this process was started, without the folder of its program."""
    program = Path(sys.argv[0] if sys.argv else "")
    name = "mrv2" if (program.parent.name, program.name) == ("mrv2", "cli.py") else program.name
    return shlex.join([name, *sys.argv[1:]])
