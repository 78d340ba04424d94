"""Measure a workload under several knob settings on one engine, and compare the settings.

Repetitions are interleaved (A B C, then C B A, ...), so that a drift of the machine hits every setting
alike.  The clock runs without instruments; stages are recorded in a pass of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from statistics import median
from typing import Any

from mrv2.bench.agreement import Difference, find_differences
from mrv2.bench.serving import ServedRun, StepProfile, profile, serve
from mrv2.bench.workloads import Workload
from mrv2.config import Knobs
from mrv2.engine.core import EngineCore
from mrv2.errors import ConfigError

Axes = Mapping[str, Sequence[Any]]
# output tokens of a warm-up request without graphs
_SHORT_WARM_UP = 8


@dataclass(frozen=True)
class Variant:
    """One setting of the varied knobs."""

    label: str
    # the varied knobs and their values
    setting: dict[str, Any]
    knobs: Knobs


def make_variants(base: Knobs, axes: Axes) -> tuple[list[Variant], list[str]]:
    """Return every legal combination of the axes' values, and why each other one is left out.

    Args:
        base: the knobs that are not varied.
        axes: knob -> values; the first value of each is what the others are compared with.
    """
    variants, refused = [], []
    for values in product(*axes.values()):
        setting = dict(zip(axes, values, strict=True))
        label = _label({"runner": base.runner, "async_scheduling": base.async_scheduling, **setting})
        try:
            variants.append(Variant(label, setting, base.with_changes(**setting)))
        except ConfigError as error:
            refused.append(f"{label}: {error}")
    if not variants:
        raise ConfigError("no combination of the varied knobs is legal: " + "; ".join(refused))
    return variants, refused


def _label(setting: dict[str, Any]) -> str:
    others = [
        f"{'graphs' if name == 'cuda_graphs' else name}={value}"
        for name, value in setting.items()
        if name not in ("runner", "async_scheduling")
    ]
    return " ".join([setting["runner"], "async" if setting["async_scheduling"] else "sync", *others])


@dataclass
class VariantResult:
    """What was measured under one setting."""

    variant: Variant
    runs: list[ServedRun] = field(default_factory=list)
    # None = no recorded pass
    profile: StepProfile | None = None

    @property
    def rates(self) -> list[float]:
        """Output tokens a second of each repetition."""
        return [run.tokens_per_second for run in self.runs]

    @property
    def rate(self) -> float:
        """Median of `rates`."""
        return median(self.rates)

    @property
    def last(self) -> ServedRun:
        return self.runs[-1]

    @property
    def waits_per_step(self) -> dict[str, float]:
        """Host waits a step by reason, in the run without instruments."""
        return {reason: count / max(self.last.num_steps, 1) for reason, count in sorted(self.last.waits.items())}

    def as_dict(self, roofline_rate: float) -> dict[str, Any]:
        """Return the measurement as plain values for a record; `roofline_rate` is the memory floor's tok/s."""
        run = self.last
        return {
            "label": self.variant.label,
            "setting": self.variant.setting,
            "knobs": self.variant.knobs.as_dict(),
            "tok_s": self.rates,
            "tok_s_median": self.rate,
            "tok_s_best": max(self.rates),
            "roofline_share": self.rate / roofline_rate,
            "seconds": [each.seconds for each in self.runs],
            "num_steps": run.num_steps,
            "step_ms": 1e3 * median(each.seconds for each in self.runs) / max(run.num_steps, 1),
            "num_graph_replays": run.num_graph_replays,
            "num_preemptions": run.num_preemptions,
            "waits_per_step": self.waits_per_step,
            "tokens_digest": run.digest,
            "profile": None if self.profile is None else asdict(self.profile),
        }


@dataclass(frozen=True)
class Comparison:
    """One knob's effect with all others equal."""

    knob: str
    baseline: str
    changed: str
    # tok/s of `changed` over tok/s of `baseline`
    reached: float
    # async scheduling only: what the overlap of host time h and device time d a step of the sync run
    # should bring, (h + d) / max(h, d)
    expected: float | None = None
    # and what it brought in the recorded passes, of which h and d are: recording makes the host slower
    recorded: float | None = None
    # (h + d - o) / max(h, d), where o is the time in which host and device of the sync run work side by side as
    # it is (a launch returns when the device is at work already): what is left for async scheduling; None where no
    # device stage was recorded
    attainable: float | None = None


def compare(results: Sequence[VariantResult], axes: Axes) -> list[Comparison]:
    """Compare each varied value with the first of its knob, all other knobs equal."""
    found = []
    for knob, values in axes.items():
        for result in results:
            setting = result.variant.setting
            if setting[knob] == values[0]:
                continue
            twin = next((r for r in results if r.variant.setting == {**setting, knob: values[0]}), None)
            if twin is None:
                continue
            expected = recorded = attainable = None
            if knob == "async_scheduling" and setting[knob] and twin.profile is not None:
                host_ms, device_ms, overlap = twin.profile.host_ms, twin.profile.device_ms, twin.profile.overlap
                expected = overlap_gain(host_ms, device_ms)
                if overlap is not None:
                    attainable = overlap_gain(host_ms, device_ms, overlap * device_ms)
                if result.profile is not None:
                    recorded = twin.profile.step_ms / result.profile.step_ms
            reached = result.rate / twin.rate
            labels = twin.variant.label, result.variant.label
            found.append(Comparison(knob, *labels, reached, expected, recorded, attainable))
    return found


def overlap_gain(host_ms: float, device_ms: float, overlapped_ms: float = 0.0) -> float | None:
    """Return (h + d - o) / max(h, d): how much faster a step gets when host and device work side by side.

    o = time in which they do so already.
    """
    longer = max(host_ms, device_ms)
    return (host_ms + device_ms - overlapped_ms) / longer if longer else None


def measure(
    core: EngineCore,
    workload: Workload,
    variants: Sequence[Variant],
    *,
    repetitions: int = 3,
    record_stages: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> list[VariantResult]:
    """Serve `workload` under every variant: warm-up, interleaved repetitions, then a recorded pass.

    With graphs the warm-up is the whole workload, so that no kernel compiles while the clock runs;
    elsewhere it is the same requests with a few output tokens.
    """
    if repetitions < 1:
        raise ConfigError(f"repetitions={repetitions} must be at least 1")
    results = [VariantResult(variant) for variant in variants]
    for result in results:
        progress(f"{workload.name}: warm-up, {result.variant.label}")
        core.set_knobs(**result.variant.knobs.as_dict())
        has_graphs = core.device.type == "cuda" and core.knobs.cuda_graphs != "off"
        warm_up = workload if has_graphs else workload.shortened(_SHORT_WARM_UP)
        serve(core, warm_up.engine_requests())
    for repetition in range(repetitions):
        for result in results if repetition % 2 == 0 else reversed(results):
            progress(f"{workload.name}: repetition {repetition + 1} of {repetitions}, {result.variant.label}")
            core.set_knobs(**result.variant.knobs.as_dict())
            result.runs.append(serve(core, workload.engine_requests()))
    if record_stages:
        for result in results:
            progress(f"{workload.name}: recorded pass, {result.variant.label}")
            core.set_knobs(**result.variant.knobs.as_dict())
            result.profile, _ = profile(core, workload.engine_requests())
    return results


def same_tokens(results: Sequence[VariantResult]) -> bool:
    """Return whether every run of every variant generated the same tokens."""
    return len({run.digest for result in results for run in result.runs}) == 1


def disagreements(
    core: EngineCore, workload: Workload, results: Sequence[VariantResult]
) -> list[tuple[str, Difference]]:
    """Return (label, difference) for each request of a run that parts from the very first run's tokens.

    Settings that promise no more than the same distribution are left out.
    """
    first, judged, found = results[0].runs[0], set[str](), []
    judged.add(first.digest)
    for result in results:
        if not result.variant.knobs.promises_tokens_of(results[0].variant.knobs):
            continue
        for run in result.runs:
            if run.digest not in judged:
                judged.add(run.digest)
                differences = find_differences(core, workload.engine_requests(), first.tokens, run.tokens)
                found += [(result.variant.label, difference) for difference in differences]
    return found
