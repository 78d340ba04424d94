"""Torch attention over a paged cache, shared by the mixed and the decode reference.

Requests of one query length and of a similar context length are gathered through their block
tables and computed as one batched matmul; padding inside such a group stays below a factor of two.

Legend: B = requests, b = requests of a group, n = their query length, S = their longest context,
G = Hq / Hkv.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from mrv2_kernels._numerics import accumulator_dtype, bytes_of

# scores held at once; bounds the memory of a long prefill (2^23 fp32 values are 32 MiB)
MAX_SCORES = 1 << 23


def attend_paged(
    # [T, Hq, D]
    q: torch.Tensor,
    # [NB, BS, Hkv, D]
    k_cache: torch.Tensor,
    # [NB, BS, Hkv, D]
    v_cache: torch.Tensor,
    # [B, MB] int32
    block_tables: torch.Tensor,
    # [B]: first row of each request in q
    query_starts: list[int],
    # [B]
    query_lens: list[int],
    # [B]
    seq_lens: list[int],
    # [T, Hq, D]
    out: torch.Tensor,
    scale: float,
) -> None:
    """Write the causal attention of every request with a query; rows of empty contexts become zeros."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if query_len > 0:
            groups[query_len, seq_len.bit_length()].append(request)
    for (query_len, _), requests in groups.items():
        device = q.device
        starts = torch.tensor([query_starts[r] for r in requests], device=device)
        rows = (starts[:, None] + torch.arange(query_len, device=device)).flatten()
        lengths = torch.tensor([seq_lens[r] for r in requests], device=device)
        longest = max(seq_lens[r] for r in requests)
        if longest == 0:
            out[rows] = 0.0
            continue
        tables = block_tables[torch.tensor(requests, device=device)]
        k = _gather(k_cache, tables, lengths, longest)
        v = _gather(v_cache, tables, lengths, longest)
        # what lies beyond a context may be NaN, and 0 * NaN is NaN
        shortest = min(seq_lens[r] for r in requests)
        beyond = torch.arange(shortest, longest, device=device) >= lengths[:, None]
        v[:, :, shortest:].masked_fill_(beyond[:, None, :, None], 0.0)
        queries = q[rows].to(k.dtype).view(len(requests), query_len, *q.shape[1:])
        out[rows] = _attend_chunked(queries, k, v, lengths, scale).flatten(0, 1).to(out.dtype)


def _gather(
    # [NB, BS, Hkv, D]
    cache: torch.Tensor,
    # [b, MB]
    tables: torch.Tensor,
    # [b]
    lengths: torch.Tensor,
    longest: int,
) -> torch.Tensor:
    """Return each request's context, [b, Hkv, S, D], in the accumulator dtype."""
    block_size = cache.shape[1]
    num_blocks = -(-longest // block_size)
    used = torch.arange(num_blocks, device=tables.device) * block_size < lengths[:, None]
    # table entries past a request's last block hold anything
    blocks = torch.where(used, tables[:, :num_blocks], 0).flatten()
    gathered = (
        bytes_of(cache)
        .index_select(0, blocks)
        .view(cache.dtype)
        .view(len(tables), num_blocks * block_size, *cache.shape[2:])
    )
    return (
        gathered[:, :longest].transpose(1, 2).to(accumulator_dtype(cache.dtype), memory_format=torch.contiguous_format)
    )


def _attend_chunked(
    # [b, n, Hq, D]
    q: torch.Tensor,
    # [b, Hkv, S, D]
    k: torch.Tensor,
    # [b, Hkv, S, D]
    v: torch.Tensor,
    # [b]
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Return [b, n, Hq, D], a chunk of queries at a time; keys that no query of a chunk sees are left out."""
    num_requests, query_len, num_heads, _ = q.shape
    longest = k.shape[2]
    chunk = max(16, MAX_SCORES // (num_requests * num_heads * longest))
    if chunk >= query_len:
        return _attend(q, k, v, lengths - query_len, scale)
    out = torch.empty_like(q)
    for start in range(0, query_len, chunk):
        stop = min(start + chunk, query_len)
        seen = longest - query_len + stop
        first = lengths - query_len + start
        out[:, start:stop] = _attend(q[:, start:stop], k[:, :, :seen], v[:, :, :seen], first, scale)
    return out


def _attend(
    # [b, n, Hq, D]
    q: torch.Tensor,
    # [b, Hkv, S, D]
    k: torch.Tensor,
    # [b, Hkv, S, D]
    v: torch.Tensor,
    # [b]: position of the first query
    first: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    num_requests, query_len, num_heads, head_dim = q.shape
    num_kv_heads, num_keys = k.shape[1:3]
    group = num_heads // num_kv_heads
    positions = first[:, None] + torch.arange(query_len, device=q.device)
    hidden = torch.arange(num_keys, device=q.device) > positions[:, :, None]
    # the heads that share a KV head become rows of one product: [b, Hkv, n * G, D]
    packed = q.view(num_requests, query_len, num_kv_heads, group, head_dim).transpose(1, 2)
    packed = packed.reshape(num_requests, num_kv_heads, query_len * group, head_dim)
    scores = (packed @ k.transpose(2, 3)).mul_(scale)
    by_query = scores.view(num_requests, num_kv_heads, query_len, group, num_keys)
    by_query.masked_fill_(hidden[:, None, :, None, :], -torch.inf)
    out = torch.softmax(scores, dim=-1) @ v
    return out.view(num_requests, num_kv_heads, query_len, group, head_dim).transpose(1, 2).flatten(2, 3)
