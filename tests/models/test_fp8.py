"""quantization="fp8" and kv_cache_dtype="fp8": what becomes 8-bit, and that all settings agree on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.hf_folders import write_folder
from models.paged_harness import PagedHarness
from mrv2.bench.roofline import ModelCost
from mrv2.config import Knobs
from mrv2.device import Device, make_device
from mrv2.engine.core import EngineCore
from mrv2.engine.executor import NAN_BYTE
from mrv2.sampling_params import SamplingParams
from mrv2_kernels._numerics import bytes_of
from mrv2_kernels.gemm import FP8, quantise_rows
from mrv2_models.causal_lm import CausalLM
from mrv2_models.config import ModelConfig
from mrv2_models.kv_cache import KVCacheSpec, group_specs, kept_dtype
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


@pytest.mark.parametrize("option", [{"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}], ids=str)
def test_all_runners_and_modes_say_the_same(option: dict) -> None:
    said = []
    for knobs in (
        Knobs(async_scheduling=False),
        Knobs(queue_depth=3),
        Knobs(runner="v1"),
        Knobs(cuda_graphs="step"),
        Knobs(cuda_graphs="step", async_scheduling=False),
    ):
        core = make_core(knobs=knobs, **option)
        collector = Collector(core)
        for i in range(4):
            params = SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=12, ignore_eos=True)
            collector.submit(f"r{i}", random_prompt(i, 11 + 9 * i), params)
        said.append({name: served.token_ids for name, served in collector.run().items()})
        core.shutdown()
    assert all(each == said[0] for each in said)


def served(ready: Device | None = None, **options: object) -> tuple[dict[str, list[int]], EngineCore]:
    core = make_core(ready, **options)
    collector = Collector(core)
    for i in range(3):
        collector.submit(f"r{i}", random_prompt(i, 20 + 30 * i), SamplingParams(temperature=0.0, max_tokens=16))
    return {name: each.token_ids for name, each in collector.run().items()}, core


def test_keys_and_values_are_kept_as_eight_bit_floats_and_weights_are_not() -> None:
    _, core = served(kv_cache_dtype="fp8")
    assert {cache.dtype for pair in core.executor.kv_caches for cache in pair} == {FP8}
    assert FP8 not in {parameter.dtype for parameter in core.executor.model.parameters()}
    core.shutdown()


def test_the_first_token_of_a_prompt_of_one_sees_only_the_rounding_of_its_own_value() -> None:
    """With one key the softmax is 1 whatever was rounded: logits move by what the format loses of v, not more."""
    model = load_model("tiny-qwen3", load_format="dummy", dtype="float32")
    plain, eight_bits = (PagedHarness(model, kv_cache_dtype=kept).step({"a": [7]})["a"] for kept in ("auto", "fp8"))
    moved = (eight_bits - plain).norm() / plain.norm()
    assert 0 < moved < 2**-4


def test_the_same_memory_holds_as_many_times_more_blocks_as_bytes_are_saved() -> None:
    specs = [KVCacheSpec(num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)] * 3
    (plain,), (eight_bits,) = group_specs(specs), group_specs(specs, kept_dtype("fp8", torch.device("cpu")))
    assert plain.bytes_per_block == 2 * eight_bits.bytes_per_block and eight_bits.layers == (0, 1, 2)
    assert kept_dtype("auto", torch.device("cpu")) is None
    with pytest.raises(ValueError, match="'auto' or 'fp8'"):
        kept_dtype("fp8_e5m2", torch.device("cpu"))


def test_drafters_keep_theirs_alike_and_drafts_change_no_token() -> None:
    plain, core = served(kv_cache_dtype="fp8")
    core.shutdown()
    for method in ("eagle3", "mtp"):
        drafted, core = served(
            kv_cache_dtype="fp8",
            speculators=(method,),
            max_num_spec_tokens=2,
            knobs=Knobs(spec_method=method, num_spec_tokens=2),
        )
        (drafter,) = core.executor.drafters
        assert {cache.dtype for pair in drafter.kv_caches for cache in pair} == {FP8}
        assert drafter.bytes_per_block == drafter.groups[0].spec.bytes_per_block
        assert drafted == plain, method
        core.shutdown()


def test_what_nobody_wrote_is_not_read() -> None:
    """Blocks hold NaN, which 8-bit floats have too, until their tokens are computed."""
    plain, core = served(kv_cache_dtype="fp8")
    core.shutdown()
    poisoned, core = served(make_device("host", poison=True), kv_cache_dtype="fp8")
    unread = bytes_of(core.executor.kv_caches[0][0])
    assert poisoned == plain and (unread == NAN_BYTE).any()
    core.shutdown()


def test_gathered_attention_reads_the_same_cache() -> None:
    plain, core = served(kv_cache_dtype="fp8")
    core.shutdown()
    gathered, core = served(kv_cache_dtype="fp8", knobs=Knobs(attention="sdpa"))
    core.shutdown()
    assert gathered == plain


def test_the_cost_card_counts_the_bytes_of_the_cache() -> None:
    for kept, size in (("auto", 2), ("fp8", 1)):
        config = ModelConfig.from_preset("tiny-qwen3")
        cost = ModelCost.of(config, torch.bfloat16, None, kept)  # type: ignore[arg-type]
        assert cost.kv_bytes_per_token == (
            2 * size * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        )
