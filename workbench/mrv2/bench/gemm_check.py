"""Compile and check plans of matrix products in processes of their own, many at a time.

A plan that does not compile, is wrong, hangs or breaks its CUDA context costs its own process only; and the
processes leave every kernel in Triton's cache, so that the measurement after them compiles nothing.

``python -m mrv2.bench.gemm_check`` is one such process: tasks as JSON on the standard input, one JSON line before
and one after each of them on the standard output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from math import isnan
from queue import Empty, Queue
from typing import IO, Any

import torch

from mrv2.bench.gemm_cases import DTYPE, EPS, PRODUCTS, Form, Product, Quantization, sums_before
from mrv2_kernels.gemm import (
    LinearPlan,
    fused_linear,
    linear,
    linear_of_sums,
    linear_parts,
    quantise_rows,
    workspace_for,
)
from mrv2_kernels.gemm.gemv import gemv_torch

# of the norm of the result; bf16 rounds each element by 0.17 % on average, and a norm before the product rounds too
TOLERANCE = 1e-2
# for one task, compilation included
_PATIENCE_SECONDS = 60.0
_START_SECONDS = 120.0


@dataclass(frozen=True)
class Task:
    """One plan for one product at one batch size."""

    num_rows: int
    product: Product
    plan: LinearPlan
    # with how much of what surrounds it in a layer
    form: Form = "alone"
    # how its weights are kept
    quantization: Quantization | None = None

    @property
    def kernel(self) -> tuple[object, ...]:
        """What decides which kernel is compiled, about; tasks that share it belong in one process."""
        rows = self.num_rows if self.plan.variant == "gemv" or self.plan.normed else 0
        around = self.form == "fused" or (self.form == "parts" and self.product.gated)
        return (self.plan, self.product.num_inputs, rows, around and self.product, self.quantization)

    @property
    def gated(self) -> bool:
        """Whether the activation is part of it."""
        return self.form != "alone" and self.product.gated

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "num_rows": self.num_rows,
            "product": self.product.name,
            "plan": asdict(self.plan),
            "form": self.form,
            "quantization": self.quantization,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Task:
        """Inverse of `as_dict`."""
        product = next(each for each in PRODUCTS if each.name == values["product"])
        plan = LinearPlan(**values["plan"])
        return cls(values["num_rows"], product, plan, values["form"], values["quantization"])


@dataclass(frozen=True)
class Verdict:
    """What became of a task: its relative error, or why it failed."""

    error: float | None
    failure: str | None


def check_all(tasks: Sequence[Task], *, num_processes: int) -> dict[Task, Verdict]:
    """Check all the tasks on the current CUDA device and return their verdicts."""
    by_kernel: dict[tuple[object, ...], list[Task]] = {}
    for task in tasks:
        by_kernel.setdefault(task.kernel, []).append(task)
    shares: list[list[Task]] = [[] for _ in range(num_processes)]
    for index, group in enumerate(by_kernel.values()):
        shares[index % num_processes] += group
    verdicts: dict[Task, Verdict] = {}
    with ThreadPoolExecutor(num_processes) as pool:
        for found in pool.map(_check_share, [share for share in shares if share]):
            verdicts |= found
    return verdicts


def _check_share(tasks: list[Task]) -> dict[Task, Verdict]:
    """Check tasks in one process; start another behind a task at which it died."""
    verdicts: dict[Task, Verdict] = {}
    left = list(tasks)
    while left:
        found, why = _run_process(left)
        verdicts |= found
        left = [task for task in left if task not in verdicts]
        if left:
            verdicts[left.pop(0)] = Verdict(None, why)
    return verdicts


def _run_process(tasks: list[Task]) -> tuple[dict[Task, Verdict], str]:
    """Return the verdicts of one process, and how it ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mrv2.bench.gemm_check"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert process.stdin is not None and process.stdout is not None, "both are pipes"
    lines: Queue[str | None] = Queue()
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    verdicts: dict[Task, Verdict] = {}
    said = ""
    patience = _START_SECONDS
    try:
        process.stdin.write(json.dumps([task.as_dict() for task in tasks]))
        process.stdin.close()
        while True:
            line = lines.get(timeout=patience)
            if line is None:
                return verdicts, f"its process ended with {process.wait()}: {said}"
            if not line.startswith('{"index"'):
                said = line.strip()[:300] or said
                continue
            patience = _PATIENCE_SECONDS
            values = json.loads(line)
            if "error" in values:
                verdicts[tasks[values["index"]]] = Verdict(values["error"], values["failure"])
    except Empty:
        return verdicts, f"no answer within {patience:.0f} s"
    except BrokenPipeError:
        return verdicts, "its process did not start"
    finally:
        process.kill()
        process.wait()


def _read(stream: IO[str], lines: Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def relative_error(task: Task, device: torch.device) -> float:
    """Compute the product of a task twice on fresh random data; return its error against float64.

    Of a plan that takes in the norm of partial sums it is the greatest error of any number of them.
    Raises `ArithmeticError` if the two results differ in a bit.
    """
    if task.plan.normed:
        return max(_error_of_sums(task, device, each) for each in sums_before(task.num_rows, task.product))
    product = task.product
    generator = torch.Generator(device).manual_seed(task.num_rows)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator)

    x = random(task.num_rows, product.num_inputs).to(DTYPE)
    weight = (random(product.num_outputs, product.num_inputs) / product.num_inputs**0.5).to(DTYPE)
    scale = None
    expected_weight = weight.double()
    if task.quantization is not None:
        # of very unequal sizes, so that a scale of another row shows
        weight, scale = quantise_rows(weight * torch.logspace(-1, 1, len(weight), device=device)[:, None])
        expected_weight = weight.double() * scale.double()[:, None]
    num_outputs = product.num_outputs // (2 if task.gated else 1)
    workspace = workspace_for([(task.plan, task.num_rows, num_outputs)], device) if task.form == "alone" else None
    is_fused = task.form == "fused"
    norm = random(product.num_inputs).to(DTYPE) if is_fused and product.normed else None
    residual = random(task.num_rows, num_outputs).to(DTYPE) if is_fused and not product.normed else None
    shape, dtype = (task.num_rows, num_outputs), DTYPE
    if task.form == "parts" and task.plan.splits > 1:
        shape, dtype = (task.plan.splits, *shape), torch.float32
    outs = [torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(2)]
    for out in outs:
        if task.form == "fused":
            around = {"norm": norm, "eps": EPS, "gated": task.gated, "residual": residual}
            fused_linear(x, weight, task.plan, out=out, scale=scale, **around)
        elif task.form == "parts":
            linear_parts(x, weight, task.plan, gated=task.gated, out=out)
        else:
            linear(x, weight, task.plan, workspace, out, scale)
    if not torch.equal(*outs) and not torch.isnan(outs[0]).any():
        raise ArithmeticError("two runs on the same data differ")
    wide = [None if each is None else each.double() for each in (norm, residual)]
    expected = gemv_torch(x.double(), expected_weight, norm=wide[0], eps=EPS, gated=task.gated, residual=wide[1])
    # partial sums [S, M, N] are added
    total = outs[0].double().view(-1, *expected.shape).sum(0)
    return float((total - expected).norm() / expected.norm())


def _error_of_sums(task: Task, device: torch.device, num_sums: int) -> float:
    """Return the greater error of the product and of the stream that come from partial sums and a residual."""
    product = task.product
    generator = torch.Generator(device).manual_seed(num_sums)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator)

    sums, norm = random(num_sums, task.num_rows, product.num_inputs), random(product.num_inputs).to(DTYPE)
    residual = random(*sums.shape[1:]).to(DTYPE)
    weight = (random(product.num_outputs, product.num_inputs) / product.num_inputs**0.5).to(DTYPE)
    found = [linear_of_sums(sums, residual, norm, EPS, weight, task.plan, gated=task.gated) for _ in range(2)]
    if not all(torch.equal(a, b) or torch.isnan(a).any() for a, b in zip(*found, strict=True)):
        raise ArithmeticError("two runs on the same data differ")
    stream = sums.double().sum(0) + residual.double()
    expected = (gemv_torch(stream, weight.double(), norm=norm.double(), eps=EPS, gated=task.gated), stream)
    # NaN is the greatest of all
    errors = [(a.double() - b).norm() / b.norm() for a, b in zip(found[0], expected, strict=True)]
    return float(torch.stack(errors).max())


def main() -> None:
    """Serve as one checking process."""
    tasks = [Task.from_dict(values) for values in json.load(sys.stdin)]
    device = torch.device("cuda")
    for index, task in enumerate(tasks):
        print(json.dumps({"index": index, "started": time.time()}), flush=True)
        error, failure = None, None
        try:
            error = relative_error(task, device)
            if not error <= TOLERANCE:
                failure = f"wrong: relative error {error:.3g}"
        except torch.AcceleratorError:
            # the context is lost, and with it this process
            raise
        except Exception as fault:  # whatever a compiler raises is a finding
            failure = f"{type(fault).__name__}: {' '.join(str(fault).split())[:400]}"
        # NaN is not JSON
        shown = None if error is None or isnan(error) else error
        print(json.dumps({"index": index, "error": shown, "failure": failure}), flush=True)


if __name__ == "__main__":
    main()
