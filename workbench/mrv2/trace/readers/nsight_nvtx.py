"""NVTX ranges and marks, and the GIL's own ranges, from an Nsight Systems export."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mrv2.trace.readers.nsight_host import global_pid
from mrv2.trace.readers.nsight_ops import NO_TEXT
from mrv2.trace.readers.sqlite_source import SqliteSource
from mrv2.trace.strings import StringPool
from mrv2.trace.table import Coverage, RangeKind, WaitKind

DEFAULT_DOMAIN = "default"
_GIL_DOMAIN = "GIL Trace"
# eventType; 70 and 71 are ranges imported from text files
_CATEGORY, _MARK, _DOMAIN = 33, 34, 75
_KINDS = {34: RangeKind.MARK, 59: RangeKind.PUSH_POP, 60: RangeKind.START_END, 70: RangeKind.PUSH_POP}
_KINDS[71] = RangeKind.START_END
_OPEN = -(2**62)
# of the domain that this package's own stages use
_OWN_DOMAIN, _WAIT_CATEGORY = "mrv2", "wait"


@dataclass
class NvtxResult:
    """Columns of `Ranges`, and columns of `Waits` for the GIL and for named waits."""

    ranges: dict[str, np.ndarray]
    waits: dict[str, np.ndarray]


def read_nvtx(source: SqliteSource, texts: dict[int, str], pool: StringPool, coverage: Coverage) -> NvtxResult:
    """Read all ranges.  An open range ends at `_OPEN` until `close_open` knows the capture's end."""
    kinds = ", ".join(map(str, _KINDS))
    payload = {"int64Value": -1, "uint64Value": -1, "int32Value": -1, "uint32Value": -1}
    wanted = {"start": 0, "end": _OPEN, "eventType": 0, "globalTid": 0, "endGlobalTid": -1, "textId": NO_TEXT}
    wanted |= {"domainId": 0, "category": 0, **payload}
    present = {"start", "eventType"} <= source.columns("NVTX_EVENTS")
    rows = source.integers("NVTX_EVENTS", wanted, f"eventType IN ({kinds}) ORDER BY rowid" * present)
    step = np.full(len(rows["start"]), -1, np.int64)
    for column in payload:
        step = np.where(step == -1, rows[column], step)
    process = global_pid(rows["globalTid"])
    kind = np.select([rows["eventType"] == key for key in _KINDS], list(_KINDS.values()), 0).astype(np.uint8)
    is_open = (rows["end"] == _OPEN) & (kind != RangeKind.MARK)
    columns = {
        "start": rows["start"],
        "end": np.where(kind == RangeKind.MARK, rows["start"], rows["end"]),
        "process": process,
        "thread": rows["globalTid"],
        "end_thread": np.where(rows["endGlobalTid"] < 0, rows["globalTid"], rows["endGlobalTid"]),
        "name": _names(source, rows["textId"], texts, pool, kinds, present),
        "domain": _domains(source, process, rows["domainId"], texts, pool),
        "category": _categories(source, process, rows["domainId"], rows["category"], texts, pool),
        "step": step,
        "kind": kind,
        "is_open": is_open,
    }
    return _split(columns, pool, coverage)


def _names(
    source: SqliteSource, keys: np.ndarray, texts: dict[int, str], pool: StringPool, kinds: str, present: bool
) -> np.ndarray:
    """Return name ids: the row's own text, else its registered string."""
    names = pool.map_keys(keys, texts, "unnamed range")
    if present and "text" in source.columns("NVTX_EVENTS"):
        found = source.rows("NVTX_EVENTS", ["text"], f"eventType IN ({kinds}) ORDER BY rowid")
        for i, (text,) in enumerate(found):
            if text is not None:
                names[i] = pool.id(text)
    return names


def _declared(source: SqliteSource, event_type: int, texts: dict[int, str]) -> list[tuple[int, int, int, str]]:
    """Return (process, domain, category, text) of the rows that name a domain or a category."""
    wanted = ["globalTid", "domainId", "category", "text", "textId"]
    rows = source.rows("NVTX_EVENTS", wanted, f"eventType = {event_type}")
    return [
        (global_pid(tid or 0), domain or 0, category or 0, text or texts.get(key, ""))
        for tid, domain, category, text, key in rows
    ]


def _domains(
    source: SqliteSource, process: np.ndarray, domain: np.ndarray, texts: dict[int, str], pool: StringPool
) -> np.ndarray:
    """Return domain names as string ids; domain 0 is the default one and has no row."""
    names = {(pid, key): text for pid, key, _, text in _declared(source, _DOMAIN, texts)}
    return _by_pairs(
        np.stack([process, domain]),
        lambda key: names.get(key) or (DEFAULT_DOMAIN if key[1] == 0 else f"domain {key[1]}"),
        pool,
    )


def _categories(
    source: SqliteSource,
    process: np.ndarray,
    domain: np.ndarray,
    category: np.ndarray,
    texts: dict[int, str],
    pool: StringPool,
) -> np.ndarray:
    """Return category names as string ids, -1 without one."""
    names = {row[:3]: row[3] for row in _declared(source, _CATEGORY, texts)}
    return _by_pairs(
        np.stack([process, domain, category]),
        lambda key: None if key[2] == 0 else names.get(key) or f"category {key[2]}",
        pool,
    )


def _by_pairs(keys: np.ndarray, text_of: Callable[[tuple], str | None], pool: StringPool) -> np.ndarray:
    """Return string ids for key columns [num_keys, rows], asking `text_of` once for each distinct key."""
    if not keys.shape[1]:
        return np.empty(0, np.int32)
    distinct, where = np.unique(keys, axis=1, return_inverse=True)
    texts = [text_of(tuple(key)) for key in distinct.T.tolist()]
    return np.array([-1 if text is None else pool.id(text) for text in texts], np.int32)[where]


def _split(columns: dict[str, np.ndarray], pool: StringPool, coverage: Coverage) -> NvtxResult:
    """Take the GIL's ranges out, and copy this package's named waits into the waits."""
    names = pool.values
    in_gil = np.isin(columns["domain"], [i for i, text in enumerate(names) if text == _GIL_DOMAIN])
    waiting = np.isin(columns["name"], [i for i, text in enumerate(names) if text == "Waiting for GIL"])
    own = np.isin(columns["domain"], [i for i, text in enumerate(names) if text == _OWN_DOMAIN])
    named = own & np.isin(columns["category"], [i for i, text in enumerate(names) if text == _WAIT_CATEGORY])
    is_wait = (in_gil & waiting) | named
    waits = {name: columns[name][is_wait] for name in ("start", "end", "process", "thread", "name", "is_open")}
    waits["kind"] = np.where(named[is_wait], WaitKind.NAMED, WaitKind.GIL).astype(np.uint8)
    ranges = {name: column[~in_gil] for name, column in columns.items()}
    reason = "" if in_gil.any() else "the GIL was not traced (nsys profile -t python-gil,...)"
    coverage.set("waits.gil", int((in_gil & waiting).sum()), recorded=not reason, reason=reason)
    reason = "" if own.any() else "no ranges in the domain 'mrv2'"
    coverage.set("waits.named", int(named.sum()), recorded=not reason, reason=reason)
    found = len(ranges["start"])
    coverage.set("ranges", found, recorded=False, reason="" if found else "no NVTX ranges (nsys profile -t nvtx,...)")
    return NvtxResult(ranges, waits)


def close_open(columns: dict[str, np.ndarray], capture_end: int) -> int:
    """Let open rows end at `capture_end`, in place; returns how many there were."""
    is_open = columns["is_open"]
    columns["end"] = np.where(is_open, np.maximum(capture_end, columns["start"]), columns["end"])
    # a range may be closed by a clock that lags the one that opened it
    columns["end"] = np.maximum(columns["end"], columns["start"])
    return int(is_open.sum())
