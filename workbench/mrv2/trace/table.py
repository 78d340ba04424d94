"""`Trace`: everything that one recording says, as NumPy columns on one clock.

Times are int64 nanoseconds, intervals are half-open ``[start, end)``.  Every table is sorted by start;
ranges with equal starts come outermost first.  Text is an index into `Trace.strings`.  A table that the source never
recorded is empty *and* `Trace.coverage` says so: "nothing recorded" and "nothing happened" differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mrv2.errors import MRV2Error, nearest
from mrv2.trace.columns import (
    TABLE_TYPES,
    TABLES,
    TEXT_COLUMNS,
    Api,
    CopyKind,
    MemoryKind,
    OpKind,
    Ops,
    Overhead,
    PythonFrames,
    RangeKind,
    Ranges,
    Syncs,
    SyncType,
    Table,
    TableName,
    WaitKind,
    Waits,
)
from mrv2.trace.methods import TraceMethods

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "TABLES",
    "TABLE_TYPES",
    "TEXT_COLUMNS",
    "Api",
    "CopyKind",
    "Coverage",
    "MemoryKind",
    "OpKind",
    "Ops",
    "Overhead",
    "PythonFrames",
    "RangeKind",
    "Ranges",
    "SyncType",
    "Syncs",
    "Table",
    "TableCoverage",
    "TableName",
    "Trace",
    "TraceError",
    "WaitKind",
    "Waits",
]


class TraceError(MRV2Error, ValueError):
    """A recording cannot be read, written or analysed; the message is one line."""


@dataclass(frozen=True)
class TableCoverage:
    """What a recording knows about one kind of event.

    "collected": there are rows.  "empty": it was recorded and nothing happened.  "not collected": it was never
    recorded, so its absence means nothing; `reason` says why, or what the file lacks.
    """

    status: Literal["collected", "empty", "not collected"]
    rows: int = 0
    reason: str = ""

    def __str__(self) -> str:
        text = f"{self.status} ({self.rows} rows)" if self.status == "collected" else self.status
        return f"{text}: {self.reason}" if self.reason else text


@dataclass
class Coverage:
    """`TableCoverage` by key: the tables of `Trace`, and parts of them with a dot.

    Parts: ``ops.kernel``, ``ops.memcpy``, ``ops.memset``, ``ops.graph``, ``ops.stage``, ``ranges.<domain>`` is not
    listed; ``syncs.records`` (device-side records), ``syncs.stack``, ``waits.os``, ``waits.gil``, ``waits.named``.
    """

    entries: dict[str, TableCoverage] = field(default_factory=dict)

    def __getitem__(self, key: str) -> TableCoverage:
        return self.entries.get(key, TableCoverage("not collected", 0, "this kind of recording has none"))

    def has(self, key: str) -> bool:
        """Return whether `key` was recorded, be it that nothing happened."""
        return self[key].status != "not collected"

    def set(self, key: str, rows: int, *, recorded: bool = True, reason: str = "") -> None:
        """Note `rows` rows; with none, `recorded` decides between "empty" and "not collected"."""
        status = "collected" if rows else "empty" if recorded else "not collected"
        self.entries[key] = TableCoverage(status, rows, reason)

    def report(self) -> str:
        """Return one line for each key."""
        width = max(map(len, self.entries), default=0)
        return "\n".join(f"{key:<{width}}  {value}" for key, value in sorted(self.entries.items()))


@dataclass
class Trace(TraceMethods):
    """One recording.

    `meta` keys: ``source`` ("nsight", "kineto", "recorder") and ``granularity`` of CUDA graphs ("node", "graph",
    "mixed", "none") always; where known ``path``, ``versions`` (dict), ``gpu_name``, ``utc_epoch_ns`` (of time 0),
    ``recorded_by``, ``config``, ``knobs``, ``capture_start_ns``, ``capture_end_ns``, ``streams`` (stream id to name).
    """

    ops: Ops = field(default_factory=Ops.make)
    api: Api = field(default_factory=Api.make)
    ranges: Ranges = field(default_factory=Ranges.make)
    syncs: Syncs = field(default_factory=Syncs.make)
    waits: Waits = field(default_factory=Waits.make)
    overhead: Overhead = field(default_factory=Overhead.make)
    python: PythonFrames = field(default_factory=PythonFrames.make)
    strings: list[str] = field(default_factory=list)
    # (process, thread) to the thread's name
    thread_names: dict[tuple[int, int], str] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=lambda: {"source": "unknown", "granularity": "none"})
    coverage: Coverage = field(default_factory=Coverage)
    # what a reader of any figure must know first: dropped records, clock skew, open ranges
    diagnostics: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        rows = ", ".join(f"{name} {len(self.table(name))}" for name in TABLES if len(self.table(name)))
        return f"Trace({self.meta.get('source', 'unknown')}: {rows or 'no events'})"

    def table(self, name: str) -> Table:
        """Return a table by name.

        Raises:
            TraceError: there is no such table.
        """
        if name not in TABLE_TYPES:
            raise TraceError(f"a trace has no table {name!r}{nearest(name, TABLES)}; tables: {', '.join(TABLES)}")
        return getattr(self, name)

    def name_of(self, ids: np.ndarray | int) -> Any:
        """Return the text of one string id, or an object array for an array of ids; -1 gives an empty string."""
        if isinstance(ids, (int, np.integer)):
            return self.strings[int(ids)] if ids >= 0 else ""
        # index -1 finds the empty string at the end
        return np.array([*self.strings, ""], dtype=object)[np.asarray(ids)]

    def string_id(self, text: str) -> int:
        """Return the id of `text`, or -1 if no event carries it."""
        try:
            return self.strings.index(text)
        except ValueError:
            return -1

    def span(self) -> tuple[int, int] | None:
        """Return the first and last instant of any event, or None without events."""
        starts = [int(t.start.min()) for t in self._timed() if len(t)]
        ends = [int(t.end.max()) for t in self._timed() if len(t)]
        return (min(starts), max(ends)) if starts else None

    def _timed(self) -> list[Any]:
        return [self.table(name) for name in TABLES]

    def window(self, start: int, end: int) -> Trace:
        """Return the part that touches ``[start, end)``; rows stay whole, `meta` notes the window."""
        if end < start:
            raise TraceError(f"window({start}, {end}): the end lies before the start")
        cut = {name: self.table(name).window(start, end) for name in TABLES}
        return replace(self, **cut, meta={**self.meta, "window": (start, end)})

    def processes(self) -> list[int]:
        """Return the ids of all processes with events, ascending."""
        found = [np.unique(t.process) for t in self._timed() if "process" in t.column_types()]
        return np.unique(np.concatenate(found)).tolist()

    def select_process(self, process: int) -> Trace:
        """Return the part of one process; tables without a process stay whole.

        Raises:
            TraceError: no event belongs to `process`.
        """
        if process not in self.processes():
            legal = ", ".join(map(str, self.processes())) or "none"
            raise TraceError(f"no event belongs to process {process}; processes: {legal}")
        cut = {
            name: t.take(t.columns()["process"] == process)
            for name in TABLES
            if "process" in (t := self.table(name)).column_types()
        }
        return replace(self, **cut)

    def to_pandas(self, name: str) -> pd.DataFrame:
        """Return a table as a data frame for people: text instead of string ids, a duration column.

        Raises:
            TraceError: there is no such table, or pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise TraceError("data frames need pandas: pip install 'mrv2-workbench[notebook]'") from error
        columns: dict[str, Any] = dict(self.table(name).columns())
        for text in TEXT_COLUMNS:
            if text in columns:
                ids, codes = np.unique(columns[text], return_inverse=True)
                # two ids may carry one text only if a caller built the list by hand; categories must be unique
                columns[text] = pd.Categorical(self.name_of(ids)[codes])
        frame = pd.DataFrame(columns)
        frame.insert(2, "duration", frame["end"] - frame["start"])
        return frame
