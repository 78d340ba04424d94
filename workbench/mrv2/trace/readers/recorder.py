"""The in-process recorder as a `Trace`: host stages, device stages and named waits."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from mrv2.trace.strings import StringPool
from mrv2.trace.table import Coverage, OpKind, Ops, Ranges, Syncs, SyncType, Trace, WaitKind, Waits

if TYPE_CHECKING:
    from mrv2.instrument.recorder import Recorder, Span

DOMAIN = "mrv2"
_NO_TOOL = "the in-process recorder sees stages, not CUDA: record with level 'kernels' or 'nsight'"


def read(recorder: Recorder, meta: dict[str, Any] | None = None) -> Trace:
    """Return what `recorder` holds now; never waits for the device.

    Threads and streams are numbered in order of appearance; their names are in `Trace.thread_names` and
    ``meta["streams"]``.  Waits appear twice, as waits and as syncs of type NAMED.

    Args:
        meta: what else is known, for example ``{"knobs": ..., "config": ..., "gpu_name": ...}``.
    """
    spans = recorder.spans()
    pool, coverage, process = StringPool(), Coverage(), os.getpid()
    host = [span for span in spans if span.kind == "host"]
    waits = [span for span in spans if span.kind == "wait"]
    device = [span for span in spans if span.kind == "device"]
    threads = _numbers(span.lane for span in spans if span.kind != "device")
    streams = _numbers(span.lane for span in device)
    named = {**_columns(waits, pool), "process": process, "thread": _lookup(waits, threads)}
    trace = Trace(
        ops=Ops.make(
            **_columns(device, pool),
            process=process,
            stream=_lookup(device, streams),
            kind=OpKind.STAGE,
            step=_steps(device),
        ),
        ranges=Ranges.make(
            **_columns(host, pool),
            process=process,
            thread=_lookup(host, threads),
            end_thread=_lookup(host, threads),
            domain=pool.id(DOMAIN),
            step=_steps(host),
        ),
        waits=Waits.make(**named, kind=WaitKind.NAMED),
        syncs=Syncs.make(**named, sync_type=SyncType.NAMED),
        strings=pool.values,
        thread_names={(process, number): name for name, number in threads.items()},
        coverage=coverage,
    )
    trace.meta = {
        "source": "recorder",
        "granularity": "none",
        "recorded_by": "in-process recorder",
        # wall clock at time 0 of the recorder's clock
        "utc_epoch_ns": time.time_ns() - time.perf_counter_ns(),
        "streams": {number: name for name, number in streams.items()},
        **(meta or {}),
    }
    _cover(trace, len(device))
    if recorder.dropped:
        trace.diagnostics.append(
            f"{recorder.dropped} spans were overwritten: the ring holds {recorder.capacity}; "
            "record fewer steps or raise its capacity"
        )
    return trace


def _cover(trace: Trace, num_stages: int) -> None:
    cover = trace.coverage
    cover.set("ops", num_stages, recorded=False, reason="" if num_stages else "no device was given to the recorder")
    cover.set("ops.stage", num_stages, recorded=False, reason=cover["ops"].reason)
    for key in ("kernel", "memcpy", "memset", "graph"):
        cover.set(f"ops.{key}", 0, recorded=False, reason=_NO_TOOL)
    cover.set("api", 0, recorded=False, reason=_NO_TOOL)
    cover.set("ranges", len(trace.ranges))
    cover.set("waits.named", len(trace.waits))
    cover.set("waits.os", 0, recorded=False, reason="needs Nsight Systems")
    cover.set("waits.gil", 0, recorded=False, reason="needs Nsight Systems")
    cover.set("waits", len(trace.waits))
    cover.set("syncs", len(trace.syncs), reason="named waits only: waits inside other libraries are not seen")
    cover.set("syncs.records", 0, recorded=False, reason=_NO_TOOL)
    cover.set("syncs.stack", 0, recorded=False, reason="arm a sync_guard for stacks")
    cover.set("overhead", 0, recorded=False, reason="the recorder does not measure itself")
    cover.set("python", 0, recorded=False, reason="needs the torch profiler")


def _numbers(lanes: Any) -> dict[str, int]:
    """Return 0, 1, ... for lane names in order of appearance."""
    return {lane: i for i, lane in enumerate(dict.fromkeys(lanes))}


def _lookup(spans: list[Span], numbers: dict[str, int]) -> np.ndarray:
    return np.array([numbers[span.lane] for span in spans], np.int64)


def _steps(spans: list[Span]) -> np.ndarray:
    return np.array([-1 if span.step is None else span.step for span in spans], np.int64)


def _columns(spans: list[Span], pool: StringPool) -> dict[str, np.ndarray]:
    return {
        "start": np.array([span.start_ns for span in spans], np.int64),
        "end": np.array([span.end_ns for span in spans], np.int64),
        "name": pool.ids(span.name for span in spans),
    }
