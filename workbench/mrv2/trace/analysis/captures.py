"""The device time of graph nodes by the ranges under which they were captured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mrv2.trace.analysis.frame import Frame, Number

if TYPE_CHECKING:
    from mrv2.trace.analysis.model import Analysis


@dataclass(frozen=True, eq=False, repr=False)
class Captures(Frame):
    """One row for each range path at capture, the costliest first; a replay's own ranges say nothing about these."""

    # "outer > inner"; ranges that were open when the nodes were captured
    captured_under: list[str]
    # [num_paths]: operations that ran, and the sum of their times
    num_ops: np.ndarray
    total_ns: np.ndarray
    # of the summed time of all graph nodes in the window, captured under a range or not
    share: Number
    # summed time a step; None without steps
    step_ns: Number | None


def capture_table(analysis: Analysis) -> Captures | None:
    """Return the graph nodes that began in the window by capture path; None if no capture was recorded."""
    ops, (low, high) = analysis.trace.ops, analysis.window
    inside = (ops.start >= low) & (ops.start < high)
    of_nodes = int((ops.end - ops.start)[inside & (ops.graph_node >= 0)].sum())
    rows = np.flatnonzero(inside & (ops.captured >= 0))
    if not len(rows):
        return None
    distinct, which, count = np.unique(ops.captured[rows], return_inverse=True, return_counts=True)
    total = np.zeros(len(distinct), np.int64)
    np.add.at(total, which, (ops.end - ops.start)[rows])
    order = np.argsort(-total, kind="stable")
    num_steps = len(analysis.windows)
    return Captures(
        captured_under=analysis.trace.name_of(distinct[order]).tolist(),
        num_ops=count[order],
        total_ns=total[order],
        share=total[order] / max(of_nodes, 1),
        step_ns=total[order] / num_steps if num_steps else None,
    )
