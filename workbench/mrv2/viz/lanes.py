"""The rows of a timeline, top to bottom: steps, host threads, synchronisation, then each device's streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mrv2.trace.analysis.nesting import ThreadKey, split_by_thread
from mrv2.trace.nesting import sub_lanes
from mrv2.trace.table import OpKind, RangeKind, SyncType, Table, Trace
from mrv2.viz.index import Bands, Row, Ticks, TimelineIndex
from mrv2.viz.names import host_hues, op_hues
from mrv2.viz.theme import HUE_ID

# deeper nesting and wider concurrency than this share one last row
MAX_DEPTH = 12
_THIN = 0.7


def build_index(trace: Trace, bands: Bands | None = None) -> TimelineIndex:
    """Return the index of a trace; `bands` are the steps, by default those that `step_bands` finds.

    Raises:
        TraceError: the trace has no events.
    """
    bands = step_bands(trace) if bands is None else bands
    rows = [*_step_rows(bands), *_host_rows(trace), *_sync_rows(trace), *_device_rows(trace), *_overhead_rows(trace)]
    return TimelineIndex(rows, sync_ticks(trace), bands)


def pack(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return the depth of each interval, sorted by start with outer ones first; int32 [n].

    Nested intervals get their nesting depth, overlapping ones the lowest free depth; equal depths never overlap.
    """
    if not len(start):
        return np.zeros(0, np.int32)
    depth = np.zeros(len(start), np.int32)
    reach = np.maximum.accumulate(end)
    opens = np.ones(len(start), np.bool_)
    opens[1:] = start[1:] >= reach[:-1]
    cluster = np.cumsum(opens)
    # most kernels stand alone: only clusters of several need the walk
    crowded = np.flatnonzero(np.bincount(cluster)[cluster] > 1)
    if len(crowded):
        depth[crowded] = sub_lanes(start[crowded], end[crowded], cluster[crowded])
    return depth


def step_bands(trace: Trace) -> Bands:
    """Return one band for each step id that host ranges carry, from its first start to its last end."""
    ranges = trace.ranges
    mine = (ranges.step >= 0) & (ranges.kind != RangeKind.MARK)
    if not mine.any():
        return Bands(*(np.zeros(0, np.int64) for _ in range(3)))
    steps, where = np.unique(ranges.step[mine], return_inverse=True)
    start = np.full(len(steps), np.iinfo(np.int64).max)
    end = np.full(len(steps), np.iinfo(np.int64).min)
    np.minimum.at(start, where, ranges.start[mine])
    np.maximum.at(end, where, ranges.end[mine])
    order = np.argsort(start, kind="stable")
    return Bands(start[order], end[order], steps[order])


def sync_ticks(trace: Trace) -> Ticks:
    """Return every synchronisation that holds the host; waits between streams are none."""
    syncs = trace.syncs
    mine = np.flatnonzero(syncs.sync_type != SyncType.STREAM_WAIT)
    return Ticks(syncs.start[mine], syncs.end[mine], syncs.name[mine], mine)


def _rows(
    table: Table,
    name: str,
    chosen: np.ndarray,
    *,
    key: str,
    label: str,
    hue: np.ndarray | int,
    step: np.ndarray | None = None,
    height: float = 1.0,
) -> list[Row]:
    """Return the events `chosen` (row numbers, sorted) of a table as one row for each depth."""
    columns = table.columns()
    start, end = columns["start"][chosen], columns["end"][chosen]
    none = np.full(len(chosen), -1, np.int64)
    filled = {
        "start": start,
        "end": end,
        "hue": np.broadcast_to(np.asarray(hue, np.uint8), start.shape),
        "name": columns["name"][chosen],
        "step": step if step is not None else columns["step"][chosen] if "step" in columns else none,
        "corr": columns["corr"][chosen] if "corr" in columns else none,
        "event": chosen,
    }
    depth = pack(start, end)
    out = []
    for level in range(min(int(depth.max(initial=-1)) + 1, MAX_DEPTH)):
        if level == 0 and not depth.any():
            part = filled
        elif level < MAX_DEPTH - 1:
            part = {column: array[depth == level] for column, array in filled.items()}
        else:
            part = _flattened({column: array[depth >= level] for column, array in filled.items()})
        out.append(
            Row(f"{key}:{level}", label, key, **part, table=name, depth=level, height=height if level == 0 else _THIN)
        )
    return out


def _flattened(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the outlines of overlapping events: the first of each cluster stands for it, as long as the cluster."""
    reach = np.maximum.accumulate(columns["end"])
    opens = np.ones(len(reach), np.bool_)
    opens[1:] = columns["start"][1:] >= reach[:-1]
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(reach)) - 1
    return {column: (reach[last] if column == "end" else array[first]) for column, array in columns.items()}


def _step_rows(bands: Bands) -> list[Row]:
    depth = pack(bands.start, bands.end)
    out = []
    for level in range(min(int(depth.max(initial=-1)) + 1, MAX_DEPTH)):
        mine = np.flatnonzero(depth == level)
        none = np.full(len(mine), -1, np.int64)
        hue = np.zeros(len(mine), np.uint8)
        out.append(
            Row(
                f"steps:{level}", "steps", "steps", bands.start[mine], bands.end[mine], hue, none, bands.step[mine], none,
                mine, table="steps", depth=level, height=_THIN,
            )  # fmt: skip
        )
    return out


def _host_rows(trace: Trace) -> list[Row]:
    tables = (trace.ranges, trace.python, trace.waits, trace.api)
    by_thread = [split_by_thread(table.process, table.thread, np.arange(len(table))) for table in tables]
    nothing = np.zeros(0, np.int64)
    hues = host_hues(trace, trace.ranges.name)
    out: list[Row] = []
    for process, thread in _threads(tables, by_thread):
        name = _thread_label(trace, process, thread)
        lane = f"{process}:{thread}"
        ranges, python, waits, calls = (rows.get((process, thread), nothing) for rows in by_thread)
        out += _range_rows(trace, ranges, hues, f"ranges:{lane}", name)
        out += _rows(
            trace.python, "python", python, key=f"python:{lane}", label=f"{name}: Python", height=_THIN,
            hue=host_hues(trace, trace.python.name[python]),
        )  # fmt: skip
        out += _rows(
            trace.waits, "waits", waits, key=f"waits:{lane}", label=f"{name}: waits", hue=HUE_ID["wait"], height=_THIN
        )
        out += _rows(
            trace.api, "api", calls, key=f"api:{lane}", label=f"{name}: CUDA calls", height=_THIN,
            hue=host_hues(trace, trace.api.name[calls]), step=_call_steps(trace, calls, ranges),
        )  # fmt: skip
    return out


def _range_rows(trace: Trace, mine: np.ndarray, hues: np.ndarray, key: str, label: str) -> list[Row]:
    """Return the ranges of a thread: those that nest, then those that may cross, each packed by itself."""
    ranges = trace.ranges
    out: list[Row] = []
    for suffix, kinds in (("", (RangeKind.PUSH_POP, RangeKind.MARK)), (" (start/end)", (RangeKind.START_END,))):
        chosen = mine[np.isin(ranges.kind[mine], kinds)]
        out += _rows(ranges, "ranges", chosen, key=key + suffix, label=label + suffix, hue=hues[chosen])
    return out


def _call_steps(trace: Trace, calls: np.ndarray, mine: np.ndarray) -> np.ndarray:
    """Return the step of each API call [n] from the outermost range `mine` around it, -1 none; int64 [n]."""
    ranges = trace.ranges
    mine = mine[(ranges.step[mine] >= 0) & (ranges.kind[mine] == RangeKind.PUSH_POP)]
    outer = mine[pack(ranges.start[mine], ranges.end[mine]) == 0]
    if not len(outer):
        return np.full(len(calls), -1, np.int64)
    at = trace.api.start[calls]
    last = np.searchsorted(ranges.start[outer], at, "right") - 1
    inside = (last >= 0) & (ranges.end[outer][last] > at)
    return np.where(inside, ranges.step[outer][last], -1)


def _sync_rows(trace: Trace) -> list[Row]:
    syncs = trace.syncs
    orders = np.flatnonzero(syncs.sync_type == SyncType.STREAM_WAIT)
    holds = np.flatnonzero(syncs.sync_type != SyncType.STREAM_WAIT)
    return [
        *_rows(syncs, "syncs", holds, key="syncs", label="host syncs", hue=HUE_ID["wait"]),
        *_rows(syncs, "syncs", orders, key="stream_waits", label="stream waits (no host wait)", hue=0, height=_THIN),
    ]


def _device_rows(trace: Trace) -> list[Row]:
    ops = trace.ops
    if not len(ops):
        return []
    hues = op_hues(trace, ops.name, ops.kind)
    copies = (ops.kind == OpKind.MEMCPY) | (ops.kind == OpKind.MEMSET)
    stages = ops.kind == OpKind.STAGE
    # several processes on one device have streams of their own
    by_process = split_by_thread(ops.process, ops.device, np.arange(len(ops)))
    many = len(by_process) > len(np.unique(ops.device))
    out: list[Row] = []
    for (process, device), of_device in by_process.items():
        by_stream = split_by_thread(ops.device, ops.stream, of_device)
        busy = {key: int((ops.end[rows] - ops.start[rows]).sum()) for key, rows in by_stream.items()}
        for _, stream in sorted(busy, key=lambda key: -busy[key]):
            mine = by_stream[device, stream]
            label = _stream_label(trace, device, stream) + (f" (process {process})" if many else "")
            lane = f"{device}:{stream}:{process}" if many else f"{device}:{stream}"
            parts = (
                ("stage", f"{label}: stages", stages),
                ("stream", label, ~copies & ~stages),
                ("copies", f"{label}: copies", copies),
            )
            for part, text, mask in parts:
                chosen = mine[mask[mine]]
                out += _rows(ops, "ops", chosen, key=f"{part}:{lane}", label=text, hue=hues[chosen])
    return out


def _overhead_rows(trace: Trace) -> list[Row]:
    every = np.arange(len(trace.overhead))
    return _rows(trace.overhead, "overhead", every, key="overhead", label="profiler overhead", hue=0, height=_THIN)


def _threads(tables: Sequence[Any], by_thread: list[dict[ThreadKey, np.ndarray]]) -> list[ThreadKey]:
    """Return the threads of all host events: those with ranges first, then by their first event."""
    first: dict[ThreadKey, tuple[int, int]] = {}
    for order, (table, threads) in enumerate(zip(tables, by_thread)):
        for thread, rows in threads.items():
            first.setdefault(thread, (order, int(table.start[rows[0]])))
    return sorted(first, key=first.__getitem__)


def _thread_label(trace: Trace, process: int, thread: int) -> str:
    name = trace.thread_names.get((process, thread))
    return f"{name} ({thread})" if name else f"thread {thread}" if thread >= 0 else "unknown thread"


def _stream_label(trace: Trace, device: int, stream: int) -> str:
    name = trace.meta.get("streams", {}).get(stream)
    return f"GPU {device} {name}" if name else f"GPU {device} stream {stream}"
