"""Prefill: time to the first token, the rates of its matrix products and attention, and what it does to decodes.

Rates come from one step without graphs whose kernels are recorded by part of the model.  Beside them stand torch's
own products of the same shapes, and torch's fused attention over contiguous keys and values of the same lengths.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from mrv2.bench.bandwidth import seconds_of
from mrv2.bench.environment import environment
from mrv2.bench.explain import kernels_of, labelled
from mrv2.bench.growth import decoding
from mrv2.engine.core import EngineCore
from mrv2.engine.messages import EngineRequest
from mrv2.record import record
from mrv2.sampling_params import SamplingParams
from mrv2_models.layers import Linear

KIND = "mrv2-prefill"


@dataclass(frozen=True)
class Arrivals:
    """Prompts that arrive together; times to the first token in milliseconds."""

    num_prompts: int
    prompt_len: int
    tokens_per_second: float
    ttft_p50_ms: float
    ttft_p99_ms: float


@dataclass(frozen=True)
class Rates:
    """One prefill step of `num_tokens`, in FLOP/s."""

    num_tokens: int
    dense: float
    dense_of_torch: float
    attention: float
    attention_of_torch: float


@dataclass(frozen=True)
class Beside:
    """Gaps between two tokens of running requests, in milliseconds: alone, and while prompts are prefilled."""

    num_decodes: int
    num_prompts: int
    prompt_len: int
    # the knob: prompt tokens of a step in which some request decodes, 0 = no limit
    prefill_chunk: int
    alone_p50_ms: float
    alone_p99_ms: float
    beside_p50_ms: float
    beside_p99_ms: float
    # from the arrival of the prompts to the last one's first token
    prefill_ms: float


def measure_arrivals(core: EngineCore, num_prompts: int, prompt_len: int) -> Arrivals:
    """Serve prompts of random ids for one token each, twice; return the second run."""
    found = None
    for _ in range(2):
        core.kv.pool.forget_all()
        start, first = perf_counter(), []
        for request in _prompts(core, "p", num_prompts, prompt_len):
            core.add_request(request)
        while core.has_unfinished:
            outputs = core.step()
            first += [perf_counter() - start] * sum(bool(output.new_token_ids) for output in outputs)
        found = Arrivals(
            num_prompts=num_prompts,
            prompt_len=prompt_len,
            tokens_per_second=num_prompts * prompt_len / max(first),
            ttft_p50_ms=1e3 * float(np.percentile(first, 50)),
            ttft_p99_ms=1e3 * float(np.percentile(first, 99)),
        )
    assert found is not None, "two runs were made"
    return found


def measure_rates(core: EngineCore, prompt_len: int) -> Rates | None:
    """Record one step full of prompts; None without CUDA."""
    if core.device.type != "cuda":
        return None
    knobs, config = core.knobs, core.model_config
    num_prompts = max(1, core.config.max_num_batched_tokens // prompt_len)
    core.set_knobs(cuda_graphs="off")
    core.kv.pool.forget_all()
    # compiles what is new
    for request in _prompts(core, "w", num_prompts, prompt_len):
        core.add_request(request)
    while core.has_unfinished:
        core.step()
    core.kv.pool.forget_all()
    with labelled(core.executor.model), record(steps=1, level="kernels", core=core) as rec:
        for request in _prompts(core, "r", num_prompts, prompt_len):
            core.add_request(request)
        core.step()
    while core.has_unfinished:
        core.step()
    kernels = kernels_of(rec.trace())
    core.set_knobs(**knobs.as_dict())
    products = [(path, m) for path, m in core.executor.model.named_modules() if isinstance(m, Linear)]
    names = {"part: " + _part(path) for path, _ in products}
    owners, ns = np.array(kernels.owners), kernels.durations
    dense_s = 1e-9 * int(ns[np.isin(owners, list(names))].sum())
    attention_s = 1e-9 * int(ns[owners == "part: attention"].sum())
    num_tokens = num_prompts * prompt_len
    dense_flops = 2 * num_tokens * sum(m.weight.numel() for _, m in products)
    pairs = num_prompts * prompt_len * (prompt_len + 1) // 2
    attention_flops = 4 * pairs * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    # every layer has the same products
    layer = {_part(path): module.weight.to(core.executor.model.dtype) for path, module in products}
    torch_dense_s = sum(_product_seconds(core, weight, num_tokens) for weight in layer.values())
    torch_dense_s *= len(products) / len(layer)
    torch_attention_s = config.num_hidden_layers * _attention_seconds(core, num_prompts, prompt_len)
    return Rates(
        num_tokens=num_tokens,
        dense=dense_flops / dense_s,
        dense_of_torch=dense_flops / torch_dense_s,
        attention=attention_flops / attention_s,
        attention_of_torch=attention_flops / torch_attention_s,
    )


def _part(path: str) -> str:
    return ".".join(word for word in path.split(".") if word != "layers" and not word.isdigit())


def _product_seconds(core: EngineCore, weight: torch.Tensor, num_tokens: int) -> float:
    x = core.device.full((num_tokens, weight.shape[1]), 0.5, weight.dtype)
    out = core.device.empty((num_tokens, weight.shape[0]), weight.dtype)
    return seconds_of(core.device, lambda: torch.mm(x, weight.t(), out=out), 5)


def _attention_seconds(core: EngineCore, num_prompts: int, prompt_len: int) -> float:
    config, dtype = core.model_config, core.executor.model.dtype
    shape = (num_prompts, config.num_attention_heads, prompt_len, config.head_dim)
    q = core.device.full(shape, 0.5, dtype)
    # keys and values repeated for each head of a group: the kernel reads them from the cache
    return seconds_of(core.device, lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True), 5)


def measure_beside(
    core: EngineCore, num_decodes: int, num_prompts: int, prompt_len: int, chunks: Sequence[int]
) -> list[Beside]:
    """Let prompts arrive while requests decode, once for each `prefill_chunk` of `chunks`.

    Returns the gaps between the tokens of those requests before and meanwhile.
    """
    knobs, found = core.knobs, []
    for chunk in chunks:
        core.set_knobs(prefill_chunk=chunk)
        # compiles and captures what is new
        _measure_beside(core, num_decodes, 1, prompt_len)
        found.append(_measure_beside(core, num_decodes, num_prompts, prompt_len))
    core.set_knobs(**knobs.as_dict())
    return found


def _measure_beside(core: EngineCore, num_decodes: int, num_prompts: int, prompt_len: int) -> Beside:
    with decoding(core, num_decodes, 128, 4000 if core.device.type == "cuda" else 200):
        alone = _gaps(core, lambda seen, steps: steps >= 100, set())
        prompts = _prompts(core, "b", num_prompts, prompt_len)
        waiting = {request.req_id for request in prompts}
        start = perf_counter()
        for request in prompts:
            core.add_request(request)
        beside = _gaps(core, lambda seen, steps: seen >= len(waiting), waiting)
        prefill_ms = 1e3 * (perf_counter() - start)
    p = [float(np.percentile(gaps, q)) for gaps in (alone, beside) for q in (50, 99)]
    return Beside(num_decodes, num_prompts, prompt_len, core.knobs.prefill_chunk, p[0], p[1], p[2], p[3], prefill_ms)


def _gaps(core: EngineCore, is_done: Callable[[int, int], bool], waiting: set[str]) -> list[float]:
    """Step until `is_done` (requests of `waiting` that have a token, steps); return gaps in ms, others' tokens only."""
    last: dict[str, float] = {}
    gaps: list[float] = []
    seen, steps = set[str](), 0
    while not is_done(len(seen), steps):
        outputs, steps = core.step(), steps + 1
        now = perf_counter()
        for output in outputs:
            if output.req_id in waiting:
                seen.add(output.req_id)
            elif output.new_token_ids:
                if output.req_id in last:
                    gaps.append(1e3 * (now - last[output.req_id]))
                last[output.req_id] = now
    return gaps


def _prompts(core: EngineCore, name: str, count: int, length: int) -> list[EngineRequest]:
    rng = random.Random(f"{name}{count}{length}")
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, seed=0)
    vocab = core.model_config.vocab_size
    return [
        EngineRequest(
            req_id=f"{name}{i}", prompt_token_ids=[rng.randrange(vocab) for _ in range(length)], params=params
        )
        for i in range(count)
    ]


def make_record(core: EngineCore, arrivals: Arrivals, rates: Rates | None, beside: Sequence[Beside]) -> dict[str, Any]:
    """Return the record as plain values."""
    return {
        "kind": KIND,
        "environment": environment(),
        "model": core.model_config.name,
        "max_num_batched_tokens": core.config.max_num_batched_tokens,
        "knobs": core.knobs.as_dict(),
        "arrivals": asdict(arrivals),
        "rates": None if rates is None else asdict(rates),
        "beside": [asdict(each) for each in beside],
    }


def report(record: dict[str, Any]) -> str:
    """Return the record as text."""
    a, rates = record["arrivals"], record["rates"]
    lines = [
        f"{record['model']}: {a['num_prompts']} prompts of {a['prompt_len']} tokens at once: "
        f"{a['tokens_per_second']:,.0f} prompt tok/s, first token after {a['ttft_p50_ms']:.1f} ms (median), "
        f"{a['ttft_p99_ms']:.1f} ms (p99)",
    ]
    if rates is not None:
        for name in ("dense", "attention"):
            mine, torchs = rates[name], rates[f"{name}_of_torch"]
            lines.append(
                f"{name:>10}: {mine / 1e12:7.1f} TFLOP/s, torch on the same shapes {torchs / 1e12:7.1f}: "
                f"{mine / torchs:.0%} of it"
            )
    for b in record["beside"]:
        lines.append(
            f"{b['num_decodes']} decodes beside {b['num_prompts']} x {b['prompt_len']}, at most "
            f"{b['prefill_chunk'] or 'all'} prompt tokens a step: gap between tokens "
            f"p50 {b['alone_p50_ms']:.2f} -> {b['beside_p50_ms']:.2f} ms, p99 {b['alone_p99_ms']:.2f} -> "
            f"{b['beside_p99_ms']:.2f} ms ({b['beside_p99_ms'] / b['alone_p99_ms']:.2f} x); "
            f"prefill took {b['prefill_ms']:.0f} ms"
        )
    return "\n".join(lines)
