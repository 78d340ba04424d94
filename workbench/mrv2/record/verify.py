"""Did the capture catch what it should hold?  If not, the reason in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mrv2.instrument import nvtx_status
from mrv2.instrument.nvtx_sink import DOMAIN
from mrv2.record.backend import Level, RecordError

if TYPE_CHECKING:
    from mrv2.trace import Trace


def num_ranges(trace: Trace, domain: str | None = None) -> int:
    """Return how many named ranges a capture holds; marks do not count."""
    from mrv2.trace import RangeKind

    wanted = trace.ranges.kind != RangeKind.MARK
    if domain is not None:
        wanted &= trace.ranges.domain == trace.string_id(domain)
    return int(np.count_nonzero(wanted))


def check_capture(trace: Trace, level: Level, *, has_engine: bool) -> None:
    """Raise `RecordError` if a recording made by this process lacks its ranges.

    Args:
        has_engine: an engine of this process was recorded, so its stages must be there.
    """
    if not has_engine or num_ranges(trace, DOMAIN):
        return
    if level == "nsight":
        why = why_no_ranges(trace, nvtx_status())
        raise RecordError(f"the capture holds no range of domain {DOMAIN!r}: {why}")
    raise RecordError("the capture holds no stage: no step of the engine ran while it was recorded")


def why_no_ranges(trace: Trace, status: str | None) -> str:
    """Say why an Nsight Systems capture has no ranges.

    Args:
        status: `nvtx_status` of the recorded process, None when unknown.
    """
    if status is not None and status != "on":
        return status.removeprefix("off: ")
    if not trace.coverage.has("ranges"):
        return f"NVTX was not traced ({trace.coverage['ranges'].reason or 'give nsys -t cuda,nvtx'})"
    if status == "on":
        return "no stage began and ended while it was recorded"
    nsys = trace.meta.get("versions", {}).get("nsys", "")
    return (
        "the program opened none, or MRV2_NVTX=0 or NVTX_DISABLE is set, or its package nvtx is missing, or it is too "
        f"new for nsys {nsys}".rstrip() + " (then pip install nvtx==0.2.11)"
    )
