"""A layer whose products take in what surrounds them is the layer, on the host's references in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import mrv2_models.layers
from models.paged_harness import PagedHarness
from mrv2_kernels.gemm import LIBRARY, LinearPlan, ProductPicks
from mrv2_kernels.gemm.picks import Pick
from mrv2_models.causal_lm import CausalLM
from mrv2_models.drafters.loading import random_head
from mrv2_models.layers import Linear, share_workspace
from mrv2_models.registry import load_model

GEMV = LinearPlan("gemv")
PROMPTS = {"a": list(range(3, 20)), "b": [7, 9, 11]}
STEPS = [PROMPTS, {"a": [5], "b": [6]}, {"a": [8]}, {"a": [1], "b": [2]}]


def products(model: CausalLM) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear)]


def logits(model: CausalLM) -> torch.Tensor:
    harness = PagedHarness(model)
    return torch.cat([each for tokens in STEPS for each in harness.step(tokens).values()])


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen3"])
def test_fused_layers_compute_what_separate_kernels_do(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(preset, load_format="dummy", dtype=torch.float64)
    expected = logits(model)
    for each in products(model):
        each.picks = ProductPicks((2,), (Pick(LIBRARY, GEMV),))
    right = mrv2_models.layers.silu_and_mul

    def for_prompts(x: torch.Tensor) -> torch.Tensor:
        assert x.shape[0] > 2, "a decode step of two rows has no activation kernel"
        return right(x)

    monkeypatch.setattr(mrv2_models.layers, "silu_and_mul", for_prompts)
    torch.testing.assert_close(logits(model), expected, rtol=1e-10, atol=1e-10)


def test_a_layer_that_drafts_may_fuse_too() -> None:
    target = load_model("tiny-qwen3", load_format="dummy", dtype=torch.float64)
    head = random_head("mtp", target)
    harness = PagedHarness(target)
    batch = harness.batch({"a": [5], "b": [6]})
    torch.manual_seed(0)
    features = torch.randn(2, target.config.hidden_size, dtype=torch.float64)
    results = []
    for picks in (ProductPicks(), ProductPicks((2,), (Pick(LIBRARY, GEMV),))):
        for each in head.modules():
            if isinstance(each, Linear):
                each.picks = picks
        inputs = (batch.input_ids, features, batch.positions, harness.state.prepare_attn(batch), harness.kv_caches[0])
        results.append(head(*inputs))
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("index", range(4))
def test_a_layer_fuses_as_a_whole_or_not_at_all(index: int) -> None:
    model = load_model("tiny-qwen3", load_format="dummy", dtype=torch.float64)
    expected = logits(model)
    for at, each in enumerate(products(model)):
        each.picks = ProductPicks((2,), (Pick(LIBRARY, None if at % 4 == index else GEMV),))
    torch.testing.assert_close(logits(model), expected, rtol=1e-10, atol=1e-10)


def test_the_host_fuses_nothing() -> None:
    model = load_model("tiny-qwen3", load_format="dummy", dtype=torch.bfloat16)
    assert not any(each.fuses(m) or each.picks.at(m).plan != LIBRARY for each in products(model) for m in (1, 2, 8))


def test_one_workspace_suits_every_product_that_splits() -> None:
    model = load_model("tiny-qwen3", load_format="dummy")
    share_workspace(model)
    assert all(each.workspace is None for each in products(model))
    plan = LinearPlan("streamed", splits=3)
    for at, each in enumerate(products(model)):
        each.picks = ProductPicks((4, 8), (Pick(plan), Pick(replace(plan, splits=1 + at % 2))))
    share_workspace(model)
    assert len({id(each.workspace) for each in products(model)}) == 1
    for each in products(model):
        assert each.workspace is not None
        for num_rows, pick in zip(each.picks.num_rows, each.picks.picks, strict=True):
            each.workspace.require(pick.plan, num_rows, each.weight.shape[0])
        assert not each.workspace.counters.any()
