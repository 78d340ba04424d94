"""How the kernels of a graph get their owners, and what a part's bytes are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from models.paged_harness import PagedHarness
from mrv2.bench import explain
from mrv2.bench.explain import Kernels, labelled, make_budget
from mrv2.cli import main
from mrv2.errors import ConfigError
from mrv2_kernels.gemm import LinearPlan, Pick, ProductPicks
from mrv2_models import causal_lm, layers
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


@pytest.mark.parametrize("in_parts", [False, True])
def test_every_kernel_of_a_layer_has_its_part_and_a_module_is_counted_once(
    in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever methods call each other: of products that take in a norm or leave it alone, and of attention."""
    model = load_model("tiny-qwen3", dtype="float64", load_format="dummy", max_model_len=32)
    if in_parts:
        whole = LinearPlan("warpgroup", 8, 64, normed=True)
        for path, module in model.named_modules():
            if isinstance(module, Linear):
                plan = LinearPlan("warpgroup", 8, 64, splits=2) if path.endswith((".o", ".down")) else whole
                module.picks = ProductPicks((8,), (Pick(parts=plan),))
    ranges: list[str] = []
    seen: list[tuple[str, str]] = []

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        ranges.append(name)
        yield
        ranges.pop()

    def watch(module: ModuleType, name: str) -> None:
        kernel = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append((name, ranges[-1]))
            return kernel(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    monkeypatch.setattr(explain, "stage", stage)
    watch(causal_lm, "attend")
    for name in ("embed_norm", "linear", "linear_of_sums", "linear_parts", "rms_norm"):
        watch(layers, name)
    harness = PagedHarness(model)
    with labelled(model) as sizes:
        harness.step({"a": [3, 4, 5]})
    product, normed = ("linear_parts", "linear_of_sums") if in_parts else ("linear", "linear")
    layer = [
        *([] if in_parts else [("rms_norm", "input_norm")]),
        (normed, "attention.qkv"),
        ("attend", "attention"),
        (product, "attention.o"),
        *([] if in_parts else [("rms_norm", "post_norm")]),
        (normed, "mlp.gate_up"),
        (product, "mlp.down"),
    ]
    last = [*layer, ("rms_norm", "norm"), ("linear", "head.project")]
    assert seen[-len(last) :] == [(kernel, f"part: {part}") for kernel, part in last]
    called = {part: size.num_calls for part, size in sizes.items() if size.num_calls}
    assert called.keys() >= {part for _, part in last}
    assert called == {part: len(sizes[part].modules) for part in called}
    # the norm of the first layer, which has nothing to add, is the lookup's
    assert seen[0] == ("embed_norm", "part: embed") and called["embed"] == 1
    assert called.get("input_norm", 0) == (0 if in_parts else len(model.layers) - 1) and len(model.layers) > 1
    assert called["attention"] == called["mlp.gate_up"] == len(model.layers)


def test_it_needs_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--explain", "--model", "tiny-qwen3", "--device", "host", "--num-gpu-blocks", "64"]) != 0
    assert "needs CUDA" in capsys.readouterr().err
