"""Busy, overlapped, exposed and idle time.

With C the CPU work of the engine threads, B the busy time of one device, W the window, ``|.|`` the length of a union::

    overlap, CPU view   |C & B| / |C|      share of the CPU work hidden behind the GPU
    overlap, GPU view   |C & B| / |B|
    exposed             |C - B|            CPU work while the GPU idles
    identity            |C & B| + |C - B| + |B - C| + |W - (C | B)| = |W|

Several devices are never united: each has its own figures, and the headline is their mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mrv2.trace.analysis.frame import Float64, Frame, cell_text
from mrv2.trace.columns import Int64
from mrv2.trace.intervals import Intervals, union
from mrv2.trace.table import CopyKind, OpKind

if TYPE_CHECKING:
    from mrv2.trace.analysis.model import Analysis


def ratio(part: float | None, whole: float | None) -> float | None:
    """Return ``part / whole``, or None if either is unknown or `whole` is 0."""
    return None if part is None or not whole else part / whole


@dataclass(frozen=True)
class DeviceFigures:
    """One device in one window; all times in nanoseconds.  None: without evidence."""

    device: int
    window_ns: int
    num_ops: int
    # union of everything, and of kernels and graphs only
    busy_ns: int
    busy_compute_ns: int
    # sum of durations: larger than busy when streams overlap
    gpu_time_sum_ns: int
    # idle = head + tail + bubbles + micro gaps; head is before the first operation of the window, tail after the last
    head_idle_ns: int
    tail_idle_ns: int
    bubble_ns: int
    num_bubbles: int
    micro_gap_ns: int
    # None without ranges on a host thread
    cpu_work_ns: int | None
    overlap_ns: int | None
    exposed_ns: int | None
    gpu_only_ns: int | None
    idle_both_ns: int | None

    @property
    def idle_ns(self) -> int:
        """Time in which the device ran nothing."""
        return self.window_ns - self.busy_ns

    @property
    def idle_share(self) -> float | None:
        """Idle time / window."""
        return ratio(self.idle_ns, self.window_ns)

    @property
    def utilization(self) -> float | None:
        """Busy time / window."""
        return ratio(self.busy_ns, self.window_ns)

    @property
    def concurrency(self) -> float | None:
        """Sum of durations / busy time; above 1, operations ran side by side."""
        return ratio(self.gpu_time_sum_ns, self.busy_ns)

    @property
    def overlap_cpu(self) -> float | None:
        """Share of the CPU work that ran while the device was busy."""
        return ratio(self.overlap_ns, self.cpu_work_ns)

    @property
    def overlap_gpu(self) -> float | None:
        """Share of the device's busy time in which the CPU worked too."""
        return ratio(self.overlap_ns, self.busy_ns)


@dataclass(frozen=True)
class Overview:
    """All devices of one window, and the mean over them."""

    window: tuple[int, int]
    devices: list[DeviceFigures]
    # CPU work of the engine threads, whatever the device; None without ranges
    cpu_work_ns: int | None
    # sum of the launching calls' times, once each; None if calls were not collected
    launch_api_ns: int | None
    # busy is an upper bound: whole graphs or stages are one operation
    busy_is_upper_bound: bool
    # bubbles by cause, largest first; None without GPU rows
    causes: dict[str, int] | None

    def mean(self, name: str) -> float | None:
        """Return the mean of a figure over the devices, or None if any device lacks it."""
        values = [getattr(device, name) for device in self.devices]
        return None if not values or any(v is None for v in values) else sum(values) / len(values)

    @property
    def overlap_cpu(self) -> float | None:
        """The headline: share of the CPU work hidden behind the GPU."""
        return self.mean("overlap_cpu")

    @property
    def overlap_gpu(self) -> float | None:
        """Share of the GPU's busy time in which the CPU worked too."""
        return self.mean("overlap_gpu")

    @property
    def utilization(self) -> float | None:
        """Share of the window in which the GPU was busy."""
        return self.mean("utilization")

    @property
    def launch_bound(self) -> bool | None:
        """Whether launching takes longer than the GPU's work and most bubble time is the host's doing."""
        busy, causes = self.mean("busy_ns"), self.causes
        if busy is None or self.launch_api_ns is None or causes is None:
            return None
        of_host = sum(ns for name, ns in causes.items() if name.startswith("host:") or name == "launch_api")
        return self.launch_api_ns > busy and 2 * of_host > sum(causes.values())

    def __str__(self) -> str:
        lines = [f"window {cell_text('x_ns', self.window[1] - self.window[0])} us"]
        bound = " (upper bound)" if self.busy_is_upper_bound else ""
        for d in self.devices:
            lines += [
                f"device {d.device}: busy {cell_text('x_ns', d.busy_ns)} us{bound}, idle {percent(d.idle_share)}, "
                f"{d.num_bubbles} bubbles of {cell_text('x_ns', d.bubble_ns)} us, "
                f"concurrency {cell_text('x', d.concurrency)}",
                f"  overlap {percent(d.overlap_cpu)} of the CPU work, {percent(d.overlap_gpu)} of the GPU's busy time; "
                f"exposed {cell_text('x_ns', d.exposed_ns)} us",
            ]
        if not self.devices:
            lines.append("GPU: not collected")
        return "\n".join(lines)


def percent(share: float | None) -> str:
    """Return a share as text, ``n/a`` if it is undefined."""
    return "n/a" if share is None else f"{100 * share:.1f} %"


def split_idle(busy: Intervals, window: tuple[int, int], min_ns: int) -> tuple[Intervals, Intervals, int, int]:
    """Return ``(bubbles, micro gaps, head idle, tail idle)`` of a window; the gaps as intervals, the rest in ns."""
    if not len(busy):
        return Intervals.empty(), Intervals.empty(), window[1] - window[0], 0
    gaps = busy.complement(int(busy.start[0]), int(busy.end[-1]))
    is_bubble = gaps.end - gaps.start >= min_ns
    bubbles = Intervals(gaps.start[is_bubble], gaps.end[is_bubble])
    micro = Intervals(gaps.start[~is_bubble], gaps.end[~is_bubble])
    return bubbles, micro, int(busy.start[0]) - window[0], window[1] - int(busy.end[-1])


def _device_figures(analysis: Analysis, device: int) -> DeviceFigures:
    window = analysis.window
    length = window[1] - window[0]
    ops = analysis.trace.ops
    busy, compute = analysis.busy(device), analysis.busy(device, compute=True)
    bubbles, micro, head, tail = split_idle(busy, window, analysis.min_bubble_ns)
    clipped = np.minimum(ops.end, window[1]) - np.maximum(ops.start, window[0])
    mine = (ops.device == device) & (clipped >= 0)
    work = analysis.cpu_work(device)
    both = None if work is None else (work & busy).measure
    cpu = None if work is None else work.measure
    exposed = None if cpu is None or both is None else cpu - both
    gpu_only = None if both is None else busy.measure - both
    return DeviceFigures(
        device=device,
        window_ns=length,
        num_ops=int(mine.sum()),
        busy_ns=busy.measure,
        busy_compute_ns=compute.measure,
        gpu_time_sum_ns=int(clipped[mine].sum()),
        head_idle_ns=head,
        tail_idle_ns=tail,
        bubble_ns=bubbles.measure,
        num_bubbles=len(bubbles),
        micro_gap_ns=micro.measure,
        cpu_work_ns=cpu,
        overlap_ns=both,
        exposed_ns=exposed,
        gpu_only_ns=gpu_only,
        idle_both_ns=None if work is None else length - (work | busy).measure,
    )


def overview(analysis: Analysis) -> Overview:
    """Return the figures of the analysis' window."""
    trace, window = analysis.trace, analysis.window
    work = analysis.cpu_work()
    bubbles = analysis.bubbles()
    launch_api = None
    if len(trace.api) and len(trace.ops):
        launch = analysis.join.launch
        start, end = trace.api.start[launch], trace.api.end[launch]
        launch_api = int(np.maximum(np.minimum(end, window[1]) - np.maximum(start, window[0]), 0).sum())
    return Overview(
        window=window,
        devices=[_device_figures(analysis, device) for device in analysis.devices],
        cpu_work_ns=None if work is None else work.measure,
        launch_api_ns=launch_api,
        busy_is_upper_bound=analysis.busy_is_upper_bound,
        causes=None if bubbles is None else bubbles.by_cause(),
    )


@dataclass(frozen=True, eq=False, repr=False)
class CopyOverlap(Frame):
    """How much of the copies of each kind on each stream ran beside kernels."""

    # all columns [num_rows]
    device: Int64
    stream: Int64
    # CopyKind by name, or its number
    kind: list[str]
    copies: Int64
    bytes: Int64
    # union of the copies, and the part of it beside kernels or graphs
    time_ns: Int64
    hidden_ns: Int64
    # hidden / time; NaN for copies without duration
    hidden_share: Float64


def copy_overlap(analysis: Analysis) -> CopyOverlap | None:
    """Return one row for each (device, stream, kind of copy), or None if copies were not collected."""
    trace = analysis.trace
    if not trace.coverage.has("ops.memcpy"):
        return None
    low, high = analysis.window
    ops = trace.ops
    rows = np.flatnonzero((ops.kind == OpKind.MEMCPY) & (ops.start < high) & (ops.end >= low))
    keys = np.stack([ops.device[rows].astype(np.int64), ops.stream[rows], ops.copy_kind[rows].astype(np.int64)])
    distinct, which = np.unique(keys, axis=1, return_inverse=True)
    out: dict[str, list] = {"copies": [], "bytes": [], "time_ns": [], "hidden_ns": []}
    for i, device in enumerate(distinct[0].tolist()):
        mine = rows[which.reshape(-1) == i]
        copies = union(ops.start[mine], ops.end[mine]).clip(low, high)
        out["copies"].append(len(mine))
        out["bytes"].append(int(np.maximum(ops.bytes[mine], 0).sum()))
        out["time_ns"].append(copies.measure)
        out["hidden_ns"].append((copies & analysis.busy(device, compute=True)).measure)
    columns = {name: np.array(values, np.int64) for name, values in out.items()}
    names = {int(kind): kind.name for kind in CopyKind}
    time = columns["time_ns"].astype(np.float64)
    share = np.divide(columns["hidden_ns"], time, out=np.full(len(time), np.nan), where=time > 0)
    kinds = [names.get(kind, f"kind {kind}") for kind in distinct[2].tolist()]
    return CopyOverlap(device=distinct[0], stream=distinct[1], kind=kinds, hidden_share=share, **columns)
