"""Statements about a trace that a test can make; each fails when the evidence for it is missing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import numpy as np

from mrv2.errors import MRV2Error
from mrv2.trace.analysis import Analysis, SyncTable
from mrv2.trace.analysis.overlap import percent
from mrv2.trace.analysis.skew import dropped_records
from mrv2.trace.intervals import Intervals, union
from mrv2.trace.table import RangeKind, Trace

STEP = "step"
_SHOWN = 5


class TraceAssertionError(MRV2Error, AssertionError):
    """A statement about a trace is false, or the trace holds no evidence for it."""


def assert_no_sync(
    source: Trace | Analysis,
    within: str = STEP,
    *,
    allow: Iterable[str] = (),
    min_stall_ns: int = 0,
    all_threads: bool = False,
    named_waits_suffice: bool = False,
    min_coverage: float = 0.95,
) -> None:
    """Assert that the host waited for the device nowhere within every step, or within ranges of a name.

    Args:
        within: "step", or the name of a range.
        allow: patterns (``*`` and ``?`` as in file names) of waits that are there by design.  Each is compared with
            the reason of a named wait, the call, the names of the enclosing ranges, and ``thread:NAME``.
        min_stall_ns: waits in which the GPU still worked for less than this do not count; those of unknown stall do.
        all_threads: waits of any thread count, by default only those of the engine threads.
        named_waits_suffice: accept a recording without CUDA calls, in which only named waits can be seen.
        min_coverage: least share of operations whose call is in the trace; below, calls were lost.

    Raises:
        TraceAssertionError: there are such waits (the message names them), or the trace cannot tell.
    """
    analysis = _analysis(source)
    what = f"no sync within {within!r}"
    _require_complete(analysis, what)
    table = analysis.syncs()
    calls = analysis.trace.coverage["api"]
    if table is None or (calls.status == "not collected" and not named_waits_suffice):
        raise TraceAssertionError(
            f"{what}: CUDA calls were not collected ({calls.reason or 'no reason given'}), so a wait would not show"
        )
    if len(analysis.trace.ops) and len(analysis.trace.api):
        share = float(analysis.join.has_call.mean())
        if share < min_coverage:
            raise TraceAssertionError(
                f"{what}: only {percent(share)} of the GPU operations have their call in the trace, calls were lost"
            )
    inside = _inside(analysis, table, within, what, all_threads)
    if min_stall_ns > 0:
        inside &= np.isnan(table.stall_ns) | (table.stall_ns >= min_stall_ns)
    patterns = list(allow)
    found = [row for row in np.flatnonzero(inside).tolist() if not _is_allowed(analysis, table, row, patterns)]
    if found:
        found.sort(key=lambda row: table.start[row])
        lines = [_describe(table, row) for row in found[:_SHOWN]]
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise TraceAssertionError(
            f"{what}: {len(found)} host waits (allowed: {', '.join(patterns) or 'none'}): {'; '.join(lines)}{more}"
        )


def assert_overlap(source: Trace | Analysis, stage: str | None = None, *, at_least: float) -> None:
    """Assert that at least a share of the CPU work ran while the GPU was busy.

    Args:
        stage: only the work inside ranges of this name counts; None: all work of the engine threads.
        at_least: 0..1.  With several devices their mean is compared.

    Raises:
        TraceAssertionError: the share is smaller, or the trace cannot tell.
    """
    analysis = _analysis(source)
    what = f"overlap of {stage or 'the CPU work'} at least {percent(at_least)}"
    _require_complete(analysis, what)
    _require_gpu(analysis, what)
    share = analysis.overview().overlap_cpu if stage is None else _stage_overlap(analysis, stage, what)
    if share is None:
        raise TraceAssertionError(f"{what}: no host work was recorded ({analysis.trace.coverage['ranges']})")
    if share < at_least:
        raise TraceAssertionError(f"{what}: it is {percent(share)}")


def assert_max_bubble(
    source: Trace | Analysis,
    *,
    max_ns: int | None = None,
    p95_ns: int | None = None,
    step_p95_ns: int | None = None,
) -> None:
    """Assert upper limits on the gaps of the GPU inside the window.

    Args:
        max_ns: of the longest gap.
        p95_ns: of the 95th percentile of the gaps (the longest, if there are fewer than 20).
        step_p95_ns: of the 95th percentile of the gaps' sum in each step (the largest sum, below 20 steps).

    Raises:
        TraceAssertionError: a limit is exceeded, or the trace cannot tell.
        ValueError: no limit is given.
    """
    if max_ns is None and p95_ns is None and step_p95_ns is None:
        raise ValueError("assert_max_bubble: give at least one of max_ns, p95_ns, step_p95_ns")
    analysis = _analysis(source)
    _require_complete(analysis, "bubbles of the GPU")
    _require_gpu(analysis, "bubbles of the GPU")
    bubbles = analysis.bubbles()
    assert bubbles is not None, "a trace with GPU rows has bubbles, be it none"
    lengths = bubbles.length_ns
    if max_ns is not None and len(lengths) and int(lengths.max()) > max_ns:
        longest = bubbles.longest(1)
        raise TraceAssertionError(
            f"longest bubble at most {max_ns} ns: one at {int(longest.start[0])} lasts {int(lengths.max())} ns, "
            f"mostly {longest.main_cause[0]}"
        )
    if p95_ns is not None and len(lengths) and _p95(lengths) > p95_ns:
        raise TraceAssertionError(
            f"95th percentile of {len(lengths)} bubbles at most {p95_ns} ns: "
            f"it is {_p95(lengths):.0f} ns; {_causes(analysis)}"
        )
    if step_p95_ns is not None:
        steps = analysis.steps().take(slice(analysis.warmup, None))
        if not len(steps) or steps.bubble_ns is None:
            raise TraceAssertionError(f"bubbles per step: {steps.source}")
        if _p95(steps.bubble_ns) > step_p95_ns:
            raise TraceAssertionError(
                f"95th percentile of the bubbles in {len(steps)} steps at most {step_p95_ns} ns: "
                f"it is {_p95(steps.bubble_ns):.0f} ns; {_causes(analysis)}"
            )


def assert_stage_gap(source: Trace | Analysis, first: str, second: str, *, p95_ns: int) -> None:
    """Assert that the GPU hardly idles between two stages of a step.

    Args:
        first, second: stages, in the order in which they run.
        p95_ns: of the 95th percentile, over steps behind the warm-up, of the idle time between the last operation of
            `first` and the first one of `second` (the largest, below 20 steps).

    Raises:
        TraceAssertionError: the limit is exceeded, or the trace cannot tell.
    """
    analysis = _analysis(source)
    what = f"idle time between {first!r} and {second!r} at most {p95_ns} ns"
    _require_complete(analysis, what)
    _require_gpu(analysis, what)
    if not len(analysis.windows):
        raise TraceAssertionError(f"{what}: {analysis.windows.source}")
    gaps = analysis.stage_gaps(first, second)
    if gaps is None:
        hint = analysis.trace.coverage["ops.captured"].reason or "they did not run"
        raise TraceAssertionError(f"{what}: no operations are known to belong to both stages ({hint})")
    settled = gaps.take(np.isin(gaps.step, analysis.windows.step[analysis.warmup :]))
    if not len(settled):
        raise TraceAssertionError(f"{what}: no step behind the warm-up ran both stages")
    if _p95(settled.idle_ns) > p95_ns:
        worst = int(settled.idle_ns.argmax())
        raise TraceAssertionError(
            f"{what}: the 95th percentile of {len(settled)} steps is {_p95(settled.idle_ns):.0f} ns; the longest, "
            f"{int(settled.idle_ns[worst])} ns, in step {int(settled.step[worst])}"
        )


def assert_graph_idle(source: Trace | Analysis, *, at_most: float) -> None:
    """Assert that the GPU idles for a small share of the time between the executions of CUDA graphs.

    Args:
        at_most: 0..1, of the time from the first execution behind the warm-up to the last.

    Raises:
        TraceAssertionError: the share is larger, or the trace cannot tell.
    """
    analysis = _analysis(source)
    what = f"idle between CUDA graphs at most {percent(at_most)}"
    _require_complete(analysis, what)
    _require_gpu(analysis, what)
    found = analysis.graph_idle()
    if found is None:
        raise TraceAssertionError(f"{what}: fewer than two executions of CUDA graphs were recorded in the steps")
    if found.between_share > at_most:
        raise TraceAssertionError(f"{what}: it is {percent(found.between_share)} of {found.num_executions} executions")


def _analysis(source: Trace | Analysis) -> Analysis:
    return source if isinstance(source, Analysis) else Analysis(source)


def _p95(values: np.ndarray) -> float:
    return float(np.quantile(values, 0.95)) if len(values) >= 20 else float(values.max())


def _causes(analysis: Analysis) -> str:
    bubbles = analysis.bubbles()
    top = list((bubbles.by_cause() if bubbles is not None else {}).items())[:3]
    return "most of it: " + ", ".join(f"{name} {ns} ns" for name, ns in top)


def _require_complete(analysis: Analysis, what: str) -> None:
    lost = dropped_records(analysis.trace)
    if lost:
        raise TraceAssertionError(f"{what}: the recording is incomplete ({lost[0]})")


def _require_gpu(analysis: Analysis, what: str) -> None:
    if not len(analysis.trace.ops):
        reason = analysis.trace.coverage["ops"].reason or "no rows"
        raise TraceAssertionError(f"{what}: GPU activity was not collected ({reason})")


def _ranges_named(analysis: Analysis, name: str, what: str) -> np.ndarray:
    ranges, (low, high) = analysis.trace.ranges, analysis.window
    chosen = (ranges.name == analysis.trace.string_id(name)) & (ranges.kind != RangeKind.MARK)
    rows = np.flatnonzero(chosen & (ranges.start >= low) & (ranges.start < high))
    if not len(rows):
        raise TraceAssertionError(f"{what}: no range named {name!r} was collected in the window")
    return rows


def _inside(analysis: Analysis, table: SyncTable, within: str, what: str, all_threads: bool) -> np.ndarray:
    """Return which waits lie in the steps or in the ranges of that name; bool [num_syncs]."""
    threads = set(analysis.engine_threads)
    of_engine = [(p, t) in threads for p, t in zip(table.process.tolist(), table.thread.tolist())]
    # a wait whose thread is unknown may be the engine's
    engine = np.array(of_engine, np.bool_) | (table.thread < 0) | all_threads
    if within == STEP:
        if not len(analysis.windows):
            raise TraceAssertionError(f"{what}: {analysis.windows.source}")
        return (analysis.windows.index_at(table.start) >= 0) & engine
    ranges = analysis.trace.ranges
    rows = _ranges_named(analysis, within, what)
    out = np.zeros(len(table), np.bool_)
    for process, thread in {(int(ranges.process[r]), int(ranges.thread[r])) for r in rows.tolist()}:
        mine = rows[(ranges.process[rows] == process) & (ranges.thread[rows] == thread)]
        own = (table.process == process) & ((table.thread == thread) | (table.thread < 0) | all_threads)
        out |= own & union(ranges.start[mine], ranges.end[mine]).contains(table.start)
    return out


def _is_allowed(analysis: Analysis, table: SyncTable, row: int, patterns: Sequence[str]) -> bool:
    key = int(table.process[row]), int(table.thread[row])
    labels = [table.reason[row], table.name[row], *table.path[row].split(" > ")]
    labels.append(f"thread:{analysis.trace.thread_names.get(key, key[1])}")
    return any(label and fnmatchcase(label, pattern) for label in labels for pattern in patterns)


def _describe(table: SyncTable, row: int) -> str:
    step = f"step {table.step[row]}: " if table.step[row] >= 0 else ""
    via = f" after {table.via[row]}" if table.via[row] else ""
    stall = table.stall_ns[row]
    cost = "stall unknown" if np.isnan(stall) else f"stall {stall / 1e3:.1f} us"
    frames, source = table.stack(row)
    place = f" at {frames[0]}" if source not in ("ranges", "unknown") else ""
    return f"{step}{table.name[row]}{via} in {table.path[row] or 'no range'}{place}, {cost}"


def _stage_overlap(analysis: Analysis, stage: str, what: str) -> float | None:
    ranges = analysis.trace.ranges
    rows = _ranges_named(analysis, stage, what)
    work = Intervals.empty()
    for key in {(int(ranges.process[r]), int(ranges.thread[r])) for r in rows.tolist()}:
        mine = rows[(ranges.process[rows] == key[0]) & (ranges.thread[rows] == key[1])]
        work = work | (union(ranges.start[mine], ranges.end[mine]) - analysis.host.waits(key))
    work = work.clip(*analysis.window)
    if not work.measure:
        return None
    shares = [(work & analysis.busy(device)).measure / work.measure for device in analysis.devices]
    return sum(shares) / len(shares)
