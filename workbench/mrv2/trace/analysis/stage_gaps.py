"""The GPU between two stages of a step: how long from the last operation of one to the first of the other.

An operation belongs to a stage if the call that submitted it lies in a range of that name; a node of a CUDA graph also
if it was captured inside one, for a whole step in one graph is submitted under a single range. ::

    device | [verify][verify] [post_update]        [draft][draft]
                            |<----------- gap ---->|
                            |<>|           |<----->|               idle: the part of it in which nothing ran
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mrv2.trace.analysis.frame import Frame
from mrv2.trace.analysis.nesting import split_by_thread
from mrv2.trace.columns import Int64
from mrv2.trace.table import OpKind

if TYPE_CHECKING:
    from mrv2.trace.analysis.model import Analysis


@dataclass(frozen=True, eq=False, repr=False)
class StageGaps(Frame):
    """One row for each step and device that ran both stages, in the order of the steps."""

    # all columns [num_rows]
    step: Int64
    device: Int64
    # end of the last operation of the first stage
    start: Int64
    # up to the first operation of the other stage; 0 if that began before
    gap_ns: Int64
    # time inside the gap in which the device ran nothing
    idle_ns: Int64


def stage_gaps(analysis: Analysis, first: str, second: str) -> StageGaps | None:
    """Return the gaps between two stages of the steps in the window.

    Args:
        first, second: names of ranges, as in `instrument.stages`.

    Returns:
        None if no operation of the window is known to belong to one of the two: it did not run, or it ran in a graph
        that was captured before the recording or recorded as a whole.
    """
    ops, steps = analysis.trace.ops, analysis.step_ids.of_ops
    counts = np.isin(steps, analysis.windows.step) if len(analysis.windows) else np.zeros(len(ops), np.bool_)
    sides = [np.flatnonzero(counts & ops_of_stage(analysis, name)) for name in (first, second)]
    if not all(map(len, sides)):
        return None
    of_first, of_second = sides
    ends = _extreme(steps[of_first], ops.device[of_first], -ops.end[of_first])
    begins = _extreme(steps[of_second], ops.device[of_second], ops.start[of_second])
    keys = sorted(ends.keys() & begins.keys())
    start = np.array([-ends[key] for key in keys], np.int64)
    end = np.maximum(start, np.array([begins[key] for key in keys], np.int64))
    device = np.array([key[1] for key in keys], np.int64)
    idle = end - start
    for one in np.unique(device).tolist():
        mine = device == one
        idle[mine] -= analysis.busy_anywhere(one).within(start[mine], end[mine])
    return StageGaps(np.array([key[0] for key in keys], np.int64), device, start, end - start, idle)


def ops_of_stage(analysis: Analysis, name: str) -> np.ndarray:
    """Return which operations belong to the stage `name`; bool [num_ops]."""
    trace = analysis.trace
    ops = trace.ops
    captured = [i for i, text in enumerate(trace.strings) if name in text.split(" > ")]
    return (
        np.isin(ops.captured, captured) & (ops.captured >= 0)
        | ((ops.kind == OpKind.STAGE) & (ops.name == trace.string_id(name)))
        | _launched_under(analysis, name)
    )


def _launched_under(analysis: Analysis, name: str) -> np.ndarray:
    """Return which operations were submitted inside a range of that name; bool [num_ops]."""
    trace, join = analysis.trace, analysis.join
    out = np.zeros(len(trace.ops), np.bool_)
    inside = np.zeros(len(join.launch), np.bool_)
    sought = trace.string_id(name)
    if not len(inside) or sought < 0:
        return out
    api, launch = trace.api, join.launch
    for key, rows in split_by_thread(api.process[launch], api.thread[launch], np.arange(len(launch))).items():
        nest = analysis.nests[key]
        if not len(nest):
            continue
        holds = trace.ranges.name[nest.row] == sought
        for level in range(1, int(nest.depth.max()) + 1):
            nodes = np.flatnonzero(nest.depth == level)
            holds[nodes] |= holds[nest.parent[nodes]]
        node = nest.at(api.start[launch[rows]])
        inside[rows] = (node >= 0) & holds[node]
    owner = join.launch_of_op
    out[owner >= 0] = inside[owner[owner >= 0]]
    return out


def _extreme(step: np.ndarray, device: np.ndarray, time: np.ndarray) -> dict[tuple[int, int], int]:
    """Return the smallest `time` of each (step, device)."""
    order = np.lexsort((time, device, step))[::-1]
    # written backwards, so that the smallest is what stays
    return {
        (s, d): t for s, d, t in zip(step[order].tolist(), device[order].tolist(), time[order].tolist(), strict=True)
    }
