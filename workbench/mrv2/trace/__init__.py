"""Recordings of any origin as one `Trace`: read, analyse, assert, compare, export, scrub."""

from mrv2.trace.export import export
from mrv2.trace.load import load
from mrv2.trace.readers.own import save
from mrv2.trace.readers.recorder import read as from_recorder
from mrv2.trace.redact import find_leaks
from mrv2.trace.scrub import scrub, scrub_trace
from mrv2.trace.table import (
    Api,
    CopyKind,
    Coverage,
    MemoryKind,
    OpKind,
    Ops,
    Overhead,
    PythonFrames,
    RangeKind,
    Ranges,
    Syncs,
    SyncType,
    TableCoverage,
    Trace,
    TraceError,
    WaitKind,
    Waits,
)

__all__ = [
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
    "TableCoverage",
    "Trace",
    "TraceError",
    "WaitKind",
    "Waits",
    "export",
    "find_leaks",
    "from_recorder",
    "load",
    "save",
    "scrub",
    "scrub_trace",
]
