"""`Trace`: everything that one recording says, as NumPy columns on one clock.

Times are int64 nanoseconds, intervals are half-open ``[start, end)``.  Every table is sorted by start;
ranges with equal starts come outermost first.  Text is an index into `Trace.strings`.  A table that the source never
recorded is empty *and* `Trace.coverage` says so: "nothing recorded" and "nothing happened" differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, get_type_hints

import numpy as np

from mrv2.errors import MRV2Error, nearest

if TYPE_CHECKING:
    import pandas as pd

TableName = Literal["ops", "api", "ranges", "syncs", "waits", "overhead", "python"]
TABLES: tuple[TableName, ...] = ("ops", "api", "ranges", "syncs", "waits", "overhead", "python")


class TraceError(MRV2Error, ValueError):
    """A recording cannot be read, written or analysed; the message is one line."""


class OpKind(IntEnum):
    """`Ops.kind`: what ran on the device."""

    KERNEL = 0
    MEMCPY = 1
    MEMSET = 2
    # one whole graph execution whose nodes were not recorded
    GRAPH = 3
    # a device stage of the in-process recorder: one or more kernels, with the holes between them
    STAGE = 4


class RangeKind(IntEnum):
    """`Ranges.kind`: how the range was opened and closed."""

    PUSH_POP = 0
    START_END = 1
    # a point in time: start == end
    MARK = 2


class SyncType(IntEnum):
    """`Syncs.sync_type`; STREAM_WAIT orders streams on the device and never holds the host."""

    UNKNOWN = 0
    EVENT = 1
    STREAM_WAIT = 2
    STREAM = 3
    CONTEXT = 4
    # a named wait of the in-process recorder
    NAMED = 5


class WaitKind(IntEnum):
    """`Waits.kind`: what held the thread."""

    OS = 0
    GIL = 1
    NAMED = 2


class CopyKind(IntEnum):
    """`Ops.copy_kind`, as CUPTI numbers it (others exist)."""

    UNKNOWN = 0
    H2D = 1
    D2H = 2
    D2D = 8
    P2P = 10


class MemoryKind(IntEnum):
    """`Ops.src_kind` and `Ops.dst_kind`, as Nsight Systems numbers them (others exist)."""

    PAGEABLE = 0
    PINNED = 1
    DEVICE = 2
    MANAGED = 4


# a column and its type, [num_rows]
Int64 = Annotated[np.ndarray, np.dtype(np.int64)]
Int32 = Annotated[np.ndarray, np.dtype(np.int32)]
Int8 = Annotated[np.ndarray, np.dtype(np.int8)]
UInt8 = Annotated[np.ndarray, np.dtype(np.uint8)]
Bool = Annotated[np.ndarray, np.dtype(np.bool_)]

_T = TypeVar("_T", bound="Table")


@dataclass(frozen=True, eq=False, repr=False)
class Table:
    """Columns of equal length; subclasses declare them."""

    # what fills a column that a source does not have; the others are required
    defaults: ClassVar[dict[str, int]] = {}

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} rows)"

    @classmethod
    @cache
    def column_types(cls) -> dict[str, np.dtype]:
        """Return the columns in order, with their types."""
        hints = get_type_hints(cls, include_extras=True)
        return {f.name: hints[f.name].__metadata__[0] for f in fields(cls)}

    @classmethod
    def make(cls: type[_T], **columns: Any) -> _T:
        """Build a table sorted by start; columns left out get their defaults.

        Raises:
            ValueError: a column is unknown, required and missing, or of another length.
        """
        legal = cls.column_types()
        for name in columns:
            if name not in legal:
                raise ValueError(f"{cls.__name__} has no column {name!r}; columns: {', '.join(legal)}")
        start = np.asarray(columns.get("start", ()), np.int64)
        out: dict[str, np.ndarray] = {}
        for name, dtype in legal.items():
            value = columns.get(name, cls.defaults.get(name, None if columns else ()))
            if value is None:
                raise ValueError(f"{cls.__name__}.make: column {name!r} is missing")
            out[name] = array = np.asarray(value).astype(dtype, copy=False)
            if not array.ndim:
                out[name] = np.full(len(start), array)
            elif len(array) != len(start):
                raise ValueError(f"{cls.__name__}.{name} has {len(array)} rows, start has {len(start)}")
        ends_later = len(start) > 1 and bool(np.any(np.diff(start) == 0))
        if len(start) > 1 and (ends_later or np.any(np.diff(start) < 0)):
            order = np.lexsort((-out["end"], start))
            out = {name: array[order] for name, array in out.items()}
        return cls(**out)

    def columns(self) -> dict[str, np.ndarray]:
        """Return the columns by name, in order."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def take(self: _T, rows: np.ndarray | slice) -> _T:
        """Return the rows that a mask, a sorted index array or a slice selects."""
        return type(self)(**{name: array[rows] for name, array in self.columns().items()})

    def window(self: _T, start: int, end: int) -> _T:
        """Return the rows that touch ``[start, end)``, whole; a point counts where it lies."""
        mine: dict[str, np.ndarray] = self.columns()
        touches = (mine["start"] < end) & ((mine["end"] > start) | (mine["start"] >= start))
        return self.take(touches)


@dataclass(frozen=True, eq=False, repr=False)
class Ops(Table):
    """What ran on a device, one row each."""

    defaults: ClassVar[dict[str, int]] = {
        "device": 0,
        "stream": 0,
        "context": 0,
        "process": 0,
        "corr": -1,
        "bytes": -1,
        "copy_kind": -1,
        "src_kind": -1,
        "dst_kind": -1,
        "graph_node": -1,
        "graph_id": -1,
        "step": -1,
    }

    # all [num_ops]
    start: Int64
    end: Int64
    device: Int32
    stream: Int64
    context: Int64
    process: Int64
    # joins an operation to its API call together with `process`; -1 none
    corr: Int64
    # OpKind
    kind: UInt8
    # string id
    name: Int32
    # bytes moved or set; -1 for kernels or unknown
    bytes: Int64
    # CopyKind; -1 not a copy
    copy_kind: Int8
    # MemoryKind; -1 unknown
    src_kind: Int8
    dst_kind: Int8
    # graph node and graph (or executable graph) that the operation belongs to; -1 none or unknown
    graph_node: Int64
    graph_id: Int64
    # step number where the source records one with the operation; -1 unknown
    step: Int64


@dataclass(frozen=True, eq=False, repr=False)
class Api(Table):
    """Calls of the CUDA runtime and driver, one row each."""

    defaults: ClassVar[dict[str, int]] = {"process": 0, "thread": -1, "corr": -1, "return_value": 0}

    # all [num_calls]
    start: Int64
    end: Int64
    process: Int64
    thread: Int64
    corr: Int64
    # string id; the name has lost its version suffix (cudaLaunchKernel, not cudaLaunchKernel_v7000)
    name: Int32
    return_value: Int32


@dataclass(frozen=True, eq=False, repr=False)
class Ranges(Table):
    """Named ranges of host threads: NVTX, profiler annotations, stages."""

    defaults: ClassVar[dict[str, int]] = {
        "process": 0,
        "thread": -1,
        "end_thread": -1,
        "category": -1,
        "step": -1,
        "kind": 0,
        "is_open": 0,
    }

    # all [num_ranges]
    start: Int64
    end: Int64
    process: Int64
    thread: Int64
    # thread that closed the range; equals `thread` unless the range crosses threads
    end_thread: Int64
    # string ids; category -1 none
    name: Int32
    domain: Int32
    category: Int32
    # integer payload; -1 none
    step: Int64
    # RangeKind
    kind: UInt8
    # still open when the recording stopped; `end` is then the last instant recorded
    is_open: Bool


@dataclass(frozen=True, eq=False, repr=False)
class Syncs(Table):
    """Explicit synchronisation, one row each; API call and device record are already merged."""

    defaults: ClassVar[dict[str, int]] = {
        "process": 0,
        "thread": -1,
        "corr": -1,
        "sync_type": 0,
        "stream": -1,
        "context": -1,
        "event_id": -1,
        "event_stream": -1,
        "event_corr": -1,
        "stack": -1,
    }

    # all [num_syncs]
    start: Int64
    end: Int64
    process: Int64
    # -1 unknown
    thread: Int64
    corr: Int64
    # SyncType
    sync_type: Int8
    # what is waited for; -1 unknown or not applicable.  STREAM_WAIT: the stream that is held back
    stream: Int64
    context: Int64
    event_id: Int64
    # where the awaited event was recorded: its stream, and `corr` of the recording call; -1 unknown
    event_stream: Int64
    event_corr: Int64
    # string ids; stack -1 none, else frames innermost first, one a line
    name: Int32
    stack: Int32


@dataclass(frozen=True, eq=False, repr=False)
class Waits(Table):
    """Times in which a thread was held, other than by CUDA."""

    defaults: ClassVar[dict[str, int]] = {"process": 0, "thread": -1}

    # all [num_waits]
    start: Int64
    end: Int64
    process: Int64
    thread: Int64
    # string id
    name: Int32
    # WaitKind
    kind: UInt8


@dataclass(frozen=True, eq=False, repr=False)
class Overhead(Table):
    """Times that the profiler says it took itself."""

    # all [num_rows]
    start: Int64
    end: Int64
    # string id
    name: Int32


@dataclass(frozen=True, eq=False, repr=False)
class PythonFrames(Table):
    """Python function calls."""

    defaults: ClassVar[dict[str, int]] = {"process": 0, "thread": -1}

    # all [num_calls]
    start: Int64
    end: Int64
    process: Int64
    thread: Int64
    # string id
    name: Int32


TABLE_TYPES: dict[str, type[Table]] = {
    "ops": Ops,
    "api": Api,
    "ranges": Ranges,
    "syncs": Syncs,
    "waits": Waits,
    "overhead": Overhead,
    "python": PythonFrames,
}


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
class Trace:
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
        for text in ("name", "domain", "category", "stack"):
            if text in columns:
                ids, codes = np.unique(columns[text], return_inverse=True)
                # two ids may carry one text only if a caller built the list by hand; categories must be unique
                columns[text] = pd.Categorical(self.name_of(ids)[codes])
        frame = pd.DataFrame(columns)
        frame.insert(2, "duration", frame["end"] - frame["start"])
        return frame
