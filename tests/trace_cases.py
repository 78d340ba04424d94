"""Small traces, built event by event, for tests of the analysis."""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2.trace import (
    Api,
    CopyKind,
    MemoryKind,
    OpKind,
    Ops,
    Overhead,
    PythonFrames,
    RangeKind,
    Ranges,
    Syncs,
    SyncType,
    Trace,
    WaitKind,
    Waits,
)
from mrv2.trace.strings import StringPool
from mrv2.trace.table import TABLE_TYPES

MAIN, WORKER = 1, 2
PROCESS = 10
STREAM, SIDE = 7, 13
_COLLECTED = ("ops", "ops.kernel", "ops.memcpy", "api", "ranges", "syncs", "waits", "overhead")


class TraceCase:
    """Collects events of one process; `build` makes the trace.  Times are nanoseconds."""

    def __init__(self) -> None:
        self.pool = StringPool()
        self.rows: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLE_TYPES}
        self.meta: dict[str, Any] = {"source": "nsight", "granularity": "none"}
        self.diagnostics: list[str] = []
        self.not_collected: dict[str, str] = {"python": "no profile"}
        self.thread_names: dict[tuple[int, int], str] = {}
        self._next_corr = 1

    def add(self, table: str, name: str, start: int, end: int, **columns: Any) -> None:
        """Add a row to any table."""
        base = {} if table == "overhead" else {"process": PROCESS}
        self.rows[table].append({**base, "name": self.pool.id(name), "start": start, "end": end, **columns})

    def corr(self) -> int:
        """Return a fresh correlation id."""
        self._next_corr += 1
        return self._next_corr

    def op(self, start: int, end: int, corr: int = -1, *, name: str = "kernel", **columns: Any) -> None:
        """Add an operation, by default a kernel without a call."""
        base = {"corr": corr, "stream": STREAM, "device": 0, "kind": OpKind.KERNEL}
        self.add("ops", name, start, end, **{**base, **columns})

    def call(self, name: str, start: int, end: int, thread: int = MAIN, corr: int | None = None, **columns: Any) -> int:
        """Add a CUDA call and return its correlation id."""
        corr = self.corr() if corr is None else corr
        self.add("api", name, start, end, thread=thread, corr=corr, **columns)
        return corr

    def launch(self, start: int, end: int, *ops: tuple[int, int], thread: int = MAIN, **columns: Any) -> int:
        """Add a launching call and its operations."""
        corr = self.call("cudaLaunchKernel", start, end, thread)
        for op in ops:
            self.op(*op, corr, **columns)
        return corr

    def copy(self, start: int, end: int, op: tuple[int, int], *, thread: int = MAIN, **columns: Any) -> int:
        """Add an asynchronous copy to pinned host memory."""
        corr = self.call("cudaMemcpyAsync", start, end, thread)
        base = {"copy_kind": CopyKind.D2H, "src_kind": MemoryKind.DEVICE, "dst_kind": MemoryKind.PINNED, "bytes": 4}
        self.op(*op, corr, **{"name": "Memcpy DtoH", "kind": OpKind.MEMCPY, **base, **columns})
        return corr

    def range(self, name: str, start: int, end: int, step: int = -1, *, thread: int = MAIN, **columns: Any) -> None:
        """Add a range of the domain "mrv2"."""
        base = {"thread": thread, "end_thread": thread, "domain": self.pool.id("mrv2"), "step": step}
        self.add("ranges", name, start, end, **{**base, **columns})

    def span(self, name: str, start: int, end: int, thread: int = MAIN, **columns: Any) -> None:
        """Add a start/end range."""
        self.range(name, start, end, thread=thread, kind=RangeKind.START_END, **columns)

    def sync(
        self, start: int, end: int, kind: SyncType = SyncType.STREAM, *, thread: int = MAIN, **columns: Any
    ) -> int:
        """Add a synchronising call with its record."""
        names = {
            SyncType.STREAM: "cudaStreamSynchronize",
            SyncType.EVENT: "cudaEventSynchronize",
            SyncType.CONTEXT: "cudaDeviceSynchronize",
            SyncType.STREAM_WAIT: "cudaStreamWaitEvent",
        }
        corr = self.call(names[kind], start, end, thread)
        base = {"stream": STREAM} if kind == SyncType.STREAM else {}
        self.add("syncs", names[kind], start, end, thread=thread, corr=corr, sync_type=kind, **{**base, **columns})
        return corr

    def wait(self, start: int, end: int, kind: WaitKind = WaitKind.OS, thread: int = MAIN) -> None:
        """Add a time in which a thread was held."""
        self.add("waits", "wait", start, end, thread=thread, kind=kind)

    def build(self) -> Trace:
        """Return the trace."""
        types = {"ops": Ops, "api": Api, "ranges": Ranges, "syncs": Syncs, "waits": Waits}
        types |= {"overhead": Overhead, "python": PythonFrames}
        tables = {name: _table(types[name], rows) for name, rows in self.rows.items()}
        trace = Trace(
            **tables,
            strings=self.pool.values,
            meta=self.meta,
            diagnostics=self.diagnostics,
            thread_names=self.thread_names,
        )
        for key in _COLLECTED:
            trace.coverage.set(key, len(self.rows.get(key, [])))
        for key, reason in self.not_collected.items():
            trace.coverage.set(key, 0, recorded=False, reason=reason)
        return trace


def _table(kind: Any, rows: list[dict[str, Any]]) -> Any:
    if not rows:
        return kind.make()
    names = dict.fromkeys(name for row in rows for name in row)
    fill = {name: kind.defaults.get(name, 0) for name in names}
    return kind.make(**{name: np.array([row.get(name, fill[name]) for row in rows], np.int64) for name in names})


def sync_steps(num_steps: int = 30, *, overlap: bool = False, first: int = 0) -> TraceCase:
    """Return a step loop of 1000 ns a turn: schedule, launch a kernel of 500 ns, wait for it, update.

    With `overlap`, the wait is for the kernel of the turn before, so the next launch follows at once.
    """
    case = TraceCase()
    recorded: dict[int, int] = {}
    for i in range(num_steps):
        at, step = 1000 * i, first + i
        case.range("schedule", at, at + 100, step)
        case.range("execute_model", at + 100, at + 300, step)
        case.launch(at + 200, at + 210, (at + 220, at + 1220 if overlap else at + 720))
        recorded[step] = case.call("cudaEventRecord", at + 212, at + 214)
        awaited = step - 1 if overlap else step
        if awaited not in recorded:
            continue
        done = at + 320 if overlap else at + 740
        case.range("wait_output", at + 300, done + 20, awaited)
        case.range("wait: output", at + 305, done + 10, awaited)
        case.wait(at + 305, done + 10, WaitKind.NAMED)
        case.sync(at + 310, done, SyncType.EVENT, event_stream=STREAM, event_corr=recorded[awaited])
        case.range("update_from_output", done + 20, done + 120, awaited)
    return case
