"""How far the device's clock contradicts the host's, and what else a reader of any figure must know.

No operation starts before its call, and no wait returns before what it waited for: ``a.start - g.start`` and
``r - s.end`` are at most 0.  Their largest values bound the error of the clocks from below.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from mrv2.trace.table import Ops, Trace

if TYPE_CHECKING:
    from mrv2.trace.analysis.model import Analysis

_DECILES = 10
_DROPPED = re.compile(r"\b(dropp|lost|overwrit|overflow|discard)", re.IGNORECASE)


@dataclass(frozen=True)
class Skew:
    """One device against the host.  None: no evidence."""

    device: int
    # largest a.start - g.start over operations with a call
    launch_ns: int | None
    # largest r - s.end over waits whose scope is recorded
    sync_ns: int | None
    # `launch_ns` by tenth of the capture: a drift shows as a slope
    by_decile: list[int | None]

    @property
    def skew_ns(self) -> int:
        """Proven error of the clocks; 0 if nothing contradicts."""
        return max(self.launch_ns or 0, self.sync_ns or 0, 0)


def estimate_skew(analysis: Analysis) -> list[Skew]:
    """Return the estimate for each device; empty without GPU rows."""
    trace, join = analysis.trace, analysis.join
    ops, api = trace.ops, trace.api
    out = []
    for device in analysis.devices:
        mine = (join.call >= 0) & (ops.device == device)
        rows = slice(None) if mine.all() else np.flatnonzero(mine)
        early = api.start[join.call[rows]] - ops.start[rows] if mine.any() else np.empty(0, np.int64)
        parts = np.array_split(early, _DECILES) if len(early) else [early] * _DECILES
        out.append(
            Skew(
                device=device,
                launch_ns=int(early.max()) if len(early) else None,
                sync_ns=_sync_skew(analysis, device),
                by_decile=[int(part.max()) if len(part) else None for part in parts],
            )
        )
    return out


def _sync_skew(analysis: Analysis, device: int) -> int | None:
    table = analysis.syncs()
    if table is None or analysis.devices != [device]:
        return None
    sure = np.isin(table.scope, ("stream", "event", "context")) & (table.ready > table.start)
    late = table.ready[sure] - table.end[sure]
    return int(late.max()) if len(late) else None


def shift_device(trace: Trace, offsets_ns: dict[int, int]) -> Trace:
    """Return the trace with the operations of each device moved by an offset; `meta` and `diagnostics` say so."""
    ops = trace.ops
    shift = np.zeros(len(ops), np.int64)
    for device, offset in offsets_ns.items():
        shift[ops.device == device] = offset
    moved = Ops.make(**{**ops.columns(), "start": ops.start + shift, "end": ops.end + shift})
    words = ", ".join(f"device {device} by {offset} ns" for device, offset in sorted(offsets_ns.items()))
    return replace(
        trace,
        ops=moved,
        meta={**trace.meta, "shifted_ns": dict(offsets_ns)},
        diagnostics=[*trace.diagnostics, f"GPU times were shifted on request: {words}"],
    )


def dropped_records(trace: Trace) -> list[str]:
    """Return the diagnostics that say that records are missing."""
    return [line for line in trace.diagnostics if _DROPPED.search(line)]


def banners(analysis: Analysis) -> list[str]:
    """Return the recording's own diagnostics and what the analysis found suspicious."""
    trace, join = analysis.trace, analysis.join
    out = list(trace.diagnostics)
    if not len(trace.ops):
        out.append(f"no GPU rows: every GPU figure is n/a ({trace.coverage['ops'].reason or 'none in the file'})")
    for skew in analysis.skew():
        if skew.skew_ns > 0:
            out.append(
                f"clock skew: device {skew.device} contradicts the host by {skew.skew_ns} ns; "
                "delays smaller than that mean nothing"
            )
    if join.num_ambiguous:
        out.append(f"{join.num_ambiguous} operations have a correlation id of several calls; the nearest counts")
    orphans = len(trace.ops) - int(join.has_call.sum())
    if len(trace.api) and orphans:
        out.append(f"{orphans} of {len(trace.ops)} operations have no call: they count as busy, in no range")
    if trace.meta.get("granularity") in ("node", "mixed") and np.any(trace.ops.graph_node >= 0):
        out.append("graphs were traced node by node, which stretches them: take timing from whole-graph recordings")
    windows = analysis.windows
    if len(windows) > 1 and len(analysis.devices):
        first = int(windows.start[0]), int(windows.end[0])
        if not any(len(analysis.busy_anywhere(device).clip(*first)) for device in analysis.devices):
            out.append("the GPU was silent in the first step: the profiler may have missed its beginning")
    return out
