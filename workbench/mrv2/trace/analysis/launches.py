"""Launches: from the call on the host to its first operation on the device.

With a the call, g its first operation, P the latest end among what g's stream still had before it::

    start delay        g.start - a.start
    queue delay        max(0, g.start - a.end)                 NVIDIA's "queue time"
    queue wait         max(0, min(g.start, P) - a.end)         the part of it behind earlier work: harmless
    launch latency     g.start - max(a.start, P)               only if the stream was empty at a.end (HTA's rule)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mrv2.trace.analysis.frame import Float64, Frame
from mrv2.trace.columns import Int64
from mrv2.trace.intervals import union_measure

if TYPE_CHECKING:
    from mrv2.trace.analysis.model import Analysis


@dataclass(frozen=True, eq=False, repr=False)
class Launches(Frame):
    """One row for each call that submitted work, in order of the calls; a graph launch is one row."""

    # all columns [num_launches]; row in ``api``, and the operation that starts first (row in ``ops``)
    call: Int64
    op: Int64
    start: Int64
    num_ops: Int64
    # duration of the call
    api_ns: Int64
    start_delay_ns: Int64
    queue_delay_ns: Int64
    queue_wait_ns: Int64
    # NaN where the stream still had work when the call returned
    launch_latency_ns: Float64
    # idle time between the operations of one launch; 0 for single operations and graphs recorded as a whole
    intra_gap_ns: Int64
    # operations submitted to the stream earlier and not done when the call began
    queued: Int64
    # step number of the call, -1 unknown
    step: Int64
    # steps between the call's and the one that the device worked on; 0 = the device had nothing left, NaN unknown
    run_ahead: Float64
    # delays up to this are below the error of the clocks
    _skew_ns: int

    @property
    def unreliable(self) -> np.ndarray:
        """Whether the start delay is smaller than the clocks' error; bool [num_launches]."""
        return self.start_delay_ns < self._skew_ns


def find_launches(analysis: Analysis) -> Launches | None:
    """Return the launches of the whole capture, or None without calls or operations."""
    trace, join, order = analysis.trace, analysis.join, analysis.stream_order
    if not len(trace.api) or not len(trace.ops):
        return None
    ops, api = trace.ops, trace.api
    call, op = join.launch, join.first_op
    start, end, begins = api.start[call], api.end[call], ops.start[op]
    ready = np.maximum(order.earlier_end[op], order.awaited_end(op, start))
    owned = np.flatnonzero(join.launch_of_op >= 0)
    owner = join.launch_of_op[owned]
    num_ops = np.bincount(owner, minlength=len(call))
    return Launches(
        call=call,
        op=op,
        start=start,
        num_ops=num_ops,
        api_ns=end - start,
        start_delay_ns=begins - start,
        queue_delay_ns=np.maximum(begins - end, 0),
        queue_wait_ns=np.maximum(np.minimum(begins, ready) - end, 0),
        launch_latency_ns=np.where(ready <= end, begins - np.maximum(start, ready), np.nan),
        intra_gap_ns=_intra_gaps(analysis, owned, owner, num_ops),
        queued=_queued(analysis, op, start),
        step=analysis.step_ids.of_calls,
        run_ahead=run_ahead(analysis, start, analysis.windows.index_of(analysis.step_ids.of_calls)),
        _skew_ns=max([skew.skew_ns for skew in analysis.skew()], default=0),
    )


def _intra_gaps(analysis: Analysis, owned: np.ndarray, owner: np.ndarray, num_ops: np.ndarray) -> np.ndarray:
    ops = analysis.trace.ops
    out = np.zeros(len(num_ops), np.int64)
    many = num_ops > 1
    if not many.any():
        return out
    keep = many[owner]
    rows, owner = owned[keep], owner[keep]
    start, end = ops.start[rows], ops.end[rows]
    first, last = np.full(len(out), np.iinfo(np.int64).max), np.full(len(out), np.iinfo(np.int64).min)
    np.minimum.at(first, owner, start)
    np.maximum.at(last, owner, end)
    busy = union_measure(start, end, owner, len(out))
    return np.where(many, np.where(many, last, 0) - np.where(many, first, 0) - busy, 0)


def _queued(analysis: Analysis, op: np.ndarray, start: np.ndarray) -> np.ndarray:
    ops = analysis.trace.ops
    out = np.zeros(len(op), np.int64)
    for (process, stream), rows in analysis.stream_order.by_stream.items():
        if rows.size == len(ops):
            mine = np.arange(len(op))
        else:
            mine = np.flatnonzero((ops.process[op] == process) & (ops.stream[op] == stream))
        out[mine] = analysis.queues.stream(process, stream).pending_at(start[mine])
    return out


def run_ahead(analysis: Analysis, times: np.ndarray, host_at: np.ndarray) -> np.ndarray:
    """Return how many steps the host is ahead of the device; NaN where the step or the device's work is unknown.

    Args:
        times: instants; int64 ns [n].
        host_at: row of the step that the host works on at each of them, -1 unknown; int64 [n].
    """
    windows, trace = analysis.windows, analysis.trace
    op_step = windows.index_of(analysis.step_ids.of_ops)
    known = np.flatnonzero(op_step >= 0)
    if not len(known):
        return np.full(len(times), np.nan)
    finish = np.full(len(windows), np.iinfo(np.int64).min)
    np.maximum.at(finish, op_step[known], trace.ops.end[known])
    # the device has left a step when that and all earlier ones are done
    device_at = np.searchsorted(np.maximum.accumulate(finish), times, "right")
    return np.where(host_at >= 0, np.maximum(host_at - device_at, 0), np.nan)
