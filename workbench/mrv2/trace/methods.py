"""The questions that a `Trace` answers itself; each is one call of the analysis with its default settings."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mrv2.trace.analysis import (
        Analysis,
        Bubbles,
        Captures,
        GraphIdle,
        Overview,
        StageGaps,
        Stages,
        Steps,
        SyncTable,
    )
    from mrv2.trace.compare import Align, Comparison
    from mrv2.trace.table import Trace


def _above(name: str) -> Any:
    """Return a module that is built on `Trace`: looked up when first needed, because it imports `Trace` itself."""
    return import_module(f"mrv2.trace.{name}")


class TraceMethods:
    """Base of `Trace`; the analysis with default settings is made once and kept."""

    def analyze(self, **settings: Any) -> Analysis:
        """Return the analysis of this trace; see `Analysis` for the settings."""
        make = _above("analysis").Analysis
        if settings:
            return make(self, **settings)
        if "_analysis" not in self.__dict__:
            self.__dict__["_analysis"] = make(self)
        return self.__dict__["_analysis"]

    def overview(self) -> Overview:
        """Return busy, overlapped, exposed and idle time."""
        return self.analyze().overview()

    def steps(self, **settings: Any) -> Steps:
        """Return one row a step; `settings` as for `Analysis`, for example ``step_name="step"``."""
        return self.analyze(**settings).steps()

    def sync_points(self) -> SyncTable | None:
        """Return every host wait with its price, dearest first; None if none could have been recorded."""
        return self.analyze().syncs()

    def bubbles(self, min_ns: int | None = None) -> Bubbles | None:
        """Return the gaps of the GPU with their causes; None without GPU rows."""
        return self.analyze().bubbles(min_ns)

    def stages(self) -> Stages:
        """Return the durations of each stage."""
        return self.analyze().stages()

    def captures(self) -> Captures | None:
        """Return the device time of graph nodes by the ranges at their capture; None if no capture was recorded."""
        return self.analyze().captures()

    def stage_gaps(self, first: str, second: str) -> StageGaps | None:
        """Return the GPU's time between two stages of each step; None if one of them cannot be told or did not run."""
        return self.analyze().stage_gaps(first, second)

    def graph_idle(self) -> GraphIdle | None:
        """Return the GPU's idle time between and inside executions of CUDA graphs; None below two executions."""
        return self.analyze().graph_idle()

    def compare(self, other: Trace, align: Align = "auto", **settings: Any) -> Comparison:
        """Compare with another trace; differences are other - self.  See `compare.compare`."""
        return _above("compare").compare(self.analyze(), other, align=align, **settings)

    def assert_no_sync(self, within: str = "step", *, allow: Iterable[str] = (), **settings: Any) -> None:
        """Assert that the host waited for the device nowhere inside; see `assertions.assert_no_sync`."""
        _above("assertions").assert_no_sync(self.analyze(), within, allow=allow, **settings)

    def assert_overlap(self, stage: str | None = None, *, at_least: float) -> None:
        """Assert that enough CPU work ran beside a busy GPU; see `assertions.assert_overlap`."""
        _above("assertions").assert_overlap(self.analyze(), stage, at_least=at_least)

    def assert_max_bubble(self, **limits: int | None) -> None:
        """Assert upper limits on the gaps of the GPU; see `assertions.assert_max_bubble`."""
        _above("assertions").assert_max_bubble(self.analyze(), **limits)

    def assert_stage_gap(self, first: str, second: str, *, p95_ns: int) -> None:
        """Assert an upper limit on the GPU's idling between two stages; see `assertions.assert_stage_gap`."""
        _above("assertions").assert_stage_gap(self.analyze(), first, second, p95_ns=p95_ns)

    def assert_graph_idle(self, *, at_most: float) -> None:
        """Assert an upper limit on the GPU's idling between CUDA graphs; see `assertions.assert_graph_idle`."""
        _above("assertions").assert_graph_idle(self.analyze(), at_most=at_most)
