"""The columns of a `Trace`: one class for each table, and what the numbers in them mean."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_type_hints

import numpy as np

TableName = Literal["ops", "api", "ranges", "syncs", "waits", "overhead", "python"]
TABLES: tuple[TableName, ...] = ("ops", "api", "ranges", "syncs", "waits", "overhead", "python")
# columns that hold ids of `Trace.strings`
TEXT_COLUMNS = ("name", "domain", "category", "stack", "captured")


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
        "captured": -1,
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
    # string id of the ranges that were open when the node was captured, "outer > inner"; -1 none or not recorded
    captured: Int32
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
