"""Small Nsight Systems exports for tests: the columns that matter, in the schema of 2023 and in that of 2026."""

from __future__ import annotations

import gzip
import sqlite3
from pathlib import Path
from typing import Any

OLD, NEW = "3.7.2", "3.28.1"
PID, TID = 4000, 4001
_VM = 1 << 48
_OP = "start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER, greenContextId INTEGER, streamId INTEGER, "
_OP += "correlationId INTEGER, globalPid INTEGER"
_CUPTI = "CUPTI_ACTIVITY_KIND_"
# DDL by table; a table that a schema does not have is missing from it
_COMMON = {
    "StringIds": "id INTEGER PRIMARY KEY, value TEXT",
    "META_DATA_EXPORT": "name TEXT, value TEXT",
    "META_DATA_CAPTURE": "name TEXT, value TEXT",
    "TARGET_INFO_SYSTEM_ENV": "globalVid INTEGER, devStateName TEXT, name TEXT, nameEnum INTEGER, value TEXT",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs INTEGER, utcTime TEXT, localTime TEXT",
    "TARGET_INFO_GPU": "vmId INTEGER, id INTEGER, name TEXT, busLocation TEXT, uuid TEXT",
    "PROCESSES": "globalPid INTEGER, pid INTEGER, name TEXT",
    "ThreadNames": "nameId INTEGER, priority INTEGER, globalTid INTEGER",
    "ProcessStreams": "globalPid INTEGER, filenameId INTEGER, contentId INTEGER",
    "PROFILER_OVERHEAD": "start INTEGER, end INTEGER, globalTid INTEGER, nameId INTEGER, returnValue INTEGER",
    "OSRT_API": "start INTEGER, end INTEGER, eventClass INTEGER, globalTid INTEGER, nameId INTEGER, "
    "returnValue INTEGER, nestingLevel INTEGER, callchainId INTEGER",
    "CUDA_CALLCHAINS": "id INTEGER, symbol INTEGER, module INTEGER, unresolved INTEGER, originalIP INTEGER, "
    "stackDepth INTEGER",
    f"{_CUPTI}RUNTIME": "start INTEGER, end INTEGER, eventClass INTEGER, globalTid INTEGER, correlationId INTEGER, "
    "nameId INTEGER, returnValue INTEGER, callchainId INTEGER",
}
_NVTX = "start INTEGER NOT NULL, end INTEGER, eventType INTEGER, rangeId INTEGER, category INTEGER, color INTEGER, "
_NVTX += "text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER, uint64Value INTEGER, "
_NVTX += "int64Value INTEGER, doubleValue REAL, uint32Value INTEGER, int32Value INTEGER, floatValue REAL, "
_NVTX += "jsonTextId INTEGER, jsonText TEXT"
_NODES = "start INTEGER, end INTEGER, eventClass INTEGER, globalTid INTEGER, nameId INTEGER"
_KERNEL = f"{_OP}, demangledName INTEGER, shortName INTEGER, mangledName INTEGER, graphNodeId INTEGER"
_COPY = f"{_OP}, bytes INTEGER, copyKind INTEGER, srcKind INTEGER, dstKind INTEGER, graphNodeId INTEGER"
_SET = f"{_OP}, value INTEGER, bytes INTEGER, graphNodeId INTEGER, memKind INTEGER"
_SYNC = f"{_OP}, syncType INTEGER, eventId INTEGER"
_EVENT = "deviceId INTEGER, contextId INTEGER, greenContextId INTEGER, streamId INTEGER, correlationId INTEGER, "
_EVENT += "globalPid INTEGER, eventId INTEGER"
DDL: dict[str, dict[str, str]] = {
    OLD: {
        **_COMMON,
        "NVTX_EVENTS": _NVTX,
        f"{_CUPTI}KERNEL": _KERNEL,
        f"{_CUPTI}MEMCPY": _COPY,
        f"{_CUPTI}MEMSET": _SET,
        f"{_CUPTI}SYNCHRONIZATION": _SYNC,
        f"{_CUPTI}CUDA_EVENT": _EVENT,
        # creation of nodes
        "CUDA_GRAPH_EVENTS": f"{_NODES}, graphNodeId INTEGER, originalGraphNodeId INTEGER",
    },
    NEW: {
        **_COMMON,
        "NVTX_EVENTS": f"{_NVTX}, binaryData TEXT, eventId INTEGER PRIMARY KEY",
        f"{_CUPTI}KERNEL": f"{_KERNEL}, graphId INTEGER",
        f"{_CUPTI}MEMCPY": f"{_COPY}, copyCount INTEGER",
        f"{_CUPTI}MEMSET": _SET,
        f"{_CUPTI}SYNCHRONIZATION": f"{_SYNC}, deprecatedSyncType INTEGER, eventSyncId INTEGER",
        f"{_CUPTI}CUDA_EVENT": f"{_EVENT}, timestamp INTEGER, eventSyncId INTEGER",
        f"{_CUPTI}GRAPH_TRACE": f"{_OP}, graphId INTEGER, graphExecId INTEGER",
        f"{_CUPTI}OVERHEAD": "start INTEGER, end INTEGER, globalTid INTEGER, nameId INTEGER",
        # creation of graphs: the same name as above, another meaning
        "CUDA_GRAPH_EVENTS": f"{_NODES}, graphId INTEGER, originalGraphId INTEGER, graphExecId INTEGER",
        "CUDA_GRAPH_NODE_EVENTS": f"{_NODES}, graphNodeId INTEGER, originalGraphNodeId INTEGER",
        "DIAGNOSTIC_EVENT": "timestamp INTEGER, timestampType INTEGER, source INTEGER, severity INTEGER, text TEXT, "
        "globalPid INTEGER",
    },
}


def global_pid(pid: int) -> int:
    """Return the packed form of a process id."""
    return _VM | (pid << 24)


def global_tid(tid: int, pid: int = PID) -> int:
    """Return the packed form of a thread id."""
    return global_pid(pid) | tid


class NsightFile:
    """Collects rows; `write` makes the file.  As in a real lazy export, a table without rows is left out."""

    def __init__(self, schema: str = NEW, *, lazy: bool = True) -> None:
        self.schema = schema
        self.lazy = lazy
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self._strings: dict[str, int] = {}
        for name, value in (("EXPORT_SCHEMA_VERSION", schema), ("EXPORT_PRODUCT_VERSION", "2026.4.0.1")):
            self.add("META_DATA_EXPORT", name=name, value=value)

    def add(self, table: str, **columns: Any) -> None:
        """Add a row; columns that the schema lacks are left out."""
        self.rows.setdefault(table, []).append(columns)

    def text(self, value: str) -> int:
        """Return the id of a string."""
        return self._strings.setdefault(value, len(self._strings) + 10)

    def _op(self, table: str, start: int, end: int, corr: int | None, pid: int, more: dict[str, Any]) -> None:
        base = {"deviceId": 0, "contextId": 1, "streamId": 7, "correlationId": corr, "globalPid": global_pid(pid)}
        self.add(_CUPTI + table, start=start, end=end, **{**base, **more})

    def kernel(self, name: str, start: int, end: int, corr: int | None = None, pid: int = PID, **more: Any) -> None:
        """Add a kernel."""
        key = self.text(name)
        names = {"demangledName": key, "shortName": key, "mangledName": key}
        self._op("KERNEL", start, end, corr, pid, {**names, **more})

    def memcpy(self, start: int, end: int, corr: int | None = None, pid: int = PID, **more: Any) -> None:
        """Add a copy, by default 64 bytes from device to pinned memory."""
        self._op("MEMCPY", start, end, corr, pid, {"bytes": 64, "copyKind": 2, "srcKind": 2, "dstKind": 1, **more})

    def memset(self, start: int, end: int, corr: int | None = None, pid: int = PID, **more: Any) -> None:
        """Add a set of device memory."""
        self._op("MEMSET", start, end, corr, pid, {"bytes": 32, "memKind": 2, **more})

    def graph(self, start: int, end: int, corr: int | None = None, pid: int = PID, **more: Any) -> None:
        """Add the execution of a whole graph."""
        self._op("GRAPH_TRACE", start, end, corr, pid, {"graphId": 3, "graphExecId": 5, **more})

    def sync(self, kind: int, start: int, end: int, corr: int | None = None, pid: int = PID, **more: Any) -> None:
        """Add a synchronisation record."""
        base = {"syncType": kind, "eventId": 2**32 - 1, "streamId": 2**32 - 1, "eventSyncId": 2**32 - 1}
        self._op("SYNCHRONIZATION", start, end, corr, pid, {**base, **more})

    def event(self, event_id: int, stream: int, corr: int, sync_id: int = 0, pid: int = PID) -> None:
        """Add the recording of an event."""
        columns = {"streamId": stream, "correlationId": corr, "eventId": event_id, "eventSyncId": sync_id}
        self.add(f"{_CUPTI}CUDA_EVENT", deviceId=0, contextId=1, globalPid=global_pid(pid), **columns)

    def api(
        self,
        name: str,
        start: int,
        end: int,
        corr: int | None = None,
        tid: int = TID,
        pid: int = PID,
        **more: Any,
    ) -> None:
        """Add a CUDA call."""
        columns = {"nameId": self.text(name), "correlationId": corr, "returnValue": 0, "eventClass": 0}
        self.add(f"{_CUPTI}RUNTIME", start=start, end=end, globalTid=global_tid(tid, pid), **{**columns, **more})

    def launch(self, name: str, at: int, took: int, start: int, end: int, corr: int, **more: Any) -> None:
        """Add a kernel and its launch."""
        self.api("cudaLaunchKernel_v7000", at, at + took, corr)
        self.kernel(name, start, end, corr, **more)

    def nvtx(self, name: str, start: int, end: int | None, tid: int = TID, pid: int = PID, **more: Any) -> None:
        """Add a push/pop range of the default domain; ``eventType`` and others by name."""
        base = {"eventType": 59, "textId": self.text(name), "domainId": 0}
        self.add("NVTX_EVENTS", start=start, end=end, globalTid=global_tid(tid, pid), **{**base, **more})

    def domain(self, key: int, name: str, pid: int = PID) -> None:
        """Declare an NVTX domain."""
        self.add("NVTX_EVENTS", start=-5, eventType=75, domainId=key, text=name, globalTid=global_tid(TID, pid))

    def category(self, domain: int, key: int, name: str, pid: int = PID) -> None:
        """Declare an NVTX category."""
        columns = {"domainId": domain, "category": key, "text": name}
        self.add("NVTX_EVENTS", start=0, eventType=33, globalTid=global_tid(TID, pid), **columns)

    def osrt(self, name: str, start: int, end: int, tid: int = TID, pid: int = PID) -> None:
        """Add a call of the operating system."""
        columns = {"nameId": self.text(name), "returnValue": 0, "nestingLevel": 0}
        self.add("OSRT_API", start=start, end=end, globalTid=global_tid(tid, pid), **columns)

    def write(self, path: Path) -> Path:
        """Write the file, packed if the name ends in ``.gz``."""
        plain = path.with_suffix("") if path.suffix == ".gz" else path
        plain.unlink(missing_ok=True)
        connection = sqlite3.connect(plain)
        self.rows["StringIds"] = [{"id": key, "value": text} for text, key in self._strings.items()]
        for table, columns in DDL[self.schema].items():
            rows = self.rows.get(table, [])
            if not rows and self.lazy and table != "StringIds":
                continue
            connection.execute(f"CREATE TABLE {table} ({columns})")
            known = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            marks = ", ".join("?" * len(known))
            connection.executemany(
                f"INSERT INTO {table} VALUES ({marks})", [[row.get(column) for column in known] for row in rows]
            )
        connection.commit()
        connection.close()
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(plain.read_bytes()))
            plain.unlink()
        return path


def worked_example(schema: str = NEW, *, graph_rows: bool = False) -> NsightFile:
    """Return one step with a graph of 40 nodes, a launch on a second stream, and an orphan kernel.

    In microseconds: ``step`` [0, 1000] holds ``forward`` [100, 300]; the graph's launch [110, 160] yields 40 nodes of 8
    every 10 from 170; a launch [200, 230] runs [215, 225] on stream 13; an orphan runs [600, 650]; a launch [295, 310]
    straddles the end of ``forward`` and runs [700, 720]; a start/end range [50, 900] ends on another thread.
    """
    file = NsightFile(schema)
    us = 1000
    file.domain(1, "mrv2")
    file.nvtx("step", 0, 1000 * us, domainId=1, int64Value=7)
    file.nvtx("forward", 100 * us, 300 * us, domainId=1, int64Value=7)
    file.nvtx("request", 50 * us, 900 * us, domainId=1, eventType=60, endGlobalTid=global_tid(TID + 1), int64Value=7)
    file.api("cudaGraphLaunch_v10000", 110 * us, 160 * us, 1)
    if graph_rows:
        file.graph(170 * us, 568 * us, 1)
    else:
        for node in range(40):
            at = (170 + 10 * node) * us
            file.kernel("node", at, at + 8 * us, 1, graphNodeId=(5 << 32) + node)
    file.launch("side", 200 * us, 30 * us, 215 * us, 225 * us, 2, streamId=13)
    file.kernel("orphan", 600 * us, 650 * us)
    file.launch("straddling", 295 * us, 15 * us, 700 * us, 720 * us, 3)
    return file


def speculating_steps(
    schema: str = NEW,
    *,
    steps: int = 24,
    whole_step: bool = True,
    captured: bool = True,
    idle_us: int = 4,
    draft_us: int = 12,
    count_wait: int = 0,
) -> NsightFile:
    """Return steps of 100 us of a loop that verifies and drafts, in microseconds of each::

        host    schedule 0-5, execute_model 10-30, wait: output 60-95
        device  forward 30-50, verify 50-60, post_update 62-66, draft `idle_us` behind it for `draft_us`

    Args:
        whole_step: all of a step is one graph, launched under ``step_graph``; else stages are launched one by one.
        captured: the capture of that graph was recorded.
        count_wait: in every so-manyth step the host also waits for the number of accepted tokens, inside
            ``sample_tokens`` 40-55; 0: in none.
    """
    file, us = NsightFile(schema), 1000
    file.domain(1, "mrv2")
    file.category(1, 4, "host stage")
    file.category(1, 5, "wait")
    file.category(1, 6, "device stage")
    draft = 66 + idle_us
    parts = [("forward", 30, 50), ("verify", 50, 60), ("post_update", 62, 66), ("draft", draft, draft + draft_us)]
    table = "CUDA_GRAPH_EVENTS" if schema == OLD else "CUDA_GRAPH_NODE_EVENTS"
    for node, (name, _, _) in enumerate(parts):
        at = -1000 * us + 100 * us * node
        if whole_step and captured:
            file.nvtx(name, at, at + 50 * us, domainId=1, category=6)
            times = {"start": at + 10 * us, "end": at + 10 * us, "globalTid": global_tid(TID)}
            file.add(table, **times, nameId=file.text("create"), graphNodeId=(5 << 32) + node)
    for step in range(steps):
        at, corr = 100 * us * step, 10 * step + 1

        def span(name: str, start: float, end: float, category: int, at: int = at, step: int = step) -> None:
            columns = {"domainId": 1, "category": category, "int64Value": step}
            file.nvtx(name, at + round(start * us), at + round(end * us), **columns)

        span("schedule", 0, 5, 4)
        span("execute_model", 10, 30, 4)
        if whole_step:
            span("step_graph", 11, 20, 6)
            file.api("cudaGraphLaunch_v10000", at + 12 * us, at + 18 * us, corr)
        for node, (name, start, end) in enumerate(parts):
            if whole_step:
                file.kernel(name, at + start * us, at + end * us, corr, graphNodeId=(5 << 32) + node)
            else:
                span(name, 11 + 3 * node, 13 + 3 * node, 6)
                file.launch(name, at + (11 + 3 * node) * us, us, at + start * us, at + end * us, corr + node)
        waits = [("wait: output", 60, 95)]
        if count_wait and step % count_wait == 0:
            span("sample_tokens", 38, 58, 4)
            waits.append(("wait: v1: accepted tokens", 40, 55))
        for place, (name, start, end) in enumerate(waits):
            span(name, start, end, 5)
            file.api("cudaEventSynchronize_v3020", at + (start + 1) * us, at + (end - 1) * us, corr + 6 + place)
            file.sync(1, at + (start + 2) * us, at + (end - 2) * us, corr + 6 + place, eventId=3)
    return file
