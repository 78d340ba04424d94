"""What the host did, from an Nsight Systems export: API calls, synchronisation, waits, profiler overhead, threads."""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2.trace.readers.cuda_calls import plain_name, sync_type_of
from mrv2.trace.readers.nsight_ops import NO_TEXT, PREFIX
from mrv2.trace.readers.sqlite_source import SqliteSource
from mrv2.trace.readers.sync_merge import NO_ID, merge_syncs, resolve_events
from mrv2.trace.strings import StringPool
from mrv2.trace.table import Api, Coverage, Overhead, Syncs, SyncType, WaitKind

RUNTIME = f"{PREFIX}RUNTIME"
SYNCHRONIZATION = f"{PREFIX}SYNCHRONIZATION"
_PID_BITS = ~0xFFFFFF
# calls of the operating system that hold a thread until something happens
_OS_WAITS = frozenset(
    (
        "sem_wait",
        "sem_timedwait",
        "sem_clockwait",
        "pthread_cond_wait",
        "pthread_cond_timedwait",
        "pthread_cond_clockwait",
        "pthread_join",
        "futex",
        "poll",
        "ppoll",
        "epoll_wait",
        "epoll_pwait",
        "epoll_pwait2",
        "select",
        "pselect",
        "sleep",
        "usleep",
        "nanosleep",
        "clock_nanosleep",
        "pause",
        "wait",
        "waitpid",
        "waitid",
        "sigwait",
        "sigwaitinfo",
        "sigtimedwait",
    )
)


def global_pid(global_tid: Any) -> Any:
    """Return the process part of global thread ids (an array or a number), in the same packing."""
    return global_tid & _PID_BITS


def read_api(source: SqliteSource, texts: dict[int, str], pool: StringPool, coverage: Coverage) -> tuple[Api, Syncs]:
    """Read CUDA calls, and synchronisation with both of its traces merged."""
    wanted = {"start": 0, "end": 0, "globalTid": 0, "correlationId": -1, "nameId": NO_TEXT, "returnValue": 0}
    wanted["callchainId"] = -1
    rows = source.integers(RUNTIME, wanted)
    distinct = np.unique(rows["nameId"])
    plain = {key: plain_name(texts[key]) for key in distinct.tolist() if key in texts}
    chain = rows["callchainId"]
    order_free = {
        "start": rows["start"],
        "end": np.maximum(rows["end"], rows["start"]),
        "process": global_pid(rows["globalTid"]),
        "thread": rows["globalTid"],
        "corr": rows["correlationId"],
        "name": pool.map_keys(rows["nameId"], plain, "unnamed call"),
        "return_value": rows["returnValue"],
    }
    # `make` sorts by start; the call chains must follow
    order = np.lexsort((-order_free["end"], order_free["start"]))
    api = Api.make(**{name: column[order] for name, column in order_free.items()})
    traced = bool(len(api)) or any(source.count(PREFIX + table) for table in ("KERNEL", "MEMCPY", "GRAPH_TRACE"))
    reason = "" if len(api) else "the CUDA API was not traced (nsys profile -t cuda,...)"
    coverage.set("api", len(api), recorded=False, reason=reason)
    syncs = _syncs(source, api, chain[order], texts, pool)
    records = source.count(SYNCHRONIZATION)
    coverage.set("syncs.records", records, recorded=traced, reason="" if traced else "CUDA was not traced")
    known = len(api) or records
    coverage.set("syncs", len(syncs), recorded=bool(known), reason="" if known else "CUDA calls were not traced")
    stacks = int(np.count_nonzero(syncs.stack >= 0))
    coverage.set(
        "syncs.stack", stacks, recorded=False, reason="" if stacks else "no call chains (nsys profile --cudabacktrace)"
    )
    return api, syncs


def _syncs(source: SqliteSource, api: Api, chain: np.ndarray, texts: dict[int, str], pool: StringPool) -> Syncs:
    wanted = {"start": 0, "end": 0, "globalPid": 0, "correlationId": -1, "syncType": 0}
    wanted |= {"streamId": NO_ID, "contextId": -1, "eventId": NO_ID, "eventSyncId": -1}
    rows = source.integers(SYNCHRONIZATION, wanted)
    records = {
        "start": rows["start"],
        "end": np.maximum(rows["end"], rows["start"]),
        "process": rows["globalPid"],
        "corr": rows["correlationId"],
        "sync_type": rows["syncType"],
        "stream": np.where(rows["streamId"] == NO_ID, -1, rows["streamId"]),
        "context": rows["contextId"],
        "event_id": np.where(rows["eventId"] == NO_ID, -1, rows["eventId"]),
    }
    wanted = {"globalPid": 0, "correlationId": -1, "streamId": -1, "eventId": -1, "eventSyncId": -1}
    events = source.integers(f"{PREFIX}CUDA_EVENT", wanted)
    stream, corr = resolve_events(
        {**records, "event_sync_id": np.where(rows["eventSyncId"] == NO_ID, -1, rows["eventSyncId"])},
        {
            "process": events["globalPid"],
            "corr": events["correlationId"],
            "stream": events["streamId"],
            "event_id": events["eventId"],
            "event_sync_id": events["eventSyncId"],
        },
    )
    records |= {"event_stream": stream, "event_corr": corr}
    is_event = records["sync_type"] == SyncType.EVENT
    records["stream"] = np.where(is_event & (records["stream"] < 0), stream, records["stream"])
    return merge_syncs(records, api, pool, call_stack=_call_stacks(source, api, chain, texts, pool))


def _call_stacks(
    source: SqliteSource, api: Api, chain: np.ndarray, texts: dict[int, str], pool: StringPool
) -> np.ndarray | None:
    """Return the stack of each synchronising call, string ids int32 [num_calls]; None without call chains."""
    if "CUDA_CALLCHAINS" not in source.tables:
        return None
    sync_names = [i for i in np.unique(api.name).tolist() if sync_type_of(pool.values[i]) is not None]
    wanted = set(chain[np.isin(api.name, sync_names) & (chain >= 0)].tolist())
    frames: dict[int, list[tuple[int, str]]] = {}
    for key, symbol, depth in source.rows("CUDA_CALLCHAINS", ["id", "symbol", "stackDepth"]):
        if key in wanted:
            text = texts.get(symbol, "?") if isinstance(symbol, int) else str(symbol or "?")
            frames.setdefault(key, []).append((depth or 0, text))
    stacks = {key: "\n".join(text for _, text in sorted(found, key=lambda f: f[0])) for key, found in frames.items()}
    known = np.where(np.isin(api.name, sync_names), chain, -1)
    return pool.map_keys(known, stacks, None)


def read_os_waits(source: SqliteSource, texts: dict[int, str], pool: StringPool, coverage: Coverage) -> dict:
    """Return the columns of `Waits` for calls of the operating system that wait."""
    ids = [key for key, text in texts.items() if text in _OS_WAITS]
    where = f"nameId IN ({', '.join(map(str, ids)) or 'NULL'})"
    has_table = {"start", "end", "nameId"} <= source.columns("OSRT_API")
    rows = source.integers("OSRT_API", {"start": 0, "end": 0, "globalTid": 0, "nameId": NO_TEXT}, where * has_table)
    reason = "" if source.count("OSRT_API") else "OS calls were not traced (nsys profile -t osrt,...)"
    coverage.set("waits.os", len(rows["start"]), recorded=not reason, reason=reason)
    return {
        "start": rows["start"],
        "end": np.maximum(rows["end"], rows["start"]),
        "process": global_pid(rows["globalTid"]),
        "thread": rows["globalTid"],
        "name": pool.map_keys(rows["nameId"], texts, "wait"),
        "kind": np.full(len(rows["start"]), WaitKind.OS, np.uint8),
    }


def read_overhead(source: SqliteSource, texts: dict[int, str], pool: StringPool, coverage: Coverage) -> Overhead:
    """Read the times that the profiler reports as its own."""
    parts = []
    for table in ("PROFILER_OVERHEAD", f"{PREFIX}OVERHEAD"):
        rows = source.integers(table, {"start": 0, "end": 0, "nameId": NO_TEXT})
        name = pool.map_keys(rows["nameId"], texts, "profiler overhead")
        parts.append({"start": rows["start"], "end": np.maximum(rows["end"], rows["start"]), "name": name})
    table = Overhead.make(**{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
    reason = "" if len(table) else "the file reports none"
    coverage.set("overhead", len(table), recorded=False, reason=reason)
    return table


def read_threads(source: SqliteSource, texts: dict[int, str]) -> dict[int, str]:
    """Return the names of threads by global thread id."""
    rows = source.rows("ThreadNames", ["globalTid", "nameId"])
    return {tid: texts.get(name, "") for tid, name in rows if tid is not None}
