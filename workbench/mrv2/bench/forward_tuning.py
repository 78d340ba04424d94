"""Launch plans of decode attention, timed where they work: in the forward pass of a whole model, as one CUDA graph.

A launch alone in a loop does not show what it costs in a step.  There it stands between products, may begin before
the product in front of it has ended, reads keys and values that left the cache a step ago, and holds shared memory
that the product behind it wants for its weights.  So each candidate replaces the plan of one bucket, the forward
pass of that bucket is captured anew, and its replays are timed.

Contexts of one length end together; those of a real batch do not, and the longest ones may be left alone with a
memory that they cannot fill.  So large buckets are also timed with mixed contexts, as workload e has them.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from statistics import median
from typing import Any, Literal

import torch

from mrv2.bench.environment import environment
from mrv2.bench.failures import reason_of
from mrv2.bench.layer_problems import BLOCK_SIZE, QWEN3, check_decode
from mrv2.bench.workloads import make_workload
from mrv2.device import Device, make_device
from mrv2.errors import ConfigError
from mrv2_kernels.attention import plan as plans
from mrv2_kernels.attention.plan import DecodeChoice, DecodePlan, decode_choice
from mrv2_models.attention import AttentionMetadata
from mrv2_models.causal_lm import CausalLM
from mrv2_models.kv_cache import allocate_kv_caches, group_specs, kept_dtype
from mrv2_models.model_state import ForwardBatch, resolve_model_state
from mrv2_models.registry import load_model

KIND = "mrv2-forward-tuning"
MODEL = "qwen3-0.6b"
# a length that all contexts of a batch have, or as many lengths as `mixed_contexts` says
Contexts = int | Literal["mixed"]
# requests -> contexts
BUCKETS: dict[int, tuple[Contexts, ...]] = {
    1: (384, 4096),
    8: (384, 8192),
    16: (384, 4096),
    32: (384, 4096, "mixed"),
    64: (384, 2048, "mixed"),
    128: (384, 1024, "mixed"),
    192: (384, "mixed"),
    256: (160, 1024, "mixed"),
    512: (160, 512),
}
# (keys a tile, warps, stages, registers of a thread or None), programs that may share a context, tiles of each
Shapes = tuple[tuple[tuple[int, int, int] | tuple[int, int, int, int], tuple[int, ...], tuple[int, ...]], ...]
# of 64 requests and more
_MANY: Shapes = (
    ((16, 1, 3), (1,), (4,)),
    ((16, 1, 3, 128), (1,), (4,)),
    ((16, 1, 2, 128), (1,), (4,)),
    ((16, 1, 4), (1,), (4,)),
    ((32, 1, 2), (1,), (4,)),
    ((32, 1, 3), (1,), (4,)),
    ((32, 2, 2), (1,), (4,)),
    ((32, 2, 2, 96), (1,), (4,)),
    ((32, 2, 3), (1,), (4,)),
    ((64, 2, 2), (1,), (2,)),
)
# the same, for contexts that several programs may share: of 256 keys each and more
_SHARED: Shapes = (
    ((16, 1, 3), (4,), (16, 32)),
    ((16, 1, 3, 128), (2, 4), (16, 32)),
    ((16, 1, 2, 128), (2, 4), (16, 32)),
    ((32, 1, 2), (2, 4), (8, 16)),
    ((32, 2, 2, 96), (4,), (8, 16)),
    ((64, 2, 2), (4,), (4, 8)),
)
# of 16 to 128, whose contexts several programs may share
_SOME: Shapes = (
    ((16, 1, 2), (2, 4, 8), (4,)),
    ((16, 1, 3), (2, 4, 8), (4,)),
    ((32, 1, 2), (2, 4, 8), (2,)),
    ((32, 2, 2), (2, 4), (2,)),
    ((64, 2, 2), (1, 2, 4), (1,)),
    ((128, 4, 2), (1, 2, 4), (1,)),
)
# requests -> launches worth a try
SHAPES: dict[int, Shapes] = {
    1: (
        ((32, 4, 3), (32, 16), (1,)),
        ((32, 4, 2), (32,), (1,)),
        ((32, 2, 2), (32,), (1,)),
        ((32, 8, 2), (32,), (1,)),
        ((64, 4, 2), (32, 16, 8), (1,)),
        ((64, 8, 2), (32, 16), (1,)),
        ((16, 1, 3), (32,), (1, 2)),
        ((16, 2, 3), (32,), (1, 2)),
        ((128, 8, 2), (32, 8), (1,)),
    ),
    8: (
        ((128, 4, 2), (4, 2), (1, 2)),
        ((128, 8, 2), (4, 2), (1, 2)),
        ((64, 4, 2), (4, 8), (1, 2)),
        ((64, 4, 3), (4, 8), (1, 2)),
        ((64, 2, 2), (4, 8, 16), (1,)),
        ((64, 1, 2), (4, 8, 16), (1,)),
        ((32, 1, 2), (8, 16), (1, 2)),
        ((32, 2, 2), (8, 16), (1, 2)),
        ((32, 4, 3), (4, 8), (2, 4)),
        ((16, 1, 3), (8, 16), (2,)),
        ((16, 2, 3), (4, 8, 16), (2, 4)),
    ),
    32: (
        *_SOME,
        ((128, 4, 2), (2, 4), (4,)),
        ((128, 8, 2), (1,), (1,)),
        ((64, 4, 3), (1, 2), (2,)),
        ((32, 4, 3), (2, 4), (4,)),
        ((16, 2, 3), (2, 4, 8), (8,)),
    ),
    16: _SOME,
    64: (*_MANY, *_SHARED, *_SOME[:3]),
    128: (*_MANY, *_SHARED),
    192: (*_MANY, *_SHARED),
    256: (*_MANY, *_SHARED),
    512: _MANY,
}
_REPLAYS, _ROUNDS = 12, 5
_STAGE = "measure"


@dataclass(frozen=True)
class ForwardTime:
    """One choice in one bucket."""

    batch: int
    context: Contexts
    choice: DecodeChoice
    # of a forward pass with its logits
    microseconds: float


@cache
def mixed_contexts(batch: int) -> tuple[int, ...]:
    """Return the contexts of the `batch` requests of workload e that live longest, at the last step that has them all.

    Raises `ConfigError` for more requests than it has.
    """
    requests = make_workload("e", vocab_size=1 << 16).requests
    if batch > len(requests):
        raise ConfigError(f"mixed contexts are those of {len(requests)} requests of workload e, not of {batch}")
    order = sorted(range(len(requests)), key=lambda index: -requests[index].output_len)[:batch]
    step = requests[order[-1]].output_len
    return tuple(requests[index].input_len + step for index in sorted(order))


def lengths(batch: int, contexts: Contexts) -> tuple[int, ...]:
    """Return each request's context."""
    return mixed_contexts(batch) if contexts == "mixed" else (contexts,) * batch


def candidates(batch: int, kept: torch.dtype = torch.bfloat16) -> list[DecodeChoice]:
    """Return the choices worth a try for `batch` requests: the one in force first, and the kernels one by one.

    Plans that split no context are tried in the order in force, the one in force also in the other.
    """
    now = decode_choice(batch, QWEN3.num_kv_heads, QWEN3.head_dim, torch.bfloat16, kept)
    found = [now, replace(now, ahead=not now.ahead), DecodeChoice(now.plan, fused=False)]
    if now.plan.num_splits == 1:
        found.append(replace(now, ordered=not now.ordered))
    for tile, splits, tiles in SHAPES[batch]:
        block_n, warps, stages, *registers = tile
        plans = [DecodePlan(block_n, warps, stages, n, each, *registers) for n in splits for each in tiles]
        found += [DecodeChoice(plan, ahead=True, ordered=now.ordered and plan.num_splits == 1) for plan in plans]
    return list(dict.fromkeys(found))


@contextmanager
def in_force(batch: int, choice: DecodeChoice, kept: torch.dtype = torch.bfloat16) -> Iterator[None]:
    """Make `choice` the one of a bucket for the time of the block."""
    table = plans.measured(kept)[QWEN3.head_dim]  # the table itself is what is being tuned
    pairs, before = batch * QWEN3.num_kv_heads, dict(table)
    table[pairs] = choice
    decode_choice.cache_clear()
    try:
        yield
    finally:
        table.clear()
        table.update(before)
        decode_choice.cache_clear()


def decode_batch(
    # [NB] int32
    order: torch.Tensor,
    contexts: Sequence[int],
) -> ForwardBatch:
    """Return a decode step of requests of these contexts, which take their blocks from `order`, in turn."""
    device, num_requests = order.device, len(contexts)
    needed = [-(-context // BLOCK_SIZE) for context in contexts]
    width = -(-max(needed) // 16) * 16
    tables, first = torch.zeros((num_requests, width), dtype=torch.int32, device=device), 0
    for request, num_blocks in enumerate(needed):
        taken = torch.arange(first, first + num_blocks, device=device) % len(order)
        tables[request, :num_blocks] = order[taken]
        first += num_blocks
    rows = torch.arange(num_requests + 1, dtype=torch.int32, device=device)
    seq_lens = torch.tensor(contexts, dtype=torch.int32, device=device)
    positions = seq_lens - 1
    last = tables.gather(1, (positions // BLOCK_SIZE)[:, None].long()).squeeze(1)
    return ForwardBatch(
        input_ids=rows[:-1],
        positions=positions,
        idx_mapping=rows[:-1],
        query_start_loc=rows,
        seq_lens=seq_lens,
        block_tables=[tables],
        slot_mappings=[last * BLOCK_SIZE + positions % BLOCK_SIZE],
        max_query_len=1,
        uniform_decode=True,
    )


def _num_blocks(contexts: Sequence[int]) -> int:
    return sum(-(-context // BLOCK_SIZE) for context in contexts)


class _Forward:
    """A decode step of a model with random weights over a random cache."""

    def __init__(self, model: CausalLM, num_blocks: int, kept: torch.dtype | None) -> None:
        self.model, self.state = model, resolve_model_state(model)
        groups = group_specs(self.state.kv_cache_specs(BLOCK_SIZE), kept)
        self.kv_caches = allocate_kv_caches(
            groups, num_blocks, lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=model.device)
        )
        self.state.initialize_kv_cache(groups, self.kv_caches)
        self.order = torch.randperm(num_blocks - 1, device=model.device).int() + 1

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        attn: AttentionMetadata = self.state.prepare_attn(batch)
        hidden = self.model(**self.state.prepare_inputs(batch), attn=attn, kv_caches=self.kv_caches)
        return self.model.compute_logits(hidden)


def tune_forward(
    device: Device,
    buckets: Sequence[int] = tuple(BUCKETS),
    *,
    kv_cache_dtype: str = "auto",
    seconds: float = 120.0,
    progress: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Check and time the candidates of each bucket; return the record as plain values.  CUDA only.

    What `seconds` (from the call on) leave no time for is named among the failures.
    """
    if device.type != "cuda":
        raise ConfigError("--layers --tune times a model's forward pass: it needs a CUDA device")
    deadline = time.monotonic() + seconds
    kept = kept_dtype(kv_cache_dtype, device.torch_device) or torch.bfloat16
    wanted = {choice for batch in buckets for choice in candidates(batch, kept)}
    failures = _check(sorted({c.plan for c in wanted if c.fused}, key=str), kv_cache_dtype, progress)
    progress(f"forward: checked after {seconds - (deadline - time.monotonic()):.0f} s")
    most = max(_num_blocks(lengths(batch, each)) for batch in buckets for each in BUCKETS[batch])
    times: list[ForwardTime] = []
    holder: list[_Forward] = []
    left_out: list[str] = []

    def load() -> None:
        model = load_model(
            MODEL, load_format="dummy", dtype="bfloat16", device=device.torch_device, max_model_len=40960
        )
        holder.append(_Forward(model, most + 2, kept))

    device.main.run(_STAGE, load)
    device.synchronize("forward: inputs")
    for batch in buckets:
        progress(f"forward: {batch} requests")
        for choice in candidates(batch, kept):
            if choice.plan in failures:
                continue
            if time.monotonic() > deadline:
                left_out.append(f"{batch} requests: {_label(asdict(choice))}")
                continue
            for context in BUCKETS[batch]:
                try:
                    with in_force(batch, choice, kept):
                        found = _seconds(device, holder[0], lengths(batch, context))
                except Exception as error:  # any failure of a candidate is a finding
                    failures[choice.plan] = f"{batch} x {context}: {reason_of(error)}"
                    break
                times.append(ForwardTime(batch, context, choice, 1e6 * found))
    holder.clear()
    return {
        "kind": KIND,
        "environment": environment(),
        "model": MODEL,
        "kv_cache_dtype": kv_cache_dtype,
        "times": [asdict(each) for each in times],
        "best": {str(batch): asdict(best) for batch in buckets if (best := best_choice(times, batch))},
        "failures": {str(plan): why for plan, why in failures.items()} | dict.fromkeys(left_out, "left out: no time"),
    }


def best_choice(times: Sequence[ForwardTime], batch: int) -> DecodeChoice | None:
    """Return the choice of least geometric mean over the bucket's contexts; the first and mixed ones count twice."""
    contexts = BUCKETS[batch]
    by_choice: dict[DecodeChoice, dict[Contexts, float]] = {}
    for each in times:
        if each.batch == batch:
            by_choice.setdefault(each.choice, {})[each.context] = each.microseconds
    means = {
        choice: sum(math.log(us) * (2 if context in (contexts[0], "mixed") else 1) for context, us in found.items())
        for choice, found in by_choice.items()
        if len(found) == len(contexts)
    }
    return min(means, key=lambda choice: means[choice]) if means else None


def _check_plan(plan: DecodePlan, kv_cache_dtype: str) -> str | None:
    device = make_device("cuda")
    kept = kept_dtype(kv_cache_dtype, device.torch_device) or torch.bfloat16
    try:
        for pdl in (False, True):
            check_decode(QWEN3, plan, pdl, device.torch_device, kept)
        device.synchronize("forward: check")
    except Exception as error:  # any failure of a candidate is a finding
        return reason_of(error)
    return None


def _check(
    wanted: Sequence[DecodePlan], kv_cache_dtype: str, progress: Callable[[str], object]
) -> dict[DecodePlan, str]:
    """Compile and compare the plans, several at a time; return those that failed, with the reason."""
    workers = max(1, min(len(wanted), os.cpu_count() or 1))
    progress(f"forward: {len(wanted)} plans are compiled and checked by {workers} processes")
    failures: dict[DecodePlan, str] = {}
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = {pool.submit(_check_plan, plan, kv_cache_dtype): plan for plan in wanted}
        for job in as_completed(jobs):
            try:
                reason = job.result()
            except Exception as error:  # the process died
                reason = reason_of(error)
            if reason is not None:
                failures[jobs[job]] = reason
    return failures


def _seconds(device: Device, forward: _Forward, contexts: Sequence[int]) -> float:
    batches: list[ForwardBatch] = []
    device.main.run(_STAGE, lambda: batches.append(decode_batch(forward.order, contexts)))
    # compiles, and grows the allocator's pools
    device.main.run(_STAGE, lambda: forward.run(batches[0]))
    device.synchronize("forward: warm-up")
    graph = device.capture(lambda: forward.run(batches[0]))
    rounds = []
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(_ROUNDS):

        def replay() -> None:
            start.record()
            for _ in range(_REPLAYS):
                graph.replay()
            end.record()

        device.main.run(_STAGE, replay)
        device.synchronize("forward")
        rounds.append(1e-3 * start.elapsed_time(end) / _REPLAYS)
    # the first one warms up
    return median(rounds[1:])


def report(record: dict[str, Any]) -> str:
    """Return the record as a table: microseconds of a forward pass by bucket and choice, the fastest first."""
    what = f"{record['model']}, kv_cache_dtype {record['kv_cache_dtype']}"
    lines = [f"{what}: microseconds of a forward pass of decodes, as one graph"]
    for batch in dict.fromkeys(each["batch"] for each in record["times"]):
        rows: dict[str, dict[Contexts, float]] = {}
        for each in record["times"]:
            if each["batch"] == batch:
                rows.setdefault(_label(each["choice"]), {})[each["context"]] = each["microseconds"]
        contexts = BUCKETS[batch]
        lines.append(f"{batch} requests, contexts {', '.join(map(str, contexts))}")
        first = next(iter(rows))
        order = sorted(rows, key=lambda label: rows[label].get(contexts[0], math.inf))
        for label in order:
            shown = "".join(f"{rows[label][c]:10.1f}" if c in rows[label] else f"{'-':>10}" for c in contexts)
            lines.append(f"  {shown}  {label}{'  (in force)' if label == first else ''}")
        best = record["best"].get(str(batch))
        if best:
            lines.append(f"  best: {_label(best)}")
    lines += [f"failed: {name}: {why}" for name, why in record["failures"].items()]
    return "\n".join(lines)


def headline(record: dict[str, Any]) -> dict[str, Any]:
    """Return what fits one JSON line."""
    gpu = record["environment"]["gpu"] or {}
    return {
        "kind": KIND,
        "gpu": gpu.get("name"),
        "revision": record["environment"]["revision"],
        "kv_cache_dtype": record["kv_cache_dtype"],
        "best": {batch: _label(choice) for batch, choice in record["best"].items()},
        "num_failures": len(record["failures"]),
    }


def _label(choice: dict[str, Any]) -> str:
    plan = "n{block_n} w{num_warps} s{num_stages} splits {num_splits} x {tiles_per_split} tiles".format(
        **choice["plan"]
    )
    registers = choice["plan"].get("max_registers")
    plan += f" r{registers}" if registers else ""
    # records from before there was an order have none
    plan += "".join(f" {name}" for name in ("ahead", "ordered") if choice.get(name))
    return plan if choice["fused"] else "kernels one by one"
