"""Products of few rows, compiled: against float64, alone and in chains whose kernels overlap."""

from __future__ import annotations

import pytest
import torch

from mrv2_kernels.gemm import (
    LIBRARY,
    LinearPlan,
    fp8_picks,
    fused_linear,
    linear,
    quantise_rows,
    why_not,
    workspace_for,
)
from mrv2_kernels.gemm.gemv import gemv_torch

pytestmark = pytest.mark.gpu

ROWS = (1, 4, 8, 16, 17, 33, 64, 70)
# Qwen3-0.6B's o and down, SmolLM2's qkv and down, and one whose blocks have tails
SHAPES = ((1024, 2048), (1024, 3072), (960, 576), (576, 1536), (80, 272))
PLANS = (
    LinearPlan("gemv", block_n=8),
    LinearPlan("streamed", block_m=16, block_n=32),
    LinearPlan("streamed", block_m=64, block_n=64, splits=2),
    LinearPlan("turned", block_m=64, block_n=64),
    LinearPlan("turned", block_m=16, block_n=128, splits=2, num_warps=8, stages=3),
    LinearPlan("resident", block_m=16, block_n=8),
    LinearPlan("resident", block_m=16, block_n=16, splits=2, num_warps=8, stages=2),
    LinearPlan("resident", block_m=32, block_n=32, splits=4),
    LinearPlan("resident", block_m=64, block_n=16, stages=2),
    LinearPlan("resident", block_m=16, block_n=16, early=True),
)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda")


def _assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 5e-3) -> None:
    error = (actual.double() - expected).norm() / expected.norm()
    assert error <= tolerance, f"relative error {error}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.label)
@pytest.mark.parametrize("num_outputs, num_inputs", SHAPES)
def test_product(num_outputs: int, num_inputs: int, plan: LinearPlan, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = (_random(num_outputs, num_inputs) / num_inputs**0.5).to(dtype)
    suited = [m for m in ROWS if why_not(plan, m, num_outputs, num_inputs, dtype) is None]
    workspace = workspace_for([(plan, m, num_outputs) for m in suited], "cuda")
    for num_rows in suited:
        # every second row of a wider tensor
        x = _random(2 * num_rows, num_inputs + 16).to(dtype)[::2, :num_inputs]
        out = torch.full((num_rows, num_outputs), float("nan"), dtype=dtype, device="cuda")
        linear(x, weight, plan, workspace, out)
        _assert_close(out, x.double() @ weight.double().T)


@pytest.mark.parametrize("num_rows", [1, 8, 32, 64])
@pytest.mark.parametrize("variant", ["gemv", "streamed", "resident"])
def test_a_chain_that_overlaps_is_the_chain_one_by_one(variant: str, num_rows: int) -> None:
    """Each product reads what the one before wrote, in two buffers that take turns."""
    plans = [LinearPlan(variant, block_m=64, block_n=16, stages=2), LinearPlan(variant, 32, 16, splits=2, stages=2)]
    if variant == "gemv":
        if num_rows > 1:
            pytest.skip("a gemv has at most four rows")
        plans = plans[:1]
    torch.manual_seed(0)
    weights = [(_random(1024, 1024) / 32).bfloat16() for _ in range(40)]
    workspace = workspace_for([(plan, num_rows, 1024) for plan in plans], "cuda")
    start = _random(num_rows, 1024).bfloat16()
    results = []
    for one_by_one in (True, False, False):
        buffers = [start.clone(), torch.empty_like(start)]
        for index, weight in enumerate(weights):
            linear(buffers[index % 2], weight, plans[index % len(plans)], workspace, buffers[1 - index % 2])
            if one_by_one:
                torch.cuda.synchronize()
        results.append(buffers[0])
    assert torch.isfinite(results[0]).all() and results[0].any()
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("around", ["norm", "gated", "residual", "norm+gated", "norm+gated+residual"])
@pytest.mark.parametrize(
    "plan, num_rows",
    [
        (LinearPlan("gemv", block_n=8), (1, 3)),
        (LinearPlan("resident", block_m=16, block_n=8, num_warps=8), (1, 5, 16, 17)),
        (LinearPlan("resident", block_m=16, block_n=64), (8,)),
        (LinearPlan("resident", block_m=32, block_n=16, stages=2), (30, 32, 40)),
        (LinearPlan("resident", block_m=64, block_n=32, stages=2, num_warps=8), (64,)),
    ],
    ids=lambda value: getattr(value, "label", None),
)
@pytest.mark.parametrize("num_outputs, num_inputs", [(6144, 1024), (3072, 576), (160, 272)])
def test_products_with_what_surrounds_them(
    num_outputs: int, num_inputs: int, plan: LinearPlan, num_rows: tuple[int, ...], around: str
) -> None:
    torch.manual_seed(0)
    gated = "gated" in around
    width = num_outputs // (2 if gated else 1)
    weight = (_random(num_outputs, num_inputs) / num_inputs**0.5).bfloat16()
    for rows in num_rows:
        # every second row of a wider tensor, of very unequal sizes
        x = (_random(2 * rows, num_inputs + 16) * torch.logspace(-2, 1, 2 * rows, device="cuda")[:, None]).bfloat16()
        x = x[::2, :num_inputs]
        given = {"norm": torch.rand(num_inputs, device="cuda").bfloat16() if "norm" in around else None, "eps": 1e-6}
        given |= {"gated": gated, "residual": _random(rows, width).bfloat16() if "residual" in around else None}
        wide = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in given.items()}
        expected = gemv_torch(x.double(), weight.double(), **wide)
        out = torch.full((rows, width), float("nan"), dtype=torch.bfloat16, device="cuda")
        fused_linear(x, weight, plan, out=out, **given)
        # row by row: a row of small numbers must not hide behind the others
        error = (out.double() - expected).norm(dim=1) / expected.norm(dim=1)
        assert (error <= 1e-2).all(), f"{rows} rows: relative errors {error.tolist()}"
        if given["residual"] is not None:
            # the stream may be added to in place
            fused_linear(x, weight, plan, out=given["residual"], **given)
            assert torch.equal(given["residual"], out)


@pytest.mark.parametrize("num_rows", [8, 32])
def test_fused_products_that_overlap_are_those_one_by_one(num_rows: int) -> None:
    plan = LinearPlan("resident", block_m=max(16, num_rows), block_n=16, stages=4)
    torch.manual_seed(0)
    norm = torch.ones(1024, device="cuda").bfloat16()
    weights = [((_random(2048, 1024) / 32).bfloat16(), (_random(1024, 1024) / 32).bfloat16()) for _ in range(20)]
    start = _random(num_rows, 1024).bfloat16()
    results = []
    for one_by_one in (True, False, False):
        stream = start.clone()
        for gate_up, down in weights:
            gated = fused_linear(stream, gate_up, plan, norm=norm, eps=1e-6, gated=True)
            if one_by_one:
                torch.cuda.synchronize()
            fused_linear(gated, down, plan, residual=stream, out=stream)
            if one_by_one:
                torch.cuda.synchronize()
        results.append(stream)
    assert torch.isfinite(results[0]).all() and not torch.equal(results[0], start)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_outputs, num_inputs", SHAPES)
def test_product_with_eight_bit_weights(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> None:
    """Each plan that the rule may choose, and the library behind a dequantisation; columns differ in size."""
    torch.manual_seed(0)
    rows = torch.logspace(-1, 1, num_outputs, device="cuda")[:, None]
    weight, scale = quantise_rows(_random(num_outputs, num_inputs) / num_inputs**0.5 * rows)
    full = (weight.to(torch.float64) * scale.double()[:, None]).T
    for num_rows in (*ROWS, 128, 256, 300):
        x = _random(2 * num_rows, num_inputs + 16).to(dtype)[::2, :num_inputs]
        chosen = fp8_picks(x.device, dtype, num_outputs, num_inputs).at(num_rows).plan
        for plan in {chosen, LIBRARY, *PLANS[1:]}:
            if why_not(plan, num_rows, num_outputs, num_inputs, dtype) is None and plan.splits == 1:
                out = torch.full((num_rows, num_outputs), float("nan"), dtype=dtype, device="cuda")
                linear(x, weight, plan, None, out, scale)
                # against the size of what is added up: a sum that cancels has no relative error worth asking for
                error = ((out.double() - x.double() @ full).abs() / (x.double().abs() @ full.abs())).max()
                assert error <= 5e-3, f"{num_rows} rows, {plan.label}: relative error {error}"


@pytest.mark.parametrize(
    "plan",
    [
        LinearPlan("gemv", block_n=8),
        LinearPlan("resident", block_m=16, block_n=16),
        LinearPlan("resident", block_m=32, block_n=64, num_warps=8, early=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("gated", [False, True])
def test_fused_products_with_eight_bit_weights(gated: bool, plan: LinearPlan) -> None:
    torch.manual_seed(0)
    weight, scale = quantise_rows(_random(2048, 1024) / 32)
    x, norm = _random(3, 1024).bfloat16(), torch.rand(1024, device="cuda").bfloat16() + 0.5
    residual = _random(3, 1024 if gated else 2048).bfloat16()
    around = {"norm": norm, "eps": 1e-6, "gated": gated, "residual": residual, "scale": scale}
    got = fused_linear(x, weight, plan, **around)
    _assert_close(got, gemv_torch(x, weight, **around).double(), 1e-2)
