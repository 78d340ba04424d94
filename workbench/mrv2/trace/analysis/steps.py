"""One row a step: what the host did, what the device did, and how far they ran beside each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mrv2.trace.analysis.frame import Float64, Frame, Number
from mrv2.trace.analysis.launches import run_ahead
from mrv2.trace.columns import Int64
from mrv2.trace.intervals import union_measure

if TYPE_CHECKING:
    from mrv2.trace.analysis.model import Analysis


@dataclass(frozen=True, eq=False, repr=False)
class Steps(Frame):
    """All times are inside the step's window (see `analysis.windows`) unless said otherwise.

    With several devices, device figures are means.  A column is None without evidence, a single figure NaN.
    """

    # all columns [num_steps]
    step: Int64
    start: Int64
    end: Int64
    wall_ns: Int64
    # work of the engine threads, waits left out
    cpu_ns: Int64 | None
    gpu_busy_ns: Number | None
    # share of the CPU work beside a busy GPU, and share of the GPU's busy time beside CPU work
    overlap_cpu: Float64 | None
    overlap_gpu: Float64 | None
    # CPU work while the GPU idled, and time in which neither worked
    exposed_ns: Number | None
    idle_both_ns: Number | None
    # gaps of the GPU, long and short ones; a gap across steps is divided between them
    bubble_ns: Number | None
    micro_gap_ns: Number | None
    # host waits on engine threads, and how long the GPU still worked meanwhile
    syncs: Int64 | None
    sync_stall_ns: Float64 | None
    # steps that the host was ahead of the device when it submitted the step's first work (when the turn began, if
    # calls are not recorded); 0 = synchronous
    run_ahead: Float64 | None
    launches: Int64 | None
    # busy time of the work that the step submitted, whenever it ran
    own_gpu_ns: Number | None
    # what marks a step
    _source: str

    def window(self, rows: slice | np.ndarray | None = None) -> tuple[int, int]:
        """Return from the first start to the last end of the chosen steps."""
        chosen = self if rows is None else self.take(rows)
        return int(chosen.start.min()), int(chosen.end.max())

    @property
    def source(self) -> str:
        """What marks a step, or why there are none."""
        return self._source


def step_table(analysis: Analysis) -> Steps:
    """Return the steps of the analysis; no rows if nothing marks them."""
    windows = analysis.windows
    start, end = windows.start, windows.end
    device = _device_columns(analysis)
    work = analysis.cpu_work()
    syncs, stall = _sync_columns(analysis)
    launches, ahead = _launch_columns(analysis)
    return Steps(
        step=windows.step,
        start=start,
        end=end,
        wall_ns=end - start,
        cpu_ns=None if work is None else work.within(start, end),
        **device,
        syncs=syncs,
        sync_stall_ns=stall,
        run_ahead=ahead,
        launches=launches,
        own_gpu_ns=_own_gpu(analysis),
        _source=windows.source,
    )


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0)


def _device_columns(analysis: Analysis) -> dict[str, np.ndarray | None]:
    names = ("gpu_busy_ns", "overlap_cpu", "overlap_gpu", "exposed_ns", "idle_both_ns", "bubble_ns", "micro_gap_ns")
    out: dict[str, np.ndarray | None] = dict.fromkeys(names)
    if not analysis.devices:
        return out
    start, end = analysis.windows.start, analysis.windows.end
    bubbles = analysis.bubbles()
    found: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for device in analysis.devices:
        whole = analysis.busy(device)
        busy = whole.within(start, end)
        found["gpu_busy_ns"].append(busy)
        if bubbles is not None and len(whole):
            gaps = whole.complement(int(whole.start[0]), int(whole.end[-1])).within(start, end)
            long = bubbles.within(start, end, device)
            found["bubble_ns"].append(long)
            found["micro_gap_ns"].append(gaps - long)
        work = analysis.cpu_work(device)
        if work is not None:
            cpu, both = work.within(start, end), (work & whole).within(start, end)
            found["overlap_cpu"].append(_share(both, cpu))
            found["overlap_gpu"].append(_share(both, busy))
            found["exposed_ns"].append(cpu - both)
            found["idle_both_ns"].append(end - start - (cpu + busy - both))
    for name, columns in found.items():
        if columns:
            out[name] = columns[0] if len(columns) == 1 else np.mean(columns, axis=0)
    return out


def _sync_columns(analysis: Analysis) -> tuple[np.ndarray | None, np.ndarray | None]:
    table = analysis.syncs()
    if table is None:
        return None, None
    size = len(analysis.windows)
    rows = np.flatnonzero(table.counted)
    at = analysis.windows.index_at(table.start[rows])
    rows, at = rows[at >= 0], at[at >= 0]
    stall = np.bincount(at, weights=np.nan_to_num(table.stall_ns[rows]), minlength=size)
    return np.bincount(at, minlength=size), stall if len(analysis.trace.ops) else None


def _launch_columns(analysis: Analysis) -> tuple[np.ndarray | None, np.ndarray | None]:
    launches, windows = analysis.launches(), analysis.windows
    if launches is None:
        ahead = run_ahead(analysis, windows.start, np.arange(len(windows)))
        return None, None if np.isnan(ahead).all() else ahead
    at = windows.index_of(launches.step)
    known = np.flatnonzero(at >= 0)
    counts = np.bincount(at[known], minlength=len(windows))
    ahead = np.full(len(windows), np.nan)
    # launches are in order of time: going backwards, the last write is the step's first launch
    ahead[at[known[::-1]]] = launches.run_ahead[known[::-1]]
    return counts, ahead


def _own_gpu(analysis: Analysis) -> np.ndarray | None:
    ops, windows = analysis.trace.ops, analysis.windows
    if not len(ops) or not len(windows):
        return None
    at = windows.index_of(analysis.step_ids.of_ops)
    if not np.any(at >= 0):
        return None
    total = np.zeros(len(windows), np.int64)
    for device in analysis.devices:
        rows = np.flatnonzero((at >= 0) & (ops.device == device))
        total += union_measure(ops.start[rows], ops.end[rows], at[rows], len(windows))
    return total if len(analysis.devices) == 1 else total / len(analysis.devices)
