"""A trace as Chrome JSON, laid out so that Perfetto nests it correctly.

Slices of one track must lie inside each other or apart.  So each thread gets a track for ranges, one for CUDA calls,
one for Python frames and one for waits; each stream gets as many tracks as it ran operations at once; and whatever
overlaps in part (ranges that cross threads or each other) becomes an async slice.  Times are written as microseconds
with three decimals, that is exactly.  A kernel is tied to its launch by a flow arrow.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from mrv2.trace.nesting import clamp_children, crossing, sub_lanes
from mrv2.trace.readers.sync_merge import call_rows
from mrv2.trace.table import OpKind, RangeKind, SyncType, Table, Trace

# children that stick out by less than this are rounded times, not overlaps
_ROUNDING_NS = 1000
# a thread's tracks, top to bottom
_HOST_TRACKS = ("ranges", "CUDA calls", "Python", "waits")
_OP_CATEGORIES = {
    OpKind.KERNEL: "kernel",
    OpKind.MEMCPY: "gpu_memcpy",
    OpKind.MEMSET: "gpu_memset",
    OpKind.GRAPH: "cuda_graph",
    OpKind.STAGE: "device_stage",
}
# process numbers of the devices: above any real process
_DEVICE_PROCESS = 1 << 30


def write_perfetto(trace: Trace, path: str | Path) -> Path:
    """Write `trace` for ui.perfetto.dev or chrome://tracing; gzip when the name ends in ``.gz``.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(path)
    if path.suffix == ".gz":
        with gzip.open(path, "wt", encoding="utf-8", compresslevel=5) as file:
            _write(file, trace)
    else:
        with path.open("w", encoding="utf-8") as file:
            _write(file, trace)
    return path


def _write(file: IO[str], trace: Trace) -> None:
    other = {"source": trace.meta.get("source"), "recorded_by": trace.meta.get("recorded_by")}
    file.write('{"displayTimeUnit":"ns","otherData":' + json.dumps(other) + ',"traceEvents":[\n')
    separator = ""
    for event in perfetto_events(trace):
        file.write(separator + event)
        separator = ",\n"
    file.write("\n]}\n")


def perfetto_events(trace: Trace) -> Iterator[str]:
    """Yield the events, each as JSON text; times count from the trace's first instant."""
    span = trace.span()
    if span is None:
        return
    yield from _Writer(trace, span[0]).events()


def _us(ns: int) -> str:
    """Return microseconds with three decimals."""
    return f"{ns // 1000}.{ns % 1000:03d}"


class _Writer:
    """Numbers tracks as they appear, and turns rows into events."""

    def __init__(self, trace: Trace, base: int) -> None:
        self.trace = trace
        self.base = base
        self.names = [json.dumps(text) for text in trace.strings]
        self.tracks: dict[tuple, int] = {}
        self.next_async = 0
        # where a call's slice lies: (pid, tid, row's start), for flows
        self.call_tracks = np.zeros(len(trace.api), np.int64)

    def events(self) -> Iterator[str]:
        """Yield everything: slices first, then flows, then the names of the tracks."""
        trace = self.trace
        is_sync = trace.syncs.sync_type == SyncType.NAMED
        yield from self._ranges()
        yield from self._slices("CUDA calls", trace.api, "cuda_runtime", tracks_out=self.call_tracks)
        yield from self._slices("Python", trace.python, "python_function")
        yield from self._slices("waits", trace.waits, "wait")
        # named waits are in `waits` already; the others are CUDA calls, unless the calls were not recorded
        if not len(trace.api):
            yield from self._slices("waits", trace.syncs.take(~is_sync), "sync")
        yield from self._ops()
        yield from self._metadata()

    def _track(self, key: tuple) -> int:
        """Return the track number (a tid) of a key that begins with the process."""
        return self.tracks.setdefault(key, len(self.tracks) + 1)

    def _host_track(self, process: int, thread: int, track: str) -> int:
        return self._track((process, "host", thread, track))

    def _ranges(self) -> Iterator[str]:
        ranges = self.trace.ranges
        is_mark = ranges.kind == RangeKind.MARK
        spans = ~is_mark & (ranges.thread == ranges.end_thread)
        yield from self._slices("ranges", ranges.take(spans), "range", extra=_range_args)
        across = ranges.take(~is_mark & (ranges.thread != ranges.end_thread))
        yield from self._async(across, np.arange(len(across)), "range", _range_args)
        marks = ranges.take(is_mark)
        for start, process, thread, name in _rows(marks, "start", "process", "thread", "name"):
            tid = self._host_track(process, thread, "ranges")
            yield self._event("i", name, "mark", process, tid, start, ',"s":"t"')

    def _slices(
        self, track: str, table: Table, category: str, extra: Any = None, tracks_out: np.ndarray | None = None
    ) -> Iterator[str]:
        """Yield complete events on one track a thread; what does not nest there becomes async."""
        columns = table.columns()
        if not len(table):
            return
        lane = _lanes(columns["process"], columns["thread"])
        end = clamp_children(columns["start"], columns["end"], lane, _ROUNDING_NS)
        crosses = crossing(columns["start"], end, lane)
        extras = extra(self.trace, table) if extra else None
        rows = zip(
            *(columns[key].tolist() for key in ("start", "process", "thread", "name")),
            end.tolist(),
            crosses.tolist(),
            strict=True,
        )
        for i, (start, process, thread, name, stop, crossed) in enumerate(rows):
            tid = self._host_track(process, thread, track)
            if tracks_out is not None:
                tracks_out[i] = tid
            if not crossed:
                tail = f',"dur":{_us(stop - start)}' + (f',"args":{extras[i]}' if extras else "")
                yield self._event("X", name, category, process, tid, start, tail)
        yield from self._async(table, np.flatnonzero(crosses), category, extra)

    def _async(self, table: Table, rows: np.ndarray, category: str, extra: Any = None) -> Iterator[str]:
        """Yield begin and end events that need not nest; each has an id of its own."""
        picked = table.take(rows)
        extras = extra(self.trace, picked) if extra else None
        columns = _rows(picked, "start", "end", "process", "thread", "name")
        for i, (start, end, process, thread, name) in enumerate(columns):
            self.next_async += 1
            tid = self._host_track(process, thread, "ranges")
            tail = f',"id":{self.next_async}'
            yield self._event(
                "b", name, category, process, tid, start, tail + (f',"args":{extras[i]}' if extras else "")
            )
            yield self._event("e", name, category, process, tid, end, tail)

    def _ops(self) -> Iterator[str]:
        ops = self.trace.ops
        if not len(ops):
            return
        # concurrent operations of one stream (branches of a graph) need a track each
        number = sub_lanes(ops.start, ops.end, _lanes(ops.process, ops.device, ops.context, ops.stream))
        call = call_rows(ops.process, ops.corr, self.trace.api)
        first = _first_of_call(call)
        api = self.trace.api
        keys = ("start", "end", "device", "stream", "context", "process", "corr", "kind", "name", "bytes", "step")
        for i, (start, end, device, stream, context, process, corr, kind, name, size, step) in enumerate(
            _rows(ops, *keys)
        ):
            pid = _DEVICE_PROCESS + device
            tid = self._track((pid, "stream", stream, int(number[i]), process, context))
            args = {"stream": stream, "correlation": corr, "bytes": size, "step": step}
            text = json.dumps({key: value for key, value in args.items() if value >= 0}, separators=(",", ":"))
            tail = f',"dur":{_us(end - start)},"args":{text}'
            yield self._event("X", name, _OP_CATEGORIES[OpKind(kind)], pid, tid, start, tail)
            # one arrow a launch, to its first operation; a start before the launch means skewed clocks: no arrow
            if first[i] and start >= api.start[call[i]]:
                launch = int(call[i])
                ids = f',"id":{launch}'
                at, caller = int(api.start[launch]), int(api.process[launch])
                yield self._event("s", None, "launch", caller, int(self.call_tracks[launch]), at, ids)
                yield self._event("f", None, "launch", pid, tid, start, ids + ',"bp":"e"')

    def _event(self, phase: str, name: int | None, category: str, pid: int, tid: int, at: int, tail: str) -> str:
        text = '"launch"' if name is None else self.names[name]
        where = f'"pid":{pid},"tid":{tid},"ts":{_us(at - self.base)}'
        return f'{{"ph":"{phase}","name":{text},"cat":"{category}",{where}{tail}}}'

    def _metadata(self) -> Iterator[str]:
        """Yield the names and the order of processes and tracks."""
        trace = self.trace
        streams = trace.meta.get("streams") or {}
        order: dict[int, tuple] = {}
        named: set[int] = set()
        for key, tid in self.tracks.items():
            pid = key[0]
            if key[1] == "host":
                _, _, thread, track = key
                label = f"{trace.thread_names.get((pid, thread)) or 'thread'} {thread}: {track}"
                order[tid] = (0, thread, _HOST_TRACKS.index(track))
                process_name = f"process {pid}"
            else:
                _, _, stream, number, _, _ = key
                label = str(streams.get(stream, f"stream {stream}")) + (f" ({number + 1})" if number else "")
                order[tid] = (1, stream, number)
                process_name = f"GPU {pid - _DEVICE_PROCESS}"
            if pid not in named:
                named.add(pid)
                yield _meta_event("process_name", pid, 0, {"name": process_name})
                yield _meta_event("process_sort_index", pid, 0, {"sort_index": pid})
            yield _meta_event("thread_name", pid, tid, {"name": label})
        ranked = {tid: rank for rank, tid in enumerate(sorted(order, key=lambda t: order[t]))}
        for key, tid in self.tracks.items():
            yield _meta_event("thread_sort_index", key[0], tid, {"sort_index": ranked[tid]})


def _meta_event(name: str, pid: int, tid: int, args: dict[str, Any]) -> str:
    return json.dumps({"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}, separators=(",", ":"))


def _rows(table: Table, *names: str) -> Iterable[tuple]:
    """Return rows of plain numbers."""
    columns = table.columns()
    return zip(*(columns[name].tolist() for name in names), strict=True)


def _lanes(*keys: np.ndarray) -> np.ndarray:
    """Return one number for each distinct combination of keys; int64 [rows]."""
    return np.unique(np.stack([key.astype(np.int64) for key in keys]), axis=1, return_inverse=True)[1]


def _first_of_call(call: np.ndarray) -> np.ndarray:
    """Return which operation is the first of its call (rows are sorted by start); bool [ops]."""
    out = np.zeros(len(call), np.bool_)
    known = np.flatnonzero(call >= 0)
    out[known[np.unique(call[known], return_index=True)[1]]] = True
    return out


def _range_args(trace: Trace, table: Table) -> list[str]:
    """Return the arguments of ranges as JSON: domain, category, step."""
    out = []
    for domain, category, step in _rows(table, "domain", "category", "step"):
        args: dict[str, Any] = {"domain": trace.strings[domain]}
        if category >= 0:
            args["category"] = trace.strings[category]
        if step >= 0:
            args["step"] = step
        out.append(json.dumps(args, separators=(",", ":")))
    return out
