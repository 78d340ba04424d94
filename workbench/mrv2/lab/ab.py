"""A/B: the same requests under two settings, in alternation; differences with intervals, and whether tokens agree."""

from __future__ import annotations

import html
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mrv2.config import Knobs
from mrv2.errors import ConfigError
from mrv2.lab.driver import Driver, describe_changes
from mrv2.lab.load import Load, LoadGenerator
from mrv2.lab.metrics import quantile
from mrv2.lab.presets import changed_only
from mrv2.lab.requests import LabRequest
from mrv2.record import record

if TYPE_CHECKING:
    from mrv2.trace import Trace

RESAMPLES = 2000
LEVEL = 0.95
RECORDED_STEPS = 24


@dataclass(frozen=True)
class Run:
    """One pass over the requests under one setting."""

    side: str
    repetition: int
    seconds: float
    steps: int
    ttft: list[float | None]
    tpot: list[float | None]
    token_ids: list[list[int]]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))


@dataclass(frozen=True)
class DeltaRow:
    """One figure: medians of both sides, and their ratio with an interval."""

    label: str
    unit: str
    a: float | None
    b: float | None
    # b / a, and its interval; None without pairs
    ratio: float | None
    low: float | None
    high: float | None
    # pairs that were compared
    n: int

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes "no difference"."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


@dataclass
class ABResult:
    """What came out; shows itself as a table."""

    a: dict[str, Any]
    b: dict[str, Any]
    load: Load
    num_requests: int
    runs: list[Run] = field(default_factory=list)
    # a recording of each side, made after the timed runs
    traces: dict[str, Trace] = field(default_factory=dict)

    def side(self, name: str) -> list[Run]:
        """Return the runs of "a" or "b" in order."""
        return [run for run in self.runs if run.side == name]

    @property
    def repetitions(self) -> int:
        return len(self.side("a"))

    @property
    def names(self) -> tuple[str, str]:
        """Both settings as short texts: what differs from the defaults."""
        return tuple(describe_changes(changed_only(k)) or "defaults" for k in (self.a, self.b))  # type: ignore[return-value]  # two of them

    @property
    def same_tokens(self) -> tuple[int, int]:
        """How many requests got the same tokens on both sides in every repetition, and how many there are."""
        pairs = list(zip(self.side("a"), self.side("b"), strict=True))
        same = sum(
            all(a.token_ids[i] == self.side("a")[0].token_ids[i] == b.token_ids[i] for a, b in pairs)
            for i in range(self.num_requests)
        )
        return same, self.num_requests

    @property
    def promises_tokens(self) -> bool:
        """Whether both settings promise the same tokens for the same seed."""
        return Knobs(**self.a).promises_tokens_of(Knobs(**self.b)) and self.load.seed is not None

    def rows(self) -> list[DeltaRow]:
        """Return the table of differences."""
        a, b = self.side("a"), self.side("b")

        def by_run(of: Any) -> tuple[list[float], list[float]]:
            return [of(run) for run in a], [of(run) for run in b]

        def by_request(of: Any) -> tuple[list[float], list[float]]:
            pairs = [
                (x, y)
                for left, right in zip(a, b, strict=True)
                for x, y in zip(of(left), of(right), strict=True)
                if x and y
            ]
            return [1000 * x for x, _ in pairs], [1000 * y for _, y in pairs]

        return [
            _delta("output rate", "tok/s", *by_run(lambda run: run.num_tokens / run.seconds)),
            _delta("time for all requests", "s", *by_run(lambda run: run.seconds)),
            _delta("time to first token", "ms", *by_request(lambda run: run.ttft)),
            _delta("time per output token", "ms", *by_request(lambda run: run.tpot)),
            _delta("steps", "", *by_run(lambda run: run.steps)),
            _delta("time a step", "ms", *by_run(lambda run: 1000 * run.seconds / max(run.steps, 1))),
        ]

    def verdict(self) -> str:
        """Return the outcome in one sentence."""
        rate, (same, total) = self.rows()[0], self.same_tokens
        tokens = f"{same} of {total} requests got the same tokens"
        if not self.promises_tokens:
            tokens += " (these settings do not promise it)"
        if rate.ratio is None or rate.low is None or rate.high is None:
            return tokens
        spread = f"{100 * (rate.low - 1):+.1f} to {100 * (rate.high - 1):+.1f} %"
        sure = "" if rate.is_clear else ", which is no clear difference"
        return f"B gives {100 * (rate.ratio - 1):+.1f} % output tokens a second ({spread}){sure}; {tokens}"

    def side_by_side(self, **options: Any) -> Any:
        """Return both timelines above each other as a plotly figure (see `mrv2.viz.compare.side_by_side`)."""
        from mrv2.viz.compare import side_by_side

        if len(self.traces) < 2:
            raise ConfigError("this comparison was made without recordings: call ab(..., recorded=True)")
        options = {"position": 4, "num_steps": 4, "names": ("A: " + self.names[0], "B: " + self.names[1])} | options
        return side_by_side(self.traces["a"], self.traces["b"], **options)

    def as_dict(self) -> dict[str, Any]:
        """Return what the panel and sessions show."""
        same, total = self.same_tokens
        return {
            "names": list(self.names),
            "a": self.a,
            "b": self.b,
            "rows": [vars(row) | {"clear": row.is_clear} for row in self.rows()],
            "same": same,
            "total": total,
            "promises": self.promises_tokens,
            "verdict": self.verdict(),
            "repetitions": self.repetitions,
            "differing": [name for name in self.a if self.a[name] != self.b.get(name)],
        }

    def __repr__(self) -> str:
        lines = [f"A: {self.names[0]}", f"B: {self.names[1]}", self.verdict()]
        for row in self.rows():
            change = "n/a" if row.ratio is None else f"{100 * (row.ratio - 1):+6.1f} %"
            lines.append(f"{row.label:>22}  {_number(row.a):>9} {_number(row.b):>9} {row.unit:<6} {change}  n={row.n}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return ab_table(self.as_dict())


def ab_table(result: dict[str, Any]) -> str:
    """Return `ABResult.as_dict` as an HTML table."""
    names = [html.escape(name) for name in result["names"]]
    body = "".join(
        f"<tr><td>{html.escape(row['label'])}</td><td>{_number(row['a'])}</td><td>{_number(row['b'])}</td>"
        f"<td>{row['unit']}</td><td>{_percent(row)}</td><td>{row['n']}</td></tr>"
        for row in result["rows"]
    )
    return (
        f"<table><caption>{html.escape(result['verdict'])}</caption><thead><tr><th></th><th>A: {names[0]}</th>"
        f"<th>B: {names[1]}</th><th></th><th>B against A (95 %)</th><th>pairs</th></tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )


def run_ab(
    driver: Driver,
    a: dict[str, Any],
    b: dict[str, Any],
    load: Load,
    *,
    requests: int,
    repetitions: int,
    recorded: bool,
) -> ABResult:
    """Run both settings in alternation (a b, b a, ...) on the driver's thread; the knobs are put back afterwards.

    Args:
        a, b: every knob of either side.
        requests: how many, of `load.pack` in turn, at most `load.users` at a time.
    """
    result = ABResult(a, b, load, requests)
    before, paused = dict(driver.snapshot.knobs), driver.paused
    windows_enabled = driver.windows.enabled
    driver.paused = True
    driver.busy_with = "A/B"
    try:
        driver.drain()
        driver.windows.collect()
        driver.windows.enabled = False
        # prefix cache, kernels and graphs are warm for both
        for side in ("a", "b"):
            _pass(driver, result, side, -1)
        for repetition in range(repetitions):
            for side in "ab" if repetition % 2 == 0 else "ba":
                result.runs.append(_pass(driver, result, side, repetition))
        if recorded:
            for side in "ab":
                with record(RECORDED_STEPS, "stages", engine=driver.client) as recording:
                    _pass(driver, result, side, -1)
                result.traces[side] = recording.trace()
    finally:
        driver.drain(abort=True)
        driver.client.set(**before)
        driver.snapshot = driver.client.snapshot()
        driver.windows.enabled, driver.paused, driver.busy_with = windows_enabled, paused, ""
    result.runs.sort(key=lambda run: (run.side, run.repetition))
    return result


def _pass(driver: Driver, result: ABResult, side: str, repetition: int) -> Run:
    driver.busy_with = f"A/B: {side.upper()}" + ("" if repetition < 0 else f", pass {repetition + 1}")
    driver.client.set(**getattr(result, side))
    # every pass sends the same requests with the same seeds
    generator = LoadGenerator(Load(**{**vars(result.load), "mode": "closed"}))
    sent: list[LabRequest] = []
    first_step, began = driver.client.snapshot().step, time.monotonic()
    while len(sent) < result.num_requests or any(not request.finished for request in sent):
        num_open = sum(not request.finished for request in sent)
        for due in generator.due(time.monotonic(), num_open)[: result.num_requests - len(sent)]:
            sent.append(driver.send(due, result.load))
        driver.round(serve_load=False)
    return Run(
        side=side,
        repetition=repetition,
        seconds=max(request.last_token or began for request in sent) - began,
        steps=driver.client.snapshot().step - first_step,
        ttft=[request.ttft for request in sent],
        tpot=[request.tpot for request in sent],
        token_ids=[list(request.token_ids) for request in sent],
    )


def _delta(label: str, unit: str, a: Sequence[float], b: Sequence[float]) -> DeltaRow:
    """Compare pairs [n]: the median of their ratios, with a bootstrap interval over the pairs."""
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x > 0 and y > 0]
    logs = np.log([y / x for x, y in pairs]) if pairs else np.zeros(0)
    low = high = None
    if len(logs) > 1:
        draws = np.random.default_rng(0).integers(0, len(logs), (RESAMPLES, len(logs)))
        medians = np.median(logs[draws], axis=1)
        tail = 50 * (1 - LEVEL)
        low, high = (math.exp(x) for x in np.percentile(medians, [tail, 100 - tail]))
    ratio = math.exp(float(np.median(logs))) if len(logs) else None
    return DeltaRow(label, unit, quantile(a, 0.5), quantile(b, 0.5), ratio, low, high, len(pairs))


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _percent(row: dict[str, Any]) -> str:
    if row["ratio"] is None:
        return "n/a"
    text = f"{100 * (row['ratio'] - 1):+.1f} %"
    if row["low"] is None:
        return text
    return f"{text} ({100 * (row['low'] - 1):+.1f} to {100 * (row['high'] - 1):+.1f})"
