"""Finds every place where a host thread waited, or may have waited, for the device; one row each."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from mrv2.trace.analysis.calls import is_allocation, is_framework_read, is_implicit_sync, rows_named
from mrv2.trace.analysis.join import LaunchJoin
from mrv2.trace.analysis.nesting import split_by_thread
from mrv2.trace.analysis.windows import outermost
from mrv2.trace.readers.cuda_calls import is_query
from mrv2.trace.table import CopyKind, MemoryKind, OpKind, SyncType, Trace

_POLLS_IN_A_ROW = 3
Columns = dict[str, np.ndarray]


class SyncKind(IntEnum):
    """How a wait came about."""

    # a call whose purpose it is to wait
    EXPLICIT = 0
    # a blocking copy, a copy with pageable host memory, memory management, loading of code
    IMPLICIT = 1
    # a value read by Python code, as .item() does: the copy to the host and the wait for it are one row
    FRAMEWORK = 2
    # three or more queries in a row
    POLLING = 3


class Scope(IntEnum):
    """What a wait covers."""

    # not recorded; the latest operation that ended before the wait returned is taken
    ESTIMATED = 0
    STREAM = 1
    EVENT = 2
    CONTEXT = 3
    # the copy that the call itself submitted
    OWN_COPY = 4
    # a call that may wait, with nothing to tell for what
    UNKNOWN = 5


def find_host_syncs(trace: Trace, join: LaunchJoin) -> Columns:
    """Return all host waits, sorted by start.  Stream waits on the device are none.

    Columns, all [num_syncs]: ``start``, ``end``, ``process``, ``thread``, ``corr``; ``asked`` (when the set of awaited
    operations was closed); ``kind`` (`SyncKind`); ``scope`` (`Scope`); ``stream``, ``context``, ``event_stream``,
    ``event_corr`` (-1 unknown); ``op`` (the copy that belongs to it, a row of ``ops``, or -1); ``call`` (row in
    ``api`` of implicit ones, else -1); ``name``, ``via``, ``stack`` (string ids, -1 none).
    """
    explicit, implicit, polling = _explicit(trace), _implicit(trace, join), _polling(trace)
    explicit, implicit = _merge_reads(trace, join, explicit, implicit)
    rows = {name: np.concatenate([part[name] for part in (explicit, implicit, polling)]) for name in explicit}
    rows = _merge_framework(trace, rows)
    order = np.lexsort((-rows["end"], rows["start"]))
    return {name: column[order] for name, column in rows.items()}


def _columns(size: int, **given: np.ndarray | int) -> Columns:
    names = ("start", "end", "asked", "process", "thread", "corr", "kind", "scope", "stream", "context")
    names += ("event_stream", "event_corr", "op", "name", "via", "stack", "call")
    out = {name: np.full(size, -1, np.int64) for name in names}
    for name, value in given.items():
        out[name] = np.array(np.broadcast_to(value, size), np.int64)
    return out


def _explicit(trace: Trace) -> Columns:
    syncs = trace.syncs.take(trace.syncs.sync_type != SyncType.STREAM_WAIT)
    scope = np.full(len(syncs), Scope.ESTIMATED, np.int64)
    scope[(syncs.sync_type == SyncType.STREAM) & (syncs.stream >= 0)] = Scope.STREAM
    scope[(syncs.sync_type == SyncType.EVENT) & (syncs.event_stream >= 0)] = Scope.EVENT
    scope[syncs.sync_type == SyncType.CONTEXT] = Scope.CONTEXT
    columns = syncs.columns()
    same = ("start", "end", "process", "thread", "corr", "stream", "context", "event_stream", "event_corr", "name")
    given = {name: columns[name] for name in (*same, "stack")}
    return _columns(len(syncs), **given, asked=syncs.start, kind=SyncKind.EXPLICIT, scope=scope)


def _implicit(trace: Trace, join: LaunchJoin) -> Columns:
    ops, api = trace.ops, trace.api
    pageable = (ops.kind == OpKind.MEMCPY) & (join.call >= 0)
    pageable &= (ops.src_kind == MemoryKind.PAGEABLE) | (ops.dst_kind == MemoryKind.PAGEABLE)
    waits = rows_named(api.name, trace.strings, is_implicit_sync)
    waits[join.call[pageable]] = True
    rows = np.flatnonzero(waits)
    launch_row = np.full(len(api), -1, np.int64)
    launch_row[join.launch] = join.first_op
    op = launch_row[rows]
    manages = rows_named(api.name[rows], trace.strings, is_allocation)
    return _columns(
        len(rows),
        start=api.start[rows],
        end=api.end[rows],
        asked=api.end[rows],
        process=api.process[rows],
        thread=api.thread[rows],
        corr=api.corr[rows],
        name=api.name[rows],
        kind=SyncKind.IMPLICIT,
        op=op,
        call=rows,
        scope=np.where(manages | (op < 0), Scope.UNKNOWN, Scope.OWN_COPY),
        stream=np.where(op >= 0, ops.stream[op], -1) if len(ops) else np.full(len(rows), -1),
        via=np.where(op >= 0, ops.name[op], -1) if len(ops) else np.full(len(rows), -1),
    )


def polling_runs(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Return first and last row in ``api`` of each run of three or more queries with no other call between."""
    api = trace.api
    queries = rows_named(api.name, trace.strings, is_query)
    firsts, lasts = [], []
    if queries.any():
        for rows in split_by_thread(api.process, api.thread, np.arange(len(api))).values():
            mine = np.concatenate([[False], queries[rows], [False]])
            change = np.diff(mine.astype(np.int8))
            first, last = np.flatnonzero(change == 1), np.flatnonzero(change == -1) - 1
            long = last - first + 1 >= _POLLS_IN_A_ROW
            firsts.append(rows[first[long]])
            lasts.append(rows[last[long]])
    if not firsts:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    return np.concatenate(firsts), np.concatenate(lasts)


def _polling(trace: Trace) -> Columns:
    first, last = polling_runs(trace)
    api = trace.api
    return _columns(
        len(first),
        start=api.start[first],
        end=api.end[last],
        asked=api.start[first],
        process=api.process[first],
        thread=api.thread[first],
        corr=api.corr[last],
        name=api.name[first],
        kind=SyncKind.POLLING,
        scope=Scope.ESTIMATED,
    )


def _merge_reads(trace: Trace, join: LaunchJoin, explicit: Columns, implicit: Columns) -> tuple[Columns, Columns]:
    """Join a device-to-host copy with the stream synchronisation that follows it: together they read a value.

    No other work may be submitted, and no other synchronisation be made, between the two.
    """
    ops, api = trace.ops, trace.api
    reads = np.flatnonzero(ops.copy_kind[join.first_op] == CopyKind.D2H)
    if not len(reads):
        return explicit, implicit
    dropped = np.zeros(len(api), np.bool_)
    launches = split_by_thread(api.process[join.launch], api.thread[join.launch], np.arange(len(join.launch)))
    by_thread = split_by_thread(explicit["process"], explicit["thread"], np.arange(len(explicit["start"])))
    is_read = np.zeros(len(join.launch), np.bool_)
    is_read[reads] = True
    for key, syncs in by_thread.items():
        mine = launches.get(key)
        if mine is None:
            continue
        starts, sync_starts = api.start[join.launch[mine]], explicit["start"][syncs]
        last = np.searchsorted(starts, sync_starts, "left") - 1
        launch = mine[np.maximum(last, 0)]
        op = join.first_op[launch]
        # the previous synchronisation came before the copy
        previous = np.concatenate([[-1], np.searchsorted(starts, sync_starts[:-1], "left") - 1])
        fits = (last >= 0) & (last > previous) & is_read[launch] & (explicit["scope"][syncs] == Scope.STREAM)
        fits &= explicit["stream"][syncs] == ops.stream[op]
        syncs, launch, op = syncs[fits], launch[fits], op[fits]
        explicit["via"][syncs], explicit["op"][syncs] = ops.name[op], op
        explicit["kind"][syncs] = SyncKind.FRAMEWORK
        pageable = (ops.src_kind[op] == MemoryKind.PAGEABLE) | (ops.dst_kind[op] == MemoryKind.PAGEABLE)
        # with pageable memory the wait begins in the copy
        calls = join.launch[launch[pageable]]
        explicit["start"][syncs[pageable]] = api.start[calls]
        dropped[calls] = True
    keep = ~dropped[implicit["call"]]
    return explicit, {name: column[keep] for name, column in implicit.items()}


def _merge_framework(trace: Trace, rows: Columns) -> Columns:
    """Make one row of all waits inside one torch operator that reads a device value."""
    ranges = trace.ranges
    reads = rows_named(ranges.name, trace.strings, is_framework_read) & (ranges.end > ranges.start)
    if not reads.any() or not len(rows["start"]):
        return rows
    keep = np.ones(len(rows["start"]), np.bool_)
    by_thread = split_by_thread(rows["process"], rows["thread"], np.arange(len(rows["start"])))
    for key, found in split_by_thread(ranges.process, ranges.thread, np.flatnonzero(reads)).items():
        mine = by_thread.get(key)
        if mine is None:
            continue
        # outermost operators only: item calls _local_scalar_dense
        outer = outermost(ranges, found)
        at = np.searchsorted(ranges.start[outer], rows["start"][mine], "right") - 1
        inside = (at >= 0) & (rows["end"][mine] <= ranges.end[outer[np.maximum(at, 0)]])
        for operator in np.unique(at[inside]).tolist():
            group = mine[inside & (at == operator)]
            # the synchronisation stands for the group, else its last row
            group = group[np.argsort(rows["kind"][group] == SyncKind.IMPLICIT, kind="stable")]
            chosen = group[0]
            rows["start"][chosen] = rows["start"][group].min()
            rows["end"][chosen] = rows["end"][group].max()
            rows["kind"][chosen] = SyncKind.FRAMEWORK
            rows["via"][chosen] = ranges.name[outer[operator]]
            keep[group[1:]] = False
    return {name: column[keep] for name, column in rows.items()}
