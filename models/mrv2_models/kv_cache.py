"""What each layer keeps between steps, and how equal needs are grouped and allocated.

Legend: NB blocks, BS tokens per block, Hkv heads of this rank, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from mrv2_kernels.gemm.fp8 import FP8, MIN_CAPABILITY
from mrv2_models.errors import UnsupportedModelError

# (shape, dtype) -> device tensor
EmptyFn = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
# [NB, BS, Hkv, D] each
LayerCache = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """One layer's cache; layers with equal specs share block tables."""

    kind: Literal["full"] = "full"
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    # in tokens
    block_size: int = 16

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of one layer, keys and values."""
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers with one spec; a block id of the group names one block in each of them."""

    spec: KVCacheSpec
    layers: tuple[int, ...]

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block id costs, over all layers of the group."""
        return self.spec.bytes_per_block * len(self.layers)


def kept_dtype(kv_cache_dtype: str, device: torch.device) -> torch.dtype | None:
    """Return what keys and values are kept in by the option `kv_cache_dtype`; None = what each spec says.

    Raises `UnsupportedModelError` for a GPU whose kernels cannot convert 8-bit floats.
    """
    if kv_cache_dtype == "auto":
        return None
    if kv_cache_dtype != "fp8":
        raise ValueError(f"kv_cache_dtype={kv_cache_dtype!r} must be 'auto' or 'fp8'")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        raise UnsupportedModelError(
            f"kv_cache_dtype='fp8' needs compute capability {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}, "
            f"{torch.cuda.get_device_name(device)} has less; leave it out"
        )
    return FP8


def group_specs(specs: Sequence[KVCacheSpec], dtype: torch.dtype | None = None) -> list[KVCacheGroup]:
    """Group layers by equal specs, in order of first appearance; `dtype` takes the place of the specs' own."""
    layers: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        layers.setdefault(spec if dtype is None else replace(spec, dtype=dtype), []).append(layer)
    return [KVCacheGroup(spec, tuple(members)) for spec, members in layers.items()]


def allocate_kv_caches(groups: Sequence[KVCacheGroup], num_blocks: int, empty_fn: EmptyFn) -> list[LayerCache]:
    """Allocate `num_blocks` blocks for every group; return one ``(k_cache, v_cache)`` per layer.

    The memory is not initialised: kernels never read a slot that was not written.
    """
    if num_blocks < 1:
        raise ValueError(f"num_blocks={num_blocks} must be at least 1")
    caches: dict[int, LayerCache] = {}
    for group in groups:
        spec = group.spec
        shape = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        for layer in group.layers:
            caches[layer] = (empty_fn(shape, spec.dtype), empty_fn(shape, spec.dtype))
    assert sorted(caches) == list(range(len(caches))), f"groups must cover each layer once, got {sorted(caches)}"
    return [caches[layer] for layer in range(len(caches))]
