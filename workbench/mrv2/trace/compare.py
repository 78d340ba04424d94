"""Two traces side by side: per-step figures and stages, with bootstrap intervals, and a verdict in one sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mrv2.trace.analysis import Analysis
from mrv2.trace.analysis.frame import text_table
from mrv2.trace.table import Trace, TraceError

Align = Literal["auto", "step_id", "position", "none"]
_METRICS = ("wall_ns", "cpu_ns", "gpu_busy_ns", "exposed_ns", "bubble_ns", "idle_both_ns", "syncs", "sync_stall_ns")
_INTERVAL = (0.025, 0.975)
# draws at a time, so that long traces need little memory
_CHUNK = 4_000_000


@dataclass(frozen=True)
class Delta:
    """One figure in both traces: medians over steps; None without evidence on that side."""

    # "step" for whole steps, else the stage
    name: str
    # column of the steps table, or "host" / "gpu" time of a stage
    what: str
    a: float | None
    b: float | None
    # median of the step-by-step differences b - a (of the medians if steps are not aligned), and its 95 % interval
    delta: float | None
    low: float | None
    high: float | None
    # steps that were compared
    count: int

    @property
    def relative(self) -> float | None:
        """Delta / a; None if a is 0 or unknown."""
        return None if self.delta is None or not self.a else self.delta / self.a

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


@dataclass(frozen=True)
class Comparison:
    """What differs between trace a and trace b."""

    names: tuple[str, str]
    # how steps were paired: "step_id", "position" or "none"
    align: str
    deltas: list[Delta]
    # settings that differ: key to (a, b)
    config: dict[str, tuple[Any, Any]]
    # what makes the two hard to compare
    notes: list[str]

    def get(self, name: str, what: str) -> Delta:
        """Return one figure.

        Raises:
            TraceError: it is not in the comparison.
        """
        for delta in self.deltas:
            if (delta.name, delta.what) == (name, what):
                return delta
        raise TraceError(f"the comparison has no {what!r} of {name!r}")

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict a figure."""
        return [
            {
                "name": d.name,
                "what": d.what,
                "a": d.a,
                "b": d.b,
                "delta": d.delta,
                "low": d.low,
                "high": d.high,
                "relative": d.relative,
                "steps": d.count,
            }
            for d in self.deltas
        ]

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        a, b = self.names
        wall = self.get("step", "wall_ns")
        if wall.delta is None or wall.low is None or wall.high is None:
            return f"{b} and {a} cannot be compared: no steps with evidence on both sides."
        interval = f"95 % interval {wall.low / 1e3:+.0f} to {wall.high / 1e3:+.0f} us, {wall.count} steps"
        if not wall.is_clear:
            return f"No clear difference: a step of {b} takes {wall.delta / 1e3:+.0f} us against {a} ({interval})."
        share = "" if wall.relative is None else f" ({100 * abs(wall.relative):.0f} %)"
        word = "faster" if wall.delta < 0 else "slower"
        size = f"{abs(wall.delta) / 1e3:.0f} us{share}"
        return f"A step of {b} is {size} {word} than one of {a} ({interval}){self._why()}."

    def _why(self) -> str:
        """Return the figure that moved most in the direction of the step time."""
        wall = self.get("step", "wall_ns").delta or 0.0
        found = [d for d in self.deltas if d.name == "step" and d.what in ("exposed_ns", "bubble_ns", "sync_stall_ns")]
        found = [d for d in found if d.is_clear and d.delta is not None and d.delta * wall > 0]
        if not found:
            return ""
        best = max(found, key=lambda d: abs(d.delta or 0.0))
        words = {"exposed_ns": "exposed CPU time", "bubble_ns": "GPU bubbles", "sync_stall_ns": "time in host waits"}
        return f", with {words[best.what]} {(best.delta or 0.0) / 1e3:+.0f} us a step"

    def __str__(self) -> str:
        rows = []
        for d in self.deltas:
            scale = 1e3 if d.what.endswith("_ns") or d.what in ("host", "gpu") else 1
            figures = {"a": d.a, "b": d.b, "delta": d.delta, "low": d.low, "high": d.high}
            values = {key: None if value is None else value / scale for key, value in figures.items()}
            rows.append({"name": d.name, "what": d.what.removesuffix("_ns"), **values, "steps": d.count})
        lines = [self.verdict, *self.notes, *(f"{k}: {x} -> {y}" for k, (x, y) in self.config.items())]
        return "\n".join([*lines, "(times in us)", text_table(rows, limit=len(rows))])


def compare(
    a: Trace | Analysis,
    b: Trace | Analysis,
    *,
    names: tuple[str, str] = ("a", "b"),
    align: Align = "auto",
    resamples: int = 2000,
    seed: int = 0,
) -> Comparison:
    """Compare two traces step by step; differences are b - a.

    Args:
        align: "step_id" pairs equal step numbers, "position" the n-th steps after warm-up, "none" resamples both sides
            independently; "auto": step numbers if most are common, else the position.
        resamples: bootstrap draws. `seed` makes them repeatable.

    Raises:
        TraceError: an unknown `align`.
    """
    if align not in ("auto", "step_id", "position", "none"):
        raise TraceError(f"compare(align={align!r}): legal are 'auto', 'step_id', 'position', 'none'")
    left, right = (x if isinstance(x, Analysis) else Analysis(x) for x in (a, b))
    series = _series(left), _series(right)
    steps = tuple(analysis.windows.step[analysis.warmup :] for analysis in (left, right))
    how = _alignment(*steps) if align == "auto" else align
    rng = np.random.default_rng(seed)
    keys = list(dict.fromkeys([*series[0], *series[1]]))
    deltas = [_delta(key, series[0].get(key), series[1].get(key), steps, how, resamples, rng) for key in keys]
    return Comparison(names, how, deltas, config_diff(left.trace, right.trace), _notes(left, right))


_Series = dict[tuple[str, str], "tuple[np.ndarray, np.ndarray] | None"]


def _series(analysis: Analysis) -> _Series:
    """Return (step numbers, values) of every figure after warm-up; None for one without evidence."""
    steps = analysis.steps().take(slice(analysis.warmup, None))
    out: _Series = {}
    for name in _METRICS:
        column = steps.columns()[name]
        out["step", name] = None if column is None or not len(steps) else (steps.step, np.asarray(column, np.float64))
    if len(steps):
        for stage in analysis.stages():
            found = (stage.steps, np.asarray(stage.samples, np.float64)) if len(stage.samples) else None
            out[stage.name, stage.where] = found
    return out


def _alignment(a: np.ndarray, b: np.ndarray) -> str:
    common = len(np.intersect1d(a, b))
    return "step_id" if common and 2 * common >= min(len(a), len(b)) else "position"


def _delta(
    key: tuple[str, str],
    a: tuple[np.ndarray, np.ndarray] | None,
    b: tuple[np.ndarray, np.ndarray] | None,
    steps: tuple[np.ndarray, ...],
    how: str,
    resamples: int,
    rng: np.random.Generator,
) -> Delta:
    medians = [None if side is None else float(np.median(side[1])) for side in (a, b)]
    if a is None or b is None:
        return Delta(*key, *medians, None, None, None, 0)  # type: ignore[arg-type]  # medians are the two of a and b
    if how == "none":
        draws = _medians(b[1], resamples, rng) - _medians(a[1], resamples, rng)
        delta, count = float(np.median(b[1]) - np.median(a[1])), min(len(a[1]), len(b[1]))
    else:
        # a common index: the step number, or the position among the steps of its own trace
        index = [side[0] if how == "step_id" else np.searchsorted(own, side[0]) for side, own in zip((a, b), steps)]
        _, at_a, at_b = np.intersect1d(index[0], index[1], return_indices=True)
        if not len(at_a):
            return Delta(*key, *medians, None, None, None, 0)  # type: ignore[arg-type]  # as above
        difference = b[1][at_b] - a[1][at_a]
        draws = _medians(difference, resamples, rng)
        delta, count = float(np.median(difference)), len(difference)
    low, high = np.quantile(draws, _INTERVAL)
    return Delta(*key, *medians, delta, float(low), float(high), count)  # type: ignore[arg-type]  # as above


def _medians(values: np.ndarray, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """Return the medians of resamples with replacement; [resamples]."""
    at_once = max(1, _CHUNK // len(values))
    parts = [
        np.median(values[rng.integers(0, len(values), (min(at_once, resamples - done), len(values)))], axis=1)
        for done in range(0, resamples, at_once)
    ]
    return np.concatenate(parts)


def config_diff(a: Trace, b: Trace) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ: config, knobs, versions, GPU, source and granularity; a missing one is None."""
    left, right = _settings(a), _settings(b)
    keys = list(dict.fromkeys([*left, *right]))
    return {key: (left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)}


def _settings(trace: Trace) -> dict[str, Any]:
    out: dict[str, Any] = {key: trace.meta.get(key) for key in ("source", "granularity", "gpu_name")}
    for group in ("versions", "config", "knobs"):
        found = trace.meta.get(group)
        if isinstance(found, dict):
            out |= {f"{group}.{key}": value for key, value in found.items()}
        elif found is not None:
            out[group] = found
    return out


def _notes(a: Analysis, b: Analysis) -> list[str]:
    out = []
    for key, word in (("granularity", "graphs"), ("source", "the traces"), ("gpu_name", "the GPUs")):
        left, right = a.trace.meta.get(key), b.trace.meta.get(key)
        if left != right:
            out.append(f"note: {word} differ in {key} ({left} against {right}): times are not directly comparable")
    return out
