"""One row for each synchronisation, from its two traces: the API call and the profiler's own record."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from mrv2.trace.readers.cuda_calls import is_query, sync_type_of
from mrv2.trace.strings import StringPool
from mrv2.trace.table import Api, Syncs, SyncType

# how the profiler writes "no stream" and "no event"
NO_ID = 2**32 - 1
_RECORD_NAMES = {
    SyncType.UNKNOWN: "synchronisation",
    SyncType.EVENT: "event synchronisation",
    SyncType.STREAM_WAIT: "stream wait",
    SyncType.STREAM: "stream synchronisation",
    SyncType.CONTEXT: "context synchronisation",
}


def call_rows(process: np.ndarray, corr: np.ndarray, api: Api) -> np.ndarray:
    """Return for each (process, corr) the row of its call in `api`, or -1; int64 [rows].

    When a correlation id occurs more than once in a process, the last call counts.
    """
    if not len(api) or not len(corr):
        return np.full(len(corr), -1, np.int64)
    # ranks keep the pair in one integer whatever the ids are
    _, ranks = np.unique(np.concatenate([api.process, process]), return_inverse=True)
    corrs, corr_ranks = np.unique(np.concatenate([api.corr, corr]), return_inverse=True)
    keys = ranks * np.int64(len(corrs)) + corr_ranks
    call_keys, wanted = keys[: len(api)], keys[len(api) :]
    order = np.argsort(call_keys, kind="stable")
    at = np.searchsorted(call_keys[order], wanted, side="right") - 1
    found = order[np.maximum(at, 0)]
    return np.where((at >= 0) & (call_keys[found] == wanted) & (corr >= 0), found, -1)


def merge_syncs(
    records: dict[str, np.ndarray],
    api: Api,
    pool: StringPool,
    record_stack: np.ndarray | None = None,
    call_stack: np.ndarray | None = None,
) -> Syncs:
    """Join records to their calls by (process, corr), and add the calls that have no record.

    The call decides: its thread, its duration (the time the host was held), and its name, because some
    profilers label a stream synchronisation as a stream wait.  Queries never wait and are left out.

    Args:
        records: columns of `Syncs` without ``thread``, ``name``, ``stack``; [num_records] each.
        record_stack: string ids, int32 [num_records], for records; `call_stack` likewise [num_calls] for calls.
    """
    names = pool.values
    type_of_name = {int(i): sync_type_of(names[i]) for i in np.unique(api.name)}
    queries = np.array([i for i in type_of_name if is_query(names[i])], np.int32)
    row = call_rows(records["process"], records["corr"], api)
    has_call = row >= 0
    keep = ~(has_call & np.isin(api.name[row] if len(api) else row, queries))
    records = {name: column[keep] for name, column in records.items()}
    row, has_call = row[keep], has_call[keep]
    record_ids = {int(kind): pool.id(text) for kind, text in _RECORD_NAMES.items()} if len(row) else {}
    # a stream wait without an event is no such thing
    kind = records["sync_type"].astype(np.int64)
    kind[(kind == SyncType.STREAM_WAIT) & (records["event_id"] < 0)] = SyncType.STREAM
    out = {name: column.copy() for name, column in records.items()}
    out["thread"] = np.full(len(row), -1, np.int64)
    out["name"] = np.array([record_ids.get(int(k), -1) for k in kind], np.int32)
    out["stack"] = np.full(len(row), -1, np.int32) if record_stack is None else record_stack[keep]
    called = np.flatnonzero(has_call)
    for column in ("start", "end", "thread", "name"):
        out[column][called] = getattr(api, column)[row[called]]
    by_name = np.array([-1 if (t := type_of_name[int(i)]) is None else t for i in out["name"][called]], np.int64)
    kind[called] = np.where(by_name >= 0, by_name, kind[called])
    out["sync_type"] = kind
    sync_ids = np.array([i for i, t in type_of_name.items() if t is not None], np.int32)
    bare = np.isin(api.name, sync_ids)
    bare[row[called]] = False
    calls = np.flatnonzero(bare)
    added = {column: getattr(api, column)[calls] for column in ("start", "end", "process", "thread", "corr", "name")}
    added["sync_type"] = np.array([type_of_name[int(i)] for i in added["name"]], np.int64)
    added["stack"] = np.full(len(calls), -1, np.int32)
    if call_stack is not None:
        added["stack"] = call_stack[calls]
        out["stack"][called] = np.where(out["stack"][called] < 0, call_stack[row[called]], out["stack"][called])
    merged = {
        column: np.concatenate([values, added.get(column, np.full(len(calls), -1, np.int64))])
        for column, values in out.items()
    }
    return Syncs.make(**merged)


def resolve_events(records: dict[str, np.ndarray], events: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return for each sync record the stream and the recording call of the event it waits for; -1 unknown.

    Args:
        records: ``process``, ``corr``, ``event_id``, ``event_sync_id``; int64 [num_records].
        events: the same columns and ``stream``, one row each time an event was recorded; int64 [num_events].
    """
    stream = np.full(len(records["corr"]), -1, np.int64)
    corr = stream.copy()
    by_sync_id: dict[tuple[int, int], int] = {}
    # recordings of one event in the order in which they were submitted
    by_event: dict[tuple[int, int], list[int]] = {}
    for i in np.argsort(events["corr"], kind="stable").tolist():
        process = int(events["process"][i])
        if events["event_sync_id"][i] >= 0:
            by_sync_id[(process, int(events["event_sync_id"][i]))] = i
        by_event.setdefault((process, int(events["event_id"][i])), []).append(i)
    for row in np.flatnonzero(records["event_id"] >= 0).tolist():
        process, sync_id = int(records["process"][row]), int(records["event_sync_id"][row])
        found = by_sync_id.get((process, sync_id))
        if sync_id < 0:
            # without an id of the recording: the latest one before the wait
            recorded = by_event.get((process, int(records["event_id"][row])), [])
            at = bisect_left(recorded, int(records["corr"][row]), key=lambda i: int(events["corr"][i]))
            found = recorded[at - 1] if at else None
        if found is not None:
            stream[row], corr[row] = events["stream"][found], events["corr"][found]
    return stream, corr
