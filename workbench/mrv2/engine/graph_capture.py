"""Captures the graphs that the knobs ask for: all of them at once, or a few between two steps.

    set_knobs      | drain | other knobs | ......................................... everything has a graph
    capture              [g g g]   [g g g]   [g g]                        at least one graph in each pause
    steps                       n n       n n     n n n n n n             n: without a graph, or with one that is there

A pause lasts some hundredths of a second, and steps get as long before the next one: requests go on at half
their speed at least, instead of standing still until the last graph is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from mrv2.config import Knobs
from mrv2.device import Device
from mrv2.engine.messages import CaptureProgress
from mrv2.runner.forward import GraphKey
from mrv2.runner.protocol import GraphSet

# of a pause between two steps
PAUSE_S = 0.05


class GraphCapture:
    """What is missing, and how far its capture is.

    Args:
        graph_sets: returns the sets of graphs of the runner that is on.
        make_inert: fills the forward's buffers with rows that read and write nothing.
    """

    def __init__(
        self, device: Device, graph_sets: Callable[[], Sequence[GraphSet]], make_inert: Callable[[], None]
    ) -> None:
        self._device = device
        self._graph_sets = graph_sets
        self._make_inert = make_inert
        self.pause_s = PAUSE_S
        # of the capture that goes on between steps; 0 = none does
        self._total = 0
        self._next_pause = float("-inf")

    @property
    def is_pending(self) -> bool:
        """Graphs are left for pauses between steps."""
        return self._total > 0

    def num_missing(self, knobs: Knobs) -> int:
        """Return how many graphs `knobs` ask for that are not there."""
        return sum(len(graphs.missing(knobs)) for graphs in self._graph_sets())

    def postpone(self, knobs: Knobs) -> None:
        """Leave what is missing to `in_a_pause`."""
        self._total, self._next_pause = self.num_missing(knobs), float("-inf")

    def all_now(self, knobs: Knobs) -> None:
        """Capture what is missing; no step is in flight."""
        self._total = 0
        wanted = [graphs for graphs in self._graph_sets() if graphs.missing(knobs)]
        for graphs in wanted:
            self._make_inert()
            graphs.capture(self._device.main, knobs)
        if wanted:
            self._device.synchronize("graph capture")

    def is_due(self, steps_wait: bool) -> bool:
        """Say whether it is time for a pause; `steps_wait`: otherwise a step could run."""
        return self.is_pending and not (steps_wait and perf_counter() < self._next_pause)

    def in_a_pause(self, knobs: Knobs) -> None:
        """Capture at least one graph, and others while the pause lasts; no step is in flight."""
        began = perf_counter()
        with self._device.capture_slice(self.pause_s):
            for graphs in self._graph_sets():
                if graphs.missing(knobs):
                    self._make_inert()
                    graphs.capture(self._device.main, knobs)
        self._device.synchronize("graph capture")
        if not self.num_missing(knobs):
            self._total = 0
        self._next_pause = 2 * perf_counter() - began

    def progress(self, knobs: Knobs) -> CaptureProgress | None:
        """Return how far the capture between steps is; None if none goes on."""
        if not self.is_pending:
            return None
        missing = [key for graphs in self._graph_sets() for key in graphs.missing(knobs)]
        return CaptureProgress(
            num_captured=self._total - len(missing),
            num_graphs=self._total,
            upcoming=describe_graph(missing[0]) if missing else "",
        )


def describe_graph(key: object) -> str:
    """Return in words what the graph of a key does: ``forward, 16 requests``."""
    shape = key if isinstance(key, GraphKey) else getattr(key, "shape", None)
    method, drafts = getattr(key, "method", ""), getattr(key, "num_drafts", None)
    what = f"{method} chain of {drafts} drafts" if drafts is not None and method else "whole step"
    if isinstance(key, GraphKey):
        what = "forward"
    if not isinstance(shape, GraphKey):
        return what
    if not shape.query_len:
        return f"{what}, {shape.num_tokens} tokens"
    each = "" if shape.query_len == 1 else f" of {shape.query_len} tokens"
    return f"{what}, {shape.num_reqs} request{'s' * (shape.num_reqs > 1)}{each}"
