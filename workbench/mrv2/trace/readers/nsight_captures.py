"""Under which ranges the nodes of CUDA graphs were captured: ranges open at a replay say nothing about its kernels."""

from __future__ import annotations

import numpy as np

from mrv2.trace.analysis.nesting import Nests
from mrv2.trace.readers.nsight_host import global_pid
from mrv2.trace.readers.sqlite_source import SqliteSource
from mrv2.trace.strings import StringPool
from mrv2.trace.table import Coverage, Trace

# an executable graph clones the captured one; a child graph is cloned once more
_MAX_CLONES = 8


def note_captures(source: SqliteSource, trace: Trace, pool: StringPool, coverage: Coverage) -> None:
    """Fill `Ops.captured` in place; processes and threads still bear the file's global ids.

    A node is created when its operation is captured, on the capturing thread; a clone of it names the original.
    """
    is_node = trace.ops.graph_node >= 0
    num_found = 0
    created = _creations(source)
    if is_node.any() and len(created["graphNodeId"]):
        keys = np.stack([trace.ops.process[is_node], trace.ops.graph_node[is_node]])
        distinct, which = np.unique(keys, axis=1, return_inverse=True)
        event = _captures_of(created, distinct[0], distinct[1])
        captured = _paths(created, event, trace, pool)[which]
        trace.ops.captured[is_node] = captured
        num_found = int((captured >= 0).sum())
    reason = "no operation ran in a graph node"
    if is_node.any():
        reason = "CUDA graphs were captured before the recording began, or under no range"
    coverage.set("ops.captured", num_found, recorded=False, reason="" if num_found else reason)


def _creations(source: SqliteSource) -> dict[str, np.ndarray]:
    """Return the creation of nodes; before 2025 the table bore the name that later means graphs."""
    table = "CUDA_GRAPH_NODE_EVENTS"
    if "graphNodeId" not in source.columns(table):
        table = "CUDA_GRAPH_EVENTS"
    present = "graphNodeId" in source.columns(table)
    wanted = {"start": 0, "globalTid": -1, "graphNodeId": -1, "originalGraphNodeId": -1}
    rows = source.integers(table if present else "", wanted)
    return {name: array[rows["graphNodeId"] >= 0] for name, array in rows.items()}


def _captures_of(created: dict[str, np.ndarray], process: np.ndarray, node: np.ndarray) -> np.ndarray:
    """Return for each node the row that created the first of its originals, or -1; int64."""
    of_process = global_pid(created["globalTid"])
    event = np.full(len(node), -1, np.int64)
    for pid in np.unique(process).tolist():
        rows = np.flatnonzero(of_process == pid)
        if not len(rows):
            continue
        rows = rows[np.argsort(created["graphNodeId"][rows], kind="stable")]
        ids = created["graphNodeId"][rows]
        mine = process == pid
        sought, found = node[mine], np.full(int(mine.sum()), -1, np.int64)
        for _ in range(_MAX_CLONES):
            at = np.minimum(np.searchsorted(ids, sought), len(ids) - 1)
            hit = ids[at] == sought
            found = np.where(hit, rows[at], found)
            original = np.where(hit, created["originalGraphNodeId"][rows[at]], -1)
            # an original that the file lacks leaves the clone's own creation, which is no capture
            found = np.where((sought >= 0) & ~hit, -1, found)
            if not (original >= 0).any():
                break
            sought = np.where(original >= 0, original, -1)
        event[mine] = found
    return event


def _paths(created: dict[str, np.ndarray], event: np.ndarray, trace: Trace, pool: StringPool) -> np.ndarray:
    """Return the string id of the range path at each creation, -1 where no range was open; int32."""
    nests = Nests(trace)
    out = np.full(len(event), -1, np.int32)
    known = event >= 0
    tids = created["globalTid"][event[known]]
    times = created["start"][event[known]]
    ids = np.full(int(known.sum()), -1, np.int32)
    for tid in np.unique(tids).tolist():
        key, mine = (int(global_pid(np.array([tid]))[0]), tid), np.flatnonzero(tids == tid)
        innermost = nests[key].at(times[mine])
        for place in np.unique(innermost[innermost >= 0]).tolist():
            ids[mine[innermost == place]] = pool.id(nests.path(key, place))
    out[known] = ids
    return out
