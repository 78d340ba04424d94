"""Attention problems that the layer benchmark checks and times: decode steps and prefills on random caches.

Legend: B = requests, C = context with the new token, NB = blocks, Hq / Hkv = query / KV heads, D = head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from mrv2_kernels.attention._tiles import TileShape
from mrv2_kernels.attention.decode import decode_num_splits, paged_attention_decode
from mrv2_kernels.attention.fused_decode import fused_decode_attention, fused_decode_attention_torch
from mrv2_kernels.attention.kv_write import write_kv
from mrv2_kernels.attention.paged import paged_attention, paged_attention_torch
from mrv2_kernels.attention.plan import DecodePlan
from mrv2_kernels.gemm.pdl import has_pdl
from mrv2_kernels.layers import qk_norm_rope, rotary_embedding

BLOCK_SIZE = 16
_EPS = 1e-6
# of bf16 results against float64, relative to 1 + |value|; outputs are averages of normal values
_TOLERANCE = 2e-2


@dataclass(frozen=True)
class HeadShape:
    """The heads of a model's attention."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_norm: bool

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * 2 * self.num_kv_heads * self.head_dim


QWEN3 = HeadShape("qwen3-0.6b", 16, 8, 128, has_norm=True)
SMOLLM2 = HeadShape("smollm2-135m", 9, 3, 64, has_norm=False)


class Pool:
    """Random keys and values of bf16 or 8-bit floats, and the order in which its blocks are handed out."""

    def __init__(
        self, shape: HeadShape, num_blocks: int, device: torch.device, kept: torch.dtype = torch.bfloat16
    ) -> None:
        self.shape, self.device = shape, device
        self.generator = torch.Generator(device).manual_seed(0)
        size = (num_blocks, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
        # [NB, BS, Hkv, D]
        caches = (torch.empty(size, dtype=torch.bfloat16, device=device) for _ in range(2))
        self.k_cache, self.v_cache = (cache.normal_(generator=self.generator).to(kept) for cache in caches)
        # [NB]
        self.order = torch.randperm(num_blocks, generator=self.generator, device=device).int()

    def normal(self, *size: int) -> torch.Tensor:
        """Return normal bf16 values."""
        return torch.randn(size, generator=self.generator, device=self.device).bfloat16()


class DecodeProblem:
    """One decode step over the blocks of a pool from `first_block` on."""

    def __init__(self, pool: Pool, contexts: Sequence[int], first_block: int = 0, padding: int = 0) -> None:
        shape, device = pool.shape, pool.device
        batch = len(contexts) + padding
        self.shape, self.pool = shape, pool
        # a multiple of 16, as engines have it, so that every problem takes the same compiled kernel
        width = -(-max(contexts) // (BLOCK_SIZE * 16)) * 16
        # [B, MB]
        self.block_tables = torch.zeros((batch, width), dtype=torch.int32, device=device)
        for request, context in enumerate(contexts):
            num_blocks = -(-context // BLOCK_SIZE)
            taken = torch.arange(first_block, first_block + num_blocks, device=device) % len(pool.order)
            self.block_tables[request, :num_blocks] = pool.order[taken]
            first_block += num_blocks
        # the block after the last one taken
        self.next_block = first_block
        # [B]
        self.seq_lens = torch.tensor([*contexts, *[0] * padding], dtype=torch.int32, device=device)
        self.positions = (self.seq_lens - 1).clamp_min(0)
        last = self.block_tables.gather(1, (self.positions // BLOCK_SIZE)[:, None].long()).squeeze(1)
        slots = last * BLOCK_SIZE + self.positions % BLOCK_SIZE
        self.slot_mapping = torch.where(self.seq_lens > 0, slots, -1).int()
        # [B, Hq + 2 Hkv, D]
        self.qkv = pool.normal(batch, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        self.out = torch.empty((batch, shape.num_heads, shape.head_dim), dtype=torch.bfloat16, device=device)
        weights = (1 + 0.1 * pool.normal(shape.head_dim), 1 + 0.1 * pool.normal(shape.head_dim))
        self.weights = weights if shape.has_norm else None
        angles = torch.rand((max(contexts), shape.head_dim // 2), generator=pool.generator, device=device)
        # [L, D]
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
        self.scale = shape.head_dim**-0.5

    def heads(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the views q, k and v of the fused projection."""
        kv_heads = self.shape.num_kv_heads
        q, k, v = self.qkv.split((self.shape.num_heads, kv_heads, kv_heads), dim=1)
        return q, k, v

    def fused(self, plan: DecodePlan, *, pdl: bool = False) -> None:
        """Launch the fused kernel."""
        pool = self.pool
        fused_decode_attention(
            *self.heads(),
            self.weights,
            _EPS,
            self.cos_sin,
            self.positions,
            pool.k_cache,
            pool.v_cache,
            self.block_tables,
            self.seq_lens,
            self.slot_mapping,
            self.out,
            scale=self.scale,
            plan=plan,
            pdl=pdl,
        )

    def chain(self) -> None:
        """Launch the three kernels that the fused one replaces; rotates q and k in place, again at each call."""
        q, k, v = self.heads()
        if self.weights is None:
            rotary_embedding(q, k, self.cos_sin, self.positions)
        else:
            qk_norm_rope(q, k, *self.weights, _EPS, self.cos_sin, self.positions)
        write_kv(k, v, self.pool.k_cache, self.pool.v_cache, self.slot_mapping)
        self.attention()

    def attention(self) -> None:
        """Launch the last of the three alone."""
        q, pool = self.heads()[0], self.pool
        splits = decode_num_splits(len(self.seq_lens), self.shape.num_kv_heads)
        paged_attention_decode(
            q,
            pool.k_cache,
            pool.v_cache,
            self.block_tables,
            self.seq_lens,
            self.out,
            scale=self.scale,
            num_splits=splits,
        )

    def error(self, plan: DecodePlan, *, pdl: bool) -> float:
        """Return the largest difference of the fused kernel from its reference, in attention and caches.

        That is computed in float64; with a cache of 8-bit floats in bf16, so that both round to it from the same
        values.  A key may then be rounded to the number beside: a step of one part in eight is not counted.
        """
        pool = self.pool
        eight_bits = pool.k_cache.dtype.itemsize == 1
        dtype = torch.bfloat16 if eight_bits else torch.float64
        k_cache, v_cache = (cache.clone() if eight_bits else cache.double() for cache in (pool.k_cache, pool.v_cache))
        expected = torch.empty(self.out.shape, dtype=dtype, device=self.out.device)
        weights = self.weights and (self.weights[0].to(dtype), self.weights[1].to(dtype))
        q, k, v = self.heads()
        fused_decode_attention_torch(
            q.to(dtype),
            k.to(dtype),
            v.to(dtype),
            weights,
            _EPS,
            self.cos_sin if eight_bits else self.cos_sin.double(),
            self.positions,
            k_cache,
            v_cache,
            self.block_tables,
            self.seq_lens,
            self.slot_mapping,
            expected,
            scale=self.scale,
            plan=plan,
        )
        self.out.fill_(torch.nan)
        # twice: a launch must leave its counters as it found them
        for _ in range(2):
            self.fused(plan, pdl=pdl)
        pairs = ((self.out, expected), (pool.k_cache, k_cache), (pool.v_cache, v_cache))
        attention, keys, values = (_difference(actual, wanted) for actual, wanted in pairs)
        return max(attention, 0.0 if eight_bits and keys <= 0.125 else keys, values)


class PrefillProblem:
    """Prompts whose last `query_len` tokens attend to a cached context, or to themselves alone."""

    def __init__(self, pool: Pool, num_requests: int, query_len: int, context: int) -> None:
        shape, device = pool.shape, pool.device
        self.shape, self.pool, self.query_len, self.context = shape, pool, query_len, context
        num_blocks = -(-context // BLOCK_SIZE)
        # [B, MB]
        self.block_tables = pool.order[: num_requests * num_blocks].view(num_requests, num_blocks)
        self.query_start_loc = torch.arange(num_requests + 1, dtype=torch.int32, device=device) * query_len
        self.seq_lens = torch.full((num_requests,), context, dtype=torch.int32, device=device)
        # [T, Hq, D]
        self.q = pool.normal(num_requests * query_len, shape.num_heads, shape.head_dim)
        self.out = torch.empty_like(self.q)

    @property
    def flops(self) -> int:
        """FLOPs of the products whose result is not masked."""
        skipped = self.context - self.query_len
        pairs = self.query_len * skipped + self.query_len * (self.query_len + 1) // 2
        return 4 * self.shape.head_dim * self.shape.num_heads * pairs * len(self.seq_lens)

    def paged(self, shape: TileShape | None) -> None:
        """Launch the kernel; None = the shape that the engine takes."""
        self._run(self.q, self.pool.k_cache, self.pool.v_cache, self.out, shape)

    def torch_attention(self) -> None:
        """Run torch's own attention on contiguous keys and values; only for prompts without a cached context."""
        heads = (self.seq_lens.shape[0], self.query_len, -1, self.shape.head_dim)
        flat = self.pool.k_cache.view(-1, *self.pool.k_cache.shape[2:])[: len(self.q)]
        q, kv = self.q.view(heads).transpose(1, 2), flat.view(heads).transpose(1, 2)
        F.scaled_dot_product_attention(q, kv, kv, is_causal=True, enable_gqa=True)

    def error(self, shape: TileShape) -> float:
        """Return the largest difference of the kernel from float64."""
        pool = self.pool
        expected = torch.empty(self.q.shape, dtype=torch.float64, device=self.q.device)
        arguments = (self.q.double(), pool.k_cache.double(), pool.v_cache.double(), self.block_tables)
        paged_attention_torch(
            *arguments, self.query_start_loc, self.seq_lens, expected, scale=self.scale, max_query_len=self.query_len
        )
        self.out.fill_(torch.nan)
        self.paged(shape)
        return _difference(self.out, expected)

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return self.shape.head_dim**-0.5

    def _run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, shape: TileShape | None
    ) -> None:
        paged_attention(
            q,
            k,
            v,
            self.block_tables,
            self.query_start_loc,
            self.seq_lens,
            out,
            scale=self.scale,
            max_query_len=self.query_len,
            shape=shape,
            pdl=has_pdl(q),
        )


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference relative to 1 + |expected|; NaN counts as infinite."""
    expected = expected.double()
    relative = (actual.double() - expected).abs() / (1 + expected.abs())
    return float(relative.max().nan_to_num(torch.inf))


def check_decode(
    shape: HeadShape, plan: DecodePlan, pdl: bool, device: torch.device, kept: torch.dtype = torch.bfloat16
) -> None:
    """Compile and compare `plan`, unsplit and split; raise `ArithmeticError` where it is wrong."""
    pool = Pool(shape, 1024, device, kept)
    contexts = (1, 2, 17, plan.block_n, plan.block_n + 1, plan.block_n + 2, 640, 3000, 4100)
    problem = DecodeProblem(pool, contexts, padding=3)
    for splits in (1, plan.num_splits):
        split = replace(plan, num_splits=splits)
        error = problem.error(split, pdl=pdl)
        if error > _TOLERANCE:
            raise ArithmeticError(f"{split}: off by {error:.3g} from float64")


def check_prefill(shape: HeadShape, tile: TileShape, device: torch.device) -> None:
    """Compile and compare `tile` with and without a cached context; raise `ArithmeticError` where it is wrong."""
    pool = Pool(shape, 512, device)
    for query_len, context in ((250, 250), (70, 500)):
        error = PrefillProblem(pool, 3, query_len, context).error(tile)
        if error > _TOLERANCE:
            raise ArithmeticError(f"{tile}: off by {error:.3g} from float64")
