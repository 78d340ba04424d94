"""How a fused decode launch is cut: tile, warps, stages and splits, as pure functions of the padded batch.

Eager steps, graph replays and both runners take the same plan for the same bucket, hence sum in one order;
how many splits a request uses follows from its own length, on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

MAX_SPLITS = 32
# (request, KV head) pairs that one launch with splits can serve
MAX_SPLIT_PAIRS = 1 << 14
# programs a launch aims at: several on each of 132 SMs, so that contexts of unlike lengths even out
_PROGRAMS = 1056


@dataclass(frozen=True)
class DecodePlan:
    """Launch shape of the fused decode kernel."""

    # keys a tile, a power of two >= 16
    block_n: int
    num_warps: int
    num_stages: int
    # programs that may share a context, <= MAX_SPLITS
    num_splits: int
    # tiles a context must have for each split that it uses
    tiles_per_split: int


def split_bound(batch: int, num_kv_heads: int, programs: int = _PROGRAMS) -> int:
    """Return how many programs may share a context: a power of two that gives about `programs` in all."""
    pairs = max(batch * num_kv_heads, 1)
    if pairs > MAX_SPLIT_PAIRS:
        return 1
    return 1 << (min(max(programs // pairs, 1), MAX_SPLITS).bit_length() - 1)


def decode_plan(batch: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> DecodePlan:
    """Return the plan of a padded batch."""
    splits = split_bound(batch, num_kv_heads)
    if dtype == torch.float32:
        return DecodePlan(block_n=32, num_warps=4, num_stages=1, num_splits=splits, tiles_per_split=4)
    if head_dim <= 64:
        return DecodePlan(block_n=128, num_warps=4, num_stages=3, num_splits=splits, tiles_per_split=2)
    return DecodePlan(block_n=64, num_warps=4, num_stages=3, num_splits=splits, tiles_per_split=2)


@cache
def arrivals_of(device: torch.device) -> torch.Tensor:
    """Return the arrival counters of a device, [MAX_SPLIT_PAIRS] int32; zero between launches."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("paged attention: run it once on this device before capturing it in a CUDA graph")
    return torch.zeros(MAX_SPLIT_PAIRS, dtype=torch.int32, device=device)
