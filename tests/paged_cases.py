"""Random attention problems over a poisoned paged cache, each with its float64 answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

NO_BLOCK = 1 << 30
UNTOUCHED = 7.0


@dataclass(frozen=True)
class PagedCase:
    """Inputs of `paged_attention`; every value that no query may see is NaN, unused table entries are absurd."""

    # [T_pad, Hq, D], a strided view of a fused qkv tensor
    q: torch.Tensor
    # [NB, BS, Hkv, D]
    k_cache: torch.Tensor
    # [NB, BS, Hkv, D]
    v_cache: torch.Tensor
    # [B_pad, MB] int32
    block_tables: torch.Tensor
    # [B_pad + 1] int32
    query_start_loc: torch.Tensor
    # [B_pad] int32
    seq_lens: torch.Tensor
    scale: float
    max_query_len: int
    # [T, Hq, D] float64
    expected: torch.Tensor

    def empty_out(self) -> torch.Tensor:
        """Return an output tensor whose every value betrays whether it was written."""
        return torch.full(self.q.shape, UNTOUCHED, dtype=self.q.dtype, device=self.q.device)

    def attend(
        self, op: Callable[..., None], *, max_query_len: int | None = None, num_splits: int | None = None
    ) -> torch.Tensor:
        """Return what `paged_attention`, or one of its twins, makes of the case."""
        out = self.empty_out()
        op(
            self.q,
            self.k_cache,
            self.v_cache,
            self.block_tables,
            self.query_start_loc,
            self.seq_lens,
            out,
            scale=self.scale,
            max_query_len=max_query_len or self.max_query_len,
            num_splits=num_splits,
        )
        return out


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the causal attention of the last n positions: q [n, Hq, D], k and v [S, Hkv, D], all float64."""
    num_queries, num_keys = q.shape[0], k.shape[0]
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,shd->hns", q, k) * scale
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril(num_keys - num_queries)
    scores = scores.masked_fill(~visible, -torch.inf)
    return torch.einsum("hns,shd->nhd", scores.softmax(dim=-1), v)


def paged_case(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    device: str = "cpu",
    padding: int = 0,
    seed: int = 0,
) -> PagedCase:
    """Return a case of the given lengths; `padding` adds that many inert requests and three times as many tokens.

    Keys and values are numbers of `cache_dtype`, None = of `dtype`.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    num_blocks = [-(-n // block_size) for n in seq_lens]
    batch, width = len(seq_lens) + padding, max([*num_blocks, 1]) + 1
    # block 0 is the null block: it belongs to nobody and is as poisoned as the rest
    free = (torch.randperm(sum(num_blocks), generator=generator, device=device) + 1).int()
    pool_shape = (len(free) + 1, block_size, num_kv_heads, head_dim)
    kept = cache_dtype or dtype
    k_cache = torch.full(pool_shape, torch.nan, dtype=torch.float64, device=device)
    v_cache = torch.full(pool_shape, torch.nan, dtype=torch.float64, device=device)
    block_tables = torch.full((batch, width), NO_BLOCK, dtype=torch.int32, device=device)
    starts = torch.tensor([0, *query_lens, *[0] * padding]).cumsum(0)
    num_tokens = sum(query_lens)
    qkv = normal(num_tokens + 3 * padding, (num_heads + 2 * num_kv_heads) * head_dim)
    q = qkv[:, : num_heads * head_dim].view(-1, num_heads, head_dim)
    scale = head_dim**-0.5
    expected = torch.empty((num_tokens, num_heads, head_dim), dtype=torch.float64, device=device)
    for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        blocks, free = free[: num_blocks[request]], free[num_blocks[request] :]
        block_tables[request, : len(blocks)] = blocks
        k, v = (normal(seq_len, num_kv_heads, head_dim).to(kept).double() for _ in range(2))
        positions = torch.arange(seq_len, device=device)
        where = (blocks.long()[positions // block_size], positions % block_size)
        k_cache[where], v_cache[where] = k, v
        rows = slice(int(starts[request]), int(starts[request]) + query_len)
        expected[rows] = dense_attention(q[rows].double(), k, v, scale)
    return PagedCase(
        q=q,
        k_cache=k_cache.to(kept),
        v_cache=v_cache.to(kept),
        block_tables=block_tables,
        query_start_loc=starts.to(device, torch.int32),
        seq_lens=torch.tensor([*seq_lens, *[0] * padding], dtype=torch.int32, device=device),
        scale=scale,
        max_query_len=max([*query_lens, 1]),
        expected=expected,
    )
