"""Time of a decode layer's attention, fused and as three kernels, and of prefill attention, on random caches.

`fused` is head norms, rotary embedding, KV write and attention in one launch; `chain` the three launches it
replaces (a layer of Qwen3 takes 8 instead of 10 launches, matrix products included); `attention` the last of the
three alone.  Calls stand in one CUDA graph and go round enough blocks to leave the L2 cache, which those of one
short request nevertheless fit.  Bandwidth is the bytes of the context's keys and values over the time of the best
fused plan.  Every candidate is compiled and compared with float64 in a process of its own first; one that fails is
reported and left out.

For a batch, tiles are tried first (with splits fixed), then splits for the best tile, over all contexts; the plan of
a batch is the one with the least geometric mean of time over contexts, since it may depend on nothing else.

Predicted for an H200 (4.3 TB/s of reads) before anything was measured, Qwen3-0.6B, in microseconds: four of
latency (launch 1, lengths and block ids 0.7, keys and heads 0.8, arithmetic 1, store 0.5) and 80 % of the
bandwidth; the chain three times the latency and 60 %:

    fused (chain)      C=128      C=640        C=4096         C=32768
    B=1              4   (12)   5   (13)      9   (18)      43    (65)
    B=8              5   (13)  10   (20)     43   (64)     315   (430)
    B=32             9   (18)  28   (45)    160   (220)   1250  (1700)
    B=64            14   (25)  53   (77)    315   (430)   2500  (3400)
    B=256           43   (64) 200   (270)  1250  (1700)  10000 (13000)

Dependent launch hides the weights' load and the launch itself: 0.5 to 1 microsecond a call.  Prefill of 32 prompts
of 2,048 tokens: 330 TFLOP/s (1.7 ms) with 128 x 64 tiles in eight warps, 1.5 times what 64 x 64 in four reach;
FlashAttention in torch on contiguous tensors: 400.

Measured (traces/bench/h200-layers.json): bandwidth is better than predicted, 78 to 101 % from 64 requests of 640
tokens on, latency worse: 6 us at B=1, C=128 (the chain 7.4), 16.6 at B=64 (19.8), and at B=256, C=128 the chain is
faster, 46 against 52.  Prefill: 64 x 64 tiles in four warps with three stages 367 TFLOP/s, larger tiles 278 to 338,
torch on contiguous tensors 553.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch

from mrv2.bench.bandwidth import Limit, measure_read_bandwidth
from mrv2.bench.environment import environment
from mrv2.bench.failures import reason_of
from mrv2.bench.layer_problems import (
    BLOCK_SIZE,
    QWEN3,
    SMOLLM2,
    DecodeProblem,
    HeadShape,
    Pool,
    PrefillProblem,
    check_decode,
    check_prefill,
)
from mrv2.device import Device, make_device
from mrv2.errors import ConfigError
from mrv2.instrument import recording
from mrv2_kernels.attention._tiles import TileShape
from mrv2_kernels.attention.plan import DecodePlan, decode_plan, split_bound
from mrv2_kernels.gemm.pdl import has_pdl

KIND = "mrv2-layers"
BATCHES = {QWEN3: (32, 1, 256, 64, 8), SMOLLM2: (32, 1, 256)}
CONTEXTS = {QWEN3: (128, 640, 4096, 32768), SMOLLM2: (128, 640, 4096)}
# (keys a tile, warps, stages)
TILES = {
    128: ((64, 4, 3), (64, 4, 4), (32, 4, 4), (32, 2, 4), (64, 2, 3), (128, 4, 2), (128, 8, 2), (64, 8, 3)),
    64: ((128, 4, 3), (64, 4, 4), (64, 2, 4), (128, 8, 3), (32, 4, 4)),
}
# programs a launch aims at, and keys a context must have for each split that it uses
PROGRAMS, KEYS_PER_SPLIT = (264, 1056, 2112), (128, 256, 512)
PREFILL_TILES = (
    TileShape(64, 64, 4, 2),
    TileShape(64, 64, 4, 3),
    TileShape(128, 64, 8, 2),
    TileShape(128, 64, 8, 3),
    TileShape(128, 128, 8, 2),
)
# requests, new tokens, context
PREFILLS = ((32, 2048, 2048), (8, 512, 4096))
_FIRST_PROGRAMS, _FIRST_KEYS = 1056, 256
# several times the last-level cache, in at most this many calls
_BUFFER_BYTES, _MAX_CALLS = 256 << 20, 64
_STAGE = "measure"


@dataclass(frozen=True)
class LayerTime:
    """One variant of one bucket."""

    model: str
    batch: int
    context: int
    # "chain", "attention", "now" (fused, with the plan in force), "fused", "fused pdl"
    variant: str
    plan: DecodePlan | None
    microseconds: float
    gigabytes_per_second: float
    share_of_read_bandwidth: float


@dataclass(frozen=True)
class PrefillTime:
    """One tile of the mixed kernel, or torch's own attention."""

    prompts: str
    variant: str
    microseconds: float
    teraflops_per_second: float


def measure_layers(
    device: Device, *, seconds: float = 100.0, progress: Callable[[str], object] = print
) -> dict[str, Any]:
    """Check and time every candidate; return the record as plain values.  CUDA only.

    Buckets that `seconds` (from the call on) leave no time for are named among the failures.
    """
    if device.type != "cuda":
        raise ConfigError("--layers measures kernels: it needs a CUDA device")
    deadline = time.monotonic() + seconds
    limit = measure_read_bandwidth(device)
    failures = _check_all(device, progress)
    bench = _Bench(device, limit, failures, deadline, progress)
    for shape in (QWEN3, SMOLLM2):
        bench.measure_model(shape)
    return make_record(bench.times, bench.prefills, bench.plans, failures, limit)


def make_record(
    times: list[LayerTime],
    prefills: list[PrefillTime],
    plans: dict[str, dict[int, DecodePlan]],
    failures: dict[str, str],
    limit: Limit,
) -> dict[str, Any]:
    """Return the record: environment, limit, every time, the plan of each batch, and what failed."""
    return {
        "kind": KIND,
        "environment": environment(),
        "read_gigabytes_per_second": 1e-9 * limit.value,
        "read_method": limit.method,
        "times": [asdict(each) for each in times],
        "prefills": [asdict(each) for each in prefills],
        "plans": {model: {str(n): asdict(plan) for n, plan in found.items()} for model, found in plans.items()},
        "failures": failures,
    }


def report(record: dict[str, Any]) -> str:
    """Return the record as tables: microseconds a call, then the plans, prefills and failures."""
    lines = [
        f"bf16, reads at {record['read_gigabytes_per_second']:,.0f} GB/s ({record['read_method']}); us a call",
        f"{'model':14}{'B':>4}{'C':>7}{'chain':>10}{'attention':>11}{'now':>9}{'plan':>9}{'pdl':>9}{'best':>9}"
        f"{'GB/s':>7}{'of read':>9}  best plan here",
    ]
    for (model, batch, context), cells in _by_bucket(record).items():
        best = cells["best"]
        shown = "".join(
            f"{cells[name]['microseconds']:{width}.1f}" if name in cells else f"{'-':>{width}}"
            for name, width in (
                ("chain", 10),
                ("attention", 11),
                ("now", 9),
                ("plan", 9),
                ("fused pdl", 9),
                ("best", 9),
            )
        )
        lines.append(
            f"{model:14}{batch:4}{context:7}{shown}{best['gigabytes_per_second']:7.0f}"
            f"{best['share_of_read_bandwidth']:9.0%}  {_plan_text(best['plan'])}"
        )
    lines.append("plan of each batch (keys a tile, warps, stages, splits, tiles a split):")
    for model, plans in record["plans"].items():
        lines += [f"    {model} B={batch}: {tuple(plan.values())}" for batch, plan in plans.items()]
    lines += [
        f"prefill {each['prompts']:16}{each['variant']:22}{each['microseconds']:10.0f} us"
        f"{each['teraflops_per_second']:8.0f} TFLOP/s"
        for each in record["prefills"]
    ]
    lines += [f"failed: {name}: {why}" for name, why in record["failures"].items()]
    return "\n".join(lines)


def headline(record: dict[str, Any]) -> dict[str, Any]:
    """Return what fits one JSON line."""
    gpu = record["environment"]["gpu"] or {}
    names = ("chain", "now", "plan", "fused pdl", "best")
    return {
        "kind": KIND,
        "gpu": gpu.get("name"),
        "revision": record["environment"]["revision"],
        "read_gb_s": round(record["read_gigabytes_per_second"]),
        "us": {
            f"{model} {batch}x{context}": {n: round(cells[n]["microseconds"], 1) for n in names if n in cells}
            for (model, batch, context), cells in _by_bucket(record).items()
        },
        "prefill_tflops": {
            f"{each['prompts']} {each['variant']}": round(each["teraflops_per_second"]) for each in record["prefills"]
        },
        "num_failures": len(record["failures"]),
    }


def _by_bucket(record: dict[str, Any]) -> dict[tuple[str, int, int], dict[str, Any]]:
    """Return bucket -> name -> time: variants, "now" and "plan" (in force and found here for the batch), "best"."""
    buckets: dict[tuple[str, int, int], dict[str, Any]] = {}
    for each in record["times"]:
        cells = buckets.setdefault((each["model"], each["batch"], each["context"]), {})
        if each["variant"] != "fused":
            cells[each["variant"]] = each
            continue
        if each["plan"] == record["plans"].get(each["model"], {}).get(str(each["batch"])):
            cells["plan"] = each
        best = cells.get("best")
        if best is None or each["microseconds"] < best["microseconds"]:
            cells["best"] = each
    return {key: cells for key, cells in buckets.items() if "best" in cells}


def _plan_text(plan: dict[str, int]) -> str:
    return "n{block_n} w{num_warps} s{num_stages} splits {num_splits} x {tiles_per_split} tiles".format(**plan)


def candidate(shape: HeadShape, batch: int, tile: tuple[int, int, int], programs: int, keys: int) -> DecodePlan:
    """Return the plan of a tile whose launch aims at `programs` and whose splits have at least `keys` keys."""
    block_n, num_warps, num_stages = tile
    splits = split_bound(batch, shape.num_kv_heads, programs)
    return DecodePlan(block_n, num_warps, num_stages, splits, max(1, keys // block_n))


def _tile_name(shape: HeadShape, tile: tuple[int, int, int]) -> str:
    return "{} n{} w{} s{}".format(shape.name, *tile)


def _check_tile(shape: HeadShape, tile: tuple[int, int, int], pdl: bool) -> dict[str, str]:
    device = make_device("cuda")
    plan = replace(candidate(shape, 1, tile, _FIRST_PROGRAMS, _FIRST_KEYS), num_splits=8)
    name = _tile_name(shape, tile)
    found = _failures(device, name, lambda: check_decode(shape, plan, False, device.torch_device))
    if pdl:
        found |= _failures(device, f"{name} pdl", lambda: check_decode(shape, plan, True, device.torch_device))
    return found


def _check_prefill(tile: TileShape) -> dict[str, str]:
    device = make_device("cuda")
    name = f"prefill {_prefill_name(tile)}"
    return _failures(device, name, lambda: check_prefill(QWEN3, tile, device.torch_device))


def _check_chain(shape: HeadShape) -> dict[str, str]:
    device = make_device("cuda")
    found: dict[str, str] = {}
    for batch in BATCHES[shape]:
        problem = DecodeProblem(Pool(shape, 64, device.torch_device), [17] * batch)
        found |= _failures(device, f"{shape.name} chain B={batch}", problem.chain)
    return found


def _failures(device: Device, name: str, work: Callable[[], None]) -> dict[str, str]:
    """Run `work` to its end on the GPU; return name -> reason if it fails, else nothing."""
    try:
        work()
        device.synchronize("layers: check")
    except Exception as error:  # any failure of a candidate is a finding
        return {name: reason_of(error)}
    return {}


def _alone(fn: Callable[..., dict[str, str]], args: tuple[Any, ...]) -> dict[str, str]:
    """Call `fn` in a process of its own, whose death is a finding too."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        try:
            return process.submit(fn, *args).result()
        except Exception as error:  # the process died, or could not start
            return {f"{fn.__name__}{args}": reason_of(error)}


def _check_all(device: Device, progress: Callable[[str], object]) -> dict[str, str]:
    """Compile and compare every candidate, several at a time; return name -> reason of those that failed."""
    pdl = has_pdl(device.zeros((1,)))
    jobs: list[tuple[Callable[..., dict[str, str]], tuple[Any, ...]]] = [
        (_check_tile, (shape, tile, pdl)) for shape in BATCHES for tile in TILES[shape.head_dim]
    ]
    jobs += [(_check_prefill, (tile,)) for tile in PREFILL_TILES]
    jobs += [(_check_chain, (shape,)) for shape in BATCHES]
    workers = max(1, min(len(jobs), os.cpu_count() or 1))
    progress(f"layers: {len(jobs)} groups of candidates are compiled and checked by {workers} processes")
    failures: dict[str, str] = {}
    with ThreadPoolExecutor(workers) as pool:
        for found in pool.map(lambda job: _alone(*job), jobs):
            failures |= found
    return failures


def _prefill_name(tile: TileShape) -> str:
    return f"m{tile.block_m} n{tile.block_n} w{tile.num_warps} s{tile.num_stages}"


class _Bench:
    """Times candidates that passed their check."""

    def __init__(
        self,
        device: Device,
        limit: Limit,
        failures: dict[str, str],
        deadline: float,
        progress: Callable[[str], object],
    ) -> None:
        self.device, self.limit, self.failures, self.deadline, self.progress = (
            device,
            limit,
            failures,
            deadline,
            progress,
        )
        self.times: list[LayerTime] = []
        self.prefills: list[PrefillTime] = []
        # model -> batch -> plan
        self.plans: dict[str, dict[int, DecodePlan]] = {}

    def measure_model(self, shape: HeadShape) -> None:
        """Time prefills (of Qwen3 alone), then every batch that memory and time allow."""
        free, _ = self.device.memory_info()
        bytes_per_block = shape.bytes_per_token * BLOCK_SIZE
        wanted = max(BATCHES[shape]) * max(CONTEXTS[shape]) // BLOCK_SIZE
        num_blocks = min(wanted, int(free * 0.6) // bytes_per_block)
        pool: list[Pool] = []
        self.device.main.run(_STAGE, lambda: pool.append(Pool(shape, num_blocks, self.device.torch_device)))
        self.device.synchronize("layers: inputs")
        if shape is QWEN3:
            for prefill in PREFILLS:
                self._measure_prefill(pool[0], *prefill)
        for batch in BATCHES[shape]:
            self.progress(f"layers: {shape.name}, batch {batch}")
            self._measure_batch(pool[0], batch)
        pool.clear()
        torch.cuda.empty_cache()

    def _measure_prefill(self, pool: Pool, num_requests: int, query_len: int, context: int) -> None:
        name = f"{num_requests} x {query_len}/{context}"
        problem: list[PrefillProblem] = []
        self.device.main.run(_STAGE, lambda: problem.append(PrefillProblem(pool, num_requests, query_len, context)))
        self.device.synchronize("layers: inputs")
        variants: dict[str, Callable[[], None]] = {"now": lambda: problem[0].paged(None)}
        for tile in PREFILL_TILES:
            if f"prefill {_prefill_name(tile)}" not in self.failures:
                variants[_prefill_name(tile)] = lambda tile=tile: problem[0].paged(tile)
        if context == query_len:
            variants["torch, contiguous"] = problem[0].torch_attention
        for variant, work in variants.items():
            found = self._try(f"prefill {name} {variant}", [work])
            if found is not None:
                self.prefills.append(PrefillTime(name, variant, 1e6 * found, 1e-12 * problem[0].flops / found))

    def _measure_batch(self, pool: Pool, batch: int) -> None:
        shape = pool.shape
        problems: dict[int, list[DecodeProblem]] = {}
        for context in CONTEXTS[shape]:
            if batch * context > len(pool.order) * BLOCK_SIZE:
                self.failures[f"{shape.name} B={batch} C={context}"] = "left out: no memory"
                continue
            self.device.main.run(_STAGE, self._make_problems, problems, pool, batch, context)
            self.device.synchronize("layers: inputs")
        for context, calls in problems.items():
            for variant in ("chain", "attention"):
                work = [call.chain if variant == "chain" else call.attention for call in calls]
                if f"{shape.name} chain B={batch}" not in self.failures:
                    self._time(shape, batch, context, variant, None, work)
            now = decode_plan(batch, shape.num_kv_heads, shape.head_dim, torch.bfloat16)
            self._time(shape, batch, context, "now", now, [lambda c=call, p=now: c.fused(p) for call in calls])
        tiles = [tile for tile in TILES[shape.head_dim] if _tile_name(shape, tile) not in self.failures]
        first = [candidate(shape, batch, tile, _FIRST_PROGRAMS, _FIRST_KEYS) for tile in tiles]
        best = self._best(problems, shape, batch, first)
        if best is None:
            return
        tile = (best.block_n, best.num_warps, best.num_stages)
        second = {candidate(shape, batch, tile, programs, keys) for programs in PROGRAMS for keys in KEYS_PER_SPLIT}
        order = sorted(second - {best}, key=lambda plan: (plan.num_splits, plan.tiles_per_split))
        best = self._best(problems, shape, batch, [best, *order]) or best
        self.plans.setdefault(shape.name, {})[batch] = best
        pdl_name = f"{_tile_name(shape, tile)} pdl"
        if has_pdl(pool.order) and pdl_name not in self.failures:
            for context, calls in problems.items():
                work = [lambda c=call, p=best: c.fused(p, pdl=True) for call in calls]
                self._time(shape, batch, context, "fused pdl", best, work)

    def _make_problems(self, problems: dict[int, list[DecodeProblem]], pool: Pool, batch: int, context: int) -> None:
        size = batch * context * pool.shape.bytes_per_token
        calls: list[DecodeProblem] = []
        first_block = 0
        for _ in range(min(_MAX_CALLS, max(2, -(-_BUFFER_BYTES // size)))):
            calls.append(DecodeProblem(pool, [context] * batch, first_block))
            first_block = calls[-1].next_block
        problems[context] = calls

    def _best(
        self, problems: dict[int, list[DecodeProblem]], shape: HeadShape, batch: int, plans: Sequence[DecodePlan]
    ) -> DecodePlan | None:
        """Time `plans` and return the one of least geometric mean over contexts, None where none ran on all."""
        means: dict[DecodePlan, float] = {}
        for plan in plans:
            found = []
            for context, calls in problems.items():
                work = [lambda c=call, p=plan: c.fused(p) for call in calls]
                found.append(self._time(shape, batch, context, "fused", plan, work))
            logs = [math.log(each) for each in found if each is not None]
            if logs and len(logs) == len(problems):
                means[plan] = sum(logs) / len(logs)
        return min(means, key=lambda plan: means[plan]) if means else None

    def _time(
        self,
        shape: HeadShape,
        batch: int,
        context: int,
        variant: str,
        plan: DecodePlan | None,
        work: Sequence[Callable[[], None]],
    ) -> float | None:
        for each in self.times:
            if (each.model, each.batch, each.context, each.variant) == (shape.name, batch, context, variant):
                if plan is not None and each.plan == plan:
                    return each.microseconds
        found = self._try(f"{shape.name} B={batch} C={context} {variant} {plan or ''}", work)
        if found is None:
            return None
        rate = batch * context * shape.bytes_per_token / found
        self.times.append(
            LayerTime(shape.name, batch, context, variant, plan, 1e6 * found, 1e-9 * rate, rate / self.limit.value)
        )
        return 1e6 * found

    def _try(self, name: str, work: Sequence[Callable[[], None]]) -> float | None:
        """Return the seconds of one call among those of a graph; a failure is noted and yields None."""
        if time.monotonic() > self.deadline:
            self.failures[name] = "left out: no time"
            return None
        try:
            return self._seconds(work)
        except Exception as error:  # any failure of a candidate is a finding
            self.failures[name] = reason_of(error)
            return None

    def _seconds(self, work: Sequence[Callable[[], None]]) -> float:
        def run() -> None:
            for call in work:
                call()

        # compiles, and grows the allocator's pools
        self.device.main.run(_STAGE, work[0])
        self.device.synchronize("layers: warm-up")
        graph = self.device.capture(run)
        times: list[int] = []
        with recording(self.device) as recorder:
            # the first replay warms up
            for _ in range(6):
                self.device.main.run(_STAGE, graph.replay)
            self.device.synchronize("layers")
            times = [span.end_ns - span.start_ns for span in recorder.spans() if span.kind == "device"]
        return median(times[1:]) * 1e-9 / len(work)
