"""Device operations of a torch profiler recording."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from mrv2.trace.readers.kineto_json import argument, integers, to_int
from mrv2.trace.strings import StringPool
from mrv2.trace.table import CopyKind, OpKind, Ops

_COPY_KINDS = {"HtoD": CopyKind.H2D, "DtoH": CopyKind.D2H, "DtoD": CopyKind.D2D, "PtoP": CopyKind.P2P}
_MEMORY_KINDS = {"Pageable": 0, "Pinned": 1, "Device": 2, "Array": 3, "Managed": 4}
# Memcpy HtoD (Pinned -> Device)
_COPY_NAME = re.compile(r"Memcpy (\w+)(?: \((.+?) -> (.+?)\))?")
_SET_NAME = re.compile(r"Memset \((.+?)\)")
_GRAPH_LAUNCHES = frozenset({"cudaGraphLaunch", "cuGraphLaunch"})


def read_ops(
    groups: dict[str, list[dict[str, Any]]], pool: StringPool, process: int, api: dict[str, np.ndarray]
) -> tuple[Ops, str, list[str]]:
    """Return operations, granularity of graphs, and diagnostics.

    Args:
        groups: events with ``start`` and ``end``; groups "kernel", "memcpy" and "memset" are read.
        process: host process that all of them belong to.
        api: columns ``corr`` and ``name`` of the API calls.
    """
    kinds = {"kernel": OpKind.KERNEL, "memcpy": OpKind.MEMCPY, "memset": OpKind.MEMSET}
    events = [event for group in kinds for event in groups[group]]
    size = len(events)
    columns = {
        "start": np.fromiter((event["start"] for event in events), np.int64, size),
        "end": np.fromiter((event["end"] for event in events), np.int64, size),
        "device": _or_track(events, ("device",), "pid"),
        "stream": _or_track(events, ("stream",), "tid"),
        "context": integers(events, "context", default=0),
        "corr": integers(events, "correlation"),
        "kind": np.repeat(list(kinds.values()), [len(groups[group]) for group in kinds]),
        "name": pool.ids(str(event.get("name", "")) for event in events),
        "bytes": integers(events, "bytes"),
        "graph_node": integers(events, "graph node id", "graph_node_id"),
        "graph_id": integers(events, "graph id", "graph_id"),
    }
    for column in ("graph_node", "graph_id"):
        columns[column] = np.where(columns[column] == 0, -1, columns[column])
    columns |= _memory(columns["name"], pool)
    columns["corr"] = np.where(columns["corr"] == 0, -1, columns["corr"])
    granularity, diagnostics = "none", []
    launches = [i for i, name in enumerate(pool.values) if name in _GRAPH_LAUNCHES]
    launched = api["corr"][np.isin(api["name"], launches)]
    in_graph = (columns["graph_node"] >= 0) | (np.isin(columns["corr"], launched) & (columns["corr"] >= 0))
    if in_graph.any():
        granularity = "node"
    elif len(launched):
        diagnostics.append(
            f"{len(launched)} CUDA graph launches, but nothing of what ran inside them: GPU figures are too low"
        )
    return Ops.make(**columns, process=process), granularity, diagnostics


def _or_track(events: list[dict[str, Any]], names: tuple[str, ...], track: str) -> np.ndarray:
    """Return an argument, or where it is missing the event's own pid or tid; int64 [events]."""
    values = (argument(event, *names) for event in events)
    return np.fromiter(
        (to_int(event.get(track), 0) if value is None else to_int(value, 0) for event, value in zip(events, values)),
        np.int64,
        len(events),
    )


def _memory(names: np.ndarray, pool: StringPool) -> dict[str, np.ndarray]:
    """Return kinds of copies and memory, which the profiler writes into the names only."""
    out = {column: np.full(len(names), -1, np.int64) for column in ("copy_kind", "src_kind", "dst_kind")}
    for i in np.unique(names).tolist():
        text, rows = pool.values[i], names == i
        if copy := _COPY_NAME.match(text):
            out["copy_kind"][rows] = _COPY_KINDS.get(copy[1], CopyKind.UNKNOWN)
            out["src_kind"][rows] = _MEMORY_KINDS.get(copy[2], -1)
            out["dst_kind"][rows] = _MEMORY_KINDS.get(copy[3], -1)
        elif found := _SET_NAME.match(text):
            out["dst_kind"][rows] = _MEMORY_KINDS.get(found[1], -1)
    return out
