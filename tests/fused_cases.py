"""Random decode steps for the fused kernel, each with the cache and the attention that float64 gives."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mrv2_kernels.attention.fused_decode import fused_decode_attention
from mrv2_kernels.attention.plan import DecodePlan
from paged_cases import NO_BLOCK, UNTOUCHED, dense_attention

EPS = 1e-6


@dataclass(frozen=True)
class FusedCase:
    """Inputs of `fused_decode_attention`; what no program may read is NaN, unused table entries are absurd."""

    # [B_pad, (Hq + 2 Hkv), D]
    qkv: torch.Tensor
    num_heads: int
    # [D] each, or None
    norm_weights: tuple[torch.Tensor, torch.Tensor] | None
    # [L, D] float32
    cos_sin: torch.Tensor
    # [B_pad] int32
    positions: torch.Tensor
    # [NB, BS, Hkv, D]
    k_cache: torch.Tensor
    # [NB, BS, Hkv, D]
    v_cache: torch.Tensor
    # [B_pad, MB] int32
    block_tables: torch.Tensor
    # [B_pad] int32
    seq_lens: torch.Tensor
    # [B_pad] int32
    slot_mapping: torch.Tensor
    # [B_pad, Hq, D] float64, zeros for padding
    expected: torch.Tensor
    # the caches after the step, float64
    expected_k_cache: torch.Tensor
    expected_v_cache: torch.Tensor

    def run(
        self,
        twin: str,
        plan: DecodePlan,
        *,
        # [B_pad] int32
        order: torch.Tensor | None = None,
        pdl: bool = False,
    ) -> torch.Tensor:
        """Run one twin on the case's own caches and return the attention."""
        kv_heads, dim = self.k_cache.shape[2:]
        q, k, v = self.qkv.split((self.num_heads, kv_heads, kv_heads), dim=1)
        out = torch.full(q.shape, UNTOUCHED, dtype=q.dtype, device=q.device)
        getattr(fused_decode_attention, twin)(
            q,
            k,
            v,
            self.norm_weights,
            EPS,
            self.cos_sin,
            self.positions,
            self.k_cache,
            self.v_cache,
            self.block_tables,
            self.seq_lens,
            self.slot_mapping,
            out,
            scale=dim**-0.5,
            plan=plan,
            order=order,
            pdl=pdl,
        )
        return out

    def check(self, out: torch.Tensor, tolerance: float) -> None:
        """Compare the attention and both caches; slots that the step does not write must stay as they were."""
        close = torch.testing.assert_close
        close(out.double(), self.expected, rtol=tolerance, atol=tolerance)
        close(self.k_cache.double(), self.expected_k_cache, rtol=tolerance, atol=tolerance, equal_nan=True)
        close(self.v_cache.double(), self.expected_v_cache, rtol=0, atol=0, equal_nan=True)


def rotated(
    # [H, D]
    heads: torch.Tensor,
    # [D] or None
    weight: torch.Tensor | None,
    # [D]
    cos_sin: torch.Tensor,
) -> torch.Tensor:
    """Return heads [H, D] normed and rotated, in float64."""
    heads = heads.double()
    if weight is not None:
        heads = heads / (heads.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight.double()
    low, high = heads.chunk(2, dim=-1)
    cos, sin = cos_sin.double().chunk(2)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def fused_case(
    seq_lens: list[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    has_norm: bool = True,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    exact: bool = False,
    device: str = "cpu",
    padding: int = 0,
    seed: int = 0,
) -> FusedCase:
    """Return a step of one new token for contexts of `seq_lens` tokens (the new one included).

    The caches are of `cache_dtype`, None = of `dtype`; an 8-bit one rounds what it takes, unless the case is `exact`:
    not rotated, of numbers that the caches hold.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    batch = len(seq_lens) + padding
    num_blocks = [-(-n // block_size) for n in seq_lens]
    free = (torch.randperm(sum(num_blocks), generator=generator, device=device) + 1).int()
    pool_shape = (len(free) + 1, block_size, num_kv_heads, head_dim)
    kept = cache_dtype or dtype
    k_cache = torch.full(pool_shape, torch.nan, dtype=torch.float64, device=device)
    v_cache = torch.full(pool_shape, torch.nan, dtype=torch.float64, device=device)
    width = max(num_blocks) + 1
    tables = torch.full((batch, width), NO_BLOCK, dtype=torch.int32, device=device)
    slots = torch.full((batch,), -1, dtype=torch.int32, device=device)
    positions = torch.zeros(batch, dtype=torch.int32, device=device)
    angles = torch.randn(max(seq_lens), head_dim // 2, generator=generator, device=device) * (not exact)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    weights = (1 + 0.1 * normal(head_dim), 1 + 0.1 * normal(head_dim)) if has_norm else None
    q_weight, k_weight = weights or (None, None)
    qkv = normal(batch, num_heads + 2 * num_kv_heads, head_dim)
    if exact:
        qkv = qkv.to(kept).to(dtype)
    expected = torch.zeros((batch, num_heads, head_dim), dtype=torch.float64, device=device)
    new_k, new_v = {}, {}
    for request, seq_len in enumerate(seq_lens):
        blocks, free = free[: num_blocks[request]], free[num_blocks[request] :]
        tables[request, : len(blocks)] = blocks
        q, k, v = qkv[request].split((num_heads, num_kv_heads, num_kv_heads))
        past = torch.arange(seq_len - 1, device=device)
        where = (blocks.long()[past // block_size], past % block_size)
        past_k, past_v = (normal(seq_len - 1, num_kv_heads, head_dim).to(kept).double() for _ in range(2))
        k_cache[where], v_cache[where] = past_k, past_v
        q, k = rotated(q, q_weight, cos_sin[seq_len - 1]), rotated(k, k_weight, cos_sin[seq_len - 1])
        if cache_dtype is not None:
            k, v = k.to(dtype).to(kept), v.to(kept)
        k, v = k.double(), v.double()
        all_k, all_v = torch.cat((past_k, k[None])), torch.cat((past_v, v[None]))
        expected[request] = dense_attention(q[None], all_k, all_v, head_dim**-0.5)[0]
        positions[request] = seq_len - 1
        slot = int(blocks[(seq_len - 1) // block_size]) * block_size + (seq_len - 1) % block_size
        slots[request] = slot
        new_k[slot], new_v[slot] = k, v
    expected_caches = []
    for cache, new in ((k_cache, new_k), (v_cache, new_v)):
        expected_cache = cache.clone()
        for slot, row in new.items():
            expected_cache[slot // block_size, slot % block_size] = row
        expected_caches.append(expected_cache)
    return FusedCase(
        qkv=qkv,
        num_heads=num_heads,
        norm_weights=weights,
        cos_sin=cos_sin,
        positions=positions,
        k_cache=k_cache.to(kept),
        v_cache=v_cache.to(kept),
        block_tables=tables,
        seq_lens=torch.tensor([*seq_lens, *[0] * padding], dtype=torch.int32, device=device),
        slot_mapping=slots,
        expected=expected,
        expected_k_cache=expected_caches[0],
        expected_v_cache=expected_caches[1],
    )
