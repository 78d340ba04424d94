"""What each way of drafting brings: acceptance, speed, and what a step with drafts costs beside a plain one.

The same greedy answers to fixed questions under every method, at each batch size.  tau is the tokens that a
request gets from a step of the target; a method pays if tau is more than the time of its step (forward,
logits, verification, drafting) in units of a step without drafts.  What a step is made of can be told apart
where its stages are launched one by one; a graph of whole steps has one time only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

from mrv2.bench.environment import environment
from mrv2.bench.serving import StepProfile, profile, serve
from mrv2.engine.core import EngineCore
from mrv2.engine.messages import EngineRequest
from mrv2.errors import ConfigError
from mrv2.instrument import stages
from mrv2.sampling_params import SamplingParams
from mrv2.speculators import parse_speculators

KIND = "mrv2-speculation"
OFF = "off"
QUESTIONS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List five animals that live in the ocean and say one thing about each.",
    "Summarise the story of Little Red Riding Hood.",
    "What is the capital of France, and what is it known for?",
    "Give me a simple recipe for pancakes, step by step.",
    "Write a short letter that thanks a friend for a birthday present.",
    "What is the difference between a list and a tuple in Python?",
)


@dataclass(frozen=True)
class Outcome:
    """One method at one batch size; times in milliseconds."""

    method: str
    num_drafts: int
    batch_size: int
    tokens_per_second: float
    # time between two tokens of a request, the mean
    tpot_ms: float
    # tokens of a request for each step of the target that yields it some
    tau: float
    # of the drafts at each place, the share that was accepted
    acceptance: list[float]
    # steps that were replayed as one graph, of all: the level of graphs that was reached
    whole_steps: float
    # device time of a step
    step_ms: float | None
    # the target's part of it: forward, logits, sampling, verification; and the drafter's; None = one graph holds both
    target_ms: float | None
    draft_ms: float | None
    # the same in units of a step without drafts; None = not recorded
    step_ratio: float | None
    verify_ratio: float | None
    draft_ratio: float | None
    # requests that say exactly what they say without drafts (half types: ties may fall otherwise)
    num_equal: int


def measure_speculation(
    core: EngineCore,
    prompts: Sequence[Sequence[int]],
    methods: Sequence[str],
    batch_sizes: Sequence[int],
    *,
    num_tokens: int,
    repetitions: int = 3,
    temperature: float = 0.0,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Outcome]:
    """Serve the prompts, repeated up to each batch size, under every method; "off" is measured first."""
    outcomes: list[Outcome] = []
    for batch_size in batch_sizes:
        plain = plain_times = None
        # at batch size 1 the prompts are served one after the other
        waves = [[prompts[i % len(prompts)] for i in range(batch_size)]] if batch_size > 1 else [[p] for p in prompts]
        for method in (OFF, *(m for m in methods if m != OFF)):
            core.set_knobs(spec_method=method)
            progress(f"batch {batch_size}, {method}")
            requests = [_requests(wave, num_tokens, temperature) for wave in waves]
            serve(core, requests[0])
            before = _counts(core)
            timed = [[serve(core, wave) for wave in requests] for _ in range(repetitions)]
            drafted, accepted = (
                [x - y for x, y in zip(a, b, strict=True)] for a, b in zip(_counts(core), before, strict=True)
            )
            seconds = median(sum(run.seconds for run in runs) for runs in timed)
            tokens = {f"{w}:{name}": ids for w, run in enumerate(timed[0]) for name, ids in run.tokens.items()}
            recorded, _ = profile(core, requests[0])
            times = _device_times(recorded)
            if plain is None or plain_times is None:
                plain, plain_times = tokens, times
            runs = [run for each in timed for run in each]
            outcomes.append(
                Outcome(
                    method=method,
                    num_drafts=core.knobs.num_spec_tokens if method != OFF else 0,
                    batch_size=batch_size,
                    tokens_per_second=sum(map(len, tokens.values())) / seconds,
                    tpot_ms=1e3 * seconds / (len(waves) * num_tokens),
                    tau=1.0 + sum(accepted) / drafted[0] if drafted[0] else 1.0,
                    acceptance=[a / d for a, d in zip(accepted, drafted, strict=True) if d],
                    whole_steps=sum(run.num_step_replays for run in runs) / sum(run.num_steps for run in runs),
                    step_ms=times.step,
                    target_ms=times.target,
                    draft_ms=times.draft,
                    step_ratio=_ratio(times.step, plain_times.step),
                    verify_ratio=_ratio(times.target, plain_times.target),
                    draft_ratio=_ratio(times.draft, plain_times.target),
                    num_equal=sum(tokens[name] == plain[name] for name in plain),
                )
            )
    core.set_knobs(spec_method=OFF)
    return outcomes


def loaded_methods(core: EngineCore, wanted: Sequence[str] | None = None) -> list[str]:
    """Return the methods that the engine can measure; raises `ConfigError` for a wanted one that it cannot."""
    loaded = ["ngram", *parse_speculators(core.config.speculators)]
    for method in wanted or ():
        if method not in (OFF, *loaded):
            raise ConfigError(f"{method!r} cannot be measured: loaded are {', '.join((OFF, *loaded))}")
    return list(wanted or loaded)


def make_record(core: EngineCore, outcomes: Sequence[Outcome], num_tokens: int) -> dict[str, Any]:
    """Return the record as plain values."""
    return {
        "kind": KIND,
        "environment": environment(),
        "model": core.model_config.name,
        "speculators": list(core.config.speculators),
        "num_tokens": num_tokens,
        "knobs": {k: v for k, v in core.knobs.as_dict().items() if k != "spec_method"},
        "outcomes": [asdict(each) for each in outcomes],
    }


def headline(record: dict[str, Any]) -> dict[str, Any]:
    """Return the one line for machines: tau and speed of each method and batch size."""
    rows = {
        f"{each['method']}@{each['batch_size']}": [round(each["tau"], 3), round(each["tokens_per_second"], 1)]
        for each in record["outcomes"]
    }
    return {"kind": KIND, "model": record["model"], "tau_and_tok_s": rows}


def report(record: dict[str, Any]) -> str:
    """Return the record as a table."""
    plain = {e["batch_size"]: e["tokens_per_second"] for e in record["outcomes"] if e["method"] == OFF}
    lines = [
        f"{record['model']}, greedy answers of {record['num_tokens']} tokens, "
        f"cuda_graphs={record['knobs']['cuda_graphs']}",
        f"{'batch':>6}{'method':>13}{'drafts':>8}{'tok/s':>10}{'of off':>8}{'TPOT ms':>9}{'tau':>7}{'whole steps':>13}"
        f"{'step/decode':>13}{'verify/decode':>15}{'draft/decode':>14}{'equal':>8}  acceptance by place",
    ]
    for each in record["outcomes"]:
        ratios = ["-" if each[k] is None else f"{each[k]:.2f}" for k in ("step_ratio", "verify_ratio", "draft_ratio")]
        lines.append(
            f"{each['batch_size']:>6}{each['method']:>13}{each['num_drafts']:>8}{each['tokens_per_second']:>10,.0f}"
            f"{each['tokens_per_second'] / plain[each['batch_size']]:>8.2f}{each['tpot_ms']:>9.3f}{each['tau']:>7.2f}"
            f"{each['whole_steps']:>12.0%} {ratios[0]:>13}{ratios[1]:>15}{ratios[2]:>14}{each['num_equal']:>8}  "
            + " ".join(f"{share:.2f}" for share in each["acceptance"])
        )
    return "\n".join(lines)


def _requests(prompts: Sequence[Sequence[int]], num_tokens: int, temperature: float) -> list[EngineRequest]:
    return [
        EngineRequest(
            req_id=str(index),
            prompt_token_ids=list(prompt),
            params=SamplingParams(
                temperature=temperature, max_tokens=num_tokens, ignore_eos=True, seed=index, detokenize=False
            ),
        )
        for index, prompt in enumerate(prompts)
    ]


def _counts(core: EngineCore) -> tuple[list[int], list[int]]:
    """Return the drafts proposed and accepted so far by place, padded to one width."""
    width = max(1, core.config.max_num_spec_tokens)
    stats = core.scheduler.stats
    drafted, accepted = list(stats.num_drafted), list(stats.num_accepted)
    return drafted + [0] * (width - len(drafted)), accepted + [0] * (width - len(accepted))


class _Times(NamedTuple):
    """Device milliseconds a step; None = not recorded."""

    step: float | None = None
    target: float | None = None
    draft: float | None = None


def _device_times(recorded: StepProfile) -> _Times:
    """Return the device time of a step, and what of it the target and the drafter take where they are apart."""
    times = recorded.device_stages_ms
    if not times:
        return _Times()
    step = sum(ms for name, ms in times.items() if name not in (stages.UPLOAD, stages.OUTPUT_COPY))
    if stages.STEP_GRAPH in times:
        return _Times(step)
    draft = times.get(stages.DRAFT, 0.0)
    return _Times(step, step - draft, draft)


def _ratio(time: float | None, plain: float | None) -> float | None:
    return time / plain if time is not None and plain else None
