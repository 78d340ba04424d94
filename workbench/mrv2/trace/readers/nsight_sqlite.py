"""Reader for SQLite exports of Nsight Systems, schema 3.x (nsys 2023 to 2026), plain or gzip."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from mrv2.trace.readers import nsight_host, nsight_nvtx, nsight_ops
from mrv2.trace.readers.nsight_captures import note_captures
from mrv2.trace.readers.sqlite_source import SqliteSource, export_info, open_sqlite
from mrv2.trace.strings import StringPool
from mrv2.trace.table import Coverage, OpKind, PythonFrames, Ranges, Trace, TraceError, Waits

_MAX_MESSAGES = 20


def read(path: str | Path) -> Trace:
    """Read an export; times are nanoseconds from the start of its session.

    Raises:
        TraceError: not an export, an unknown schema, or a damaged file.
    """
    path = Path(path)
    with open_sqlite(path) as connection:
        source = SqliteSource(connection)
        return _read(source, export_info(source, path), path)


def _read(source: SqliteSource, info: dict[str, str], path: Path) -> Trace:
    texts, pool, coverage = source.strings(), StringPool(), Coverage()
    api, syncs = nsight_host.read_api(source, texts, pool, coverage)
    result = nsight_ops.read_ops(source, texts, pool, coverage, coverage.has("syncs.records"))
    nvtx = nsight_nvtx.read_nvtx(source, texts, pool, coverage)
    os_waits = nsight_host.read_os_waits(source, texts, pool, coverage)
    trace = Trace(
        ops=result.ops,
        api=api,
        syncs=syncs,
        overhead=nsight_host.read_overhead(source, texts, pool, coverage),
        coverage=coverage,
        diagnostics=[*_messages(source), *result.diagnostics],
    )
    end = _capture_end(source, trace, nvtx.ranges)
    num_open = nsight_nvtx.close_open(nvtx.ranges, end)
    nsight_nvtx.close_open(nvtx.waits, end)
    if num_open:
        trace.diagnostics.append(f"{num_open} ranges were still open when the recording stopped; they end there")
    trace.ranges = Ranges.make(**nvtx.ranges)
    del nvtx.waits["is_open"]
    trace.waits = Waits.make(**{name: np.concatenate([nvtx.waits[name], os_waits[name]]) for name in os_waits})
    coverage.set(
        "waits", len(trace.waits), recorded=any(coverage.has(f"waits.{kind}") for kind in ("os", "gil", "named"))
    )
    coverage.set("python", 0, recorded=False, reason="Nsight Systems keeps Python frames out of its SQLite export")
    trace.python = PythonFrames.make()
    trace.strings = pool.values
    note_captures(source, trace, pool, coverage)
    trace.meta = _meta(source, info, path, trace, result.granularity, end)
    _note_missing_graphs(trace)
    _unpack_processes(trace, nsight_host.read_threads(source, texts))
    return trace


def _capture_end(source: SqliteSource, trace: Trace, ranges: dict[str, np.ndarray]) -> int:
    """Return the last instant that the recording knows of."""
    ends = [int(table.end.max()) for table in (trace.ops, trace.api, trace.syncs) if len(table)]
    closed = ranges["end"][~ranges["is_open"]]
    ends += [int(closed.max())] if len(closed) else []
    ends += [int(ranges["start"].max())] if len(ranges["start"]) else []
    return max(ends, default=0)


def _messages(source: SqliteSource) -> list[str]:
    """Return the profiler's own warnings and errors, each once, with its count."""
    counts: dict[str, int] = {}
    for severity, text in source.rows("DIAGNOSTIC_EVENT", ["severity", "text"]):
        if severity in (2, 3) and text:
            line = f"profiler {'error' if severity == 3 else 'warning'}: {' '.join(text.split())}"
            counts[line] = counts.get(line, 0) + 1
    lines = [line if count == 1 else f"{line} ({count} times)" for line, count in counts.items()]
    hidden = len(lines) - _MAX_MESSAGES
    return lines[:_MAX_MESSAGES] + ([f"{hidden} further profiler messages"] if hidden > 0 else [])


def _meta(
    source: SqliteSource, info: dict[str, str], path: Path, trace: Trace, granularity: str, end: int
) -> dict[str, Any]:
    epoch = source.rows("TARGET_INFO_SESSION_START_TIME", ["utcEpochNs"])
    gpus = [name for (name,) in source.rows("TARGET_INFO_GPU", ["name"]) if name]
    details = source.rows("ANALYSIS_DETAILS", ["startTime", "stopTime", "duration"])
    meta: dict[str, Any] = {
        "source": "nsight",
        "granularity": granularity,
        "path": str(path),
        "versions": {"nsys": info.get("EXPORT_PRODUCT_VERSION", ""), "schema": info["EXPORT_SCHEMA_VERSION"]},
        "gpu_name": gpus[0] if gpus else None,
        "utc_epoch_ns": epoch[0][0] if epoch else None,
        "recorded_by": f"Nsight Systems {info.get('EXPORT_PRODUCT_VERSION', '')}".rstrip(),
        "capture_end_ns": end,
    }
    span = trace.span()
    if span is not None:
        meta["capture_start_ns"] = span[0]
    if details and details[0][2]:
        meta["duration_ns"] = details[0][2]
    meta |= _stamp(source, meta)
    meta["null_streams"] = [stream for (stream,) in source.rows("TARGET_INFO_CUDA_CONTEXT_INFO", ["nullStreamId"])]
    return meta


def _stamp(source: SqliteSource, meta: dict[str, Any]) -> dict[str, Any]:
    """Return what this package's recorder wrote into the file about the run."""
    rows = source.rows("META_DATA_CAPTURE", ["name", "value"], "name LIKE 'MRV2:%'")
    try:
        found = {name.removeprefix("MRV2:"): json.loads(value) for name, value in rows}
        # the file's own versions are those of the program that wrote it
        return {**found, "versions": {**found.get("versions", {}), **meta["versions"]}}
    except (TypeError, ValueError, AttributeError):
        return {}


def _note_missing_graphs(trace: Trace) -> None:
    """Warn when graphs were launched but the file holds nothing of what ran inside them."""
    launches = [i for i, text in enumerate(trace.strings) if text in ("cudaGraphLaunch", "cuGraphLaunch")]
    num_launches = int(sum((trace.api.name == i).sum() for i in launches))
    if num_launches and trace.meta["granularity"] == "none":
        trace.diagnostics.append(
            f"{num_launches} CUDA graph launches, but nothing of what ran inside them: GPU figures are too low"
        )
    if trace.meta["granularity"] in ("graph", "mixed"):
        num_graphs = int((trace.ops.kind == OpKind.GRAPH).sum())
        trace.diagnostics.append(
            f"{num_graphs} graph executions recorded as a whole: GPU busy time is an upper bound, "
            "the kernels inside are unknown"
        )


def _unpack_processes(trace: Trace, threads: dict[int, str]) -> None:
    """Replace global ids by plain process and thread ids; several machines in one file keep theirs in upper bits."""
    tables = [trace.ops, trace.api, trace.syncs, trace.ranges, trace.waits]
    known = np.unique(np.concatenate([np.unique(table.process) for table in tables]))
    one_machine = len(np.unique(known >> 48)) <= 1
    mask = 0xFFFFFF if one_machine else 2**39 - 1
    for table in tables:
        np.copyto(table.process, (table.process >> 24) & mask)
        for column in ("thread", "end_thread"):
            if column in table.column_types():
                array = table.columns()[column]
                np.copyto(array, np.where(array < 0, array, array & 0xFFFFFF))
    trace.thread_names = {((tid >> 24) & mask, tid & 0xFFFFFF): name for tid, name in threads.items()}


def check_readable(path: str | Path) -> dict[str, str]:
    """Return the description of an export without reading its events.

    Raises:
        TraceError: as `read`.
    """
    with open_sqlite(Path(path)) as connection:
        return export_info(SqliteSource(connection), Path(path))


__all__ = ["TraceError", "check_readable", "read"]
