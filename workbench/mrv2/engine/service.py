"""The engine's side of `EngineClient`: one set of verbs, and the loop that serves them from a thread or process."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from mrv2.config import EngineConfig, Knobs
from mrv2.engine.messages import CaptureTime, EngineRequest, EngineSnapshot
from mrv2.engine.recording import StageRecording
from mrv2.engine.step_outputs import EngineOutputs
from mrv2.errors import MRV2Error
from mrv2.instrument import Span

if TYPE_CHECKING:
    from mrv2.device.base import Device
    from mrv2.engine.inspection import Inspection, Inspector
    from mrv2_models.config import ModelConfig


class Core(Protocol):
    """What a front end needs of `EngineCore`."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def model_config(self) -> ModelConfig: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def device(self) -> Device: ...
    @property
    def has_unfinished(self) -> bool: ...
    def add_request(self, message: EngineRequest, /) -> None: ...
    def abort(self, req_ids: list[str], /) -> None: ...
    def step(self) -> EngineOutputs: ...
    def set_knobs(self, *, capture: CaptureTime = "now", **changes: Any) -> Knobs: ...
    def snapshot(self) -> EngineSnapshot: ...
    def shutdown(self) -> None: ...


CoreFactory = Callable[[EngineConfig], Core]


def make_core(config: EngineConfig) -> Core:
    """Build the real engine core; imported late, because it brings torch and the model."""
    from mrv2.engine.core import EngineCore

    return EngineCore(config)


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What is fixed once the engine is loaded."""

    config: EngineConfig
    model_config: ModelConfig
    # in tokens, prompt and output together
    max_model_len: int


class EngineService:
    """The verbs of `EngineClient` on an `EngineCore`, for one thread at a time."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.info = EngineInfo(config=core.config, model_config=core.model_config, max_model_len=core.max_model_len)
        self._recording: StageRecording | None = None
        self._inspector: Inspector | None = None

    def submit(self, requests: list[EngineRequest]) -> None:
        """Admit all sequences or none; raises the `RequestError` of the first that is refused."""
        admitted: list[str] = []
        try:
            for request in requests:
                self.core.add_request(request)
                admitted.append(request.req_id)
        except BaseException:
            self.core.abort(admitted)
            raise

    def abort(self, req_ids: list[str]) -> None:
        self.core.abort(req_ids)

    def set(self, *, capture: CaptureTime = "now", **changes: Any) -> Knobs:
        return self.core.set_knobs(capture=capture, **changes)

    def snapshot(self) -> EngineSnapshot:
        return self.core.snapshot()

    def record(self, on: bool, steps: int | None = None) -> list[Span]:
        """Start recording, for `steps` turns at most, or stop and return the spans; starting twice begins anew."""
        spans: list[Span] = []
        if self._recording is not None:
            recording, self._recording = self._recording, None
            recording.stop()
            spans = recording.recorder.spans()
        if on:
            recording = StageRecording(self.core, steps)
            recording.start()
            self._recording = recording
        return spans

    def inspect(self, steps: int = 0) -> Inspection:
        """Return what the last inspected steps computed and who holds which blocks; inspect the next `steps`."""
        if self._inspector is None:
            from mrv2.engine.inspection import Inspector

            self._inspector = Inspector(self.core)
        return self._inspector.look(steps)

    def shutdown(self) -> None:
        """Stop a recording and the core."""
        if self._recording is not None:
            self._recording.abandon()
            self._recording = None
        self.core.shutdown()


@dataclass(slots=True)
class Command:
    """A call of an `EngineService` verb ("submit", "set", ...), or "close"."""

    number: int
    verb: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None


@dataclass(slots=True)
class Reply:
    """The answer to the command of that number: a value, or the error that it raised."""

    number: int
    value: Any = None
    error: MRV2Error | None = None


@dataclass(slots=True)
class Ready:
    """The engine is loaded."""

    info: EngineInfo


@dataclass(slots=True)
class Failure:
    """The engine stopped; `error` is the exception where it speaks to the user without its traceback."""

    text: str
    error: ValueError | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe `error` with its traceback; only a `ValueError` that can be pickled travels itself."""
        travels: ValueError | None = None
        if isinstance(error, ValueError):
            try:
                travels = pickle.loads(pickle.dumps(error))
            except Exception:  # whatever the exception's own reduce or init raises
                travels = None
        return cls("".join(traceback.format_exception(error)).rstrip(), travels)


EngineMessage = Ready | Reply | Failure | EngineOutputs


def run_engine(
    config: EngineConfig,
    factory: CoreFactory,
    receive: Callable[[bool], Command | None],
    send: Callable[[EngineMessage], None],
) -> None:
    """Load an engine and serve it until "close", the peer's end, or an error, which becomes a `Failure`.

    Args:
        receive: return the next command; waits for one if its argument is True, else may return None;
            raises `EOFError` when the other side is gone.
    """
    service: EngineService | None = None
    try:
        service = EngineService(factory(config))
        send(Ready(service.info))
        _serve(service, receive, send)
    except EOFError:
        pass  # the other side is gone: nobody is left to tell
    except BaseException as error:
        send(Failure.of(error))
    finally:
        if service is not None:
            service.shutdown()


def _serve(
    service: EngineService, receive: Callable[[bool], Command | None], send: Callable[[EngineMessage], None]
) -> None:
    """Commands between steps, steps while there is work, sleep when there is none."""
    while True:
        while (command := receive(not service.core.has_unfinished)) is not None:
            if command.verb == "close":
                send(Reply(command.number))
                return
            try:
                value = getattr(service, command.verb)(*command.args, **(command.kwargs or {}))
            except MRV2Error as error:
                send(Reply(command.number, error=error))
            else:
                send(Reply(command.number, value))
        outputs = service.core.step()
        if outputs:
            send(outputs)
