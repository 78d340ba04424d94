"""Time per output token of runners that speculate, while requests arrive at random: the same arrivals for all.

Requests arrive as a Poisson process of a given rate and are served as they come; a slow runner has more of them
beside each other, so that its steps get longer too.  The time per output token of a request is the time from its
first output to its last, divided by the tokens behind the first output.  Every setting serves the same requests at
the same times, in alternating order, and their ratio is taken over pairs.

    Intervals hold the middle 95 % of the means of samples that are drawn from the requests with replacement.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter, sleep
from typing import Any

import numpy as np

from mrv2.bench.environment import environment
from mrv2.engine.core import EngineCore
from mrv2.engine.messages import EngineRequest
from mrv2.errors import ConfigError, EngineDeadError
from mrv2.sampling_params import SamplingParams

KIND = "mrv2-speculation-rates"
_RESAMPLES = 4000


@dataclass(frozen=True)
class Interval:
    """A mean and where the means of other samples of this size would lie, 95 of 100."""

    mean: float
    low: float
    high: float


@dataclass
class RateOutcome:
    """One setting at one rate; times in milliseconds."""

    label: str
    knobs: dict[str, Any]
    # requests a second
    rate: float
    tpot_ms: Interval
    ttft_ms: Interval
    # output tokens a second, from the first arrival to the last token
    tokens_per_second: float
    # tokens of a request for each step of the target that yields it some
    tau: float
    # mean number of requests in service
    concurrency: float
    # host waits a step by reason
    waits_per_step: dict[str, float]
    # of each repetition's requests, in order of arrival
    tpots_ms: list[float] = field(repr=False, default_factory=list)


@dataclass
class RateComparison:
    """Time per output token of one setting over that of the first one, the same requests in pairs."""

    label: str
    against: str
    rate: float
    ratio: Interval


@dataclass
class OpenRun:
    """What one setting did with one stream of arrivals; times in seconds."""

    # [requests] each
    tpot: np.ndarray
    ttft: np.ndarray
    seconds: float
    num_tokens: int
    num_steps: int
    # time in which a request was in service, summed over requests
    in_service: float
    waits: dict[str, int]


def arrivals_of(rate: float, count: int, seed: int) -> np.ndarray:
    """Return the arrival times of `count` requests, in seconds: exponential gaps of mean 1 / rate."""
    if rate <= 0:
        raise ConfigError(f"rate={rate}: requests a second must be more than 0")
    return np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate, size=count))


def serve_open(core: EngineCore, requests: Sequence[EngineRequest], arrivals: np.ndarray) -> OpenRun:
    """Admit each request at its time, in seconds from now, and step until the last has finished.

    Raises `EngineDeadError` if a request ends in an error.
    """
    core.kv.pool.forget_all()
    gc.collect()
    count = len(requests)
    index_of = {request.req_id: index for index, request in enumerate(requests)}
    first, last = np.zeros(count), np.zeros(count)
    behind_first = np.zeros(count, dtype=np.int64)
    num_tokens, index = 0, 0
    steps, waits = core.scheduler.step, dict(core.device.waits)
    start = perf_counter()
    while index < count or core.has_unfinished:
        now = perf_counter() - start
        while index < count and arrivals[index] <= now:
            core.add_request(requests[index])
            index += 1
        if not core.has_unfinished:
            sleep(max(0.0, arrivals[index] - (perf_counter() - start)))
            continue
        outputs = core.step()
        now = perf_counter() - start
        for output in outputs:
            if output.finish_reason in ("error", "abort"):
                raise EngineDeadError(f"request {output.req_id} ended in an error: {output.stop_reason}")
            if not output.new_token_ids:
                continue
            row = index_of[output.req_id]
            if first[row] == 0.0:
                first[row] = now
            else:
                behind_first[row] += len(output.new_token_ids)
            last[row] = now
            num_tokens += len(output.new_token_ids)
    if not (behind_first > 0).all():
        raise ConfigError("a request had one output only: time per output token needs more tokens, or fewer drafts")
    return OpenRun(
        tpot=(last - first) / behind_first,
        ttft=first - arrivals,
        seconds=float(last.max() - arrivals[0]),
        num_tokens=num_tokens,
        num_steps=core.scheduler.step - steps,
        in_service=float((last - arrivals).sum()),
        waits={reason: n - waits.get(reason, 0) for reason, n in core.device.waits.items() if n > waits.get(reason, 0)},
    )


def measure_rates(
    core: EngineCore,
    prompts: Sequence[Sequence[int]],
    settings: dict[str, dict[str, Any]],
    rates: Sequence[float],
    *,
    num_requests: int,
    num_tokens: int,
    repetitions: int = 1,
    temperature: float = 0.0,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[list[RateOutcome], list[RateComparison]]:
    """Serve the prompts, repeated up to `num_requests`, at each rate under each setting: label -> changes of knobs.

    Of each repetition the arrivals are drawn anew; the first setting is what the others are compared with.
    """
    requests = [
        EngineRequest(
            req_id=str(index),
            prompt_token_ids=list(prompts[index % len(prompts)]),
            params=SamplingParams(
                temperature=temperature, max_tokens=num_tokens, ignore_eos=True, seed=index, detokenize=False
            ),
        )
        for index in range(num_requests)
    ]
    for label, changes in settings.items():
        progress(f"warm-up, {label}")
        core.set_knobs(**changes)
        serve_open(core, requests[: core.config.max_num_seqs], np.zeros(min(num_requests, core.config.max_num_seqs)))
    outcomes: list[RateOutcome] = []
    comparisons: list[RateComparison] = []
    for rate in rates:
        runs: dict[str, list[OpenRun]] = {label: [] for label in settings}
        taus: dict[str, list[tuple[int, int]]] = {label: [] for label in settings}
        for repetition in range(repetitions):
            arrivals = arrivals_of(rate, num_requests, seed=repetition)
            labels = list(settings)
            for label in labels if repetition % 2 == 0 else reversed(labels):
                progress(f"{rate:g} requests a second, repetition {repetition + 1} of {repetitions}, {label}")
                core.set_knobs(**settings[label])
                before = _accepted(core)
                runs[label].append(serve_open(core, requests, arrivals))
                taus[label].append((_accepted(core)[0] - before[0], _accepted(core)[1] - before[1]))
        for label in settings:
            core.set_knobs(**settings[label])
            outcomes.append(_outcome(label, core.knobs.as_dict(), rate, runs[label], taus[label]))
        baseline = next(iter(settings))
        for label in list(settings)[1:]:
            mine, theirs = (np.concatenate([run.tpot for run in runs[name]]) for name in (label, baseline))
            comparisons.append(RateComparison(label, baseline, rate, ratio_of_means(mine, theirs)))
    return outcomes, comparisons


# values [n]
def mean_of(values: np.ndarray, seed: int = 0) -> Interval:
    """Return the mean and its bootstrap interval."""
    rng = np.random.default_rng(seed)
    means = values[rng.integers(len(values), size=(_RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return Interval(float(values.mean()), float(low), float(high))


# values [n], others [n]
def ratio_of_means(values: np.ndarray, others: np.ndarray, seed: int = 0) -> Interval:
    """Return mean(values) / mean(others) and its bootstrap interval, over pairs."""
    rng = np.random.default_rng(seed)
    picks = rng.integers(len(values), size=(_RESAMPLES, len(values)))
    ratios = values[picks].mean(axis=1) / others[picks].mean(axis=1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return Interval(float(values.mean() / others.mean()), float(low), float(high))


def make_record(
    core: EngineCore, outcomes: Sequence[RateOutcome], comparisons: Sequence[RateComparison], **sizes: int
) -> dict[str, Any]:
    """Return the record as plain values."""
    return {
        "kind": KIND,
        "environment": environment(),
        "model": core.model_config.name,
        "speculators": list(core.config.speculators),
        "synthetic_acceptance": list(core.config.synthetic_acceptance),
        "sizes": sizes,
        "outcomes": [asdict(each) for each in outcomes],
        "comparisons": [asdict(each) for each in comparisons],
    }


def headline(record: dict[str, Any]) -> dict[str, Any]:
    """Return the one line for machines: time per output token by setting and rate, and the ratios."""

    def numbers(interval: dict[str, float]) -> list[float]:
        return [round(interval[key], 4) for key in ("mean", "low", "high")]

    return {
        "kind": KIND,
        "model": record["model"],
        "tpot_ms": {f"{e['label']}@{e['rate']:g}": numbers(e["tpot_ms"]) for e in record["outcomes"]},
        "ratios": {f"{e['label']} : {e['against']}@{e['rate']:g}": numbers(e["ratio"]) for e in record["comparisons"]},
    }


def report(record: dict[str, Any]) -> str:
    """Return the record as a table."""
    sizes = record["sizes"]
    width = max(len(each["label"]) for each in record["outcomes"]) + 2
    lines = [
        f"{record['model']}: {sizes['num_requests']} requests of {sizes['num_tokens']} output tokens, Poisson "
        f"arrivals, {sizes['repetitions']} repetitions; time per output token with its 95 % interval",
        f"{'req/s':>7}  {'setting':<{width}}{'TPOT ms':>9}{'interval':>19}{'of first':>10}{'interval':>17}"
        f"{'TTFT ms':>9}{'tok/s':>8}{'tau':>6}{'at once':>9}  waits per step",
    ]
    ratios = {(each["label"], each["rate"]): each["ratio"] for each in record["comparisons"]}
    for each in record["outcomes"]:
        tpot, ratio = each["tpot_ms"], ratios.get((each["label"], each["rate"]))
        shown = ["", ""] if ratio is None else [f"{ratio['mean']:.3f}", f"{ratio['low']:.3f} .. {ratio['high']:.3f}"]
        waits = ", ".join(f"{reason} {count:.2f}" for reason, count in sorted(each["waits_per_step"].items()))
        lines.append(
            f"{each['rate']:>7g}  {each['label']:<{width}}{tpot['mean']:>9.3f}"
            f"{tpot['low']:>9.3f} .. {tpot['high']:<6.3f}{shown[0]:>10}{shown[1]:>17}"
            f"{each['ttft_ms']['mean']:>9.1f}{each['tokens_per_second']:>8,.0f}{each['tau']:>6.2f}"
            f"{each['concurrency']:>9.1f}  {waits}"
        )
    return "\n".join(lines)


def _accepted(core: EngineCore) -> tuple[int, int]:
    """Return how often drafts were verified for a request so far, and how many drafts were accepted."""
    stats = core.scheduler.stats
    return (stats.num_drafted[0] if stats.num_drafted else 0), sum(stats.num_accepted)


def _outcome(
    label: str, knobs: dict[str, Any], rate: float, runs: list[OpenRun], counts: list[tuple[int, int]]
) -> RateOutcome:
    tpots = 1e3 * np.concatenate([run.tpot for run in runs])
    seconds, num_steps = sum(run.seconds for run in runs), sum(run.num_steps for run in runs)
    reasons = sorted({reason for run in runs for reason in run.waits})
    verified, accepted = (sum(each) for each in zip(*counts, strict=True))
    return RateOutcome(
        label=label,
        knobs=knobs,
        rate=rate,
        tpot_ms=mean_of(tpots),
        ttft_ms=mean_of(1e3 * np.concatenate([run.ttft for run in runs])),
        tokens_per_second=sum(run.num_tokens for run in runs) / seconds,
        tau=1.0 + accepted / verified if verified else 1.0,
        concurrency=sum(run.in_service for run in runs) / seconds,
        waits_per_step={r: sum(run.waits.get(r, 0) for run in runs) / max(num_steps, 1) for r in reasons},
        tpots_ms=tpots.tolist(),
    )
