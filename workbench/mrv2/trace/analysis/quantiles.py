"""Durations of stages: per step, on the host and on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mrv2.instrument import stages as names
from mrv2.trace.analysis.frame import Float64, text_table
from mrv2.trace.analysis.nesting import split_by_thread
from mrv2.trace.analysis.windows import OWN_DOMAIN
from mrv2.trace.columns import Int64
from mrv2.trace.table import OpKind, RangeKind, TraceError

if TYPE_CHECKING:
    from mrv2.trace.analysis.model import Analysis

Where = Literal["host", "gpu"]
# tails of fewer samples say nothing
MIN_SAMPLES = 20
_DEVICE_STAGES = (
    names.UPLOAD, names.STAGED_WRITES, names.GATHER_BLOCK_TABLES, names.PREPARE_INPUTS, names.FORWARD,
    names.LOGITS, names.SAMPLE, names.OUTPUT_COPY, names.POST_UPDATE,
)  # fmt: skip


def quantile_row(samples: np.ndarray, quantiles: Sequence[float] = (0.5, 0.95, 0.99)) -> dict[str, float | None]:
    """Return ``count``, ``min_ns``, the quantiles (``p95_ns``...) and ``max_ns``.

    Below `MIN_SAMPLES` samples every quantile but the median is None; without samples everything is.
    """
    out: dict[str, float | None] = {"count": len(samples), "min_ns": float(samples.min()) if len(samples) else None}
    for q in quantiles:
        enough = len(samples) >= (1 if q == 0.5 else MIN_SAMPLES)
        out[f"p{100 * q:g}_ns"] = float(np.quantile(samples, q)) if enough else None
    out["max_ns"] = float(samples.max()) if len(samples) else None
    return out


@dataclass(frozen=True)
class StageSamples:
    """One stage on one side."""

    name: str
    where: Where
    # [num_samples] nanoseconds per step in which it occurs (per call if no steps are marked); empty: not collected
    samples: Float64
    # step number of each sample, -1 if no steps are marked
    steps: Int64
    num_calls: int
    # what to know of the figure, or why there is none
    note: str = ""


def _without_samples(name: str, where: Where, note: str) -> StageSamples:
    return StageSamples(name, where, np.empty(0), np.empty(0, np.int64), 0, note)


class Stages:
    """All stages of a trace; the first `warmup` steps are left out."""

    def __init__(self, rows: list[StageSamples], per: str, warmup: int) -> None:
        self._rows = {(row.name, row.where): row for row in rows}
        # "step" or "call": what one sample is
        self.per, self.warmup = per, warmup

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[StageSamples]:
        return iter(self._rows.values())

    def get(self, name: str, where: Where = "host") -> StageSamples:
        """Return one stage; a stage that the trace does not know has no samples and says so."""
        return self._rows.get((name, where)) or _without_samples(name, where, "not collected: no such range or span")

    def quantiles(self, quantiles: Sequence[float] = (0.5, 0.95, 0.99)) -> list[dict[str, Any]]:
        """Return one row a stage: ``name``, ``where``, ``calls``, then the columns of `quantile_row`, and ``note``.

        Raises:
            TraceError: a quantile outside 0..1.
        """
        if not all(0 <= q <= 1 for q in quantiles):
            raise TraceError(f"quantiles({list(quantiles)}): each lies between 0 and 1")
        return [
            {
                "name": row.name,
                "where": row.where,
                "calls": row.num_calls,
                **quantile_row(row.samples, quantiles),
                "note": row.note,
            }
            for row in self
        ]

    def __str__(self) -> str:
        return text_table(self.quantiles(), limit=len(self))


def stage_table(analysis: Analysis) -> Stages:
    """Return the stages of the trace, in the order in which they first occur, host before device."""
    host, device = _host_rows(analysis), _device_rows(analysis)
    order = {row.name: i for i, row in reversed(list(enumerate([*host, *device])))}
    rows = sorted([*host, *device], key=lambda row: (row.where != "host", order[row.name]))
    return Stages([*rows, *_missing(analysis, rows)], "step" if len(analysis.windows) else "call", analysis.warmup)


def _samples(
    analysis: Analysis, name: str, where: Where, values: np.ndarray, steps: np.ndarray, note: str = ""
) -> StageSamples:
    """Sum values of one stage by step."""
    windows = analysis.windows
    if not len(windows):
        return StageSamples(name, where, values, np.full(len(values), -1), len(values), note)
    at = windows.index_of(steps)
    known = at >= analysis.warmup
    sums = np.bincount(at[known], weights=values[known], minlength=len(windows))
    occurs = np.flatnonzero(np.bincount(at[known], minlength=len(windows)))
    return StageSamples(name, where, sums[occurs], windows.step[occurs], int(known.sum()), note)


def _in_window(analysis: Analysis, start: np.ndarray) -> np.ndarray:
    """Return what belongs to the window; with steps, the step numbers decide instead: work may outlast its turn."""
    low, high = analysis.window
    return np.ones(len(start), np.bool_) if len(analysis.windows) else (start >= low) & (start < high)


def _range_groups(analysis: Analysis) -> list[tuple[str, np.ndarray]]:
    """Return the rows of all ranges in the window by name, in order of first occurrence."""
    ranges = analysis.trace.ranges
    rows = np.flatnonzero((ranges.kind != RangeKind.MARK) & _in_window(analysis, ranges.start))
    if not len(rows):
        return []
    order = np.argsort(ranges.name[rows], kind="stable")
    parts = np.split(rows[order], np.flatnonzero(np.diff(ranges.name[rows][order])) + 1)
    parts.sort(key=lambda part: part[0])
    return [(analysis.trace.name_of(int(ranges.name[part[0]])), part) for part in parts]


def _host_rows(analysis: Analysis) -> list[StageSamples]:
    ranges = analysis.trace.ranges
    steps = analysis.step_ids.of_ranges
    found = [
        _samples(analysis, name, "host", (ranges.end - ranges.start)[rows], steps[rows])
        for name, rows in _range_groups(analysis)
    ]
    return [row for row in found if len(row.samples)]


def _device_rows(analysis: Analysis) -> list[StageSamples]:
    trace, out = analysis.trace, []
    projection = analysis.projection()
    if projection is not None:
        whole = _with_whole_graphs(analysis)
        for name, rows in _range_groups(analysis):
            rows = rows[projection.ops[rows] > 0]
            if len(rows):
                steps = analysis.step_ids.of_ranges[rows]
                note = "upper bound: its graph is recorded as a whole" if name in whole else ""
                out.append(_samples(analysis, name, "gpu", projection.gpu_busy_ns[rows], steps, note))
    ops = trace.ops
    spans = np.flatnonzero((ops.kind == OpKind.STAGE) & _in_window(analysis, ops.start))
    for name in np.unique(ops.name[spans]).tolist():
        rows = spans[ops.name[spans] == name]
        note = "from the start of its first operation to the end of its last"
        length, steps = (ops.end - ops.start)[rows], analysis.step_ids.of_ops[rows]
        out.append(_samples(analysis, trace.name_of(name), "gpu", length, steps, note))
    return out


def _with_whole_graphs(analysis: Analysis) -> set[str]:
    """Return the names of ranges that launched a graph that is recorded as a whole."""
    trace, join = analysis.trace, analysis.join
    calls = np.unique(join.call[(trace.ops.kind == OpKind.GRAPH) & join.has_call])
    found: set[int] = set()
    for key, mine in split_by_thread(trace.api.process, trace.api.thread, calls).items():
        nest = analysis.nests[key]
        node = np.unique(nest.at(trace.api.start[mine]))
        while (node := node[node >= 0]).size:
            found.update(trace.ranges.name[nest.row[node]].tolist())
            node = np.unique(nest.parent[node])
    return {trace.name_of(i) for i in found}


def _missing(analysis: Analysis, rows: list[StageSamples]) -> list[StageSamples]:
    """Return rows without samples for device stages of this package's engine that the trace has no evidence of."""
    trace = analysis.trace
    domain = trace.string_id(OWN_DOMAIN)
    if trace.meta.get("source") != "recorder" and not (domain >= 0 and np.any(trace.ranges.domain == domain)):
        return []
    if not len(trace.ops):
        reason = f"not collected: no GPU rows ({trace.coverage['ops'].reason or 'none in the file'})"
    elif analysis.busy_is_upper_bound:
        reason = "not collected: did not run, or runs inside a CUDA graph that is recorded as a whole"
    else:
        reason = "not collected: no range of this name submitted work; it did not run, or runs inside a CUDA graph"
    known = {row.name for row in rows if row.where == "gpu"}
    return [_without_samples(name, "gpu", reason) for name in _DEVICE_STAGES if name not in known]
