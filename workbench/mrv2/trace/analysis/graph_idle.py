"""The GPU between the executions of CUDA graphs, and inside them.

In steady decode a step is one graph, so what idles between two graphs is what launching costs; what idles inside one is
the graph's own affair and can only be seen where its nodes were recorded. ::

    device | [== graph ==] [copy]   [== graph ==] [copy] [== graph ==]
                          |      |-|             |      |                idle between
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mrv2.trace.intervals import union
from mrv2.trace.table import OpKind

if TYPE_CHECKING:
    from mrv2.trace.analysis.model import Analysis


@dataclass(frozen=True)
class GraphIdle:
    """All devices together; times in nanoseconds."""

    num_executions: int
    # from the start of a device's first execution to the end of its last, summed over devices
    span_ns: int
    # in no execution, and nothing else ran either
    between_ns: int
    # in an execution, while no operation ran; None if executions were recorded as a whole
    inside_ns: int | None

    @property
    def between_share(self) -> float:
        """Idle time between executions / span."""
        return self.between_ns / self.span_ns if self.span_ns else 0.0

    @property
    def inside_share(self) -> float | None:
        """Idle time inside executions / span."""
        if self.inside_ns is None:
            return None
        return self.inside_ns / self.span_ns if self.span_ns else 0.0


def graph_idle(analysis: Analysis) -> GraphIdle | None:
    """Return the idle time of the steps in the window, the warm-up left out; None below two graph executions."""
    ops, call = analysis.trace.ops, analysis.join.call
    low, high = _settled(analysis)
    whole = ops.kind == OpKind.GRAPH
    rows = np.flatnonzero((whole | (ops.graph_node >= 0)) & (call >= 0))
    if not len(rows):
        return None
    # nodes of one launch are one execution
    calls, which = np.unique(call[rows], return_inverse=True)
    start, end = np.full(len(calls), np.iinfo(np.int64).max), np.full(len(calls), np.iinfo(np.int64).min)
    np.minimum.at(start, which, ops.start[rows])
    np.maximum.at(end, which, ops.end[rows])
    device = np.zeros(len(calls), np.int64)
    device[which] = ops.device[rows]
    kept = (start >= low) & (end <= high)
    if kept.sum() < 2:
        return None
    span = between = inside = 0
    for one in np.unique(device[kept]).tolist():
        mine = kept & (device == one)
        executions = union(start[mine], end[mine])
        first, last = int(executions.start[0]), int(executions.end[-1])
        idle = analysis.busy_anywhere(one).complement(first, last)
        span += last - first
        between += (idle - executions).measure
        inside += (idle & executions).measure
    return GraphIdle(int(kept.sum()), span, between, None if whole.any() else inside)


def _settled(analysis: Analysis) -> tuple[int, int]:
    """Return the window without the steps of the warm-up."""
    low, high = analysis.window
    steps = analysis.windows.start[analysis.warmup :]
    return (int(steps[0]) if len(steps) else low), high
