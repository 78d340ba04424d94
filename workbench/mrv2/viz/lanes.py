"""The rows of a timeline, top to bottom: steps, host threads, synchronisation, then each device's streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mrv2.trace.analysis.model import Analysis
from mrv2.trace.analysis.nesting import ThreadKey, split_by_thread
from mrv2.trace.nesting import sub_lanes
from mrv2.trace.table import OpKind, RangeKind, SyncType, Trace
from mrv2.viz.index import TICK_TABLE, Bands, Row, Ticks, TimelineIndex
from mrv2.viz.names import host_hues, op_hues
from mrv2.viz.theme import HUE_ID

# deeper nesting and wider concurrency than this share one last row
MAX_DEPTH = 12
_THIN = 0.7


def analysis_of(source: Trace | Analysis) -> Analysis:
    """Return the analysis of a trace with its defaults, or the analysis that was given."""
    return source if isinstance(source, Analysis) else source.analyze()


def build_index(analysis: Analysis) -> TimelineIndex:
    """Return the index of an analysed trace: its events, its host waits as ticks, its steps as bands.

    Raises:
        TraceError: the trace has no events.
    """
    trace, steps, waits = analysis.trace, analysis.windows, analysis.sync_rows
    bands = Bands(steps.start, steps.end, steps.step)
    rows = [
        *_step_rows(bands),
        *_host_rows(analysis),
        *_sync_rows(analysis),
        *_device_rows(analysis),
        *_overhead_rows(trace),
    ]
    return TimelineIndex(rows, Ticks(waits["start"], waits["name"]), bands)


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
    # most kernels stand alone: only where one opens before the last is over is there anything to do
    alone = opens & np.append(opens[1:], True)
    crowded = np.flatnonzero(~alone)
    if len(crowded):
        found = _nesting_depth(start[crowded], end[crowded])
        if found is None:
            found = sub_lanes(start[crowded], end[crowded], np.cumsum(opens)[crowded])
        depth[crowded] = found
    return depth


def _nesting_depth(start: np.ndarray, end: np.ndarray) -> np.ndarray | None:
    """Return how many intervals each one starts in [n], or None if equal numbers overlap: then nothing nests."""
    depth = np.arange(len(start)) - np.searchsorted(np.sort(end), start, "right")
    by_depth = np.argsort(depth, kind="stable")
    neighbours = depth[by_depth][1:] == depth[by_depth][:-1]
    overlaps = start[by_depth][1:] < end[by_depth][:-1]
    return None if depth.min() < 0 or np.any(neighbours & overlaps) else depth


def _rows(
    columns: Mapping[str, np.ndarray],
    table: str,
    chosen: np.ndarray,
    *,
    key: str,
    label: str,
    hue: np.ndarray | int,
    step: np.ndarray | None = None,
    process: int = -1,
    height: float = 1.0,
) -> list[Row]:
    """Return the events `chosen` (row numbers, sorted) of a table's columns as one row for each depth."""
    none = np.full(len(chosen), -1, np.int64)
    filled = {
        "start": columns["start"][chosen],
        "end": columns["end"][chosen],
        "hue": np.broadcast_to(np.asarray(hue, np.uint8), none.shape),
        "name": columns["name"][chosen],
        "step": step if step is not None else columns["step"][chosen] if "step" in columns else none,
        "corr": columns["corr"][chosen] if "corr" in columns else none,
        "event": chosen,
    }
    depth = pack(filled["start"], filled["end"])
    out = []
    for level in range(min(int(depth.max(initial=-1)) + 1, MAX_DEPTH)):
        if level == 0 and not depth.any():
            part = filled
        elif level < MAX_DEPTH - 1:
            part = {column: array[depth == level] for column, array in filled.items()}
        else:
            part = _flattened({column: array[depth >= level] for column, array in filled.items()})
        tall = height if level == 0 else _THIN
        out.append(Row(f"{key}:{level}", label, key, **part, table=table, process=process, depth=level, height=tall))
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
    every = np.arange(len(bands.start))
    columns = {"start": bands.start, "end": bands.end, "step": bands.step, "name": np.full(len(every), -1)}
    return _rows(columns, "steps", every, key="steps", label="steps", hue=0, height=_THIN)


def _host_rows(analysis: Analysis) -> list[Row]:
    trace = analysis.trace
    tables = (trace.ranges, trace.python, trace.waits, trace.api)
    by_thread = [split_by_thread(table.process, table.thread, np.arange(len(table))) for table in tables]
    nothing = np.zeros(0, np.int64)
    hues = host_hues(trace, trace.ranges.name)
    out: list[Row] = []
    for process, thread in _threads(tables, by_thread):
        name = _thread_label(trace, process, thread)
        lane = f"{process}:{thread}"
        ranges, python, waits, calls = (rows.get((process, thread), nothing) for rows in by_thread)
        out += _range_rows(analysis, ranges, hues, f"ranges:{lane}", name)
        out += _rows(
            trace.python.columns(), "python", python, key=f"python:{lane}", label=f"{name}: Python", height=_THIN,
            hue=host_hues(trace, trace.python.name[python]),
        )  # fmt: skip
        out += _rows(
            trace.waits.columns(), "waits", waits, key=f"waits:{lane}", label=f"{name}: waits", height=_THIN,
            hue=HUE_ID["wait"],
        )  # fmt: skip
        out += _rows(
            trace.api.columns(), "api", calls, key=f"api:{lane}", label=f"{name}: CUDA calls", height=_THIN,
            hue=host_hues(trace, trace.api.name[calls]), step=_call_steps(analysis, calls, (process, thread)),
            process=process,
        )  # fmt: skip
    return out


def _range_rows(analysis: Analysis, mine: np.ndarray, hues: np.ndarray, key: str, label: str) -> list[Row]:
    """Return the ranges of a thread: those that nest, then those that may cross, each packed by itself."""
    ranges, steps = analysis.trace.ranges, analysis.step_ids.of_ranges
    out: list[Row] = []
    for suffix, kinds in (("", (RangeKind.PUSH_POP, RangeKind.MARK)), (" (start/end)", (RangeKind.START_END,))):
        chosen = mine[np.isin(ranges.kind[mine], kinds)]
        out += _rows(
            ranges.columns(), "ranges", chosen, key=key + suffix, label=label + suffix, hue=hues[chosen],
            step=steps[chosen],
        )  # fmt: skip
    return out


def _call_steps(analysis: Analysis, calls: np.ndarray, thread: ThreadKey) -> np.ndarray:
    """Return the step of the innermost range around each API call (rows [n]), -1 none; int64 [n]."""
    nest = analysis.nests[thread]
    if not len(nest):
        return np.full(len(calls), -1, np.int64)
    node = nest.at(analysis.trace.api.start[calls])
    return np.where(node >= 0, analysis.step_ids.of_ranges[nest.row[node]], -1)


def _sync_rows(analysis: Analysis) -> list[Row]:
    waits, syncs = analysis.sync_rows, analysis.trace.syncs
    every = np.arange(len(waits["start"]))
    orders = np.flatnonzero(syncs.sync_type == SyncType.STREAM_WAIT)
    step = analysis.windows.step[analysis.windows.index_at(waits["start"])] if len(analysis.windows) else None
    return [
        *_rows(waits, TICK_TABLE, every, key="syncs", label="host syncs", hue=HUE_ID["wait"], step=step),
        *_rows(
            syncs.columns(), "syncs", orders, key="stream_waits", label="stream waits (no host wait)", hue=0,
            height=_THIN,
        ),
    ]  # fmt: skip


def _device_rows(analysis: Analysis) -> list[Row]:
    trace, ops = analysis.trace, analysis.trace.ops
    if not len(ops):
        return []
    hues, steps = op_hues(trace, ops.name, ops.kind), analysis.step_ids.of_ops
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
                out += _rows(
                    ops.columns(), "ops", chosen, key=f"{part}:{lane}", label=text, hue=hues[chosen],
                    step=steps[chosen], process=process,
                )  # fmt: skip
    return out


def _overhead_rows(trace: Trace) -> list[Row]:
    every = np.arange(len(trace.overhead))
    return _rows(
        trace.overhead.columns(), "overhead", every, key="overhead", label="profiler overhead", hue=0, height=_THIN
    )


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
