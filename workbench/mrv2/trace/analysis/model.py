"""`Analysis`: one trace, one window, one set of choices; every figure is computed when it is first asked for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from mrv2.trace.analysis.host import HostTime
from mrv2.trace.analysis.join import LaunchJoin, Queues, join_launches
from mrv2.trace.analysis.nesting import Nests, ThreadKey, split_by_thread
from mrv2.trace.analysis.step_ids import StepIds
from mrv2.trace.analysis.stream_order import StreamOrder
from mrv2.trace.analysis.sync_rows import Columns, find_host_syncs
from mrv2.trace.analysis.windows import OWN_DOMAIN, StepSpan, StepWindows, find_steps
from mrv2.trace.intervals import Intervals, union
from mrv2.trace.table import OpKind, Trace, TraceError

if TYPE_CHECKING:
    from mrv2.trace.analysis.bubbles import Bubbles
    from mrv2.trace.analysis.captures import Captures
    from mrv2.trace.analysis.graph_idle import GraphIdle
    from mrv2.trace.analysis.launches import Launches
    from mrv2.trace.analysis.overlap import CopyOverlap, Overview
    from mrv2.trace.analysis.projection import Projection
    from mrv2.trace.analysis.quantiles import Stages
    from mrv2.trace.analysis.skew import Skew
    from mrv2.trace.analysis.stage_gaps import StageGaps
    from mrv2.trace.analysis.steps import Steps
    from mrv2.trace.analysis.syncs import SyncTable

Policy = Literal["contained", "start"]


class Analysis:
    """What a trace says, in figures.

    A figure without evidence is None; see `Trace.coverage` for what was collected.

    Args:
        trace: any recording.
        window: ``(start, end)`` in the trace's nanoseconds; by default from the first step to the end of the last, or
            the whole capture if no steps are marked.
        engine_threads: threads ``(process, thread)`` whose work counts as CPU work; by default those with ranges that
            also submit device work, plus the thread that the steps are on.
        step_domain, step_name, step_span: what marks a step, see `find_steps`.
        min_bubble_ns: shorter gaps of the GPU are micro gaps.
        kernel_wait_ns: a gap before work that was submitted in time is `kernel_wait` below this, else unknown.
        policy: whether a range owns the calls wholly inside it ("contained") or those that start inside it ("start").
        warmup: how many steps at the beginning quantiles leave out.
    """

    def __init__(
        self,
        trace: Trace,
        window: tuple[int, int] | None = None,
        engine_threads: Sequence[ThreadKey] | None = None,
        *,
        step_domain: str | None = OWN_DOMAIN,
        step_name: str | None = None,
        step_span: StepSpan | None = None,
        min_bubble_ns: int = 2_000,
        kernel_wait_ns: int = 10_000,
        policy: Policy = "contained",
        warmup: int = 1,
    ) -> None:
        if window is not None and window[1] < window[0]:
            raise TraceError(f"Analysis(window={window}): the end lies before the start")
        if policy not in ("contained", "start"):
            raise TraceError(f"Analysis(policy={policy!r}): legal are 'contained' and 'start'")
        self.trace = trace
        self._window, self._engine_threads = window, engine_threads
        self._step_marks = (step_domain, step_name, step_span)
        self.min_bubble_ns, self.kernel_wait_ns = min_bubble_ns, kernel_wait_ns
        self.policy: Policy = policy
        self.warmup = warmup

    @cached_property
    def windows(self) -> StepWindows:
        """The steps that lie inside the window."""
        domain, name, span = self._step_marks
        found = find_steps(self.trace, domain=domain, name=name, span=span)
        if self._window is None:
            return found
        keep = (found.start >= self._window[0]) & (found.end <= self._window[1])
        return StepWindows(found.start[keep], found.end[keep], found.step[keep], found.thread, found.source)

    @cached_property
    def window(self) -> tuple[int, int]:
        """The time that all figures are about, in nanoseconds of the trace's clock."""
        if self._window is not None:
            return self._window
        if len(self.windows):
            return int(self.windows.start[0]), int(self.windows.end.max())
        tables = (self.trace.ops, self.trace.api, self.trace.ranges, self.trace.syncs)
        spans = [(int(t.start.min()), int(t.end.max())) for t in tables if len(t)]
        return (min(s for s, _ in spans), max(e for _, e in spans)) if spans else (0, 0)

    @cached_property
    def join(self) -> LaunchJoin:
        """Which call submitted which operation."""
        return join_launches(self.trace)

    @cached_property
    def queues(self) -> Queues:
        """What each stream had to do at any instant."""
        return Queues(self.trace, self.join)

    @cached_property
    def nests(self) -> Nests:
        """The ranges of each thread as trees."""
        return Nests(self.trace)

    @cached_property
    def step_ids(self) -> StepIds:
        """Which step ranges, calls and operations belong to."""
        return StepIds(self.trace, self.join, self.nests, self.windows, self._step_marks[0])

    @cached_property
    def stream_order(self) -> StreamOrder:
        """What precedes each operation on its stream."""
        return StreamOrder(self.trace, self.join, self.queues)

    @cached_property
    def sync_rows(self) -> Columns:
        """All host waits of the capture (`find_host_syncs`)."""
        rows = find_host_syncs(self.trace, self.join)
        # a record without its call has no thread; with one candidate there is no doubt
        for process in np.unique(rows["process"][rows["thread"] < 0]).tolist():
            threads = [thread for owner, thread in self.nests.threads if owner == process]
            if len(threads) == 1:
                rows["thread"][(rows["process"] == process) & (rows["thread"] < 0)] = threads[0]
        return rows

    @cached_property
    def host(self) -> HostTime:
        """What each host thread did."""
        return HostTime(self.trace, self.join, self.sync_rows)

    @cached_property
    def engine_threads(self) -> list[ThreadKey]:
        """Threads whose work counts as CPU work."""
        if self._engine_threads is not None:
            return list(self._engine_threads)
        staged = self.host.stage_threads
        api, launch = self.trace.api, self.join.launch
        launching = split_by_thread(api.process, api.thread, launch)
        chosen = [key for key in staged if key in launching or key == self.windows.thread]
        return chosen or staged

    @cached_property
    def devices(self) -> list[int]:
        """Devices that ran anything."""
        return np.unique(self.trace.ops.device).tolist()

    def busy(self, device: int, *, compute: bool = False) -> Intervals:
        """Return when a device ran anything (``compute``: kernels, graphs and stages only), clipped to the window."""
        return self.busy_anywhere(device, compute=compute).clip(*self.window)

    def busy_anywhere(self, device: int, *, compute: bool = False) -> Intervals:
        """Return `busy` of the whole capture."""
        key = (device, compute)
        if key not in self._busy:
            ops = self.trace.ops
            mine = ops.device == device
            if compute:
                mine &= (ops.kind == OpKind.KERNEL) | (ops.kind == OpKind.GRAPH) | (ops.kind == OpKind.STAGE)
            rows = slice(None) if mine.all() else np.flatnonzero(mine)
            self._busy[key] = union(ops.start[rows], ops.end[rows])
        return self._busy[key]

    @cached_property
    def _busy(self) -> dict[tuple[int, bool], Intervals]:
        return {}

    def cpu_work(self, device: int | None = None) -> Intervals | None:
        """Return when an engine thread worked, clipped to the window; None without ranges.

        With `device`, only threads of the processes that use it count, if there are any.
        """
        threads = self.engine_threads
        if not threads:
            return None
        if device is not None and len(self.devices) > 1:
            owners = set(np.unique(self.trace.ops.process[self.trace.ops.device == device]).tolist())
            threads = [key for key in threads if key[0] in owners] or threads
        work = Intervals.empty()
        for key in threads:
            work = work | self.host.work(key)
        return work.clip(*self.window)

    @cached_property
    def busy_is_upper_bound(self) -> bool:
        """Whether some operations stand for several, with the holes between them."""
        kinds = self.trace.ops.kind
        return bool(np.any((kinds == OpKind.GRAPH) | (kinds == OpKind.STAGE)))

    def overview(self) -> Overview:
        """Return busy, overlap, exposed and idle times per device, and the headline."""
        from mrv2.trace.analysis.overlap import overview

        return overview(self)

    def copies(self) -> CopyOverlap | None:
        """Return how much of each kind of copy ran beside kernels; None if copies were not collected."""
        from mrv2.trace.analysis.overlap import copy_overlap

        return copy_overlap(self)

    def bubbles(self, min_ns: int | None = None) -> Bubbles | None:
        """Return the gaps of the GPU and what caused them, to the nanosecond; None without GPU rows."""
        from mrv2.trace.analysis.bubbles import find_bubbles

        limit = self.min_bubble_ns if min_ns is None else min_ns
        if limit not in self._bubbles:
            self._bubbles[limit] = find_bubbles(self, limit)
        return self._bubbles[limit]

    @cached_property
    def _bubbles(self) -> dict[int, Bubbles | None]:
        return {}

    def syncs(self) -> SyncTable | None:
        """Return every host wait with its price, dearest first; None if none could have been recorded."""
        return self._syncs

    @cached_property
    def _syncs(self) -> SyncTable | None:
        from mrv2.trace.analysis.syncs import sync_table

        return sync_table(self)

    def launches(self) -> Launches | None:
        """Return one row for each call that submitted work; None if calls or operations were not collected."""
        return self._launches

    @cached_property
    def _launches(self) -> Launches | None:
        from mrv2.trace.analysis.launches import find_launches

        return find_launches(self)

    def projection(self, policy: Policy | None = None) -> Projection | None:
        """Return the device work of each range; None if ranges, calls or operations were not collected."""
        from mrv2.trace.analysis.projection import project

        return project(self, policy or self.policy)

    def captures(self) -> Captures | None:
        """Return the device time of graph nodes by the ranges at their capture; None if no capture was recorded."""
        from mrv2.trace.analysis.captures import capture_table

        return capture_table(self)

    def stage_gaps(self, first: str, second: str) -> StageGaps | None:
        """Return the GPU's time between two stages of each step; None if one of them cannot be told or did not run."""
        from mrv2.trace.analysis.stage_gaps import stage_gaps

        return stage_gaps(self, first, second)

    def graph_idle(self) -> GraphIdle | None:
        """Return the GPU's idle time between and inside executions of CUDA graphs; None below two executions."""
        return self._graph_idle

    @cached_property
    def _graph_idle(self) -> GraphIdle | None:
        from mrv2.trace.analysis.graph_idle import graph_idle

        return graph_idle(self)

    def stages(self) -> Stages:
        """Return the durations of each stage, on the host and on the device."""
        from mrv2.trace.analysis.quantiles import stage_table

        return stage_table(self)

    def steps(self) -> Steps:
        """Return one row a step."""
        return self._steps

    @cached_property
    def _steps(self) -> Steps:
        from mrv2.trace.analysis.steps import step_table

        return step_table(self)

    def skew(self) -> list[Skew]:
        """Return for each device how far its clock contradicts the host's."""
        from mrv2.trace.analysis.skew import estimate_skew

        return estimate_skew(self)

    def banners(self) -> list[str]:
        """Return what any reader of the figures must know first."""
        from mrv2.trace.analysis.skew import banners

        return banners(self)
