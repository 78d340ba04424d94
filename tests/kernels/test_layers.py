"""Norms, rotary embedding and activation: both twins against the formula in float64."""

from __future__ import annotations

import pytest
import torch

from mrv2_kernels.layers import embed_norm, qk_norm_rope, rms_norm, rotary_embedding, silu_and_mul

TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 4e-3}
TWINS = ("torch", "triton")
DTYPES = tuple(TOLERANCE)
EPS = 1e-6

pytestmark = pytest.mark.parametrize("twin", TWINS)


def _close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def _rotated(x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    cos, sin = cos_sin.double()[positions.long()][:, None].chunk(2, dim=-1)
    pairs = torch.complex(x.double()[..., :half], x.double()[..., half:]) * torch.complex(cos, sin)
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def _qkv(tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return q, k and v as views of one fused tensor, and that tensor."""
    fused = torch.randn(tokens, (heads + 2 * kv_heads) * dim, dtype=torch.float64).to(dtype)
    q, k, v = fused.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    return q.view(tokens, heads, dim), k.view(tokens, kv_heads, dim), v, fused


def _cos_sin(positions: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    angles = torch.outer(torch.arange(positions), 1e4 ** -(torch.arange(0, dim, 2) / dim)).double()
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(
        torch.float64 if dtype == torch.float64 else torch.float32
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (5, 576), (3, 1000)])
def test_rms_norm(twin: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape[0], 2 * shape[1], dtype=torch.float64).to(dtype)[:, : shape[1]]
    weight = torch.randn(shape[1], dtype=torch.float64).to(dtype)
    _close(getattr(rms_norm, twin)(x, weight, EPS), _normed(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, hidden", [(1, 64), (5, 576), (0, 64)])
def test_a_lookup_is_rows_of_the_table_and_their_norm(twin: str, tokens: int, hidden: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    table, weight = (torch.randn(*shape, dtype=torch.float64).to(dtype) for shape in ((9, hidden), (hidden,)))
    ids = torch.tensor([8, 0, 3, 3, 7], dtype=torch.int32)[:tokens]
    x, normed = getattr(embed_norm, twin)(ids, table, weight, EPS)
    assert torch.equal(x, table[ids])
    _close(normed, _normed(x, weight))
    if twin == "triton":
        assert torch.equal(normed, rms_norm.triton(x, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_with_residual_also_returns_the_rounded_sum(twin: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, 4, 96, dtype=torch.float64).to(dtype)
    weight = torch.randn(96, dtype=torch.float64).to(dtype)
    before = residual.clone()
    out, summed = getattr(rms_norm, twin)(x, weight, EPS, residual)
    assert torch.equal(summed, x + residual)
    assert torch.equal(residual, before), "the residual that was handed in must stay as it was"
    _close(out, _normed(summed, weight))


# sums over S splits [S, T, H] float32 of what a product of the given dtype would return
def _partials(splits: int, hidden: int) -> torch.Tensor:
    """Made so that the order of additions shows, and whether the total is rounded before the residual is added."""
    torch.manual_seed(splits)
    return torch.randn(splits, 4, hidden) * torch.logspace(2, -2, splits)[:, None, None]


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("splits, hidden", [(2, 96), (5, 64), (16, 100)])
def test_rms_norm_adds_partial_sums(
    twin: str, splits: int, hidden: int, dtype: torch.dtype, with_residual: bool
) -> None:
    partials, weight = _partials(splits, hidden), torch.randn(hidden).to(dtype)
    before = partials.clone()
    residual = torch.randn(4, hidden).to(dtype) if with_residual else None
    # in their order, in float32; rounded once, as the product by itself would be
    total = partials[0]
    for part in partials[1:]:
        total = total + part
    x = total.to(dtype)
    assert (x.double() - partials.double().sum(0)).abs().max() <= 2e-3 * partials.abs().max()
    found = getattr(rms_norm, twin)(partials, weight, EPS, residual)
    assert torch.equal(partials, before)
    if residual is None:
        out = found
        _close(out, _normed(x, weight))
    else:
        out, summed = found
        assert torch.equal(summed, x + residual), "the bits of the product alone and an addition behind it"
        _close(out, _normed(summed, weight))
    assert out.dtype == dtype and out.shape == (4, hidden)
    # the same bits as the norm of that product
    alone = getattr(rms_norm, twin)(x, weight, EPS, residual)
    assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_partial_sums_are_rounded_before_the_residual_is_added(twin: str, dtype: torch.dtype) -> None:
    """1 + 3 / 4 eps rounds up to 1 + eps; behind the residual -1 a sum that was not rounded leaves 3 / 4 of it."""
    step = torch.finfo(torch.float16).eps if dtype == torch.float16 else 2.0**-23
    partials = torch.stack([torch.full((2, 64), 1.0), torch.full((2, 64), 0.75 * step)])
    _, summed = getattr(rms_norm, twin)(partials, torch.ones(64, dtype=dtype), EPS, -torch.ones(2, 64, dtype=dtype))
    assert torch.equal(summed, torch.full((2, 64), step, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, kv_heads, dim", [(9, 3, 64), (4, 2, 128), (3, 1, 96)])
def test_rotary_embedding_in_place_on_views_of_qkv(
    twin: str, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    positions = torch.tensor([3, 0, 11, 11], dtype=torch.int32)
    cos_sin = _cos_sin(12, dim, dtype)
    q, k, v, _ = _qkv(4, heads, kv_heads, dim, dtype)
    expected_q, expected_k, v_before = _rotated(q, cos_sin, positions), _rotated(k, cos_sin, positions), v.clone()
    getattr(rotary_embedding, twin)(q, k, cos_sin, positions)
    _close(q, expected_q)
    _close(k, expected_k)
    assert torch.equal(v, v_before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, kv_heads, dim", [(16, 8, 128), (9, 3, 64)])
def test_qk_norm_rope_is_a_norm_of_each_head_then_a_rotation(
    twin: str, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    positions = torch.tensor([5, 0, 2], dtype=torch.int32)
    cos_sin = _cos_sin(6, dim, dtype)
    q, k, v, _ = _qkv(3, heads, kv_heads, dim, dtype)
    q_weight, k_weight = torch.randn(2, dim, dtype=torch.float64).to(dtype)
    expected_q = _rotated(_normed(q, q_weight), cos_sin, positions)
    expected_k = _rotated(_normed(k, k_weight), cos_sin, positions)
    v_before = v.clone()
    getattr(qk_norm_rope, twin)(q, k, q_weight, k_weight, EPS, cos_sin, positions)
    _close(q, expected_q)
    _close(k, expected_k)
    assert torch.equal(v, v_before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 32), (4, 1100)])
def test_silu_and_mul(twin: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(2, *shape, dtype=torch.float64).to(dtype)
    expected = gate.double() / (1 + (-gate.double()).exp()) * up.double()
    _close(getattr(silu_and_mul, twin)(torch.cat((gate, up), dim=1)), expected)


def test_no_tokens_are_no_work(twin: str) -> None:
    q, k, _, _ = _qkv(0, 4, 2, 64, torch.float32)
    weight = torch.ones(64)
    getattr(qk_norm_rope, twin)(q, k, weight, weight, EPS, _cos_sin(4, 64, torch.float32), torch.zeros(0).int())
    assert getattr(rms_norm, twin)(torch.empty(0, 64), weight, EPS).shape == (0, 64)
    added = getattr(rms_norm, twin)(torch.empty(3, 0, 64), weight, EPS, torch.empty(0, 64))
    assert [each.shape for each in added] == [(0, 64), (0, 64)]
    assert getattr(silu_and_mul, twin)(torch.empty(0, 64)).shape == (0, 32)
