"""Where one step ends and the next begins.

A step of this package's engine is no single range: its stages carry the step number, and with async scheduling the
turn of the loop that launches step n also waits for step n-1.  So a step's window is the *turn*: from the start of its
``schedule`` to the start of the next one.  Turns partition the time of the engine thread:

    turn n            | schedule n | execute n | sample n | wait n-1 | update n-1 |
    turn n+1                                                                      | schedule n+1 | ...

A turn that nothing follows within `IDLE_AFTER_NS` ends with its last range: an idle server is not in a step.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mrv2.instrument.stages import SCHEDULE
from mrv2.trace.analysis.nesting import ThreadKey, split_by_thread
from mrv2.trace.columns import Int64
from mrv2.trace.table import RangeKind, Ranges, Trace

OWN_DOMAIN = "mrv2"
IDLE_AFTER_NS = 10_000_000
StepSpan = Literal["range", "turn"]
_PROFILER_STEP = re.compile(r"ProfilerStep#(\d+)$")
# ranges of other engines that open a step, and how far the step reaches
_KNOWN: tuple[tuple[str, StepSpan], ...] = (("step", "range"), ("llm_engine step: get_output", "turn"))


@dataclass(frozen=True, eq=False)
class StepWindows:
    """The steps of one engine thread, sorted by start."""

    # [num_steps] int64 ns
    start: Int64
    end: Int64
    # step number: the ranges' payload, or the position
    step: Int64
    # the thread that the step ranges are on
    thread: ThreadKey | None
    # what marks a step, in words; or why there are none
    source: str

    def __len__(self) -> int:
        return len(self.start)

    def index_at(self, times: np.ndarray) -> np.ndarray:
        """Return the row of the step that began last before each of `times` and still runs, or -1; int64."""
        if not len(self):
            return np.full(len(times), -1, np.int64)
        row = np.searchsorted(self.start, times, "right") - 1
        return np.where((row >= 0) & (times < self.end[row]), row, -1)

    def index_of(self, steps: np.ndarray) -> np.ndarray:
        """Return the row of each step number, or -1; int64."""
        order = np.argsort(self.step, kind="stable")
        if not len(order):
            return np.full(len(steps), -1, np.int64)
        at = np.minimum(np.searchsorted(self.step[order], steps), len(order) - 1)
        return np.where(self.step[order][at] == steps, order[at], -1)


def no_steps(reason: str) -> StepWindows:
    """Return an empty result that says why."""
    empty = np.empty(0, np.int64)
    return StepWindows(empty, empty, empty, None, reason)


def outermost(ranges: Ranges, rows: np.ndarray) -> np.ndarray:
    """Return those of `rows`, sorted ranges of one thread, that begin when all earlier ones are over."""
    if not len(rows):
        return rows
    reach = np.maximum.accumulate(ranges.end[rows])
    return rows[np.concatenate([[True], ranges.start[rows][1:] >= reach[:-1]])]


def find_steps(
    trace: Trace, *, domain: str | None = OWN_DOMAIN, name: str | None = None, span: StepSpan | None = None
) -> StepWindows:
    """Find the steps of a trace.

    Args:
        domain: NVTX domain of the ranges that mark steps; None for any.
        name: the range that is a step (``span="range"``, the default) or that opens one (``"turn"``: up to the next
            such range).  None: stages of this package's engine if the trace has them, else what other tools and
            engines call a step (``ProfilerStep#n``, ``step``, vLLM's ``llm_engine step: get_output``).
    """
    ranges = trace.ranges
    if not len(ranges):
        return no_steps(f"steps not collected: {trace.coverage['ranges'].reason or 'the trace has no ranges'}")
    in_domain = np.ones(len(ranges), np.bool_)
    if domain is not None:
        in_domain = ranges.domain == trace.string_id(domain)
    usable = ranges.kind != RangeKind.MARK
    if name is not None:
        chosen = usable & (ranges.name == trace.string_id(name))
        # a name is clear enough: the domain only narrows it down where both fit
        chosen = chosen & in_domain if (chosen & in_domain).any() else chosen
        if not chosen.any():
            return no_steps(f"steps not collected: no range is named {name!r}")
        return _from_ranges(trace, np.flatnonzero(chosen), name, span or "range")
    staged = usable & in_domain & (ranges.step >= 0)
    if staged.any():
        return _from_stages(trace, np.flatnonzero(staged), domain)
    return _from_known(trace, usable)


def _from_stages(trace: Trace, rows: np.ndarray, domain: str | None) -> StepWindows:
    ranges = trace.ranges
    found = []
    for key, mine in split_by_thread(ranges.process, ranges.thread, rows).items():
        outer = outermost(ranges, mine)
        opens = outer[ranges.name[outer] == trace.string_id(SCHEDULE)]
        if len(opens):
            # a turn that could schedule nothing is repeated under the same number
            opens = opens[np.concatenate([[True], np.diff(ranges.step[opens]) != 0])]
        else:
            highest = np.maximum.accumulate(ranges.step[outer])
            opens = outer[np.concatenate([[True], np.diff(highest) > 0])]
        found.append((len(opens), key, opens, outer))
    _, key, opens, outer = max(found, key=lambda f: f[0])
    start = ranges.start[opens]
    words = f"turns of the step loop, by the stages in domain {domain!r}" if domain else "turns of the step loop"
    return StepWindows(start, _turn_ends(trace, start, outer), ranges.step[opens], key, words)


def _turn_ends(trace: Trace, start: np.ndarray, outer: np.ndarray) -> np.ndarray:
    """Return where each turn ends; int64 ns."""
    ranges = trace.ranges
    reach = np.maximum.accumulate(ranges.end[outer])
    following = np.append(start[1:], np.iinfo(np.int64).max)
    last_end = reach[np.searchsorted(ranges.start[outer], following, "left") - 1]
    return np.where(following - last_end > IDLE_AFTER_NS, last_end, following)


def _from_ranges(trace: Trace, rows: np.ndarray, name: str, span: StepSpan) -> StepWindows:
    ranges = trace.ranges
    by_thread = split_by_thread(ranges.process, ranges.thread, rows)
    key = max(by_thread, key=lambda k: len(by_thread[k]))
    mine = by_thread[key]
    start, end, step = ranges.start[mine], ranges.end[mine], ranges.step[mine]
    if np.any(step < 0):
        step = np.arange(len(mine), dtype=np.int64)
    if span == "turn":
        on_thread = (ranges.process == key[0]) & (ranges.thread == key[1]) & (ranges.kind != RangeKind.MARK)
        end = _turn_ends(trace, start, np.flatnonzero(on_thread))
        return StepWindows(start, end, step, key, f"from each range {name!r} to the next")
    return StepWindows(start, end, step, key, f"ranges named {name!r}")


def _from_known(trace: Trace, usable: np.ndarray) -> StepWindows:
    ranges = trace.ranges
    numbers = {i: int(m[1]) for i, text in enumerate(trace.strings) if (m := _PROFILER_STEP.match(text))}
    rows = np.flatnonzero(usable & np.isin(ranges.name, list(numbers)))
    if len(rows):
        by_thread = split_by_thread(ranges.process, ranges.thread, rows)
        key = max(by_thread, key=lambda k: len(by_thread[k]))
        mine = by_thread[key]
        step = np.array([numbers[i] for i in ranges.name[mine].tolist()], np.int64)
        return StepWindows(ranges.start[mine], ranges.end[mine], step, key, "ranges named 'ProfilerStep#n'")
    for name, span in _KNOWN:
        rows = np.flatnonzero(usable & (ranges.name == trace.string_id(name)))
        if len(rows):
            return _from_ranges(trace, rows, name, span)
    return no_steps("steps not collected: no ranges that mark them; pass step_name= one of the trace's range names")
