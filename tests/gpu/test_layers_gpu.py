"""Layer kernels, compiled, against their torch references in float64."""

from __future__ import annotations

import pytest
import torch

from mrv2_kernels.attention.kv_write import write_kv
from mrv2_kernels.layers import qk_norm_rope, rms_norm, rotary_embedding, silu_and_mul

pytestmark = pytest.mark.gpu

# one rounding of the result: half a unit in the last place, and a little for the sums
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}
EPS = 1e-6


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


def _close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rows, hidden", [(1, 576), (33, 1024), (512, 4096)])
def test_rms_norm(rows: int, hidden: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual, weight = (_random(*s, dtype=dtype) for s in ((rows, hidden), (rows, hidden), (hidden,)))
    _close(rms_norm(x, weight, EPS), rms_norm.torch(x.double(), weight, EPS))
    out, summed = rms_norm(x, weight, EPS, residual)
    assert torch.equal(summed, x + residual)
    _close(out, rms_norm.torch(summed.double(), weight, EPS))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("tokens, heads, kv_heads, dim", [(1, 16, 8, 128), (65, 9, 3, 64), (1000, 32, 8, 128)])
def test_rotary(tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, normed: bool) -> None:
    torch.manual_seed(0)
    qkv = _random(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    q = qkv[:, : heads * dim].view(tokens, heads, dim)
    k = qkv[:, heads * dim : (heads + kv_heads) * dim].view(tokens, kv_heads, dim)
    v = qkv[:, (heads + kv_heads) * dim :].clone()
    angles = torch.rand(4096, dim // 2, device="cuda") * 6.3
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.randint(4096, (tokens,), device="cuda", dtype=torch.int32)
    weights = _random(2, dim, dtype=dtype)
    expected_q, expected_k = q.double(), k.double()
    if normed:
        qk_norm_rope.torch(expected_q, expected_k, *weights, EPS, cos_sin, positions)
        qk_norm_rope(q, k, *weights, EPS, cos_sin, positions)
    else:
        rotary_embedding.torch(expected_q, expected_k, cos_sin, positions)
        rotary_embedding(q, k, cos_sin, positions)
    _close(q, expected_q)
    _close(k, expected_k)
    assert torch.equal(qkv[:, (heads + kv_heads) * dim :], v)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rows, width", [(1, 1536), (77, 3072), (512, 14336)])
def test_silu_and_mul(rows: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = _random(rows, 2 * width, dtype=dtype)
    _close(silu_and_mul(x), silu_and_mul.torch(x.double()))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_write_kv(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tokens, kv_heads, dim, block_size = 300, 8, 128, 16
    k, v = _random(tokens, 2 * kv_heads * dim, dtype=dtype).view(tokens, 2, kv_heads, dim).unbind(1)
    slots = torch.randperm(64 * block_size, device="cuda", dtype=torch.int32)[:tokens]
    slots[::7] = -1
    caches = torch.zeros(2, 64, block_size, kv_heads, dim, device="cuda", dtype=dtype)
    expected = caches.clone()
    write_kv.torch(k, v, *expected, slots)
    write_kv(k, v, *caches, slots)
    assert torch.equal(caches, expected)
