"""Serve a fixed set of requests with an `EngineCore`: once for the clock, once under the recorder."""

from __future__ import annotations

import gc
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from mrv2.engine.core import EngineCore
from mrv2.engine.messages import EngineRequest
from mrv2.engine.step_outputs import TokenLog
from mrv2.errors import EngineDeadError
from mrv2.instrument import Span, recording, stage, stages
from mrv2.instrument.intervals import intersect, total
from mrv2.instrument.recorder import device_busy, host_busy

# some ten thousand steps
_MAX_SPANS = 1 << 19
_END = "end of recording"


@dataclass(frozen=True)
class ServedRun:
    """One run without instruments."""

    # request id -> generated token ids
    tokens: dict[str, list[int]]
    # from the first admission to the last token
    seconds: float
    num_steps: int
    num_graph_replays: int
    num_preemptions: int
    # host waits by reason
    waits: dict[str, int]
    # of the replays, graphs of whole steps
    num_step_replays: int = 0

    @property
    def num_output_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))

    @property
    def tokens_per_second(self) -> float:
        return self.num_output_tokens / self.seconds

    @property
    def digest(self) -> str:
        """Equal for two runs exactly when they generated the same tokens for the same request ids."""
        text = ";".join(f"{req_id}:{','.join(map(str, ids))}" for req_id, ids in sorted(self.tokens.items()))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class StepProfile:
    """Where the time of a recorded run went; all times are means in milliseconds a step.

    A stage's device time runs from its first launch to its last kernel's end: in an eager stage the
    gaps between launches count as busy, in a graph replay there are none.
    """

    num_steps: int
    # wall time of the run
    step_ms: float
    # inside a host stage and not waiting
    host_ms: float
    # at least one stream inside a stage
    device_ms: float
    # share of device time during which the host worked too; None = no device stage was recorded
    overlap: float | None
    # share of the time from the first device stage to the last during which no stream was inside one
    device_idle: float | None
    # by stage; host stages nest (a runner's own inside execute_model), so they do not add up
    host_stages_ms: dict[str, float]
    device_stages_ms: dict[str, float]
    # time inside waits, by reason
    waits_ms: dict[str, float]
    # spans that did not fit the recorder; more than 0 = the figures miss the beginning of the run
    num_dropped_spans: int


def serve(core: EngineCore, requests: Sequence[EngineRequest]) -> ServedRun:
    """Admit all requests, in order, and step until the last has finished.

    The prefix cache is emptied first, so that every run does the same work.
    Raises `EngineDeadError` if a request ends in an error.
    """
    core.kv.pool.forget_all()
    gc.collect()
    log = TokenLog()
    steps, preemptions = core.scheduler.step, core.scheduler.stats.num_preemptions
    stats, waits = core.executor.runner.stats, Counter(core.device.waits)
    replays, step_replays = stats.num_graph_replays, stats.num_step_replays
    start = perf_counter()
    for request in requests:
        core.add_request(request)
    while core.has_unfinished:
        outputs = core.step()
        with stage(stages.PROCESS_OUTPUTS):
            log.take(outputs)
    tokens = log.tokens()
    seconds = perf_counter() - start
    for output in log.ends.values():
        if output.finish_reason in ("error", "abort"):
            raise EngineDeadError(f"request {output.req_id} ended in an error: {output.stop_reason}")
    return ServedRun(
        tokens=tokens,
        seconds=seconds,
        num_steps=core.scheduler.step - steps,
        num_graph_replays=stats.num_graph_replays - replays,
        num_step_replays=stats.num_step_replays - step_replays,
        num_preemptions=core.scheduler.stats.num_preemptions - preemptions,
        waits=dict(Counter(core.device.waits) - waits),
    )


def profile(core: EngineCore, requests: Sequence[EngineRequest]) -> tuple[StepProfile, ServedRun]:
    """Serve as `serve` does, recording host and device stages; the clock of this run includes the recorder."""
    with recording(core.device, capacity=_MAX_SPANS) as recorder:
        run = serve(core, requests)
        core.device.synchronize(_END)
        spans = recorder.spans()
    return summarise(spans, run.num_steps, run.seconds, recorder.dropped), run


def summarise(spans: list[Span], num_steps: int, seconds: float, num_dropped_spans: int) -> StepProfile:
    """Reduce the spans of `num_steps` recorded steps, which took `seconds`, to means a step."""
    host, device = host_busy(spans), device_busy(spans)
    window = device[-1][1] - device[0][0] if device else 0
    per_step = 1e-6 / max(num_steps, 1)
    named: dict[str, dict[str, float]] = {"host": {}, "device": {}, "wait": {}}
    for span in spans:
        times = named[span.kind]
        times[span.name] = times.get(span.name, 0.0) + (span.end_ns - span.start_ns) * per_step
    return StepProfile(
        num_steps=num_steps,
        step_ms=1e3 * seconds / max(num_steps, 1),
        host_ms=total(host) * per_step,
        device_ms=total(device) * per_step,
        overlap=total(intersect(host, device)) / total(device) if device else None,
        device_idle=1.0 - total(device) / window if window else None,
        host_stages_ms=named["host"],
        device_stages_ms=named["device"],
        waits_ms={reason: ms for name, ms in named["wait"].items() if (reason := name.removeprefix("wait: ")) != _END},
        num_dropped_spans=num_dropped_spans,
    )
