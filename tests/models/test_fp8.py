"""quantization="fp8": which weights become 8-bit, how far the model moves, and that all settings agree on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.hf_folders import write_folder
from mrv2.bench.roofline import ModelCost
from mrv2.config import Knobs
from mrv2.sampling_params import SamplingParams
from mrv2_kernels.gemm import FP8, quantise_rows
from mrv2_models.causal_lm import CausalLM
from mrv2_models.layers import Linear
from mrv2_models.registry import load_model
from serving import Collector, make_core, random_prompt


def products(model: CausalLM) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear)]


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3"])
def test_the_products_of_the_layers_are_quantised_and_nothing_else(name: str) -> None:
    plain = load_model(name, load_format="dummy", dtype="float32")
    model = load_model(name, load_format="dummy", dtype="float32", quantization="fp8")
    for mine, theirs in zip(products(model), products(plain), strict=True):
        weight, scale = quantise_rows(theirs.weight)
        assert mine.weight.dtype == FP8 and mine.scale is not None
        assert torch.equal(mine.weight.float(), weight.float()) and torch.equal(mine.scale, scale)
    for key, value in plain.state_dict().items():
        if ".weight" not in key or value.dim() == 1 or "embed" in key or "head" in key:
            assert torch.equal(model.state_dict()[key], value), key


def test_a_folder_is_quantised_as_its_numbers_are(tmp_path: Path) -> None:
    write_folder("llama-tied", tmp_path)
    plain, model = (load_model(tmp_path, dtype="float32", quantization=q) for q in (None, "fp8"))  # type: ignore[arg-type]
    for mine, theirs in zip(products(model), products(plain), strict=True):
        weight, scale = quantise_rows(theirs.weight)
        assert torch.equal(mine.weight.float(), weight.float()) and torch.equal(mine.scale, scale)  # type: ignore[arg-type]


def test_an_unknown_quantization_is_refused() -> None:
    with pytest.raises(ValueError, match="fp8"):
        load_model("tiny-llama", load_format="dummy", quantization="int3")  # type: ignore[arg-type]


def test_the_cost_card_counts_the_bytes_of_the_model() -> None:
    for name in ("tiny-llama", "tiny-qwen3"):
        model = load_model(name, load_format="dummy", dtype="bfloat16", quantization="fp8")
        unread = 0 if model.head is model.embed else model.embed.weight.nbytes
        held = sum(parameter.nbytes for parameter in model.parameters()) - unread
        assert ModelCost.of(model.config, torch.bfloat16, "fp8").weight_bytes == held


def test_all_runners_and_modes_say_the_same() -> None:
    said = []
    for knobs in (
        Knobs(async_scheduling=False),
        Knobs(queue_depth=3),
        Knobs(runner="v1"),
        Knobs(cuda_graphs="step"),
        Knobs(cuda_graphs="step", async_scheduling=False),
    ):
        core = make_core(knobs=knobs, quantization="fp8")
        collector = Collector(core)
        for i in range(4):
            params = SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=12, ignore_eos=True)
            collector.submit(f"r{i}", random_prompt(i, 11 + 9 * i), params)
        said.append({name: served.token_ids for name, served in collector.run().items()})
        core.shutdown()
    assert all(each == said[0] for each in said)
