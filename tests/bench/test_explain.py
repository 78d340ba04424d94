"""How the kernels of a graph get their owners, and what a part's bytes are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrv2.bench.explain import Kernels, labelled, make_budget
from mrv2.cli import main
from mrv2.errors import ConfigError
from mrv2_models.layers import Linear
from mrv2_models.registry import load_model, resolve_model

LABELS = ["part: embed", "part: norm", "part: qkv", "part: norm", "part: qkv", "part: head"]
NAMES = ["gather", "norm", "gemm", "norm", "gemm", "gemm"]


def kernels(names: list[str], owners: list[str]) -> Kernels:
    durations = np.arange(1, len(names) + 1) * 1000
    return Kernels(names, durations, owners, 0, 1000 * len(names) * 10)


def test_the_order_of_the_labelled_step_names_the_kernels_of_a_graph() -> None:
    # a graph has preparation in front and sampling behind; what is launched outside keeps its stage
    names = ["prepare", *NAMES, "sample", "copy"] * 2
    owners = [*[""] * 8, "output_copy"] * 2
    labels = kernels(["prepare", *NAMES], ["prepare_inputs", *LABELS])
    budget = make_budget(1, 128, labels, kernels(names, owners), {"qkv": 3_000_000, "head": 7}, 1e12)
    parts = {part.part: part for part in budget.parts}
    assert set(parts) == {"embed", "norm", "qkv", "head", "rest of the graph", "output_copy"}
    assert parts["qkv"].kernels_per_step == 2 and parts["head"].kernels_per_step == 1
    # 4 + 6 us in the first step, 13 + 15 in the second
    assert parts["qkv"].microseconds == pytest.approx((4 + 6 + 13 + 15) / 2)
    assert parts["qkv"].bandwidth_share == pytest.approx(3e6 / 19e-6 / 1e12)
    assert parts["norm"].bytes is None
    assert sum(part.share for part in budget.parts) == pytest.approx(1)
    assert budget.kernel_us == pytest.approx(sum(range(1, 19)) / 2)


def test_a_graph_of_other_kernels_is_refused() -> None:
    labels = kernels(NAMES, LABELS)
    with pytest.raises(ConfigError, match="do not repeat the 6 kernels"):
        make_budget(1, 1, labels, kernels(NAMES[:4], [""] * 4), {}, 1e12)


def test_the_bytes_of_a_part_and_no_trace_of_the_ranges_afterwards() -> None:
    found = resolve_model("tiny-qwen3")
    model = load_model("tiny-qwen3", dtype="float32", load_format="dummy", max_model_len=32)
    x = torch.zeros(3, found.config.hidden_size)
    products = [module for path, module in model.named_modules() if path.endswith("attention.qkv")]
    with labelled(model) as sizes:
        for product in products:
            product(x)
        model.compute_logits(x)
    qkv = products[0]
    assert isinstance(qkv, Linear)
    out = qkv.weight.shape[0]
    assert sizes["attention.qkv"].per_step == 4 * len(model.layers) * (qkv.weight.numel() + 3 * (x.shape[1] + out))
    head = model.head.weight
    assert 4 * head.numel() < sizes["head.project"].per_step < 4 * (head.numel() + 4 * 3 * head.shape[0])
    assert "forward" not in vars(qkv)


def test_it_needs_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--explain", "--model", "tiny-qwen3", "--device", "host", "--num-gpu-blocks", "64"]) != 0
    assert "needs CUDA" in capsys.readouterr().err
