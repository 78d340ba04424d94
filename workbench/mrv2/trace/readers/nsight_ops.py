"""What ran on the GPU, from an Nsight Systems export: kernels, copies, sets and whole graph executions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mrv2.trace.readers.sqlite_source import SqliteSource
from mrv2.trace.strings import StringPool
from mrv2.trace.table import Coverage, OpKind, Ops

PREFIX = "CUPTI_ACTIVITY_KIND_"
# NULL in a string column
NO_TEXT = -1
# a device or context id that says "starts on the host"
_HOST_ID = 2**31 - 1
_COMMON = {
    "start": 0,
    "end": 0,
    "deviceId": 0,
    "contextId": 0,
    "streamId": 0,
    "correlationId": -1,
    "globalPid": 0,
}
# the words that torch's profiler uses, so that both kinds of recording name an operation alike
_COPY_WORDS = ("", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")
_MEMORY_WORDS = ("Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static")


def _word(words: tuple[str, ...], index: int) -> str:
    return words[index] if 0 <= index < len(words) else ""


def copy_name(copy_kind: int, src_kind: int, dst_kind: int) -> str:
    """Return for example ``Memcpy DtoH (Device -> Pinned)``; unknown parts are left out."""
    kind, src, dst = _word(_COPY_WORDS, copy_kind), _word(_MEMORY_WORDS, src_kind), _word(_MEMORY_WORDS, dst_kind)
    return " ".join(["Memcpy", *filter(None, [kind]), *([f"({src} -> {dst})"] if src and dst else [])])


def set_name(memory_kind: int) -> str:
    """Return for example ``Memset (Device)``."""
    memory = _word(_MEMORY_WORDS, memory_kind)
    return f"Memset ({memory})" if memory else "Memset"


@dataclass
class OpsResult:
    """The operations, and what a reader of them must know."""

    ops: Ops
    # "node", "graph", "mixed" or "none"
    granularity: str
    diagnostics: list[str]


def read_ops(
    source: SqliteSource, texts: dict[int, str], pool: StringPool, coverage: Coverage, cuda_traced: bool
) -> OpsResult:
    """Read all device operations; `process` still holds the file's global ids.

    Graph nodes and graph executions that describe one launch are never both kept: nodes win.
    """
    parts = [_kernels(source, texts, pool), _copies(source, pool), _sets(source, pool), _graphs(source, pool)]
    keys = [("kernel", "KERNEL"), ("memcpy", "MEMCPY"), ("memset", "MEMSET"), ("graph", "GRAPH_TRACE")]
    for (key, table), part in zip(keys, parts, strict=True):
        # an export leaves out tables that have no rows, so only the other CUDA rows tell whether CUDA was traced
        reason = "" if cuda_traced else f"no {PREFIX}{table} rows and no other CUDA activity in the file"
        recorded = cuda_traced and key != "graph"
        if key == "graph" and cuda_traced and not len(part["start"]):
            reason = "no whole-graph rows: recorded with node granularity, or no graph was launched"
        coverage.set(f"ops.{key}", len(part["start"]), recorded=recorded, reason=reason)
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    diagnostics = _drop_bad_times(columns)
    _fix_host_ids(columns, diagnostics)
    _drop_covered_graphs(columns, diagnostics)
    is_node, is_graph = columns["graph_node"] >= 0, columns["kind"] == OpKind.GRAPH
    granularity = {(True, True): "mixed", (True, False): "node", (False, True): "graph", (False, False): "none"}
    result = Ops.make(**columns)
    coverage.set("ops", len(result), recorded=cuda_traced, reason="" if cuda_traced else "CUDA was not traced")
    return OpsResult(result, granularity[bool(is_node.any()), bool(is_graph.any())], diagnostics)


def _shape(rows: dict[str, np.ndarray], kind: OpKind, name: np.ndarray | int, **extra: np.ndarray) -> dict:
    """Return the columns of `Ops` (without `step`) from those that all activity tables share."""
    size = len(rows["start"])
    out = {
        "start": rows["start"],
        "end": rows["end"],
        "device": rows["deviceId"],
        "context": rows["contextId"],
        "stream": rows["streamId"],
        "corr": rows["correlationId"],
        "process": rows["globalPid"],
        "kind": np.full(size, kind, np.uint8),
        "name": np.full(size, name, np.int32) if isinstance(name, int) else name,
    }
    for column in ("bytes", "copy_kind", "src_kind", "dst_kind", "graph_node", "graph_id"):
        out[column] = extra[column] if column in extra else np.full(size, -1, np.int64)
    return out


def _graph_columns(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return node and graph ids; files without a graph column keep the graph in the node id's upper half."""
    node = np.where(rows["graphNodeId"] == 0, -1, rows["graphNodeId"])
    graph = np.where((rows["graphId"] <= 0) & (node >= 2**32), node >> 32, rows["graphId"])
    return {"graph_node": node, "graph_id": np.where(graph == 0, -1, graph)}


def _kernels(source: SqliteSource, texts: dict[int, str], pool: StringPool) -> dict:
    table = f"{PREFIX}KERNEL"
    text = next((name for name in ("demangledName", "shortName") if name in source.columns(table)), "mangledName")
    rows = source.integers(table, {**_COMMON, text: NO_TEXT, "graphNodeId": -1, "graphId": -1})
    name = pool.map_keys(rows[text], texts, "unnamed kernel")
    return _shape(rows, OpKind.KERNEL, name, **_graph_columns(rows))


def _copies(source: SqliteSource, pool: StringPool) -> dict:
    wanted = {"bytes": -1, "copyKind": 0, "srcKind": -1, "dstKind": -1, "graphNodeId": -1, "graphId": -1}
    rows = source.integers(f"{PREFIX}MEMCPY", {**_COMMON, **wanted})
    kinds, which = np.unique(
        np.stack([rows["copyKind"], rows["srcKind"], rows["dstKind"]]), axis=1, return_inverse=True
    )
    return _shape(
        rows,
        OpKind.MEMCPY,
        pool.ids(copy_name(*kind) for kind in kinds.T.tolist())[which],
        bytes=rows["bytes"],
        copy_kind=rows["copyKind"],
        src_kind=rows["srcKind"],
        dst_kind=rows["dstKind"],
        **_graph_columns(rows),
    )


def _sets(source: SqliteSource, pool: StringPool) -> dict:
    rows = source.integers(f"{PREFIX}MEMSET", {**_COMMON, "bytes": -1, "memKind": -1, "graphNodeId": -1, "graphId": -1})
    kinds, which = np.unique(rows["memKind"], return_inverse=True)
    name = pool.ids(map(set_name, kinds.tolist()))[which]
    return _shape(rows, OpKind.MEMSET, name, bytes=rows["bytes"], dst_kind=rows["memKind"], **_graph_columns(rows))


def _graphs(source: SqliteSource, pool: StringPool) -> dict:
    rows = source.integers(f"{PREFIX}GRAPH_TRACE", {**_COMMON, "graphId": -1, "graphExecId": -1})
    graph = np.where(rows["graphId"] > 0, rows["graphId"], rows["graphExecId"])
    names = {int(key): f"CUDA graph {key}" for key in np.unique(graph)}
    return _shape(rows, OpKind.GRAPH, pool.map_keys(graph, names, "CUDA graph"), graph_id=graph)


def _drop_rows(columns: dict[str, np.ndarray], drop: np.ndarray) -> None:
    for name, array in columns.items():
        columns[name] = array[~drop]


def _drop_bad_times(columns: dict[str, np.ndarray]) -> list[str]:
    """Remove operations without a time stamp, or that end before they start."""
    bad = ((columns["start"] == 0) & (columns["end"] == 0)) | (columns["end"] < columns["start"])
    if not bad.any():
        return []
    _drop_rows(columns, bad)
    return [f"{int(bad.sum())} device operations had no valid time stamp and were left out"]


def _fix_host_ids(columns: dict[str, np.ndarray], diagnostics: list[str]) -> None:
    """Give operations that "start on the host" the file's only device, or -1 if there are several."""
    on_host = columns["device"] == _HOST_ID
    if on_host.any():
        devices = np.unique(columns["device"][~on_host])
        columns["device"] = np.where(on_host, devices[0] if len(devices) == 1 else -1, columns["device"])
        diagnostics.append(f"{int(on_host.sum())} graph executions start on the host: their device is inferred")
    columns["context"] = np.where(columns["context"] == _HOST_ID, -1, columns["context"])


def _drop_covered_graphs(columns: dict[str, np.ndarray], diagnostics: list[str]) -> None:
    """Remove graph executions whose nodes are recorded too: both together would count twice."""
    is_graph = columns["kind"] == OpKind.GRAPH
    is_node = columns["graph_node"] >= 0
    if not (is_graph.any() and is_node.any()):
        return
    node_keys = np.unique(np.stack([columns["process"][is_node], columns["corr"][is_node]]), axis=1)
    known = set(map(tuple, node_keys.T.tolist()))
    covered = np.zeros(len(is_graph), np.bool_)
    for row in np.flatnonzero(is_graph):
        corr = int(columns["corr"][row])
        covered[row] = corr >= 0 and (int(columns["process"][row]), corr) in known
    if covered.any():
        _drop_rows(columns, covered)
        diagnostics.append(f"{int(covered.sum())} whole-graph rows left out: the file has their nodes")
