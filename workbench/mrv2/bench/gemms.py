"""The four matrix products of all layers in one CUDA graph, by every plan there is, against reading the weights once.

Qwen3-0.6B's products (`gemm_cases.PRODUCTS`) in bf16 with the distinct weights of 28 layers, 881 MB, or half of that
as 8-bit floats, which no cache holds.  Each reads a part of what the one before wrote.  Per batch size:

1. every plan is compiled and checked against float64, in processes of their own (`gemm_check`);
2. every plan that passed is timed on its product alone: a graph of 28 of them;
3. chains of all 112 products are timed: all by the library; the fastest of each variant per product; the fastest of
   all per product; and the best found from there by exchanging one product's plan at a time ("picked");
4. the picked chain is timed once more with the kernels between the products of a layer, and against it, for up to
   64 rows, products that take those in ("fused"); they are picked where they are faster;
5. the picked chain must give the library's result within rounding, and the same bits when its kernels are launched
   one by one;
6. of 8-bit weights, the same with 16-bit ones by the plans of the committed table stands beside it ("bf16").

Times are medians of replays by CUDA events, the graph's launch included.  What was picked goes into the record in
the form of the table `mrv2_kernels.gemm.picks`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from mrv2.bench.bandwidth import Limit, measure_read_bandwidth
from mrv2.bench.environment import environment
from mrv2.bench.gemm_cases import (
    BUCKETS,
    DTYPE,
    EPS,
    FP8_BUCKETS,
    MAX_FUSED_ROWS,
    NUM_LAYERS,
    PRODUCTS,
    Product,
    Quantization,
    candidates,
    fused_candidates,
)
from mrv2.bench.gemm_check import Task, Verdict, check_all
from mrv2.bench.gemm_stack import BEFORE, STAGE, Stack
from mrv2.device import Device
from mrv2.errors import ConfigError
from mrv2_kernels.gemm import (
    LIBRARY,
    VARIANTS,
    LinearPlan,
    LinearWorkspace,
    fused_linear,
    linear,
    picks_for,
    picks_of,
    workspace_for,
)
from mrv2_kernels.gemm.picks import Pick, as_entry
from mrv2_kernels.layers import rms_norm, silu_and_mul

KIND = "mrv2-gemms"
# where what starting ahead brings is measured
_LATE_TOO = (8, 32)
# plans of each product that the search for the best chain looks at
_NEIGHBOURS = 4
# of the library's chain, after 112 products each rounded to bf16
_CHAIN_TOLERANCE = 0.1

Plans = tuple[LinearPlan, ...]


@dataclass(frozen=True)
class ProductTime:
    """One plan on one product, or why it has no time."""

    num_rows: int
    product: str
    plan: str
    # of one product
    microseconds: float | None
    # of its weights' bytes over that time, of the read bandwidth
    share_of_read_bandwidth: float | None
    error: float | None
    failure: str | None


@dataclass(frozen=True)
class ChainTime:
    """One choice of plans on all 112 products."""

    num_rows: int
    name: str
    plans: tuple[str, ...]
    microseconds: float | None
    # of reading all weights once, over that time
    share_of_floor: float | None
    # of its result against the library's; None where that is another function
    difference: float | None = None
    same_eagerly: bool | None = None
    failure: str | None = None


def measure_gemms(
    device: Device,
    *,
    quantization: Quantization | None = None,
    buckets: Sequence[int] | None = None,
    num_processes: int | None = None,
    progress: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Check and time every plan; return the record as plain values.  CUDA only."""
    if device.type != "cuda":
        raise ConfigError("--gemms measures kernels: it needs a CUDA device")
    begin = time.perf_counter()
    buckets = buckets or (BUCKETS if quantization is None else FP8_BUCKETS)
    limit = measure_read_bandwidth(device)
    torch.cuda.empty_cache()
    tasks = [
        Task(m, product, plan, fused, quantization)
        for fused, plans in ((False, candidates), (True, fused_candidates))
        for m in buckets
        for product in PRODUCTS
        for plan in plans(m, product, quantization)
    ]
    progress(f"gemms: compiling and checking {len(tasks)} plans")
    verdicts = check_all(tasks, num_processes=num_processes or min(16, os.cpu_count() or 1))
    seconds = {"check": time.perf_counter() - begin}
    products: list[ProductTime] = []
    chains: list[ChainTime] = []
    picked: dict[int, Plans] = {}
    fused: dict[int, Plans] = {}
    stack = Stack(device, quantization)
    sixteen_bits = None if quantization is None else Stack(device)
    for num_rows in buckets:
        progress(f"gemms: {num_rows} rows, {time.perf_counter() - begin:.0f} s so far")
        bucket = _Bucket(stack, num_rows, limit)
        bucket.measure({task: verdict for task, verdict in verdicts.items() if task.num_rows == num_rows})
        if sixteen_bits is not None:
            bucket.measure_committed(sixteen_bits)
        products += bucket.products
        chains += bucket.chains
        picked[num_rows] = bucket.picked
        if bucket.fused is not None:
            fused[num_rows] = bucket.fused
    seconds["all"] = time.perf_counter() - begin
    return make_record(products, chains, picked, limit, seconds, fused, quantization)


def make_record(
    products: list[ProductTime],
    chains: list[ChainTime],
    picked: dict[int, Plans],
    limit: Limit,
    seconds: dict[str, float],
    fused: Mapping[int, Plans] = MappingProxyType({}),
    quantization: Quantization | None = None,
) -> dict[str, Any]:
    """Return the record: environment, limit, all that was tried, and the picks."""
    alone = (None,) * len(PRODUCTS)
    return {
        "kind": KIND,
        "environment": environment(),
        "quantization": quantization,
        "num_layers": NUM_LAYERS,
        "shapes": {each.name: [each.num_outputs, each.num_inputs] for each in PRODUCTS},
        "read_gigabytes_per_second": 1e-9 * limit.value,
        "read_method": limit.method,
        "floor_microseconds": 1e6 * floor_seconds(limit, quantization),
        "seconds": seconds,
        "chains": [asdict(each) for each in chains],
        "products": [asdict(each) for each in products],
        "picks": [
            as_entry(m, product.num_outputs, product.num_inputs, Pick(plan, fused_plan))
            for m, plans in picked.items()
            for product, plan, fused_plan in zip(PRODUCTS, plans, fused.get(m, alone), strict=True)
        ],
    }


def floor_seconds(limit: Limit, quantization: Quantization | None = None) -> float:
    """Return the time of reading all weights once."""
    return NUM_LAYERS * sum(product.bytes_read(quantization) for product in PRODUCTS) / limit.value


def report(record: dict[str, Any]) -> str:
    """Return the record as tables: the fastest plans of each product, failures, chains."""
    lines = [
        f"{record['num_layers']} layers, weights in {record['quantization'] or 'bf16'}; "
        f"reads at {record['read_gigabytes_per_second']:,.0f} GB/s "
        f"({record['read_method']}): floor {record['floor_microseconds']:.0f} us; "
        f"{record['seconds']['all']:.0f} s, {record['seconds']['check']:.0f} of them to compile and check",
        "",
        "one product alone: us each, share of read bandwidth; the three fastest plans, and the library's",
    ]
    timed = [each for each in record["products"] if each["microseconds"] is not None]
    for num_rows, name in dict.fromkeys((each["num_rows"], each["product"]) for each in timed):
        found = [each for each in timed if (each["num_rows"], each["product"]) == (num_rows, name)]
        found.sort(key=lambda each: each["microseconds"])
        shown = found[:3] + [each for each in found[3:] if each["plan"] == LIBRARY.label]
        cells = (f"{e['microseconds']:.2f} {e['share_of_read_bandwidth']:.0%} {e['plan']}" for e in shown)
        lines.append(f"M = {num_rows:<4}{name:8} " + " | ".join(cells))
    failed = [each for each in record["products"] + record["chains"] if each["failure"] is not None]
    lines += ["", f"failed: {len(failed)}"]
    reasons: dict[str, list[str]] = {}
    for each in failed:
        what = each.get("plan") or each["name"]
        reasons.setdefault(each["failure"][:160], []).append(f"M={each['num_rows']} {each.get('product', '')} {what}")
    lines += [f"  {len(where)} x {why}, first: {where[0]}" for why, where in list(reasons.items())[:12]]
    lines += ["", "all products of all layers in one graph", f"{'M':>4} {'chain':22}{'us':>8}{'of floor':>9}  notes"]
    for each in record["chains"]:
        if each["microseconds"] is None:
            continue
        notes = []
        if each["difference"] is not None:
            notes.append(f"differs {each['difference']:.1e}")
        if each["same_eagerly"] is False:
            notes.append("NOT THE SAME EAGERLY")
        if each["name"] in ("picked", "picked, fused", "bf16, in layers"):
            notes.append("; ".join(each["plans"]))
        lines.append(
            f"{each['num_rows']:>4} {each['name']:22}{each['microseconds']:8.1f}{each['share_of_floor']:9.0%}  "
            + ", ".join(notes)
        )
    return "\n".join(lines)


def headline(record: dict[str, Any]) -> dict[str, Any]:
    """Return what fits one JSON line."""
    gpu = record["environment"]["gpu"] or {}
    return {
        "kind": KIND,
        "gpu": gpu.get("name"),
        "quantization": record["quantization"],
        "revision": record["environment"]["revision"],
        "read_gb_s": round(record["read_gigabytes_per_second"]),
        "floor_us": round(record["floor_microseconds"]),
        "us": {
            f"{each['num_rows']} {each['name']}": round(each["microseconds"], 1)
            for each in record["chains"]
            if each["microseconds"] is not None
        },
    }


def is_right(record: dict[str, Any]) -> bool:
    """Say whether each batch size has a picked chain that gives the library's result, the same bits eagerly."""
    found = [each for each in record["chains"] if each["name"] == "picked"]
    wanted = {each["num_rows"] for each in record["picks"]}
    return {each["num_rows"] for each in found} == wanted and all(
        each["failure"] is None and each["same_eagerly"] for each in found
    )


class _Bucket:
    """Buffers and results of one batch size."""

    def __init__(self, stack: Stack, num_rows: int, limit: Limit) -> None:
        self.stack, self.num_rows, self.limit = stack, num_rows, limit
        device = stack.device
        self.products: list[ProductTime] = []
        self.chains: list[ChainTime] = []
        self.picked: Plans = (LIBRARY,) * len(PRODUCTS)
        # if that is faster than `picked` among kernels for norms, activation and additions
        self.fused: Plans | None = None
        # per product: [M, N] bf16
        self.outs = [device.zeros((num_rows, product.num_outputs), DTYPE) for product in PRODUCTS]
        # per product: [M, K], a part of what the product before wrote
        self.inputs = [self.outs[index - 1][:, : product.num_inputs] for index, product in enumerate(PRODUCTS)]
        # [M, H]
        generator = torch.Generator(stack.norm.device).manual_seed(num_rows)
        self.start = torch.randn(
            self.outs[-1].shape, generator=generator, device=stack.norm.device, dtype=torch.float32
        ).to(DTYPE)
        self.library_result: torch.Tensor | None = None

    def measure(self, verdicts: dict[Task, Verdict]) -> None:
        """Fill `products`, `chains`, `picked` and `fused`."""
        times: list[dict[LinearPlan, float]] = [self._times(index, verdicts) for index in range(len(PRODUCTS))]
        self._chain("library", self.picked)
        ranked = [sorted(found, key=lambda plan, found=found: found[plan]) for found in times]
        for variant in VARIANTS[1:]:
            best = [next((plan for plan in plans if plan.variant == variant), None) for plans in ranked]
            if any(best):
                self._chain(f"fastest {variant}", tuple(plan or LIBRARY for plan in best))
        if not all(ranked):
            return
        plans = tuple(each[0] for each in ranked)
        best_time = self._chain("fastest alone", plans)
        for index, each in enumerate(ranked):
            for plan in each[1:_NEIGHBOURS]:
                tried = (*plans[:index], plan, *plans[index + 1 :])
                spent = self._time(self._work(tried))
                if spent is not None and (best_time is None or spent < best_time):
                    plans, best_time = tried, spent
        self.picked = plans
        self._chain("picked", plans)
        if self.num_rows in _LATE_TOO:
            self._chain("picked, none ahead", tuple(replace(plan, ahead=False) for plan in plans))
        separate = self._note("picked, in layers", plans, self._layer_work(plans), compare=False)
        if self.num_rows <= MAX_FUSED_ROWS:
            self._measure_fused(verdicts, separate)

    def _times(self, index: int, verdicts: dict[Task, Verdict]) -> dict[LinearPlan, float]:
        """Time each plan that passed on one product alone; return seconds a product."""
        product, found = PRODUCTS[index], {}
        for task, verdict in verdicts.items():
            if task.product is not product or task.fused:
                continue
            failure, seconds = verdict.failure, None
            if failure is None:
                try:
                    seconds = self._time_alone(index, task.plan)
                    found[task.plan] = seconds
                except Exception as fault:  # a plan that fails is reported, not fatal
                    failure = f"{type(fault).__name__}: {' '.join(str(fault).split())[:400]}"
            share = None
            if seconds is not None:
                share = product.bytes_read(self.stack.quantization) / seconds / self.limit.value
            us = None if seconds is None else 1e6 * seconds
            self.products.append(
                ProductTime(self.num_rows, product.name, task.plan.label, us, share, verdict.error, failure)
            )
        return found

    def _workspace(self, plans: Plans, products: Sequence[Product] = PRODUCTS) -> LinearWorkspace | None:
        wanted = [(plan, self.num_rows, product.num_outputs) for plan, product in zip(plans, products, strict=True)]
        return workspace_for(wanted, self.stack.norm.device)

    def _time_alone(self, index: int, plan: LinearPlan) -> float:
        workspace = self._workspace((plan,), (PRODUCTS[index],))
        x, out = self.start.new_ones((self.num_rows, PRODUCTS[index].num_inputs)).normal_(), self.outs[index]

        def work() -> None:
            for weight, scale in self.stack.weights[index]:
                linear(x, weight, plan, workspace, out, scale)

        return self.stack.graph_seconds(work, lambda: None) / NUM_LAYERS

    def _work(self, plans: Plans) -> Callable[[], None]:
        workspace, stack = self._workspace(plans), self.stack

        def work() -> None:
            for layer in range(NUM_LAYERS):
                for index, plan in enumerate(plans):
                    weight, scale = stack.weights[index][layer]
                    linear(self.inputs[index], weight, plan, workspace, self.outs[index], scale)

        return work

    def _restart(self) -> None:
        self.outs[-1].copy_(self.start)

    def _time(self, work: Callable[[], None]) -> float | None:
        try:
            return self.stack.graph_seconds(work, self._restart)
        except Exception:  # the plan it is compared with stays
            return None

    def _chain(self, name: str, plans: Plans) -> float | None:
        """Time a chain of plain products, compare its result with the library's, and note both."""
        return self._note(name, plans, self._work(plans), compare=True)

    def _note(self, name: str, plans: Plans, work: Callable[[], None], *, compare: bool) -> float | None:
        labels = tuple(plan.label for plan in plans)
        try:
            seconds = self.stack.graph_seconds(work, self._restart)
            result = self.outs[-1].clone()
            device = self.stack.device
            device.main.run(BEFORE, self._restart)
            device.main.run(STAGE, work)
            device.synchronize("gemms: eager")
            is_same = torch.equal(result, self.outs[-1])
        except Exception as fault:  # a chain that fails is reported, not fatal
            failure = f"{type(fault).__name__}: {' '.join(str(fault).split())[:400]}"
            self.chains.append(ChainTime(self.num_rows, name, labels, None, None, failure=failure))
            return None
        difference, failure = None, None
        if self.library_result is None:
            self.library_result = result.double()
        if compare:
            difference = float((result.double() - self.library_result).norm() / self.library_result.norm())
            if not difference <= _CHAIN_TOLERANCE:
                failure = f"differs from the library's chain by {difference:.2g}"
        share = floor_seconds(self.limit, self.stack.quantization) / seconds
        self.chains.append(ChainTime(self.num_rows, name, labels, 1e6 * seconds, share, difference, is_same, failure))
        return seconds if failure is None else None

    def _measure_fused(self, verdicts: dict[Task, Verdict], separate: float | None) -> None:
        """Time the chain with norms, gated activation and residuals inside its products, against `separate` seconds."""
        choices: list[list[LinearPlan]] = []
        for product in PRODUCTS:
            fused = {task: verdict for task, verdict in verdicts.items() if task.fused and task.product is product}
            choices.append([task.plan for task, verdict in fused.items() if verdict.failure is None])
            self.products += [
                ProductTime(
                    self.num_rows, f"{product.name}, fused", task.plan.label, None, None, verdict.error, verdict.failure
                )
                for task, verdict in fused.items()
            ]
        if not all(choices):
            return
        best_time, best = None, tuple(each[0] for each in choices)
        for index, each in enumerate(choices):
            for plan in each:
                tried = (*best[:index], plan, *best[index + 1 :])
                seconds = self._time(self._fused_work(tried))
                if seconds is not None and (best_time is None or seconds < best_time):
                    best_time, best = seconds, tried
        seconds = self._note("picked, fused", best, self._fused_work(best), compare=False)
        if seconds is not None and separate is not None and seconds < separate:
            self.fused = best

    def _layer_work(self, plans: Plans) -> Callable[[], None]:
        """The products with kernels for norms, activation and additions between them, as layers run them."""
        workspace, stack = self._workspace(plans), self.stack

        def product(x: torch.Tensor, index: int, layer: int) -> torch.Tensor:
            weight, scale = stack.weights[index][layer]
            return linear(x, weight, plans[index], workspace, scale=scale)

        def work() -> None:
            x = residual = self.outs[-1]
            for layer in range(NUM_LAYERS):
                x, residual = rms_norm(x, stack.norm, EPS, residual)
                out = product(product(x, 0, layer)[:, : PRODUCTS[1].num_inputs], 1, layer)
                x, residual = rms_norm(out, stack.norm, EPS, residual)
                x = product(silu_and_mul(product(x, 2, layer)), 3, layer)
            self.outs[-1].copy_(x)

        return work

    def _fused_work(self, plans: Plans) -> Callable[[], None]:
        """norm and qkv; o and residual; norm, gate-up and activation; down and residual."""
        stack, stream = self.stack, self.outs[-1]
        qkv, gated = self.outs[0], self.outs[2].new_empty((self.num_rows, PRODUCTS[3].num_inputs))
        normed = {"norm": stack.norm, "eps": EPS}

        def product(x: torch.Tensor, index: int, layer: int, out: torch.Tensor, **around: Any) -> None:
            weight, scale = stack.weights[index][layer]
            fused_linear(x, weight, plans[index], out=out, scale=scale, **around)

        def work() -> None:
            for layer in range(NUM_LAYERS):
                product(stream, 0, layer, qkv, **normed)
                product(qkv[:, : PRODUCTS[1].num_inputs], 1, layer, stream, residual=stream)
                product(stream, 2, layer, gated, gated=True, **normed)
                product(gated, 3, layer, stream, residual=stream)

        return work

    def measure_committed(self, stack: Stack) -> None:
        """Note the chains of 16-bit weights by the committed table, as plain products and in layers."""
        mine, self.stack = self.stack, stack
        picks = picks_for(stack.norm.device, DTYPE)
        found = [picks_of(picks, each.num_outputs, each.num_inputs).at(self.num_rows) for each in PRODUCTS]
        plans = tuple(pick.plan for pick in found)
        fused = tuple(pick.fused for pick in found if pick.fused is not None)
        self._note("bf16", plans, self._work(plans), compare=False)
        if len(fused) == len(PRODUCTS):
            self._note("bf16, in layers", fused, self._fused_work(fused), compare=False)
        else:
            self._note("bf16, in layers", plans, self._layer_work(plans), compare=False)
        self.stack = mine
