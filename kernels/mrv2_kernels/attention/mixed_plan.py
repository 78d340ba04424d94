"""How `paged_attention` is launched, as a pure function of padded sizes: eager steps, graphs and both runners agree.

So many programs share a context that full blocks of a prompt's queries, of which there are no more than tokens allow,
fill the device.  As many programs as there could be shares would be too many, for one that has nothing to do still
takes its turn: 5 us at 64 rows.  So a launch has no more than _MAX_PROGRAMS, which go on to the next item where there
are more.  Before, requests owned programs of their own, padding too, shares of long contexts started behind all
decodes, and the launch waited for the end of the one before it.

Measured on an H200 by a script (traces/bench/h200-attention-shares.json), one layer of Qwen3-0.6B for a chunk of a
prompt and 32 decodes of 300 tokens with the KV write in front, microseconds by how many may share a context, and of
what chose that before:

    chunk   context    rows   before      1     2     4     8
       64       512      64       25     24           25    25
       64     2,048      64       40     40    31    31    28
       64     2,048     512      126                 31    31
       64     8,192      64       60    118           57    41
      256     2,048      64       47     49    33    34    40
      256     8,192      64       81    162    95    68    82
      512     2,048      64       57     49    47    48    56
      512     8,192      64      117    166   104   115   145
    1,024     2,048      64       68     55    69    70    88

Tried, no help: shares of 128 keys (42 and 68 instead of 37 and 45 at most), tiles of 32 queries and heads, 4 stages;
tiles of 16 queries and heads beside a chunk of 64 (21 and 28 instead of 25 and 28 at 512 and 2,048 tokens, but 56 for
41 at 8,192); as many programs as run at once (30 for 25, 40 for 28).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mrv2_kernels._triton import cdiv, next_power_of_2
from mrv2_kernels.attention._tiles import TileShape
from mrv2_kernels.attention.plan import MAX_SPLIT_PAIRS

# programs that a launch with splits aims at: four for each of 132 SMs
_PROGRAMS = 528
# that it has at most
_MAX_PROGRAMS = 1056
_MAX_SPLITS = 8
# keys of a share at least, eight tiles; twice as many where fewer than _MAX_SPLITS share a context
_MIN_SHARE = 512
# requests and KV heads from which many small programs are faster than fewer with more warps, at tiles of 16 rows
_MANY_PAIRS = 512


@dataclass(frozen=True)
class MixedPlan:
    """Launch shape of `paged_attention`."""

    tile: TileShape
    # programs that may share a context, a power of two
    num_splits: int
    # keys that each of them takes at least, a multiple of the tile's
    min_share: int
    # of the launch, for each KV head the same
    num_programs: int


def mixed_plan(
    num_tokens: int,
    num_requests: int,
    num_kv_heads: int,
    group: int,
    max_query_len: int,
    dtype: torch.dtype,
    *,
    shape: TileShape | None = None,
    num_splits: int | None = None,
) -> MixedPlan:
    """Return the plan for sizes with padding, `shape` and `num_splits` as given where they are.

    `group` is the query heads of a KV head.  Raises `ValueError` for a `num_splits` that cannot be served.
    """
    tile = shape or _tile_shape(dtype, group, max_query_len, num_requests * num_kv_heads)
    block_q = tile.block_m // group
    has_counters = (cdiv(num_tokens, block_q) + num_requests) * num_kv_heads <= MAX_SPLIT_PAIRS
    if num_splits is None:
        num_splits = _num_splits(num_tokens, num_kv_heads, block_q) if has_counters else 1
    elif num_splits & (num_splits - 1) or (num_splits > 1 and not has_counters):
        raise ValueError(
            f"paged_attention: num_splits={num_splits} must be a power of two, and 1 where {num_tokens} tokens of "
            f"{num_requests} requests may need more than {MAX_SPLIT_PAIRS} pairs of a block and a KV head; leave it "
            "out to have it picked"
        )
    # requests with tokens have one at least, and the most blocks if as many as can be have but that
    num_busy = min(num_requests, num_tokens)
    num_programs = (num_busy + (num_tokens - num_busy) // block_q) * num_kv_heads
    if num_splits > 1:
        num_programs = min(num_programs * num_splits, max(_MAX_PROGRAMS // num_kv_heads, 1) * num_kv_heads)
    # in steps of more tokens, whose blocks are more, sharing pays later
    min_share = _MIN_SHARE if num_splits >= _MAX_SPLITS else 2 * _MIN_SHARE
    return MixedPlan(tile, num_splits, max(min_share, tile.block_n), num_programs)


def _num_splits(num_tokens: int, num_kv_heads: int, block_q: int) -> int:
    wanted = _PROGRAMS // (cdiv(num_tokens, block_q) * num_kv_heads)
    return 1 << (min(max(wanted, 1), _MAX_SPLITS).bit_length() - 1)


def _tile_shape(dtype: torch.dtype, group: int, max_query_len: int, num_pairs: int) -> TileShape:
    smallest = max(16, next_power_of_2(group))
    largest = 32 if dtype == torch.float32 else 64
    block_m = max(smallest, min(next_power_of_2(max_query_len * group), largest))
    if dtype == torch.float32:
        return TileShape(block_m, block_n=32, num_warps=4, num_stages=1)
    if block_m == 16 and num_pairs >= _MANY_PAIRS:
        # verification of 64 requests: 32 instead of 36 us, of 128: 58 and 66, but of 32: 23 and 20
        return TileShape(block_m, block_n=64, num_warps=2, num_stages=2)
    # measured on an H200, as `mrv2 bench --layers` does
    return TileShape(block_m, block_n=64, num_warps=4, num_stages=3)
