"""How a decode step's attention is computed, as pure functions of the padded batch.

Eager steps, graph replays and both runners make the same choice for the same bucket, hence sum in one order;
how many splits a request uses follows from its own length, on the device.

What was measured on an H200 are pairs of a request and a KV head at two head sizes; other counts of pairs take the
choice of the nearest measured one, by ratio.  Heads of 128 in a whole forward pass (`mrv2 bench --layers --tune`,
traces/bench/h200-forward-tuning.json), heads of 64 launch by launch (`mrv2 bench --layers`).  From 384 pairs to 1,536,
and for 8, they are those of a script (h200-forward-tuning-parts.json) that also took contexts as a benchmark's end has
them, few requests of 900 to 2,000 tokens: 48 requests of such took 3,737 us with one warp a program and 2,583 with
four, 64 took 3,780 and 3,165, 96 took 4,255 and 4,026, 128 4,829 and 4,735, 192 5,918 and 5,832.  64 of 384 tokens each
took 1,354 and 1,329; one took 445 in 32 splits and 423 in 16.

Tried there too, and of no help (traces/bench/h200-forward-tuning-l2.json): a launch that has the L2 cache fetch the
weights of the next products, or the next layer's first keys and values, while products leave the memory idle.  A
forward pass of 8 requests took 831 us and more instead of 815, of 32 requests 1,292 instead of 1,282, of 64 the same.
Nor attention that asks for keys and values itself (h200-forward-tuning-parts.json): 64 keys of its own behind the first
tile, before it waits, 935 instead of 912 for 32 requests of 384 tokens and 1,427 instead of 1,417 for 64; 32 of the
next layer, when it has ended, 918 and 1,413, and 2,456 instead of 2,306 for 256 of 160.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

MAX_SPLITS = 32
# (request, KV head) pairs that one launch with splits can serve
MAX_SPLIT_PAIRS = 1 << 14
# programs a launch aims at where nothing was measured: several on each of 132 SMs
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
    # that a thread may hold: fewer let more programs run on a multiprocessor; None = as many as the compiler likes
    max_registers: int | None = None


@dataclass(frozen=True)
class DecodeChoice:
    """How a padded batch of single tokens is attended."""

    plan: DecodePlan
    # one launch with `plan`, or else one each for norm and rotation, KV write and attention
    fused: bool = True
    # the fused launch starts before its predecessor has ended, where the device can
    ahead: bool = False
    # the fused launch starts the longest contexts first (`order`); only where none is split
    ordered: bool = False


# largest head size -> pairs -> choice; of Qwen3-0.6B (8 KV heads of 128) and SmolLM2-135M (3 of 64)
_MEASURED: dict[int, dict[int, DecodeChoice]] = {
    64: {
        3: DecodeChoice(DecodePlan(128, 4, 3, num_splits=32, tiles_per_split=1), ahead=True),
        96: DecodeChoice(DecodePlan(128, 4, 3, num_splits=2, tiles_per_split=1)),
        768: DecodeChoice(DecodePlan(32, 4, 4, num_splits=1, tiles_per_split=16)),
    },
    128: {
        8: DecodeChoice(DecodePlan(32, 4, 2, num_splits=16, tiles_per_split=1), ahead=True),
        64: DecodeChoice(DecodePlan(64, 2, 2, num_splits=8, tiles_per_split=1), ahead=True),
        128: DecodeChoice(DecodePlan(64, 2, 2, num_splits=4, tiles_per_split=1), ahead=True),
        256: DecodeChoice(DecodePlan(128, 4, 2, num_splits=1, tiles_per_split=1), ahead=True),
        384: DecodeChoice(DecodePlan(64, 4, 2, num_splits=1, tiles_per_split=4), ahead=True, ordered=True),
        512: DecodeChoice(DecodePlan(64, 2, 2, num_splits=1, tiles_per_split=4), ahead=True, ordered=True),
        768: DecodeChoice(DecodePlan(64, 4, 2, num_splits=1, tiles_per_split=4), ahead=True, ordered=True),
        1024: DecodeChoice(DecodePlan(64, 2, 2, num_splits=1, tiles_per_split=4), ahead=True, ordered=True),
        1536: DecodeChoice(DecodePlan(32, 2, 3, num_splits=1, tiles_per_split=4), ahead=True, ordered=True),
        2048: DecodeChoice(DecodePlan(32, 1, 2, num_splits=1, tiles_per_split=4), ahead=True, ordered=True),
        4096: DecodeChoice(DecodePlan(32, 1, 2, num_splits=1, tiles_per_split=4), ahead=True, ordered=True),
    },
}
# the same of caches of 8-bit floats; not measured: keys a tile as many as keep the bytes in flight, or registers allow
_EIGHT_BITS: dict[int, dict[int, DecodeChoice]] = {
    64: _MEASURED[64],
    128: {
        8: DecodeChoice(DecodePlan(32, 4, 2, num_splits=32, tiles_per_split=1), ahead=True),
        64: DecodeChoice(DecodePlan(64, 2, 2, num_splits=8, tiles_per_split=1), ahead=True),
        256: DecodeChoice(DecodePlan(128, 4, 2, num_splits=1, tiles_per_split=1), ahead=True),
        512: DecodeChoice(DecodePlan(32, 1, 2, num_splits=1, tiles_per_split=4), ahead=True, ordered=True),
        2048: DecodeChoice(DecodePlan(32, 1, 3, num_splits=1, tiles_per_split=4), ahead=True, ordered=True),
    },
}


def measured(cache_dtype: torch.dtype) -> dict[int, dict[int, DecodeChoice]]:
    """Return the table of a cache: largest head size -> pairs -> choice."""
    return _EIGHT_BITS if cache_dtype.itemsize == 1 else _MEASURED


def split_bound(batch: int, num_kv_heads: int, programs: int = _PROGRAMS) -> int:
    """Return how many programs may share a context: a power of two that gives about `programs` in all."""
    pairs = max(batch * num_kv_heads, 1)
    if pairs > MAX_SPLIT_PAIRS:
        return 1
    return 1 << (min(max(programs // pairs, 1), MAX_SPLITS).bit_length() - 1)


@cache
def decode_choice(
    batch: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype | None = None
) -> DecodeChoice:
    """Return the choice for a padded batch; `cache_dtype` None = keys and values are kept in `dtype`."""
    table = measured(cache_dtype or dtype)
    size = next((size for size in sorted(table) if head_dim <= size), None)
    if size is None or dtype.itemsize > 2:
        # tiles that fit into shared memory, 128 keys a split
        block_n, num_stages = (32, 1) if dtype.itemsize > 2 else (64, 3)
        return DecodeChoice(DecodePlan(block_n, 4, num_stages, split_bound(batch, num_kv_heads), 128 // block_n))
    pairs = max(batch * num_kv_heads, 1)
    nearest = min(table[size], key=lambda known: max(pairs / known, known / pairs))
    return table[size][nearest]


def decode_plan(batch: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> DecodePlan:
    """Return the fused launch's plan for a padded batch, whether or not the launch is chosen."""
    return decode_choice(batch, num_kv_heads, head_dim, dtype).plan


@cache
def arrivals_of(device: torch.device) -> torch.Tensor:
    """Return the arrival counters of a device, [MAX_SPLIT_PAIRS] int32; zero between launches."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("paged attention: run it once on this device before capturing it in a CUDA graph")
    return torch.zeros(MAX_SPLIT_PAIRS, dtype=torch.int32, device=device)
