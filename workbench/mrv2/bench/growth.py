"""How a decode step grows with the batch and with the context: its time, its rate, and the host's part of it.

The host's part is all that the engine does but wait; what it takes at the largest batch over what it takes at 8
requests says whether a step costs the host what changes in it, or a visit to every request.

Requests of one length arrive together; what counts are the steps between the last first token and the first last
token, in which every request decodes one token.  The clock runs without instruments; the host's busy time comes
from a recorded pass of the same steps.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import fmean
from time import perf_counter
from typing import Any

from mrv2.bench.bandwidth import Limit
from mrv2.bench.environment import environment
from mrv2.bench.record import model_cost
from mrv2.bench.roofline import CostCard, StepWork
from mrv2.bench.serving import summarise
from mrv2.engine.core import EngineCore
from mrv2.engine.messages import EngineRequest
from mrv2.errors import ConfigError
from mrv2.instrument import recording
from mrv2.sampling_params import SamplingParams

KIND = "mrv2-growth"
_MAX_SPANS = 1 << 18
# tokens of each request before the first step that counts
_MARGIN = 4
# what a large batch is held against
_SMALL_BATCH = 8


@dataclass(frozen=True)
class Point:
    """One batch at one context; times of a decode step in milliseconds."""

    num_requests: int
    # tokens of a request when decoding begins
    context: int
    step_ms: float
    host_ms: float
    # of `host_ms`, by stage
    host_stages_ms: dict[str, float]
    device_ms: float
    device_idle: float | None
    tokens_per_second: float
    # of the memory floor's rate
    roofline_share: float


def measure_growth(
    core: EngineCore,
    points: Sequence[tuple[int, int]],
    bandwidth: float,
    *,
    num_steps: int = 64,
    progress: Callable[[str], object] = print,
) -> list[Point]:
    """Measure each (requests, context) of `points` under the engine's knobs; `bandwidth` in bytes a second."""
    found = []
    for num_requests, context in points:
        progress(f"growth: {num_requests} requests, context {context}")
        with decoding(core, num_requests, context, _MARGIN):
            run_steps(core, _MARGIN)
        with decoding(core, num_requests, context, num_steps):
            # their mean: with steps in flight one call may wait for two of them, the next for none
            step_ms = 1e3 * fmean(run_steps(core, num_steps))
        with decoding(core, num_requests, context, num_steps), recording(core.device, capacity=_MAX_SPANS) as recorder:
            durations = run_steps(core, num_steps)
            core.device.synchronize("growth: end of a recording")
            spans = recorder.spans()
        profile = summarise(spans, len(durations), sum(durations), recorder.dropped)
        floor = _floor_seconds(core, num_requests, context, num_steps, bandwidth)
        found.append(
            Point(
                num_requests=num_requests,
                context=context,
                step_ms=step_ms,
                host_ms=profile.host_ms,
                host_stages_ms=profile.host_stages_ms,
                device_ms=profile.device_ms,
                device_idle=profile.device_idle,
                tokens_per_second=1e3 * num_requests / step_ms,
                roofline_share=1e3 * floor / step_ms,
            )
        )
    return found


@contextmanager
def decoding(core: EngineCore, num_requests: int, context: int, num_steps: int) -> Iterator[None]:
    """Inside the block every request is past its first tokens and has more than `num_steps` to go."""
    core.kv.pool.forget_all()
    rng = random.Random(num_requests * 1_000_003 + context)
    vocab = core.model_config.vocab_size
    # the first to be served decode while the last are still in prefill
    num_prefill_steps = -(-num_requests * context // core.config.max_num_batched_tokens)
    max_tokens = num_steps + 4 * _MARGIN + num_prefill_steps
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, seed=0)
    counts = {f"g{index}": 0 for index in range(num_requests)}
    for req_id in counts:
        prompt = [rng.randrange(vocab) for _ in range(context)]
        core.add_request(EngineRequest(req_id=req_id, prompt_token_ids=prompt, params=params))
    while min(counts.values()) < _MARGIN:
        for output in core.step():
            counts[output.req_id] += len(output.new_token_ids)
            if output.finish_reason is not None:
                raise ConfigError(
                    f"{num_requests} requests with a context of {context} tokens do not decode side by side: raise "
                    "max_num_batched_tokens, max_num_seqs or the number of KV blocks"
                )
    gc.collect()
    yield
    core.abort(list(counts))
    while core.has_unfinished:
        core.step()


def run_steps(core: EngineCore, num_steps: int) -> list[float]:
    """Run `num_steps` steps; return the seconds of each."""
    durations = []
    for _ in range(num_steps):
        start = perf_counter()
        core.step()
        durations.append(perf_counter() - start)
    return durations


def _floor_seconds(core: EngineCore, num_requests: int, context: int, num_steps: int, bandwidth: float) -> float:
    """Memory floor of the median step of those measured."""
    step, length = StepWork(), context + _MARGIN + num_steps // 2
    for _ in range(num_requests):
        step.add(1, length, decode=True, yields_token=True)
    card = CostCard(
        model_cost(core),
        num_requests,
        [step],
    )
    return card.step_seconds(step, bandwidth)


def make_record(core: EngineCore, points: Sequence[Point], limit: Limit) -> dict[str, Any]:
    """Return the record as plain values."""
    return {
        "kind": KIND,
        "environment": environment(),
        "model": core.model_config.name,
        "dtype": str(core.executor.model.dtype).removeprefix("torch."),
        "knobs": core.knobs.as_dict(),
        "read_bytes_per_s": limit.value,
        "read_method": limit.method,
        "points": [asdict(point) for point in points],
    }


def host_growth(points: Sequence[dict[str, Any]]) -> dict[str, float] | None:
    """Return the host's microseconds a step at 8 requests and at the most, with their ratio; None without such points.

    Points of one context count, that of the largest batch.
    """
    most = max(points, key=lambda point: point["num_requests"], default=None)
    if most is None or most["num_requests"] <= _SMALL_BATCH:
        return None
    for point in points:
        if (point["num_requests"], point["context"]) == (_SMALL_BATCH, most["context"]):
            return {
                "num_requests": most["num_requests"],
                "host_us_at_8": 1e3 * point["host_ms"],
                "host_us_at_most": 1e3 * most["host_ms"],
                "ratio": most["host_ms"] / point["host_ms"],
                "host_share_at_most": most["host_ms"] / most["step_ms"],
            }
    return None


def report(record: dict[str, Any]) -> str:
    """Return the record as a table."""
    lines = [
        f"decode steps of {record['model']} {record['dtype']}; floor: weights and context once, at "
        f"{record['read_bytes_per_s'] / 1e9:,.0f} GB/s",
        f"{'requests':>9}{'context':>9}{'step ms':>9}{'host ms':>9}{'device ms':>10}{'idle':>7}{'tok/s':>10}"
        f"{'of floor':>9}",
    ]
    for each in record["points"]:
        idle = "-" if each["device_idle"] is None else f"{each['device_idle']:.0%}"
        lines.append(
            f"{each['num_requests']:>9}{each['context']:>9,}{each['step_ms']:>9.3f}{each['host_ms']:>9.3f}"
            f"{each['device_ms']:>10.3f}{idle:>7}{each['tokens_per_second']:>10,.0f}{each['roofline_share']:>9.0%}"
        )
    growth = host_growth(record["points"])
    if growth is not None:
        lines.append(
            f"host: {growth['host_us_at_8']:,.0f} us a step at 8 requests, {growth['host_us_at_most']:,.0f} at "
            f"{growth['num_requests']}, {growth['ratio']:.1f} times as much and {growth['host_share_at_most']:.0%} of "
            "the step"
        )
    return "\n".join(lines)


def points_for(core: EngineCore, *, num_steps: int = 64) -> list[tuple[int, int]]:
    """Return the batches at a context of 128 and the contexts at 8 requests that an engine of this size can hold."""
    max_num_seqs, budget = core.config.max_num_seqs, core.config.max_num_batched_tokens
    kv_tokens = (core.executor.num_kv_blocks - 1) * core.config.block_size
    batches = [(n, 128) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if n <= max_num_seqs]
    contexts = [(min(8, max_num_seqs), n) for n in (512, 2048, 8192, 32_000)]

    def fits(num_requests: int, context: int) -> bool:
        length = context + num_steps + 5 * _MARGIN - (-num_requests * context // budget)
        return length <= core.max_model_len and num_requests * (length + core.config.block_size) <= kv_tokens

    return [point for point in batches + contexts if fits(*point)]
