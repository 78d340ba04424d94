"""Reader for recordings of the torch profiler (Kineto), plain or gzip JSON."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from mrv2.trace.nesting import clamp_children
from mrv2.trace.readers.cuda_calls import plain_name
from mrv2.trace.readers.kineto_json import argument, load_json, no_collection, to_int, to_ns
from mrv2.trace.readers.kineto_ops import read_ops
from mrv2.trace.readers.kineto_syncs import read_syncs
from mrv2.trace.strings import StringPool
from mrv2.trace.table import Api, Coverage, Overhead, PythonFrames, Ranges, Syncs, Trace, TraceError, WaitKind, Waits

Event = dict[str, Any]
# category of an event to the group that a table is built from; older spellings included
_GROUPS = {
    "cpu_op": "range",
    "operator": "range",
    "user_annotation": "range",
    "python_function": "python",
    "cuda_runtime": "api",
    "runtime": "api",
    "cuda_driver": "api",
    "kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "memcpy": "memcpy",
    "gpu_memset": "memset",
    "memset": "memset",
    "cuda_sync": "sync",
    "overhead": "overhead",
}
_DOMAINS = {"operator": "cpu_op"}
# files without nanosecond digits let a child end up to this long after its parent
_ROUNDING_NS = 1000
# two of them still fit into 64 bits
_MAX_NS = 2**62


def read(path: str | Path) -> Trace:
    """Read a recording; operators are ranges of domain "cpu_op", annotations of domain "user_annotation".

    Raises:
        TraceError: truncated, damaged, or JSON of another kind.
    """
    with no_collection():
        return _read(Path(path))


def _read(path: Path) -> Trace:
    document = load_json(path)
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise TraceError(f"{path}: JSON, but not a trace of the torch profiler (no list 'traceEvents')")
    groups, bad = _group(events)
    if not any(groups.values()):
        raise TraceError(f"{path}: JSON events, but none of the torch profiler's categories (cpu_op, kernel, ...)")
    trace = _build(groups)
    header = document if isinstance(document, dict) else {}
    trace.meta |= _meta(header, path)
    trace.thread_names = _thread_names(events)
    if bad:
        trace.diagnostics.append(f"{bad} events without a valid time or with a negative length were left out")
    return trace


def _group(events: list[Any]) -> tuple[dict[str, list[Event]], int]:
    """Sort complete events by group, adding ``start`` and ``end`` in ns; returns them and the number left out."""
    groups: dict[str, list[Event]] = {name: [] for name in set(_GROUPS.values())}
    bad = 0
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        group = _GROUPS.get(str(event.get("cat", "")).lower())
        if group is None:
            continue
        try:
            start, length = to_ns(event["ts"]), to_ns(event.get("dur", 0))
        except (KeyError, ValueError):
            bad += 1
            continue
        if length < 0 or abs(start) > _MAX_NS or length > _MAX_NS:
            bad += 1
            continue
        event["start"], event["end"] = start, start + length
        groups[group].append(event)
    return groups, bad


def _column(events: list[Event], key: str) -> np.ndarray:
    return np.fromiter((event[key] for event in events), np.int64, len(events))


def _ids(events: list[Event], key: str) -> np.ndarray:
    return np.fromiter((to_int(event.get(key)) for event in events), np.int64, len(events))


def _host(events: list[Event], pool: StringPool) -> dict[str, np.ndarray]:
    """Return the columns that all host events share, sorted by start."""
    columns = {
        "start": _column(events, "start"),
        "end": _column(events, "end"),
        "process": _ids(events, "pid"),
        "thread": _ids(events, "tid"),
        "name": pool.ids(str(event.get("name", "")) for event in events),
    }
    return columns


def _clamp(parts: list[dict[str, np.ndarray]]) -> None:
    """Let no host event outlive the one it starts in by a rounding error; changes ``end`` in place."""
    start, end, process, thread = (
        np.concatenate([part[key] for part in parts]) for key in ("start", "end", "process", "thread")
    )
    lane = np.unique(np.stack([process, thread]), axis=1, return_inverse=True)[1] if len(start) else thread
    ends = clamp_children(start, end, lane, _ROUNDING_NS)
    for part, clamped in zip(parts, np.split(ends, np.cumsum([len(part["end"]) for part in parts])[:-1]), strict=True):
        part["end"] = clamped


def _build(groups: dict[str, list[Event]]) -> Trace:
    pool, coverage = StringPool(), Coverage()
    for event in groups["api"]:
        event["name"] = plain_name(str(event.get("name", "")))
    ranges, api, python = (_host(groups[name], pool) for name in ("range", "api", "python"))
    _clamp([ranges, api, python])
    ranges |= {
        "domain": pool.ids(map(_domain, groups["range"])),
        "category": np.fromiter((_category(event, pool) for event in groups["range"]), np.int32, len(groups["range"])),
        "end_thread": ranges["thread"],
        "step": np.fromiter(map(_step, groups["range"]), np.int64, len(groups["range"])),
    }
    api["corr"] = np.fromiter((_correlation(event) for event in groups["api"]), np.int64, len(groups["api"]))
    overhead = {key: _host(groups["overhead"], pool)[key] for key in ("start", "end", "name")}
    process = _main_process(groups)
    ops, granularity, diagnostics = read_ops(groups, pool, process, api)
    trace = Trace(
        ops=ops,
        api=Api.make(**api),
        ranges=Ranges.make(**ranges),
        python=PythonFrames.make(**python),
        overhead=Overhead.make(**overhead),
        waits=_named_waits(ranges, pool),
        syncs=Syncs.make(),
        strings=pool.values,
        meta={"source": "kineto", "granularity": granularity},
        coverage=coverage,
        diagnostics=diagnostics,
    )
    trace.syncs = read_syncs(groups["sync"], trace, pool, process)
    _cover(trace, len(groups["sync"]))
    return trace


def _named_waits(ranges: dict[str, np.ndarray], pool: StringPool) -> Waits:
    """Copy this package's named waits, which are annotations, into the waits."""
    own = (ranges["domain"] == pool.id("mrv2")) & (ranges["category"] == pool.id("wait"))
    columns = {name: ranges[name][own] for name in ("start", "end", "process", "thread", "name")}
    return Waits.make(**columns, kind=WaitKind.NAMED)


def _correlation(event: Event) -> int:
    arguments = event.get("args")
    return to_int(arguments.get("correlation")) if isinstance(arguments, dict) else -1


def _domain(event: Event) -> str:
    """Return an annotation's own domain where it names one, as this package's recorder does, else the category."""
    category = str(event["cat"]).lower()
    own = argument(event, "domain") if category == "user_annotation" else None
    return own if isinstance(own, str) else _DOMAINS.get(category, category)


def _category(event: Event, pool: StringPool) -> int:
    category = argument(event, "category") if event.get("cat") == "user_annotation" else None
    return pool.id(category) if isinstance(category, str) else -1


def _step(event: Event) -> int:
    """Return the step of an annotation: its argument, or the number of ``ProfilerStep#12``; -1 for others."""
    if event.get("cat") != "user_annotation":
        return -1
    name = str(event.get("name", ""))
    return to_int(name[13:] if name.startswith("ProfilerStep#") else argument(event, "step"))


def _main_process(groups: dict[str, list[Event]]) -> int:
    """Return the process that device operations belong to: their own rows name the device instead."""
    for group in ("api", "range", "python"):
        found = Counter(to_int(event.get("pid")) for event in groups[group])
        if found:
            return found.most_common(1)[0][0]
    return 0


def _cover(trace: Trace, num_records: int) -> None:
    cover = trace.coverage
    has_api = bool(len(trace.api))
    traced = has_api or bool(len(trace.ops))
    no_cuda = "" if traced else "no CUDA activity in the file"
    for kind, key in enumerate(("kernel", "memcpy", "memset")):
        cover.set(f"ops.{key}", int((trace.ops.kind == kind).sum()), recorded=traced, reason=no_cuda)
    cover.set("ops.graph", 0, recorded=False, reason="the torch profiler records graph nodes, never whole graphs")
    cover.set("ops", len(trace.ops), recorded=traced, reason=no_cuda)
    cover.set("api", len(trace.api), recorded=False, reason=no_cuda)
    cover.set("ranges", len(trace.ranges), recorded=False, reason="" if len(trace.ranges) else "no operators recorded")
    hints = len(trace.syncs) and not traced
    reason = "hints from operators only: a GPU run would wait there" if hints else no_cuda
    cover.set("syncs", len(trace.syncs), recorded=has_api, reason=reason)
    reason = "" if num_records else "cuda_sync events are off by default in the torch profiler"
    cover.set("syncs.records", num_records, recorded=False, reason=reason)
    stacks = int((trace.syncs.stack >= 0).sum())
    cover.set("syncs.stack", stacks, recorded=False, reason="" if stacks else "record with with_stack=True")
    no_waits = "the torch profiler does not record waits of threads"
    for key in ("waits", "waits.named"):
        cover.set(key, len(trace.waits), recorded=False, reason="" if len(trace.waits) else no_waits)
    for key in ("waits.os", "waits.gil"):
        cover.set(key, 0, recorded=False, reason=no_waits)
    cover.set("overhead", len(trace.overhead), recorded=False, reason="" if len(trace.overhead) else "none reported")
    frames = len(trace.python)
    cover.set("python", frames, recorded=False, reason="" if frames else "record with with_stack=True")


def _meta(header: dict[str, Any], path: Path) -> dict[str, Any]:
    keys = ("schemaVersion", "cuda_runtime_version", "cuda_driver_version", "cupti_version", "torch_version")
    meta: dict[str, Any] = {
        "path": str(path),
        "recorded_by": "torch profiler",
        "versions": {key: header[key] for key in keys if key in header},
        "gpu_name": None,
    }
    devices = header.get("deviceProperties")
    if isinstance(devices, list) and devices and isinstance(devices[0], dict):
        meta["gpu_name"] = devices[0].get("name")
    base = to_int(header.get("baseTimeNanoseconds"))
    if base >= 0:
        meta["utc_epoch_ns"] = base
    about = header.get("mrv2")
    if isinstance(about, dict):
        known = about.get("versions")
        meta |= {**about, "versions": {**(known if isinstance(known, dict) else {}), **meta["versions"]}}
    distributed = header.get("distributedInfo")
    if isinstance(distributed, dict) and "rank" in distributed:
        meta["rank"] = to_int(distributed["rank"])
    return meta


def _thread_names(events: list[Any]) -> dict[tuple[int, int], str]:
    names: dict[tuple[int, int], str] = {}
    for event in events:
        if isinstance(event, dict) and event.get("ph") == "M" and event.get("name") == "thread_name":
            arguments = event.get("args")
            name = arguments.get("name") if isinstance(arguments, dict) else None
            process, thread = to_int(event.get("pid")), to_int(event.get("tid"))
            if name and process >= 0 and thread >= 0:
                names[(process, thread)] = str(name)
    return names
