"""What the launches behind an attention read, fetched into the L2 cache while the memory would idle.

A layer's products of few rows are chains of latencies: they leave more than half of the memory's bandwidth unused,
and the attention behind them then waits for keys and values that were there all along.  So an attention asks the L2
cache for what comes next, by bulk prefetches that return at once and change nothing but where the bytes are:

    weights     of the products up to the next attention, which no kernel of a step writes
    context     the first blocks of each request in the next layer's cache, which an earlier step wrote

A prefetch has no result and no order: it needs no wait and makes no race.  Compute capability 9.0 on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mrv2_kernels._triton import tl, triton

# weights that one launch takes
MAX_WEIGHTS = 4


@dataclass(frozen=True)
class Upcoming:
    """What follows one attention: the weights of the next products in their order, and the next layer's cache."""

    weights: tuple[torch.Tensor, ...] = ()
    # [NB, BS, Hkv, D] each
    cache: tuple[torch.Tensor, torch.Tensor] | None = None


NOTHING = Upcoming()


@triton.jit
def _prefetch(addresses, wanted, size):
    """Ask L2 for `size` bytes from each of `addresses` [N] int64, multiples of 16, where `wanted` [N]."""
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred p;
            setp.ne.s32 p, $2, 0;
            @p cp.async.bulk.prefetch.L2.global [$1], $3;
            mov.u32 $0, 0;
        }
        """,
        "=r,l,r,r",
        [addresses, wanted.to(tl.int32), size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_weights(ptr, num_bytes, program, num_programs, LANES: tl.constexpr, CHUNK: tl.constexpr = 16384):
    """Fetch this program's share of `num_bytes`, a multiple of 16, from `ptr` on, `CHUNK` bytes a prefetch."""
    lanes = tl.arange(0, LANES)
    start = ptr.to(tl.int64)
    num_chunks = tl.cdiv(num_bytes, CHUNK)
    for first in range(program, num_chunks, num_programs * LANES):
        offsets = (first + lanes * num_programs) * CHUNK
        sizes = tl.minimum(num_bytes - offsets, CHUNK)
        _prefetch(start + offsets, sizes > 0, tl.maximum(sizes, 16))


@triton.jit
def prefetch_blocks(
    cache_ptr, table_ptr, num_blocks, program, num_programs, BLOCK_BYTES: tl.constexpr, LANES: tl.constexpr
):
    """Fetch this program's share of a request's first `num_blocks` blocks."""
    lanes = tl.arange(0, LANES)
    start = cache_ptr.to(tl.int64)
    for first in range(program, num_blocks, num_programs * LANES):
        index = first + lanes * num_programs
        wanted = index < num_blocks
        ids = tl.load(table_ptr + index, mask=wanted, other=0).to(tl.int64)
        _prefetch(start + ids * BLOCK_BYTES, wanted, tl.full([LANES], BLOCK_BYTES, tl.int32))


def prefetchable(upcoming: Upcoming) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """Return `MAX_WEIGHTS` tensors and the bytes to fetch of each, 0 for those that fill the list up.

    Takes an `upcoming` with weights.
    """
    weights = upcoming.weights[:MAX_WEIGHTS]
    sizes = tuple(each.numel() * each.element_size() & ~15 for each in weights)
    missing = MAX_WEIGHTS - len(weights)
    return weights + missing * (weights[0],), sizes + missing * (0,)
