"""When, and by which thread, operations were submitted; by their step number where no call is recorded.

The in-process recorder sees device stages and host stages but no calls.  A device stage of step n was then submitted by
the thread that the steps are on, no later than the end of the last host stage of step n that had begun by then and did
not wait for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mrv2.trace.columns import Bool, Int64
from mrv2.trace.intervals import overlap_join
from mrv2.trace.table import OpKind

if TYPE_CHECKING:
    from mrv2.trace.analysis.model import Analysis


@dataclass(frozen=True, eq=False)
class Submission:
    """One row for each operation asked for."""

    # all [num_rows]; begin and end of the call, equal if inferred from the step
    start: Int64
    end: Int64
    process: Int64
    thread: Int64
    # False: nothing tells who submitted it
    known: Bool


def submissions(analysis: Analysis, rows: np.ndarray) -> Submission:
    """Return the submission of each operation in `rows` (rows of ``ops``)."""
    ops, api, call = analysis.trace.ops, analysis.trace.api, analysis.join.call[rows]
    known, begin = call >= 0, ops.start[rows]
    out = Submission(
        start=np.where(known, api.start[call], begin) if len(api) else begin.copy(),
        end=np.where(known, api.end[call], begin) if len(api) else begin.copy(),
        process=ops.process[rows].copy(),
        thread=np.where(known, api.thread[call], -1) if len(api) else np.full(len(rows), -1, np.int64),
        known=known.copy(),
    )
    orphan = np.flatnonzero(~known & (ops.kind[rows] == OpKind.STAGE))
    key = analysis.windows.thread
    if len(orphan) and key is not None:
        _infer(analysis, rows, orphan, key, out)
    return out


def _infer(analysis: Analysis, rows: np.ndarray, orphan: np.ndarray, key: tuple[int, int], out: Submission) -> None:
    ranges, number = analysis.step_ids.ranges(key)
    waiting, _ = overlap_join(ranges.start, ranges.end, analysis.host.device_waits(key))
    submits = np.ones(len(ranges), np.bool_)
    submits[waiting] = False
    start, end, number = ranges.start[submits], ranges.end[submits], number[submits]
    if not len(start):
        return
    # by step, then by start: one integer for both
    begin, step = analysis.trace.ops.start[rows[orphan]], analysis.step_ids.of_ops[rows[orphan]]
    numbers, rank = np.unique(number, return_inverse=True)
    origin = min(int(start.min()), int(begin.min()))
    width = np.int64(max(int(start.max()), int(begin.max())) - origin + 1)
    order = np.lexsort((start, rank))
    sorted_keys = (rank * width + (start - origin))[order]
    mine = np.minimum(np.searchsorted(numbers, step), len(numbers) - 1)
    at = np.searchsorted(sorted_keys, mine * width + (begin - origin), "right") - 1
    found = order[np.maximum(at, 0)]
    valid = (at >= 0) & (numbers[mine] == step) & (number[found] == step)
    chosen = orphan[valid]
    when = np.minimum(end[found[valid]], begin[valid])
    out.start[chosen], out.end[chosen], out.known[chosen] = when, when, True
    out.process[chosen], out.thread[chosen] = key
