"""The benchmark of matrix products: what it tries, how it checks, its record; timing itself needs CUDA."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mrv2.bench import gemm_check
from mrv2.bench.bandwidth import Limit
from mrv2.bench.gemm_cases import (
    BUCKETS,
    DTYPE,
    FP8_BUCKETS,
    MAX_FUSED_ROWS,
    PRODUCTS,
    Product,
    Quantization,
    candidates,
    fused_candidates,
)
from mrv2.bench.gemm_check import TOLERANCE, Task, check_all, relative_error
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
from mrv2.device import make_device
from mrv2.errors import ConfigError
from mrv2_kernels.gemm import LIBRARY, LinearPlan, why_not
from mrv2_kernels.gemm.gemv import MAX_ROWS
from mrv2_kernels.gemm.picks import picks_of, read_picks, table_key, write_picks

RESIDENT = LinearPlan("resident")
LIMIT = Limit(4e12, "made up")
PICKED = {8: (RESIDENT, LIBRARY, RESIDENT, RESIDENT)}


def made_up_record(*, difference: float = 1e-3, same: bool = True) -> dict:
    products = [
        ProductTime(8, "qkv", "library", 6.0, 0.5, 1e-3, None),
        ProductTime(8, "qkv", "resident", 3.0, 0.9, 1e-3, None),
        ProductTime(8, "qkv", "streamed", None, None, None, "does not compile"),
    ]
    labels = tuple(plan.label for plan in PICKED[8])
    failure = None if difference < 0.1 else "differs"
    chains = [ChainTime(8, "picked", labels, 300.0, 0.7, difference, same, failure)]
    return make_record(products, chains, PICKED, LIMIT, {"all": 2.0, "check": 1.0})


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
    }
    fused = fused_candidates(num_rows, product)
    assert bool(fused) == (num_rows <= MAX_FUSED_ROWS) and all(plan.splits == 1 for plan in fused)
    assert (num_rows == 1 or num_rows > MAX_FUSED_ROWS) == all(plan.variant == "gemv" for plan in fused)


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


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_check_finds_a_right_product_right_and_a_wrong_one_wrong(
    fused: bool, gated: bool, quantization: Quantization | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = Product("any", 96, 64, normed=gated, gated=gated)
    task = Task(3, product, LIBRARY, fused, quantization)
    cpu = torch.device("cpu")
    assert relative_error(task, cpu) <= TOLERANCE
    name = "fused_linear" if fused else "linear"
    right = getattr(gemm_check, name)

    def wrong(*args: object, **kwargs: object) -> torch.Tensor:
        out = right(*args, **kwargs)
        out[0] *= -1
        return out

    monkeypatch.setattr(gemm_check, name, wrong)
    assert relative_error(task, cpu) > TOLERANCE
    monkeypatch.setattr(gemm_check, name, lambda *args, **kwargs: None)
    assert not relative_error(task, cpu) <= TOLERANCE, "an output that nobody wrote passes"


def test_tasks_survive_the_way_to_their_process() -> None:
    for task in (
        Task(8, PRODUCTS[2], LinearPlan("resident", 16, 32, 2, 8, 2)),
        Task(1, PRODUCTS[0], LIBRARY, True),
        Task(1, PRODUCTS[0], LinearPlan("resident", early=True), True, "fp8"),
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


def test_picks_go_from_the_record_through_the_table(tmp_path: Path) -> None:
    path = tmp_path / "picks.json"
    path.write_text('{"other": []}')
    write_picks("GPU", made_up_record()["picks"], path)
    table = read_picks(json.loads(path.read_text()))
    assert table["other"] == {}
    for product, plan in zip(PRODUCTS, PICKED[8], strict=True):
        picks = picks_of(table["GPU"], product.num_outputs, product.num_inputs)
        assert (picks.at(8).plan, picks.at(16).plan, picks.at(8).fused) == (plan, LIBRARY, None)
    write_picks("GPU", made_up_record()["picks"][:1], path, "fp8")
    both = read_picks(json.loads(path.read_text()))
    assert both["GPU"] == table["GPU"] and len(both[table_key("GPU", "fp8")]) == 1
    with pytest.raises(ValueError, match="named twice"):
        write_picks("GPU", 2 * made_up_record()["picks"], path)


def test_fused_plans_are_part_of_a_pick() -> None:
    fused = tuple(LinearPlan("gemv", block_n=8 << at) for at in range(4))
    record = make_record([], [], {1: (LIBRARY,) * 4, 8: (RESIDENT,) * 4}, LIMIT, {}, {1: fused})
    picks = read_picks({"GPU": record["picks"]})["GPU"]
    for product, plan in zip(PRODUCTS, fused, strict=True):
        found = picks_of(picks, product.num_outputs, product.num_inputs)
        assert found.at(1).fused == plan and found.at(2).fused is None


def test_it_needs_cuda() -> None:
    device = make_device("host")
    with pytest.raises(ConfigError, match="CUDA"):
        measure_gemms(device)
    device.close()
