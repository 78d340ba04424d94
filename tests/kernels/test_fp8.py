"""Weights as 8-bit floats: what is lost is what the format loses, and the products lose nothing more."""

from __future__ import annotations

import pytest
import torch

from mrv2_kernels.gemm import FP8, LinearPlan, fp8_picks, linear, quantise_rows, why_not
from mrv2_kernels.gemm.fp8 import FP8_MAX, dequantise_rows, picks_by_rule
from mrv2_kernels.gemm.gemv import gemv_torch, gemv_triton
from mrv2_kernels.gemm.plan import Variant
from mrv2_kernels.gemm.unpack import E4M3_TO_BF16

SHAPES = ((960, 576), (192, 1536), (48, 64), (80, 272))
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3}


def made_up(num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return x, quantised weights whose rows differ in size a thousandfold, and their scales."""
    torch.manual_seed(0)
    x = torch.randn(2 * num_rows, num_inputs + 16, dtype=torch.float64).to(dtype)[::2, :num_inputs]
    rows = torch.logspace(-2, 1, num_outputs, dtype=torch.float64)[:, None]
    weight, scale = quantise_rows(torch.randn(num_outputs, num_inputs, dtype=torch.float64) / num_inputs**0.5 * rows)
    return x, weight, scale


def exact(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x.double() @ (weight.to(torch.float64) * scale.double()[:, None]).T


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare each output's column by its own norm: a wrong scale of a small row must show."""
    error = ((actual.double() - expected).norm(dim=0) / expected.norm(dim=0)).max()
    assert error <= 4 * TOLERANCE[actual.dtype], f"relative error {error}"


def test_a_weight_is_off_by_half_a_step_of_the_format_at_most() -> None:
    torch.manual_seed(1)
    weight = torch.randn(64, 512) * torch.logspace(-6, 4, 64)[:, None]
    quantised, scale = quantise_rows(weight)
    assert quantised.dtype == FP8 and scale.dtype == torch.float32
    error = (quantised.float() * scale[:, None] - weight).abs()
    # three bits of mantissa; below the smallest normal number, 2 ** -6, steps of 2 ** -9
    allowed = torch.maximum(weight.abs() * 2**-4, scale[:, None] * 2**-10)
    assert (error <= 1.001 * allowed).all()
    assert (quantised.float().abs().amax(dim=1) == FP8_MAX).all(), "each row uses the whole range"


def test_a_row_of_zeros_stays_one() -> None:
    weight = torch.zeros(2, 32)
    weight[1, 3] = -5.0
    quantised, scale = quantise_rows(weight)
    assert torch.equal(quantised.float() * scale[:, None], weight) and scale.isfinite().all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_rows", [1, 7, 33])
@pytest.mark.parametrize("num_outputs, num_inputs", SHAPES)
@pytest.mark.parametrize("variant", ["streamed", "turned"])
def test_streamed(variant: Variant, num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> None:
    x, weight, scale = made_up(num_rows, num_outputs, num_inputs, dtype)
    out = linear.triton(x, weight, LinearPlan(variant, block_m=32, block_n=16), scale=scale)
    assert out.dtype == dtype
    assert_close(out, exact(x, weight, scale))


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("everything", [False, True])
def test_gemv_with_what_surrounds_it(num_rows: int, everything: bool) -> None:
    x, weight, scale = made_up(num_rows, 96, 272, torch.float32)
    around: dict = {"scale": scale}
    if everything:
        around |= {"norm": torch.rand(272) + 0.5, "eps": 1e-6, "gated": True, "residual": torch.randn(num_rows, 48)}
    got = gemv_triton(x, weight, LinearPlan("gemv", block_n=8), **around)
    assert torch.allclose(got, gemv_torch(x, weight, **around), rtol=2e-5, atol=2e-5)
    double = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in around.items()}
    full = (weight.double() * scale.double()[:, None]).contiguous()
    assert torch.allclose(
        got.double(), gemv_torch(x.double(), full, **(double | {"scale": None})), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("dtype", [torch.float64, *TOLERANCE])
def test_the_reference_rounds_once(dtype: torch.dtype) -> None:
    x, weight, scale = made_up(5, 80, 272, dtype)
    got, want = linear.torch(x, weight, scale=scale), exact(x, weight, scale)
    assert torch.allclose(got.double(), want, rtol=2e-3 if dtype == torch.float16 else 1e-5, atol=1e-3)
    out = torch.full_like(got, float("nan"))
    assert torch.equal(linear.torch(x, weight, scale=scale, out=out), got) and torch.equal(out, got)


def test_the_library_takes_weights_of_sixteen_bits() -> None:
    _, weight, scale = made_up(1, 48, 4112, torch.float32)
    for dtype in (torch.float16, torch.float32):
        got = dequantise_rows.triton(weight, scale, dtype)
        assert torch.equal(got, dequantise_rows.torch(weight, scale, dtype))
        assert torch.equal(got, (weight.float() * scale[:, None]).to(dtype))


@pytest.mark.parametrize(
    "num_outputs, num_inputs", [(4096, 1024), (1024, 3072), (6144, 1024), (28672, 4096), (4096, 14336)]
)
def test_every_product_has_a_plan_that_suits_it(num_outputs: int, num_inputs: int) -> None:
    picks = picks_by_rule(torch.bfloat16, num_outputs, num_inputs)
    for num_rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 264, 8192):
        pick = picks.at(num_rows)
        reason = why_not(pick.plan, num_rows, num_outputs, num_inputs, torch.bfloat16, weight_bytes=1)
        assert reason is None, (num_rows, pick.plan.label)
        assert (pick.plan.variant == "library") == (num_rows > 256)
    assert fp8_picks(torch.device("cpu"), torch.bfloat16, num_outputs, num_inputs).at(1).plan.variant == "library"


def test_a_byte_of_e4m3_moved_up_by_four_is_a_bfloat16_too_small_by_the_exponents_biases() -> None:
    """What `gemm.unpack` does to four bytes at a time, for all 254 that are numbers."""
    bits = torch.arange(-128, 128, dtype=torch.int16)
    bits = bits[(bits & 0x7F) != 0x7F]
    moved = ((bits << 4) & torch.tensor(0x87F0 - (1 << 16), dtype=torch.int16)).view(torch.bfloat16)
    assert torch.equal(moved.float() * 2.0**120, bits.to(torch.int8).view(FP8).float())
    up = f"{torch.tensor(2.0**120).bfloat16().view(torch.int16).item():04X}"
    assert f"0x{up}{up}" in E4M3_TO_BF16.value and "0x87F087F0" in E4M3_TO_BF16.value
