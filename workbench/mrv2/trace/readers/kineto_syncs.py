"""Synchronisation in a torch profiler recording: records, calls, operators that imply it, and Python stacks."""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2.trace.nesting import enclosing
from mrv2.trace.readers.kineto_json import integers
from mrv2.trace.readers.sync_merge import merge_syncs
from mrv2.trace.strings import StringPool
from mrv2.trace.table import Syncs, SyncType, Table, Trace

# operators that read a device value on the host, or whose result's size depends on one
HINT_OPS = frozenset({"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero"})
_STACK_DEPTH = 24


def _sync_type(name: str) -> SyncType:
    text = name.lower()
    if "wait" in text:
        return SyncType.STREAM_WAIT
    for word, kind in (("event", SyncType.EVENT), ("stream", SyncType.STREAM), ("context", SyncType.CONTEXT)):
        if word in text:
            return kind
    return SyncType.CONTEXT if "device" in text else SyncType.UNKNOWN


def read_syncs(events: list[dict[str, Any]], trace: Trace, pool: StringPool, process: int) -> Syncs:
    """Return one row for each synchronisation of `trace`, with the best stack that the recording offers.

    Args:
        events: ``cuda_sync`` events with ``start`` and ``end``.
        process: host process of the records.
    """
    size = len(events)
    records = {
        "start": np.fromiter((event["start"] for event in events), np.int64, size),
        "end": np.fromiter((event["end"] for event in events), np.int64, size),
        "process": np.full(size, process, np.int64),
        "corr": integers(events, "correlation"),
        "sync_type": np.array([_sync_type(str(event.get("name", ""))) for event in events], np.int64),
        "stream": integers(events, "stream"),
        "context": integers(events, "context"),
        "event_id": integers(events, "wait_on_cuda_event_id", "event_id"),
        "event_stream": integers(events, "wait_on_stream"),
        "event_corr": integers(events, "wait_on_cuda_event_record_corr_id"),
    }
    for column in ("stream", "context", "event_id", "event_stream"):
        # the profiler writes "none" as the largest 32-bit number
        records[column] = np.where(records[column] >= 2**32 - 1, -1, records[column])
    # the profiler says which event only for waits on one; a wait without must not be taken for a stream's
    unnamed = (records["sync_type"] == SyncType.STREAM_WAIT) & (records["event_id"] < 0)
    records["event_id"] = np.where(unnamed, 0, records["event_id"])
    is_event = records["sync_type"] == SyncType.EVENT
    records["stream"] = np.where(is_event & (records["event_stream"] >= 0), records["event_stream"], records["stream"])
    merged = merge_syncs(records, trace.api, pool)
    merged.event_id[(merged.sync_type == SyncType.STREAM_WAIT) & (merged.event_id == 0)] = -1
    if not len(trace.api) and not size:
        merged = _hints(trace, pool)
    np.copyto(merged.stack, _stacks(merged, trace, pool))
    return merged


def _hints(trace: Trace, pool: StringPool) -> Syncs:
    """Return operators that would wait for a GPU, for a recording that was made without one."""
    hints = [i for i, name in enumerate(pool.values) if name in HINT_OPS]
    rows = trace.ranges.take(np.isin(trace.ranges.name, hints))
    columns = {key: getattr(rows, key) for key in ("start", "end", "process", "thread", "name")}
    return Syncs.make(**columns, sync_type=SyncType.UNKNOWN)


def _stacks(syncs: Syncs, trace: Trace, pool: StringPool) -> np.ndarray:
    """Return stacks as string ids, -1 without: Python frames if recorded, else the operators around; int32 [syncs]."""
    table: Table = trace.python if len(trace.python) else trace.ranges
    if not len(table) or not len(syncs):
        return syncs.stack
    columns = table.columns()
    pairs = np.stack([np.append(columns["process"], syncs.process), np.append(columns["thread"], syncs.thread)])
    lane = np.unique(pairs, axis=1, return_inverse=True)[1]
    holders = enclosing(columns["start"], columns["end"], lane[: len(table)], syncs.start, lane[len(table) :])
    out = np.full(len(syncs), -1, np.int32)
    for i, rows in enumerate(holders):
        if rows and syncs.thread[i] >= 0:
            out[i] = pool.id("\n".join(pool.values[columns["name"][row]] for row in rows[:_STACK_DEPTH]))
    return out
