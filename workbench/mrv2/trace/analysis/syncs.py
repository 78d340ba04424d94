"""The sync table: every host wait with what it cost.

For a wait s whose awaited operations were done at r (``s.start`` if there were none)::

    s.start ........ r ............... s.end .......... first operation after r
    | stall          | return latency  |
                     | induced bubble: the part of this in which the device idled |

The *stall* is time in which the GPU still worked, no loss by itself.  The *induced bubble* is the price: the device ran
dry while the thread that feeds it was waiting, waking up and submitting again.  A wait that found its work done long
ago (r before s.start) forces nobody to run dry: it costs no more than the idle time during the call itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mrv2.trace.analysis.frame import Float64, Frame
from mrv2.trace.analysis.join import NEVER
from mrv2.trace.analysis.nesting import split_by_thread
from mrv2.trace.analysis.stacks import StackFinder
from mrv2.trace.analysis.sync_rows import Scope, SyncKind
from mrv2.trace.columns import Bool, Int64
from mrv2.trace.table import SyncType

if TYPE_CHECKING:
    from mrv2.trace.analysis.model import Analysis

WAIT_PREFIX = "wait: "


@dataclass(frozen=True, eq=False, repr=False)
class SyncTable(Frame):
    """One row for each host wait of the capture, dearest first.  NaN: the figure is undefined or without evidence."""

    # all columns [num_syncs]
    start: Int64
    end: Int64
    name: list[str]
    # "explicit", "implicit", "framework", "polling"
    kind: list[str]
    # the reason that a named wait around the call gives, an operator or a copy that belongs to it; "" none
    reason: list[str]
    via: list[str]
    # names of the enclosing ranges, outermost first
    path: list[str]
    process: Int64
    thread: Int64
    # step number, -1 outside all steps
    step: Int64
    # inside a step (or the window, if no steps are marked) on an engine thread
    counted: Bool
    # what it waited for: "stream", "event", "context", "own_copy", "estimated", "unknown"
    scope: list[str]
    # when the awaited operations were done
    ready: Float64
    duration_ns: Int64
    stall_ns: Float64
    return_latency_ns: Float64
    induced_bubble_ns: Float64
    # operations submitted and not done, just before and just after
    queued_before: Float64
    queued_after: Float64
    # row in the unsorted table of waits
    _row: Int64
    _stacks: StackFinder

    def stack(self, row: int) -> tuple[list[str], str]:
        """Return the best known stack of one row, innermost first, and where it comes from.

        Sources, best first: "recorder", "python frames", "call chain", "ranges", "unknown".
        """
        return self._stacks.find(int(self._row[row]))

    @property
    def in_steps(self) -> SyncTable:
        """The counted rows."""
        return self.take(self.counted)

    def per_call(self) -> list[dict[str, Any]]:
        """Return the counted rows summed by (name, reason, path), dearest first."""
        groups: dict[tuple[str, str, str], list[int]] = {}
        for i in np.flatnonzero(self.counted).tolist():
            groups.setdefault((self.name[i], self.reason[i], self.path[i]), []).append(i)
        out = []
        for (name, reason, path), rows in groups.items():
            columns = ("induced_bubble_ns", "stall_ns", "duration_ns")
            sums = {column: float(np.nansum(getattr(self, column)[rows])) for column in columns}
            out.append({"name": name, "reason": reason, "path": path, "count": len(rows), **sums})
        return sorted(out, key=lambda row: -row["induced_bubble_ns"])


def sync_table(analysis: Analysis) -> SyncTable | None:
    """Return the table, or None if the trace could not have recorded synchronisation."""
    trace, rows = analysis.trace, analysis.sync_rows
    if not trace.coverage.has("syncs") and not trace.coverage.has("api"):
        return None
    ready, known = _ready_times(analysis)
    start, end = rows["start"], rows["end"]
    reached = np.clip(ready, start, end)
    stall = np.where(known, reached - start, np.nan)
    latency = np.where(known, np.maximum(end - np.maximum(start, ready), 0), np.nan)
    bubble = _induced_bubbles(analysis, np.where(known, reached, end), known)
    bubble = np.where(ready <= start, np.minimum(bubble, end - start), bubble)
    before, after = _queued(analysis)
    step_row = analysis.windows.index_at(start)
    in_step = step_row >= 0
    if not len(analysis.windows):
        in_step = (start >= analysis.window[0]) & (start < analysis.window[1])
    engine = np.zeros(len(start), np.bool_)
    for process, thread in analysis.engine_threads:
        engine |= (rows["process"] == process) & (rows["thread"] == thread)
    if not analysis.engine_threads:
        engine[:] = True
    order = np.lexsort((start, -np.nan_to_num(stall), -np.nan_to_num(bubble, nan=-1.0)))
    paths, reasons = _places(analysis)
    names = trace.name_of(rows["name"])
    return SyncTable(
        start=start[order],
        end=end[order],
        name=names[order].tolist(),
        kind=[SyncKind(k).name.lower() for k in rows["kind"][order].tolist()],
        reason=[reasons[i] for i in order.tolist()],
        via=trace.name_of(rows["via"])[order].tolist(),
        path=[paths[i] for i in order.tolist()],
        process=rows["process"][order],
        thread=rows["thread"][order],
        step=_steps(analysis, step_row)[order],
        counted=(in_step & engine)[order],
        scope=[Scope(s).name.lower() for s in rows["scope"][order].tolist()],
        ready=np.where(known, np.where(ready > NEVER, ready, start), np.nan)[order],
        duration_ns=(end - start)[order],
        stall_ns=stall[order],
        return_latency_ns=latency[order],
        induced_bubble_ns=bubble[order],
        queued_before=before[order],
        queued_after=after[order],
        _row=order,
        _stacks=StackFinder(analysis),
    )


def _steps(analysis: Analysis, row: np.ndarray) -> np.ndarray:
    return np.where(row >= 0, analysis.windows.step[row], -1) if len(analysis.windows) else row


def _ready_times(analysis: Analysis) -> tuple[np.ndarray, np.ndarray]:
    """Return when the awaited operations of each wait were done (`NEVER`: there were none), and if that is known."""
    rows, ops, queues = analysis.sync_rows, analysis.trace.ops, analysis.queues
    scope = rows["scope"]
    ready = np.full(len(scope), NEVER, np.int64)
    known = (scope != Scope.UNKNOWN) & bool(len(ops))
    for which, key in ((Scope.STREAM, "stream"), (Scope.CONTEXT, "context"), (Scope.EVENT, "event_stream")):
        mine = np.flatnonzero(known & (scope == which))
        asked = rows["asked"]
        if which == Scope.EVENT:
            recorded = analysis.stream_order.recording_time(
                rows["process"][mine], rows["event_corr"][mine], asked[mine]
            )
            asked = asked.copy()
            asked[mine] = recorded
        for (process, value), at in split_by_thread(rows["process"], rows[key], mine).items():
            queue = queues.context(process, value) if which == Scope.CONTEXT else queues.stream(process, value)
            ready[at] = queue.finish_before(asked[at])
    own = np.flatnonzero(known & (scope == Scope.OWN_COPY))
    own_end = ops.end[rows["op"][own]] if len(own) else np.empty(0, np.int64)
    # a copy that outlives its call did not hold it
    ready[own] = np.where(own_end <= rows["end"][own], own_end, NEVER)
    for process in np.unique(rows["process"][known & (scope == Scope.ESTIMATED)]).tolist():
        at = np.flatnonzero(known & (scope == Scope.ESTIMATED) & (rows["process"] == process))
        ends = queues.context(process, -1).ends
        row = np.searchsorted(ends, rows["end"][at], "right") - 1
        ready[at] = np.where(row >= 0, ends[np.maximum(row, 0)], NEVER) if len(ends) else NEVER
    return ready, known


def _induced_bubbles(analysis: Analysis, ready: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return how long the device idled after `ready` until its next operation; NaN if the thread submits no more."""
    rows, trace, join = analysis.sync_rows, analysis.trace, analysis.join
    out = np.full(len(ready), np.nan)
    launch_start = trace.api.start[join.launch]
    process, thread = trace.api.process[join.launch], trace.api.thread[join.launch]
    has_calls = bool(len(launch_start))
    by_thread = split_by_thread(rows["process"], rows["thread"], np.flatnonzero(known))
    launches = split_by_thread(process, thread, np.arange(len(launch_start)))
    for key, at in by_thread.items():
        device = _device_of(analysis, key[0])
        if device is None:
            continue
        starts = trace.ops.start if len(analysis.devices) == 1 else trace.ops.start[trace.ops.device == device]
        following = np.searchsorted(starts, ready[at], "left")
        ends_at = starts[np.minimum(following, len(starts) - 1)]
        # work of anyone else that still runs at `ready` leaves no bubble to induce
        idle = np.where(analysis.busy_anywhere(device).contains(ready[at]), 0, ends_at - ready[at])
        mine = launches.get(key, np.empty(0, np.int64))
        last_launch = launch_start[mine].max() if len(mine) else (NEVER if has_calls else np.iinfo(np.int64).max)
        defined = (following < len(starts)) & (rows["end"][at] <= last_launch)
        out[at] = np.where(defined, idle, np.nan)
    return out


def _device_of(analysis: Analysis, process: int) -> int | None:
    """Return the device that a process feeds, or None if it feeds several or none."""
    if len(analysis.devices) == 1:
        return analysis.devices[0]
    ops = analysis.trace.ops
    mine = np.unique(ops.device[ops.process == process]).tolist()
    return mine[0] if len(mine) == 1 else None


def _queued(analysis: Analysis) -> tuple[np.ndarray, np.ndarray]:
    """Return how many operations of the process were pending before and after each wait; NaN without GPU rows."""
    rows = analysis.sync_rows
    before, after = np.full(len(rows["start"]), np.nan), np.full(len(rows["start"]), np.nan)
    if not len(analysis.trace.ops):
        return before, after
    for process in np.unique(rows["process"]).tolist():
        at = np.flatnonzero(rows["process"] == process)
        queue = analysis.queues.context(process, -1)
        before[at], after[at] = queue.pending_at(rows["start"][at]), queue.pending_at(rows["end"][at])
    return before, after


def _places(analysis: Analysis) -> tuple[list[str], list[str]]:
    """Return for each wait the path of its enclosing ranges, and the reason that a named wait gives."""
    rows, nests = analysis.sync_rows, analysis.nests
    paths, reasons = [""] * len(rows["start"]), [""] * len(rows["start"])
    for key, at in split_by_thread(rows["process"], rows["thread"], np.arange(len(rows["start"]))).items():
        node = nests[key].containing(rows["start"][at], rows["start"][at])
        known = {n: nests.path(key, n) for n in np.unique(node).tolist()}
        for i, n in zip(at.tolist(), node.tolist()):
            paths[i] = known[n]
            last = known[n].rpartition(" > ")[2]
            if last.startswith(WAIT_PREFIX):
                reasons[i] = last.removeprefix(WAIT_PREFIX)
    for i, name in enumerate(analysis.trace.name_of(rows["name"]).tolist()):
        # a wait of the in-process recorder is itself the named wait
        if not reasons[i] and name.startswith(WAIT_PREFIX):
            reasons[i] = name.removeprefix(WAIT_PREFIX)
    return paths, reasons


def stream_edges(analysis: Analysis) -> list[dict[str, int]]:
    """Return the stream waits: which stream (``stream``) waits from ``start`` on for which other (``event_stream``)."""
    syncs = analysis.trace.syncs
    rows = np.flatnonzero(syncs.sync_type == SyncType.STREAM_WAIT)
    names = ("start", "process", "thread", "stream", "event_stream")
    return [dict(zip(names, values)) for values in zip(*(getattr(syncs, n)[rows].tolist() for n in names))]
