"""Did the capture catch what it should hold?  If not, the reason in one line."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mrv2.instrument import nvtx_status
from mrv2.instrument.nvtx_sink import DOMAIN
from mrv2.record.backend import Level, RecordError

if TYPE_CHECKING:
    from mrv2.trace import Trace

# NVTX_EVENTS.eventType
_DOMAIN_CREATE = 75


def num_ranges(trace: Trace, domain: str | None = None) -> int:
    """Return how many named ranges a capture holds; marks do not count."""
    from mrv2.trace import RangeKind

    wanted = trace.ranges.kind != RangeKind.MARK
    if domain is not None:
        wanted &= trace.ranges.domain == trace.string_id(domain)
    return int(np.count_nonzero(wanted))


def num_steps(trace: Trace) -> int:
    """Return how many steps of our engine have a range in a capture."""
    ours = trace.ranges.step[trace.ranges.domain == trace.string_id(DOMAIN)]
    return len(np.unique(ours[ours >= 0]))


def check_capture(trace: Trace, level: Level, *, has_engine: bool, on_cuda: bool) -> None:
    """Raise `RecordError` if a recording made by this process lacks what it should hold.

    Args:
        has_engine: an engine was recorded, so its stages must be there.  Without one, nothing is known of what should
            have happened; then a missing range is only noted in `Trace.diagnostics`.
        on_cuda: the engine runs on a CUDA device, so its kernels must be there.
    """
    if not has_engine:
        if level == "nsight" and not num_ranges(trace):
            trace.diagnostics.append(f"no NVTX range arrived: {why_no_ranges(trace, nvtx_status())}")
        return
    if not num_ranges(trace, DOMAIN):
        if level != "nsight":
            raise RecordError("the capture holds no stage: no step of the engine ran while it was recorded")
        why = why_no_ranges(trace, nvtx_status())
        raise RecordError(f"the capture holds no range of domain {DOMAIN!r}: {why}")
    if level == "nsight" and not num_steps(trace):
        raise RecordError(
            "the capture holds ranges but no stage of a step: no step ran while it was recorded, or nsys began to "
            "listen too late; record again"
        )
    if on_cuda and not len(trace.ops):
        why = {
            "stages": "the recording ended before any stage of the device did",
            "kernels": "another tool (nsys, ncu) holds CUDA's profiling interface, or the driver refuses it",
            "nsight": "nsys was started without CUDA tracing (--trace=cuda,nvtx)",
        }
        raise RecordError(f"the capture holds stages of the host, but nothing that the GPU did: {why[level]}")


def why_no_ranges(trace: Trace, status: str) -> str:
    """Say why a capture of this process by Nsight Systems has no ranges; `status` is `nvtx_status`."""
    if status != "on":
        return status.removeprefix("off: ")
    if not trace.coverage.has("ranges"):
        return "nsys was started without NVTX tracing (--trace=cuda,nvtx)"
    return "no stage began and ended while it was recorded"


def why_no_foreign_ranges(export: Path, nsys: str, traced: str) -> str:
    """Say why the capture of another process has no ranges, from the export itself.

    Args:
        nsys: version of the program.
        traced: what it was told to trace.
    """
    if "nvtx" not in traced.split(","):
        return f"NVTX was not traced (--trace {traced})"
    domains = _declared_domains(export)
    if domains:
        return (
            f"the program made the NVTX domain {', '.join(domains)}, yet no range arrived: its package nvtx is too new "
            f"for nsys {nsys} (pip install nvtx==0.2.11)"
        )
    return "the program opened none; or its package nvtx is missing, or MRV2_NVTX=0 or NVTX_DISABLE is set"


def _declared_domains(export: Path) -> list[str]:
    with closing(sqlite3.connect(export)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not {"NVTX_EVENTS", "StringIds"} <= tables:
            return []
        query = (
            "SELECT DISTINCT COALESCE(text, value) FROM NVTX_EVENTS LEFT JOIN StringIds ON StringIds.id = textId "
            f"WHERE eventType = {_DOMAIN_CREATE}"
        )
        return sorted(str(name) for (name,) in connection.execute(query) if name)
