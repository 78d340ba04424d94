"""KV-cache writes: exactly the slots named are written, in both caches."""

from __future__ import annotations

import pytest
import torch

from mrv2_kernels._numerics import FP8, as_kept
from mrv2_kernels.attention.kv_write import write_kv


@pytest.mark.parametrize("twin", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("kv_heads, dim, block_size", [(3, 64, 16), (1, 128, 32), (8, 128, 16)])
def test_named_slots_and_no_others(twin: str, dtype: torch.dtype, kv_heads: int, dim: int, block_size: int) -> None:
    torch.manual_seed(0)
    slots = torch.tensor([3 * block_size + 1, -1, block_size - 1, 0, -1], dtype=torch.int32)
    fused = torch.randn(5, 2 * kv_heads * dim).to(dtype)
    fused[slots < 0] = torch.nan
    k, v = (half.view(5, kv_heads, dim) for half in fused.chunk(2, dim=1))
    k_cache, v_cache = torch.zeros(2, 4, block_size, kv_heads, dim, dtype=dtype)
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected_k[slot // block_size, slot % block_size] = k[token]
            expected_v[slot // block_size, slot % block_size] = v[token]
    getattr(write_kv, twin)(k, v, k_cache, v_cache, slots)
    assert torch.equal(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)


@pytest.mark.parametrize("twin", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_eight_bit_floats_round_to_the_nearest_and_saturate(twin: str, dtype: torch.dtype) -> None:
    """Triton's interpreter does not carry when it rounds: it gets numbers of the format, and ones beyond it."""
    torch.manual_seed(0)
    sizes = torch.logspace(-3, 4, 6)[:, None, None]
    k, v = (torch.randn(6, 2, 64) * sizes).to(dtype), (-torch.randn(6, 2, 64) * sizes).to(dtype)
    if twin == "triton":
        k, v = (torch.where(x.abs() < 448, as_kept(x, FP8).to(dtype), x) for x in (k, v))
    slots = torch.tensor([17, 0, 40, -1, 33, 5], dtype=torch.int32)
    caches = [torch.zeros(3, 16, 2, 64, dtype=FP8) for _ in range(2)]
    getattr(write_kv, twin)(k, v, *caches, slots)
    for rows, cache in zip((k, v), caches, strict=True):
        by_slot = cache.float().view(48, 2, 64)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                kept, exact = by_slot[slot], rows[token].float().clamp(-448, 448)
                # three bits of mantissa; below 2 ** -6 steps of 2 ** -9
                assert ((kept - exact).abs() <= (exact.abs() * 2**-4).clamp(min=2.0**-10)).all()
        untouched = [slot for slot in range(48) if slot not in slots.tolist()]
        assert not by_slot[untouched].any()
