"""The benchmark of matrix products: what it tries, how it checks, its record; timing itself needs CUDA."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mrv2.bench import gemm_chains, gemm_check, gemm_stack, gemms
from mrv2.bench.bandwidth import Limit
from mrv2.bench.gemm_cases import (
    BUCKETS,
    CANDIDATES,
    DTYPE,
    FP8_BUCKETS,
    MAX_FUSED_ROWS,
    MAX_NORMED_ROWS,
    PRODUCTS,
    Form,
    Product,
    Quantization,
    candidates,
    fused_candidates,
    parts_candidates,
    sums_before,
)
from mrv2.bench.gemm_chains import Chain, Chains, Plans
from mrv2.bench.gemm_check import TOLERANCE, Task, Verdict, check_all, relative_error
from mrv2.bench.gemm_stack import Stack
from mrv2.bench.gemms import (
    ChainTime,
    ProductTime,
    floor_seconds,
    headline,
    is_right,
    make_record,
    measure_gemms,
    report,
)
from mrv2.device import Device, make_device
from mrv2.errors import ConfigError
from mrv2_kernels.gemm import LIBRARY, LinearPlan, Pick, why_not
from mrv2_kernels.gemm.gemv import MAX_ROWS
from mrv2_kernels.gemm.picks import TABLE, picks_of, read_picks, table_key, write_picks

RESIDENT = LinearPlan("resident")
LIMIT = Limit(4e12, "made up")
PICKED = {8: tuple(Pick(plan) for plan in (RESIDENT, LIBRARY, RESIDENT, RESIDENT))}
# of a layer so small that the host runs chains of it
SMALL = (
    Product("qkv", 96, 32, normed=True),
    Product("o", 32, 64),
    Product("gate-up", 96, 32, normed=True, gated=True),
    Product("down", 32, 48),
)


def made_up_record(
    *,
    difference: float = 1e-3,
    same: bool = True,
    picked: dict[int, tuple[Pick, ...]] = PICKED,
    form: str | None = None,
) -> dict:
    """A record of 8 rows whose picked chain, or that of a form of the layer, is as said."""
    products = [
        ProductTime(8, "qkv", "library", 6.0, 0.5, 1e-3, None),
        ProductTime(8, "qkv", "resident", 3.0, 0.9, 1e-3, None),
        ProductTime(8, "qkv", "streamed", None, None, None, "does not compile"),
    ]
    labels = tuple(pick.plan.label for pick in PICKED[8])
    failure = None if difference < 0.1 else "differs"
    chains = [ChainTime(8, "picked", labels, 300.0, 0.7, difference, same, failure)]
    if form is not None:
        chains.insert(0, ChainTime(8, f"picked, {form}", labels, 300.0, 0.7, difference, same, failure))
        chains[1] = ChainTime(8, "picked", labels, 300.0, 0.7, 1e-3, True)
    return make_record(products, chains, picked, LIMIT, {"all": 2.0, "check": 1.0})


@pytest.mark.parametrize("num_rows", BUCKETS)
@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.name)
def test_candidates_suit_their_product(product: Product, num_rows: int) -> None:
    plans = candidates(num_rows, product)
    assert plans[0] is LIBRARY and len(plans) == len(set(plans))
    assert all(why_not(p, num_rows, product.num_outputs, product.num_inputs, DTYPE) is None for p in plans)
    tried = {plan.variant for plan in plans}
    assert tried == {
        "library",
        "streamed",
        *(["gemv"] if num_rows <= MAX_ROWS else []),
        *(["resident"] if num_rows <= 128 else []),
        # the weights of whole long rows leave no room
        *(["warpgroup"] if product.num_inputs <= 1024 else []),
    }
    assert all(plan.splits == 1 for plan in plans if plan.variant == "warpgroup"), "nothing adds a bare product's parts"
    fused = fused_candidates(num_rows, product)
    assert bool(fused) == (num_rows <= MAX_FUSED_ROWS) and all(plan.splits == 1 for plan in fused)
    assert (num_rows == 1 or num_rows > MAX_FUSED_ROWS) == all(plan.variant == "gemv" for plan in fused)


@pytest.mark.parametrize("num_rows", BUCKETS)
@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.name)
def test_candidates_in_parts_suit_their_product(product: Product, num_rows: int) -> None:
    plans = parts_candidates(num_rows, product)
    assert plans and len(plans) == len(set(plans))
    outputs = product.num_outputs // (2 if product.gated else 1)
    assert all(why_not(p, num_rows, outputs, product.num_inputs, DTYPE) is None for p in plans)
    # a norm adds what o and down leave; rotation, attention and a gate read whole sums
    assert all(plan.variant == "warpgroup" and (plan.splits == 1) == product.normed for plan in plans)
    # a chain of the plans in parts, without gate, is timed as well: its kernels are checked as bare products
    if product.gated:
        assert {replace(plan, normed=False, held=0) for plan in plans} <= set(candidates(num_rows, product))
    # a program makes as many normed rows as it multiplies
    assert any(plan.normed for plan in plans) == (product.normed and num_rows <= MAX_NORMED_ROWS)
    assert all(num_rows <= plan.block_m for plan in plans if plan.normed)
    if product.normed:
        before = PRODUCTS[PRODUCTS.index(product) - 1]
        assert set(sums_before(num_rows, product)) == {plan.splits for plan in parts_candidates(num_rows, before)}
        assert 8 in sums_before(num_rows, product), "which a product alone is timed with"
    assert not parts_candidates(num_rows, product, "fp8")
    assert not any(plan.variant == "warpgroup" for plan in candidates(num_rows, product, "fp8"))


def test_there_are_few_enough_candidates_for_a_minute() -> None:
    """Each takes 60 ms of a GPU, one process in sixteen compiles and checks ten a second."""
    tasks = [plan for find in CANDIDATES.values() for m in BUCKETS for each in PRODUCTS for plan in find(m, each, None)]
    assert len(tasks) <= 900


def test_whatever_rows_the_committed_table_names_are_measured_again() -> None:
    """Else the next measurement, which replaces a GPU's picks, would drop them."""
    for key, picks in read_picks(json.loads(TABLE.read_text())).items():
        assert {rows for rows, *_ in picks} <= set(FP8_BUCKETS if key.endswith(", fp8") else BUCKETS), key


@pytest.mark.parametrize("num_rows", FP8_BUCKETS)
@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.name)
def test_candidates_of_eight_bit_weights_suit_their_product(product: Product, num_rows: int) -> None:
    plans, fused = candidates(num_rows, product, "fp8"), fused_candidates(num_rows, product, "fp8")
    assert plans[0] is LIBRARY and len(plans) == len(set(plans)) > 1
    assert all(why_not(p, num_rows, product.num_outputs, product.num_inputs, DTYPE, 1) is None for p in plans)
    assert "streamed" not in {plan.variant for plan in plans}
    assert any(plan.variant == "turned" for plan in plans) == (num_rows >= 64)
    assert any(plan.early for plan in plans) == (2 <= num_rows <= 32) and not any(
        p.early and p.splits > 1 for p in plans
    )
    assert bool(fused) == (num_rows <= MAX_FUSED_ROWS) and {p.variant for p in fused} <= {"gemv", "resident"}
    outputs = product.num_outputs // (2 if product.gated else 1)
    assert all(why_not(p, num_rows, outputs, product.num_inputs, DTYPE, 1) is None and p.splits == 1 for p in fused)


@pytest.mark.parametrize(
    "form, quantization", [(f, q) for f in ("alone", "fused") for q in (None, "fp8")] + [("parts", None)]
)
@pytest.mark.parametrize("gated", [False, True])
def test_a_check_finds_a_right_product_right_and_a_wrong_one_wrong(
    form: Form, gated: bool, quantization: Quantization | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = Product("any", 96, 64, normed=gated, gated=gated)
    plan = LinearPlan("warpgroup", splits=1 if gated else 3) if form == "parts" else LIBRARY
    task = Task(3, product, plan, form, quantization)
    cpu = torch.device("cpu")
    assert relative_error(task, cpu) <= TOLERANCE
    name = {"alone": "linear", "fused": "fused_linear", "parts": "linear_parts"}[form]
    right = getattr(gemm_check, name)

    def wrong(*args: object, **kwargs: object) -> torch.Tensor:
        out = right(*args, **kwargs)
        # of parts: one of them
        out[0] *= -1
        return out

    monkeypatch.setattr(gemm_check, name, wrong)
    assert relative_error(task, cpu) > TOLERANCE
    monkeypatch.setattr(gemm_check, name, lambda *args, **kwargs: None)
    assert not relative_error(task, cpu) <= TOLERANCE, "an output that nobody wrote passes"


@pytest.mark.parametrize("broken", ["sum", "stream", "product"])
def test_a_check_of_partial_sums_finds_each_part_of_it_wrong(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(3, PRODUCTS[2], LinearPlan("warpgroup", 8, 64, normed=True), "parts")
    cpu = torch.device("cpu")
    assert relative_error(task, cpu) <= TOLERANCE
    right, counts = gemm_check.linear_of_sums, []

    def wrong(sums: torch.Tensor, *args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
        counts.append(len(sums))
        # only of the most sums
        if len(sums) < sums_before(3, task.product)[-1]:
            return right(sums, *args, **kwargs)
        out, stream = right(sums[1:] if broken == "sum" else sums, *args, **kwargs)
        return (out * 1.1 if broken == "product" else out), (stream * 1.1 if broken == "stream" else stream)

    monkeypatch.setattr(gemm_check, "linear_of_sums", wrong)
    assert relative_error(task, cpu) > TOLERANCE
    assert set(counts) == set(sums_before(3, task.product))
    monkeypatch.setattr(gemm_check, "linear_of_sums", lambda *args, **kwargs: [torch.full((3, 1024), torch.nan)] * 2)
    monkeypatch.setattr(gemm_check, "gemv_torch", lambda *args, **kwargs: torch.ones(3, 1024, dtype=torch.float64))
    assert not relative_error(task, cpu) <= TOLERANCE, "NaN passes"


def test_tasks_survive_the_way_to_their_process() -> None:
    for task in (
        Task(8, PRODUCTS[2], LinearPlan("resident", 16, 32, 2, 8, 2)),
        Task(1, PRODUCTS[0], LIBRARY, "fused"),
        Task(1, PRODUCTS[0], LinearPlan("resident", early=True), "fused", "fp8"),
        Task(8, PRODUCTS[3], LinearPlan("warpgroup", 8, 64, 12), "parts"),
        Task(8, PRODUCTS[0], LinearPlan("warpgroup", 8, 64, normed=True), "parts"),
    ):
        assert Task.from_dict(json.loads(json.dumps(task.as_dict()))) == task


def test_a_process_that_dies_costs_one_task_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the checking process answers, then dies within its second task."""
    program = (
        "import json, sys; json.load(sys.stdin); print('noise'); print(json.dumps({'index': 0, 'started': 0}));"
        "print(json.dumps({'index': 0, 'error': 0.5, 'failure': None})); print('the end is near'); sys.exit(3)"
    )
    started = []

    def start(command: list[str], **options: object) -> subprocess.Popen:
        started.append(command)
        return Popen([sys.executable, "-c", program], **options)

    Popen = subprocess.Popen
    monkeypatch.setattr(gemm_check.subprocess, "Popen", start)
    tasks = [Task(m, PRODUCTS[0], RESIDENT) for m in (8, 16, 32, 64)]
    verdicts = check_all(tasks, num_processes=1)
    assert [verdicts[task].error for task in tasks] == [0.5, None, 0.5, None]
    assert all("ended with 3: the end is near" in (verdicts[task].failure or "") for task in tasks[1::2])
    assert len(started) == 2


def test_the_record_holds_what_was_tried_and_is_json() -> None:
    record = made_up_record()
    assert json.loads(json.dumps(record)) == json.loads(json.dumps(record, default=str))
    assert record["floor_microseconds"] == pytest.approx(1e6 * floor_seconds(LIMIT))
    # qkv 8.4 MB, o 4.2, gate-up 12.6, down 6.3; 28 layers
    assert floor_seconds(LIMIT) == pytest.approx(28 * 31.457e6 / 4e12, rel=1e-3)
    eight = 28 * sum(product.num_outputs * (product.num_inputs + 4) for product in PRODUCTS)
    assert floor_seconds(LIMIT, "fp8") == pytest.approx(eight / 4e12)
    text = report(record)
    assert "1 x does not compile" in text and "300.0" in text and RESIDENT.label in text
    assert headline(record)["us"] == {"8 picked": 300.0}


def test_a_picked_chain_must_be_right_and_repeatable() -> None:
    assert is_right(made_up_record())
    assert not is_right(made_up_record(difference=0.5))
    assert not is_right(made_up_record(same=False))
    assert not is_right(made_up_record() | {"chains": []})
    assert not is_right(made_up_record() | {"picks": []})


@pytest.mark.parametrize("form", ["fused", "parts"])
def test_so_must_the_form_of_a_layer_that_is_picked(form: str) -> None:
    picked = {8: tuple(Pick(RESIDENT, **{form: RESIDENT}) for _ in PRODUCTS)}
    assert is_right(made_up_record(picked=picked, form=form))
    assert not is_right(made_up_record(picked=picked))
    assert not is_right(made_up_record(picked=picked, form=form, difference=0.5))
    assert not is_right(made_up_record(picked=picked, form=form, same=False))
    assert is_right(made_up_record(form=form, difference=0.5)), "a form that fails need not be picked"


def test_picks_go_from_the_record_through_the_table(tmp_path: Path) -> None:
    path = tmp_path / "picks.json"
    path.write_text('{"other": []}')
    write_picks("GPU", made_up_record()["picks"], path)
    table = read_picks(json.loads(path.read_text()))
    assert table["other"] == {}
    for product, pick in zip(PRODUCTS, PICKED[8], strict=True):
        picks = picks_of(table["GPU"], product.num_outputs, product.num_inputs)
        assert (picks.at(8), picks.at(16).plan) == (pick, LIBRARY)
    # products in parts are chosen in forward passes, which such a record has none of
    in_parts = [
        entry | {"parts": asdict(LinearPlan("warpgroup", release_late=True))} for entry in made_up_record()["picks"]
    ]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"GPU": in_parts}))
    write_picks("GPU", made_up_record()["picks"], path)
    assert json.loads(path.read_text())["GPU"] == in_parts
    path.write_text('{"other": []}')
    write_picks("GPU", made_up_record()["picks"], path)
    write_picks("GPU", made_up_record()["picks"][:1], path, "fp8")
    both = read_picks(json.loads(path.read_text()))
    assert both["GPU"] == table["GPU"] and len(both[table_key("GPU", "fp8")]) == 1
    with pytest.raises(ValueError, match="named twice"):
        write_picks("GPU", 2 * made_up_record()["picks"], path)


def test_the_forms_of_a_layer_are_part_of_a_pick() -> None:
    fused = tuple(Pick(LIBRARY, fused=LinearPlan("gemv", block_n=8 << at)) for at in range(4))
    parts = tuple(Pick(RESIDENT, parts=LinearPlan("warpgroup", 8 << at)) for at in range(4))
    record = make_record([], [], {1: fused, 8: parts, 16: (Pick(RESIDENT),) * 4}, LIMIT, {})
    picks = read_picks({"GPU": json.loads(json.dumps(record["picks"]))})["GPU"]
    for at, product in enumerate(PRODUCTS):
        found = picks_of(picks, product.num_outputs, product.num_inputs)
        assert [found.at(m) for m in (1, 2, 8, 9)] == [fused[at], parts[at], parts[at], Pick(RESIDENT)]


class Priced(Chains):
    """Chains that say what they cost: a price for their form, and one for each plan."""

    forms: dict[str, float]
    prices: dict[LinearPlan, float]

    def _priced(self, form: str, chain: Chain, plans: Plans) -> Chain:
        chain.launch.__dict__["seconds"] = self.forms[form] + sum(self.prices.get(plan, 0.0) for plan in plans)
        return chain

    def one(self, index: int, plan: LinearPlan, form: Form) -> Chain:
        return self._priced("alone", super().one(index, plan, form), (plan,))

    def alone(self, plans: Plans) -> Chain:
        return self._priced("alone", super().alone(plans), plans)

    def layers(self, plans: Plans) -> Chain:
        return self._priced("layers", super().layers(plans), plans)

    def fused(self, plans: Plans) -> Chain:
        return self._priced("fused", super().fused(plans), plans)

    def parts(self, plans: Plans) -> Chain:
        return self._priced("parts", super().parts(plans), plans)

    def parts_alone(self, plans: Plans) -> Chain:
        return self._priced("alone", super().parts_alone(plans), plans)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """The host, with a stack of two small layers to come."""
    for module in (gemm_stack, gemm_chains, gemms):
        monkeypatch.setattr(module, "PRODUCTS", SMALL)
        monkeypatch.setattr(module, "NUM_LAYERS", 2)
    with_host = make_device("host")
    yield with_host
    with_host.close()


def run(chains: Chains, chain: Chain) -> torch.Tensor:
    chains.restart()
    chain.launch()
    return chain.result.double()


def parts_plans(splits: int, *, normed: bool = False) -> Plans:
    whole, split = LinearPlan("warpgroup", normed=normed), LinearPlan("warpgroup", splits=splits)
    return (whole, split, whole, split)


def test_every_form_of_a_layer_computes_the_layers(device: Device) -> None:
    stack = Stack(device)
    # the norm's weights take part
    stack.norm.copy_(torch.linspace(0.5, 2.0, len(stack.norm)))
    chains = Chains(stack, 5)
    library = (LIBRARY,) * 4

    def normed(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt() * stack.norm.double()

    stream = chains.start.double()
    for layer in range(2):
        qkv, o, gate_up, down = (each[layer].values.double() for each in stack.weights)
        stream = stream + (normed(stream) @ qkv.T)[:, :64] @ o.T
        gate, up = (normed(stream) @ gate_up.T).chunk(2, dim=1)
        stream = stream + (gate * gate.sigmoid() * up) @ down.T
    expected = normed(stream)
    in_parts = [chains.parts(parts_plans(splits, normed=normed)) for splits in (1, 3) for normed in (False, True)]
    for chain in (chains.layers(library), chains.fused(library), *in_parts):
        found = run(chains, chain)
        assert (found - expected).norm() <= 2e-2 * expected.norm()
        # every replay starts from the same input
        assert torch.equal(found, run(chains, chain))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("splits", [1, 2])
def test_norms_are_inside_products_where_plans_say_so(
    splits: int, normed: bool, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the first norm, which adds no sums, and the model's last one."""
    right, plans = gemm_chains.linear_of_sums, []

    def seen(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        plans.append(args[5])
        return right(*args, **kwargs)

    monkeypatch.setattr(gemm_chains, "linear_of_sums", seen)
    chains = Chains(Stack(device), 5)
    run(chains, chains.parts(parts_plans(splits, normed=normed)))
    assert len(plans) == (3 if normed and splits > 1 else 0) and all(plan.normed for plan in plans)


def test_products_alone_read_what_the_one_before_wrote(device: Device) -> None:
    chains = Chains(Stack(device), 5)
    x = chains.start.double()
    for layer in range(2):
        for product, weights in zip(SMALL, chains.stack.weights, strict=True):
            x = x[:, : product.num_inputs] @ weights[layer].values.double().T
    found = run(chains, chains.alone((LIBRARY,) * 4))
    assert (found - x).norm() <= 2e-2 * x.norm()
    assert torch.equal(run(chains, chains.parts_alone(parts_plans(1))), found), "whole sums are the same chain"
    found = run(chains, chains.parts_alone(parts_plans(2)))
    assert found.shape == (2, 5, 32) and torch.isfinite(found).all() and found.any()


@pytest.mark.parametrize("fastest", ["layers", "fused", "parts"])
@pytest.mark.parametrize("wrong", [False, True])
def test_exactly_the_fastest_form_that_is_right_is_picked(
    fastest: str, wrong: bool, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs are made up; the best plans are those that only exchanging one product's plan after another finds."""
    slow, quick, broken = (LinearPlan("resident", 16, block_n) for block_n in (8, 16, 32))
    parts_slow, parts_quick = (LinearPlan("warpgroup", block_m, 64) for block_m in (8, 16))
    normed = LinearPlan("warpgroup", 8, 64, normed=True)
    Priced.forms = {"alone": 1.0, "layers": 3.0, "fused": 3.5, "parts": 3.5} | {fastest: 2.0}
    Priced.prices = {
        LIBRARY: 1.0,
        slow: 0.1,
        quick: 0.01,
        broken: 1e-6,
        parts_slow: 0.1,
        parts_quick: 0.01,
        normed: 1e-3,
    }
    monkeypatch.setattr(gemms, "Chains", Priced)

    def seconds(_: Stack, launch: Callable[[], None], before: Callable[[], None]) -> float:
        before()
        launch()
        return launch.__dict__["seconds"]

    monkeypatch.setattr(Stack, "graph_seconds", seconds)
    if wrong:
        # the form that is fastest does not compute the layer
        for name in {"fused": ("fused_linear",), "parts": ("linear_parts",)}.get(fastest, ()):
            right = getattr(gemm_chains, name)
            monkeypatch.setattr(gemm_chains, name, lambda *args, right=right, **kw: right(*args, **kw).mul_(2.0))
    verdicts = {
        Task(8, product, plan, form): Verdict(None, "wrong") if plan is broken else Verdict(1e-3, None)
        for product in SMALL
        for form, plans in (
            ("alone", (LIBRARY, slow, quick, broken)),
            ("fused", (slow, quick, broken)),
            ("parts", (parts_slow, parts_quick, *([normed] if product.gated else []))),
        )
        for plan in plans
    }
    bucket = gemms._Bucket(Stack(device), 8, LIMIT)
    bucket.measure(verdicts)
    forms = {"layers": {}, "fused": {"fused": quick}, "parts": {"parts": parts_quick}}
    pick = Pick(quick, **forms["layers" if wrong else fastest])
    gate_up = pick if pick.parts is None else replace(pick, parts=normed)
    assert bucket.picks == (pick, pick, gate_up, pick)
    named = {each.name: each for each in bucket.chains}
    assert {"library", "picked", "picked, in layers", "picked, fused", "picked, parts"} <= named.keys()
    assert "parts, products alone" in named
    for form in ("fused", "parts"):
        assert (named[f"picked, {form}"].failure is not None) == (wrong and form == fastest)
    assert broken.label not in {label for each in bucket.chains for label in each.plans}
    timed = {each.product for each in bucket.products if each.microseconds is not None}
    assert timed == {each.name for each in SMALL} | {f"{each.name}, parts" for each in SMALL}


def test_norms_inside_products_are_looked_for_with_few_sums(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither pays alone, so exchanging one plan at a time from the fastest alone does not find the two."""
    many, few = (LinearPlan("warpgroup", 8, 64, splits=splits) for splits in (8, 2))
    plain, normed = LinearPlan("warpgroup", 8, 64), LinearPlan("warpgroup", 8, 64, normed=True)

    class Joint(Priced):
        def parts(self, plans: Plans) -> Chain:
            chain = Chains.parts(self, plans)
            pays = plans[0].normed and plans[2].normed and plans[1] is few and plans[3] is few
            chain.launch.__dict__["seconds"] = 2.0 if pays else 2.5 + sum(self.prices[plan] for plan in plans)
            return chain

    Priced.forms = {"alone": 1.0, "layers": 3.0, "fused": 9.0}
    Priced.prices = {LIBRARY: 0.0, many: 0.0, few: 0.1, plain: 0.0, normed: 0.1}
    monkeypatch.setattr(gemms, "Chains", Joint)
    monkeypatch.setattr(Stack, "graph_seconds", lambda _, launch, before: (before(), launch(), launch.seconds)[2])
    verdicts = {
        Task(8, product, plan, form): Verdict(1e-3, None)
        for product in SMALL
        for form, plans in (("alone", (LIBRARY,)), ("parts", (plain, normed) if product.normed else (many, few)))
        for plan in plans
    }
    bucket = gemms._Bucket(Stack(device), 8, LIMIT)
    bucket.measure(verdicts)
    assert [pick.parts for pick in bucket.picks] == [normed, few, normed, few]


@pytest.mark.parametrize("form", [None, "fused", "parts"])
def test_plans_of_the_committed_table_are_timed_in_the_form_that_engines_run(
    form: str | None, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = LinearPlan("warpgroup" if form == "parts" else "resident")
    picks = {
        (5, each.num_outputs, each.num_inputs): Pick(RESIDENT, **({} if form is None else {form: plan}))
        for each in SMALL
    }
    monkeypatch.setattr(gemms, "picks_for", lambda *_: picks)
    monkeypatch.setattr(Stack, "graph_seconds", lambda _, launch, before: (before(), launch(), 1e-3)[2])
    stack = Stack(device)
    bucket = gemms._Bucket(stack, 5, LIMIT)
    bucket.measure_committed(stack, "committed")
    assert [(each.name, each.plans[0], each.failure) for each in bucket.chains] == [
        ("committed", RESIDENT.label, None),
        ("committed, in layers", (RESIDENT if form is None else plan).label, None),
        *([("committed, products alone", plan.label, None)] if form == "parts" else []),
    ]
    assert all(each.same_eagerly for each in bucket.chains)


def test_it_needs_cuda() -> None:
    device = make_device("host")
    with pytest.raises(ConfigError, match="CUDA"):
        measure_gemms(device)
    device.close()
