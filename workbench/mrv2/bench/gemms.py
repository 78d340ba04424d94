"""The four matrix products of all layers in one CUDA graph, by every plan there is, against reading the weights once.

Qwen3-0.6B's products (`gemm_cases.PRODUCTS`) in bf16 with the distinct weights of 28 layers, 881 MB, or half of that
as 8-bit floats, which no cache holds.  Each reads a part of what the one before wrote.  Per batch size:

1. every plan is compiled and checked against float64, in processes of their own (`gemm_check`);
2. every plan that passed is timed on its product alone: a graph of 28 of them;
3. chains of all 112 products are timed: all by the library; the fastest of each variant per product; the fastest of
   all per product; and the best found from there by exchanging one product's plan at a time ("picked");
4. the picked chain is timed once more with the kernels between the products of a layer, and against it, for up to
   64 rows, products that take those in ("fused"), and products that multiply by their gate, leave partial sums to
   the norm behind them or, for up to 8 rows, take that in ("parts"), found the same way and also timed as products
   alone; the fastest of the three is picked;
5. the picked chain must give the library's result within rounding, the other forms of a layer the first one's, and
   each the same bits when its kernels are launched one by one;
6. the plans of the table that engines go by are timed in the same forms ("committed"), which were chosen with
   attention between the products and so need not be the fastest here; of 8-bit weights, those of 16-bit ones ("bf16").

Times are medians of replays by CUDA events, the graph's launch included.  What was picked goes into the record in
the form of the table `mrv2_kernels.gemm.picks`.

An H200's record is traces/bench/h200-gemms.json; h200-products-in-parts.json is of a script that timed the same chains.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

import torch

from mrv2.bench.bandwidth import Limit, measure_read_bandwidth
from mrv2.bench.environment import environment
from mrv2.bench.failures import reason_of
from mrv2.bench.gemm_cases import (
    BUCKETS,
    CANDIDATES,
    DTYPE,
    FP8_BUCKETS,
    NUM_LAYERS,
    PRODUCTS,
    Form,
    Quantization,
)
from mrv2.bench.gemm_chains import Chain, Chains, Plans
from mrv2.bench.gemm_check import Task, Verdict, check_all
from mrv2.bench.gemm_stack import BEFORE, STAGE, Stack
from mrv2.device import Device
from mrv2.errors import ConfigError
from mrv2_kernels.gemm import LIBRARY, VARIANTS, LinearPlan, Pick, picks_for, picks_of
from mrv2_kernels.gemm.picks import as_entry

KIND = "mrv2-gemms"
# where what starting ahead brings is measured
_LATE_TOO = (8, 32)
# plans of each product that the search for the best chain looks at, the fastest alone; of those that leave partial
# sums, for which the norm behind them pays, a few more; of fused ones, which have no time alone, all
_NEIGHBOURS: dict[Form, int | None] = {"alone": 4, "parts": 6, "fused": None}
# from the chain it is compared with, after 112 products each rounded to bf16
_CHAIN_TOLERANCE = 0.1
# forms of a layer, and what they are measured against
_LAYERS, _FUSED, _PARTS = "picked, in layers", "picked, fused", "picked, parts"


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
    # of its result against the library's, of another form of a layer against the first one's; None: another function
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
        Task(m, product, plan, form, quantization)
        for form, plans in CANDIDATES.items()
        for m in buckets
        for product in PRODUCTS
        for plan in plans(m, product, quantization)
    ]
    progress(f"gemms: compiling and checking {len(tasks)} plans")
    verdicts = check_all(tasks, num_processes=num_processes or min(16, os.cpu_count() or 1))
    seconds = {"check": time.perf_counter() - begin}
    products: list[ProductTime] = []
    chains: list[ChainTime] = []
    picked: dict[int, tuple[Pick, ...]] = {}
    stack = Stack(device, quantization)
    sixteen_bits = None if quantization is None else Stack(device)
    for num_rows in buckets:
        progress(f"gemms: {num_rows} rows, {time.perf_counter() - begin:.0f} s so far")
        bucket = _Bucket(stack, num_rows, limit)
        bucket.measure({task: verdict for task, verdict in verdicts.items() if task.num_rows == num_rows})
        if sixteen_bits is None:
            bucket.measure_committed(stack, "committed")
        else:
            bucket.measure_committed(sixteen_bits, "bf16")
        products += bucket.products
        chains += bucket.chains
        picked[num_rows] = bucket.picks
    seconds["all"] = time.perf_counter() - begin
    return make_record(products, chains, picked, limit, seconds, quantization)


def make_record(
    products: list[ProductTime],
    chains: list[ChainTime],
    picked: dict[int, tuple[Pick, ...]],
    limit: Limit,
    seconds: dict[str, float],
    quantization: Quantization | None = None,
) -> dict[str, Any]:
    """Return the record: environment, limit, all that was tried, and the picks."""
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
            as_entry(m, product.num_outputs, product.num_inputs, pick)
            for m, picks in picked.items()
            for product, pick in zip(PRODUCTS, picks, strict=True)
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
        lines.append(f"M = {num_rows:<4}{name:15} " + " | ".join(cells))
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
        if each["name"] in ("picked", _FUSED, _PARTS, "committed, in layers", "bf16, in layers"):
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
    """Say whether each batch size has a picked chain that gives the library's result, the same bits eagerly.

    The same holds for the form of a layer that was picked, against the products with kernels between them.
    """
    right = {
        (each["num_rows"], each["name"]): each["failure"] is None and each["same_eagerly"] is True
        for each in record["chains"]
    }
    forms = (("plan", "picked"), ("fused", _FUSED), ("parts", _PARTS))
    wanted = {(each["num_rows"], name) for each in record["picks"] for form, name in forms if form in each}
    return bool(wanted) and all(right.get(each, False) for each in wanted)


class _Bucket:
    """Results of one batch size."""

    def __init__(self, stack: Stack, num_rows: int, limit: Limit) -> None:
        self.make, self.num_rows, self.limit = Chains(stack, num_rows), num_rows, limit
        self.products: list[ProductTime] = []
        self.chains: list[ChainTime] = []
        # of each product; a form of a layer is part of them if it is the fastest
        self.picks = (Pick(),) * len(PRODUCTS)
        # of chains, [M, H] float64
        self.results: dict[str, torch.Tensor] = {}

    def measure(self, verdicts: dict[Task, Verdict]) -> None:
        """Fill `products`, `chains` and `picks`."""
        ranked = self._ranked("alone", verdicts)
        self._bare("library", (LIBRARY,) * len(PRODUCTS))
        for variant in VARIANTS[1:]:
            best = [next((plan for plan in plans if plan.variant == variant), None) for plans in ranked]
            if any(best):
                self._bare(f"fastest {variant}", tuple(plan or LIBRARY for plan in best))
        if not all(ranked):
            return
        best_time = self._bare("fastest alone", tuple(each[0] for each in ranked))
        near = [each[: _NEIGHBOURS["alone"]] for each in ranked]
        # any chain is better than a wrong one
        plans, _ = self._search(self.make.alone, near, inf if best_time is None else best_time)
        self.picks = tuple(Pick(plan) for plan in plans)
        self._bare("picked", plans)
        if self.num_rows in _LATE_TOO:
            self._bare("picked, none ahead", tuple(replace(plan, ahead=False) for plan in plans))
        best_time = self._note(_LAYERS, plans, self.make.layers(plans))
        forms: tuple[tuple[Form, str, Callable[[Plans], Chain]], ...] = (
            ("fused", _FUSED, self.make.fused),
            ("parts", _PARTS, self.make.parts),
        )
        for form, name, make in forms:
            choices = [each[: _NEIGHBOURS[form]] for each in self._ranked(form, verdicts)]
            if not all(choices):
                continue
            starts = [choices]
            if any(plan.normed for each in choices for plan in each):
                # norms inside products pay, if at all, with few sums to add, neither alone
                starts.append([sorted(each, key=lambda plan: (not plan.normed, plan.splits)) for each in choices])
            others = min((self._search(make, each) for each in starts), key=lambda found: found[1])[0]
            seconds = self._note(name, others, make(others), against=_LAYERS)
            if seconds is not None and best_time is not None and seconds < best_time:
                best_time = seconds
                pairs = zip(plans, others, strict=True)
                self.picks = tuple(Pick(plan, **{form: other}) for plan, other in pairs)
            if form == "parts":
                self._note("parts, products alone", others, self.make.parts_alone(others))

    def _ranked(self, form: Form, verdicts: dict[Task, Verdict]) -> list[list[LinearPlan]]:
        """Return each product's plans that passed, those that have a time alone in its order; note them all."""
        found: list[list[LinearPlan]] = []
        for index, product in enumerate(PRODUCTS):
            times: dict[LinearPlan, float] = {}
            for task, verdict in verdicts.items():
                if task.product is not product or task.form != form:
                    continue
                failure, seconds = verdict.failure, None
                if failure is None and form != "fused":
                    try:
                        launch = self.make.one(index, task.plan, form).launch
                        seconds = self.make.stack.graph_seconds(launch, lambda: None) / NUM_LAYERS
                    except Exception as fault:  # a plan that fails is reported, not fatal
                        failure = reason_of(fault)
                if failure is None:
                    times[task.plan] = seconds or 0.0
                self._note_product(task, seconds, verdict.error, failure)
            found.append(sorted(times, key=lambda plan, times=times: times[plan]))
        return found

    def _note_product(self, task: Task, seconds: float | None, error: float | None, failure: str | None) -> None:
        name = task.product.name if task.form == "alone" else f"{task.product.name}, {task.form}"
        us, share = None, None
        if seconds is not None:
            us = 1e6 * seconds
            share = task.product.bytes_read(self.make.stack.quantization) / seconds / self.limit.value
        self.products.append(ProductTime(self.num_rows, name, task.plan.label, us, share, error, failure))

    def _search(
        self, make: Callable[[Plans], Chain], choices: list[list[LinearPlan]], best_time: float | None = None
    ) -> tuple[Plans, float]:
        """Return the fastest chain that exchanging one product's plan at a time finds, from the first ones, and its
        time; `best_time` is that of the first ones, if it is known.
        """
        best = tuple(each[0] for each in choices)
        if best_time is None:
            best_time = self._time(make(best))
        for index, each in enumerate(choices):
            for plan in each[1:]:
                tried = (*best[:index], plan, *best[index + 1 :])
                seconds = self._time(make(tried))
                if seconds < best_time:
                    best_time, best = seconds, tried
        return best, best_time

    def _time(self, chain: Chain) -> float:
        try:
            return self.make.stack.graph_seconds(chain.launch, self.make.restart)
        except Exception:  # whatever it is compared with stays
            return inf

    def _bare(self, name: str, plans: Plans) -> float | None:
        """Time a chain of bare products, compare its result with the library's, and note both."""
        return self._note(name, plans, self.make.alone(plans), against="library")

    def _note(self, name: str, plans: Plans, chain: Chain, against: str | None = None) -> float | None:
        """Time a chain, compare its result with an earlier one's and with that of eager launches; None if it fails."""
        labels = tuple(plan.label for plan in plans)
        device = self.make.stack.device
        try:
            seconds = self.make.stack.graph_seconds(chain.launch, self.make.restart)
            result = chain.result.clone()
            device.main.run(BEFORE, self.make.restart)
            device.main.run(STAGE, chain.launch)
            device.synchronize("gemms: eager")
            is_same = torch.equal(result, chain.result)
        except Exception as fault:  # a chain that fails is reported, not fatal
            self.chains.append(ChainTime(self.num_rows, name, labels, None, None, failure=reason_of(fault)))
            return None
        difference, failure = None, None
        self.results[name] = result.double()
        if against is not None and against not in self.results:
            failure = f"has no result of {against!r} to be compared with"
        elif against is not None:
            expected = self.results[against]
            difference = float((self.results[name] - expected).norm() / expected.norm())
            if not difference <= _CHAIN_TOLERANCE:
                failure = f"differs from {against!r} by {difference:.2g}"
        share = floor_seconds(self.limit, self.make.stack.quantization) / seconds
        self.chains.append(ChainTime(self.num_rows, name, labels, 1e6 * seconds, share, difference, is_same, failure))
        return seconds if failure is None else None

    def measure_committed(self, stack: Stack, name: str) -> None:
        """Note the chains of 16-bit weights by the committed table: products alone, and as layers run them."""
        mine, self.make = self.make, Chains(stack, self.num_rows)
        picks = picks_for(stack.norm.device, DTYPE)
        found = [picks_of(picks, each.num_outputs, each.num_inputs).at(self.num_rows) for each in PRODUCTS]
        plans = tuple(pick.plan for pick in found)
        self._note(name, plans, self.make.alone(plans))
        fused = tuple(pick.fused for pick in found if pick.fused is not None)
        parts = tuple(pick.parts for pick in found if pick.parts is not None)
        if len(fused) == len(PRODUCTS):
            self._note(f"{name}, in layers", fused, self.make.fused(fused))
        elif len(parts) == len(PRODUCTS):
            self._note(f"{name}, in layers", parts, self.make.parts(parts))
            self._note(f"{name}, products alone", parts, self.make.parts_alone(parts))
        else:
            self._note(f"{name}, in layers", plans, self.make.layers(plans))
        self.make = mine
