"""The in-process recorder: a bounded ring of spans from host threads and device streams.

All times are `time.perf_counter_ns`.  Writers from any thread take a slot number from one counter and
store one tuple, so nothing on the hot path locks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Literal, NamedTuple

from mrv2.errors import MRV2Error
from mrv2.instrument import context
from mrv2.instrument.intervals import Intervals, intersect, merge, subtract, total

if TYPE_CHECKING:
    from mrv2.device.base import Device

SpanKind = Literal["host", "wait", "device"]
_Row = tuple[str, str, str, int, int, "int | None"]


class Span(NamedTuple):
    """One named interval: `lane` is a thread's name (kinds host, wait) or a stream's name (kind device)."""

    lane: str
    name: str
    start_ns: int
    end_ns: int
    step: int | None
    kind: SpanKind


class StageSummary(NamedTuple):
    """All spans of one name and kind."""

    name: str
    kind: SpanKind
    count: int
    total_ns: int
    mean_ns: float


class Recorder:
    """Keeps the last `capacity` spans; `dropped` says how many older ones were overwritten."""

    def __init__(self, capacity: int = 1 << 17) -> None:
        if capacity < 1:
            raise ValueError(f"Recorder(capacity={capacity}): must be at least 1 span")
        self.capacity = capacity
        self._ring: list[_Row | None] = [None] * capacity
        self._next = count().__next__
        self._written = 0
        # devices resolve their finished spans here, without waiting
        self._pollers: list[Callable[[], None]] = []

    def add(self, kind: SpanKind, lane: str, name: str, start_ns: int, end_ns: int, step: int | None) -> None:
        """Store one span; safe from any thread."""
        i = self._next()
        self._ring[i % self.capacity] = (kind, lane, name, start_ns, end_ns, step)
        self._written = i + 1

    def add_poller(self, poll: Callable[[], None]) -> None:
        """Register a function that adds those device spans that have finished since its last call."""
        self._pollers.append(poll)

    @property
    def dropped(self) -> int:
        """Spans that were overwritten because the ring was full."""
        return max(0, self._written - self.capacity)

    def spans(self) -> list[Span]:
        """Return the spans that are known now, by start time; never waits for the device."""
        for poll in self._pollers:
            poll()
        rows = [row for row in self._ring if row is not None]
        rows.sort(key=lambda row: row[3])
        return [Span(lane, name, start, end, step, kind) for kind, lane, name, start, end, step in rows]  # type: ignore[arg-type]  # rows hold what `add` was given

    def summary(self) -> list[StageSummary]:
        """Return one row per (kind, name), the largest total of each kind first."""
        times: dict[tuple[SpanKind, str], list[int]] = {}
        for span in self.spans():
            times.setdefault((span.kind, span.name), []).append(span.end_ns - span.start_ns)
        rows = [StageSummary(name, kind, len(ns), sum(ns), sum(ns) / len(ns)) for (kind, name), ns in times.items()]
        return sorted(rows, key=lambda row: (row.kind, -row.total_ns, row.name))

    def start(self, device: Device | None = None) -> None:
        """Begin to record host spans, and the stages of `device` if one is given."""
        if context.recorder is not None:
            raise MRV2Error("a recording is already running; stop it first, or read its recorder")
        context.set_recorder(self)
        if device is not None:
            device.start_recording(self)

    def stop(self, device: Device | None = None) -> None:
        """Stop; device work still in flight is added by later calls of `spans`."""
        if device is not None:
            device.stop_recording()
        context.set_recorder(None)


@contextmanager
def recording(device: Device | None = None, *, capacity: int = 1 << 17) -> Iterator[Recorder]:
    """Record inside the block: host spans of all threads, and the device stages of `device`."""
    rec = Recorder(capacity)
    rec.start(device)
    try:
        yield rec
    finally:
        rec.stop(device)


def host_busy(spans: list[Span]) -> Intervals:
    """Return when at least one thread was inside a host stage and not inside a wait."""
    busy: Intervals = []
    for lane in {span.lane for span in spans if span.kind == "host"}:
        mine = [span for span in spans if span.lane == lane]
        working = merge((s.start_ns, s.end_ns) for s in mine if s.kind == "host")
        waiting = merge((s.start_ns, s.end_ns) for s in mine if s.kind == "wait")
        busy += subtract(working, waiting)
    return merge(busy)


def device_busy(spans: list[Span]) -> Intervals:
    """Return when at least one stream was inside a stage."""
    return merge((s.start_ns, s.end_ns) for s in spans if s.kind == "device")


def _by_step(spans: list[Span]) -> dict[int, list[Span]]:
    steps: dict[int, list[Span]] = {}
    for span in spans:
        if span.step is not None:
            steps.setdefault(span.step, []).append(span)
    return steps


def host_time_per_step(rec: Recorder) -> dict[int, int]:
    """Return busy host nanoseconds (waits excluded) by step; spans without a step do not count."""
    return {step: total(host_busy(spans)) for step, spans in sorted(_by_step(rec.spans()).items())}


def device_time_per_step(rec: Recorder) -> dict[int, int]:
    """Return busy device nanoseconds by the step that submitted the work."""
    return {step: total(device_busy(spans)) for step, spans in sorted(_by_step(rec.spans()).items())}


def overlap_fraction(rec: Recorder) -> float | None:
    """Return |host busy and device busy| / |device busy|, or None when no device stage was recorded."""
    spans = rec.spans()
    device = device_busy(spans)
    return total(intersect(host_busy(spans), device)) / total(device) if device else None
