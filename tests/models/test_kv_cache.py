"""KV cache specs, their groups and their memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mrv2_models.kv_cache import KVCacheSpec, allocate_kv_caches, group_specs
from mrv2_models.registry import load_model

SPEC = KVCacheSpec(num_kv_heads=3, head_dim=64, dtype=torch.float16, block_size=16)
WIDE = dataclasses.replace(SPEC, head_dim=128)


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def test_equal_specs_form_one_group_in_order_of_appearance() -> None:
    groups = group_specs([SPEC, WIDE, dataclasses.replace(SPEC), SPEC])
    assert [(group.spec, group.layers) for group in groups] == [(SPEC, (0, 2, 3)), (WIDE, (1,))]


def test_a_block_of_smollm2_costs_what_its_shape_says() -> None:
    assert SPEC.bytes_per_block == 16 * 2 * 3 * 64 * 2
    assert group_specs([SPEC] * 30)[0].bytes_per_block == 368_640


def test_each_layer_gets_its_own_memory_of_the_announced_size() -> None:
    groups = group_specs([SPEC, WIDE, SPEC])
    caches = allocate_kv_caches(groups, 5, empty)
    assert [k.shape for k, _ in caches] == [(5, 16, 3, 64), (5, 16, 3, 128), (5, 16, 3, 64)]
    tensors = [tensor for pair in caches for tensor in pair]
    assert len({tensor.data_ptr() for tensor in tensors}) == 6
    assert sum(tensor.nbytes for tensor in tensors) == 5 * sum(group.bytes_per_block for group in groups)


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks=0 must be at least 1"):
        allocate_kv_caches(group_specs([SPEC]), 0, empty)


def test_a_model_names_one_spec_per_layer() -> None:
    model = load_model("tiny-qwen3", load_format="dummy", dtype="bfloat16")
    expected = KVCacheSpec(num_kv_heads=2, head_dim=64, dtype=torch.bfloat16, block_size=32)
    assert model.kv_cache_specs(32) == [expected, expected]
