"""Products of few rows: every interpretable variant against float64, odd shapes, splits, fusions."""

from __future__ import annotations

import pytest
import torch

from mrv2_kernels.gemm import (
    LIBRARY,
    LinearPlan,
    LinearWorkspace,
    fused_linear,
    linear,
    linear_of_sums,
    linear_parts,
    why_not,
    workspace_for,
)
from mrv2_kernels.gemm.gemv import gemv_torch, gemv_triton
from mrv2_kernels.gemm.plan import Variant
from mrv2_kernels.layers import rms_norm

# one rounding of the result and a little for sums of up to 3072 terms of size one
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-3}
ROWS = (1, 2, 7, 16, 17, 33, 70)
# SmolLM2's: qkv, o, gate-up, down; and small ones whose blocks have tails
SHAPES = ((960, 576), (576, 576), (192, 1536), (48, 64), (80, 272))


def made_up(num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x, every second row of a wider tensor, and weights; products are of size one."""
    torch.manual_seed(0)
    x = torch.randn(2 * num_rows, num_inputs + 16, dtype=torch.float64).to(dtype)[::2, :num_inputs]
    return x, (torch.randn(num_outputs, num_inputs, dtype=torch.float64) / num_inputs**0.5).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare by the norm of the difference, as fits sums of random terms; NaN never passes."""
    error = (actual.double() - expected).norm() / expected.norm()
    assert error <= TOLERANCE[actual.dtype], f"relative error {error}"


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("num_outputs, num_inputs", SHAPES)
def test_streamed(num_rows: int, num_outputs: int, num_inputs: int) -> None:
    x, weight = made_up(num_rows, num_outputs, num_inputs, torch.float32)
    out = linear.triton(x, weight, LinearPlan("streamed", block_m=32, block_n=64))
    assert_close(out, x.double() @ weight.double().T)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_streamed_in_every_dtype(dtype: torch.dtype) -> None:
    x, weight = made_up(5, 80, 272, dtype)
    out = linear.triton(x, weight, LinearPlan("streamed", block_n=32))
    assert out.dtype == dtype
    assert_close(out, x.double() @ weight.double().T)


@pytest.mark.parametrize("splits", [2, 3, 4])
@pytest.mark.parametrize("num_rows", [1, 33])
def test_split_inputs_add_up_and_leave_the_workspace_ready(splits: int, num_rows: int) -> None:
    plan = LinearPlan("streamed", block_n=32, splits=splits)
    workspace = workspace_for([(plan, num_rows, 80)], "cpu")
    assert workspace is not None
    for num_inputs in (1536, 1168):
        workspace.partials.fill_(float("nan"))
        x, weight = made_up(num_rows, 80, num_inputs, torch.float32)
        assert_close(linear.triton(x, weight, plan, workspace), x.double() @ weight.double().T)
        assert not workspace.counters.any()


def test_a_split_plan_asks_for_a_workspace() -> None:
    plan = LinearPlan("streamed", splits=2)
    x, weight = made_up(3, 48, 512, torch.float32)
    with pytest.raises(ValueError, match="needs a workspace"):
        linear.triton(x, weight, plan)
    with pytest.raises(ValueError, match="need 288 and 3"):
        linear.triton(x, weight, plan, LinearWorkspace.of("cpu", num_partials=288, num_tiles=2))


@pytest.mark.parametrize("num_rows", [0, 1, 3, 4])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gemv(num_rows: int, dtype: torch.dtype) -> None:
    x, weight = made_up(num_rows, 80, 272, dtype)
    out = linear.triton(x, weight, LinearPlan("gemv"))
    assert out.shape == (num_rows, 80)
    if num_rows:
        assert_close(out, x.double() @ weight.double().T)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("with_norm", [False, True])
def test_gemv_with_what_surrounds_it(with_norm: bool, with_residual: bool, gated: bool) -> None:
    x, weight = made_up(3, 96, 272, torch.float64)
    norm = torch.rand(272, dtype=torch.float64) if with_norm else None
    residual = torch.randn(3, 48 if gated else 96, dtype=torch.float64) if with_residual else None
    s = x if norm is None else x / (x.square().mean(1, keepdim=True) + 0.1).sqrt() * norm
    expected = s @ weight.T
    if gated:
        expected = expected[:, :48] * expected[:, :48].sigmoid() * expected[:, 48:]
    if residual is not None:
        expected = expected + residual
    for twin in (gemv_triton, gemv_torch):
        out = twin(x, weight, LinearPlan("gemv"), norm=norm, eps=0.1, gated=gated, residual=residual)
        assert_close(out, expected)


def test_gemv_adds_to_its_residual_in_place() -> None:
    x, weight = made_up(2, 96, 272, torch.float64)
    stream = torch.randn(2, 96, dtype=torch.float64)
    expected = stream + x @ weight.T
    assert gemv_triton(x, weight, LinearPlan("gemv"), residual=stream, out=stream) is stream
    assert_close(stream, expected)


def test_the_reference_and_the_library_are_the_product() -> None:
    x, weight = made_up(3, 80, 272, torch.float64)
    expected = x @ weight.T
    out = torch.full_like(expected, float("nan"))
    assert linear(x, weight, LIBRARY, out=out) is out
    assert_close(out, expected)
    assert_close(linear.triton(x, weight), expected)


@pytest.mark.parametrize(
    "plan, shape, reason",
    [
        (LinearPlan("gemv"), (5, 64, 64), "at most 4"),
        (LinearPlan("streamed"), (1, 72, 64), "multiples of 16"),
        (LinearPlan("streamed", splits=3), (1, 64, 256), "nothing to the last of 3"),
        (LinearPlan("resident", block_n=128), (1, 1024, 1024), "KiB of shared memory"),
        (LinearPlan("resident"), (1, 64, 72), "multiples of 16"),
        (LinearPlan("resident", block_m=8), (1, 64, 64), "at least 16 x 8"),
        (LinearPlan("resident", splits=4), (1, 64, 512), "nothing to the last of 4"),
        (LinearPlan("resident", block_n=8), (1, 64, 3072), None),
        (LinearPlan("warpgroup", 8, 32), (8, 64, 256), "64 outputs"),
        (LinearPlan("warpgroup", 512, 64), (8, 64, 256), "8 to 256 rows for each 4 warps"),
        (LinearPlan("warpgroup", 8, 64, num_warps=8), (8, 64, 256), "8 to 256 rows for each 4 warps"),
        (LinearPlan("warpgroup", 64, 64, num_warps=2), (8, 64, 256), "for each 4 warps"),
        (LinearPlan("warpgroup", 8, 64), (8, 72, 256), "multiples of 16"),
        (LinearPlan("warpgroup", 8, 64), (8, 64, 264), "multiples of 16"),
        (LinearPlan("warpgroup", 8, 64, splits=12), (8, 1024, 2048), "nothing to the last of 12"),
        (LinearPlan("warpgroup", 8, 64), (8, 1024, 2048), "no shared memory for two blocks"),
        # 256 rows take smaller blocks
        (LinearPlan("warpgroup", 256, 64, splits=2), (256, 1024, 3072), "no shared memory for two blocks"),
        (LinearPlan("warpgroup", 8, 64, splits=12), (8, 1024, 3072), None),
        (LinearPlan("warpgroup", 8, 64, stages=1), (8, 1024, 1024), "2 at least"),
        # less than a block has nothing that could come meanwhile
        (LinearPlan("warpgroup", 8, 64, stages=1), (8, 64, 128), None),
        (LinearPlan("warpgroup", 8, 64, normed=True), (8, 4096, 1024), "4 of 8 blocks of x"),
        (LinearPlan("warpgroup", 8, 64, normed=True, stages=8), (8, 4096, 1024), None),
        (LinearPlan("warpgroup", 8, 64, normed=True, stages=8), (9, 4096, 1024), "9 rows of 1024"),
        (LinearPlan("warpgroup", 8, 64, normed=True, stages=8), (8, 64, 768), "8 rows of 768"),
        (LinearPlan("warpgroup", 256, 64, num_warps=8), (256, 4096, 1024), None),
        (LinearPlan("warpgroup", 32, 64, held=2), (8, 64, 256), "16 rows at most"),
        (LinearPlan("warpgroup", 16, 64, held=2), (8, 64, 256), None),
        (LinearPlan("ring", 8, 64, stages=16), (8, 151936, 1024), None),
        (LinearPlan("ring", 64, 64, stages=16), (64, 151936, 1024), None),
        (LinearPlan("ring", 8, 128, num_warps=8, stages=16), (8, 151936, 1024), None),
        (LinearPlan("ring", 8, 64, stages=16), (9, 151936, 1024), "9 rows: 8 at most"),
        (LinearPlan("ring", 8, 64, stages=16), (8, 1024, 1040), "1040 inputs: 1024 at most"),
        (LinearPlan("ring", 8, 64, stages=4), (8, 151936, 1024), "a ring has 5 at least"),
        (LinearPlan("ring", 128, 64, stages=16), (8, 151936, 1024), "128 rows of 1024 inputs: a ring has 5 at least"),
        (LinearPlan("ring", 8, 64, num_warps=8, stages=16), (8, 151936, 1024), "64 x 4 or 128 x 8"),
        (LinearPlan("ring", 8, 32, stages=16), (8, 151936, 1024), "64 x 4 or 128 x 8"),
        (LinearPlan("ring", 8, 64, splits=2, stages=16), (8, 151936, 1024), "whole sums only"),
        (LinearPlan("ring", 8, 64, stages=16), (8, 151936, 1032), "multiples of 16"),
        (LinearPlan("library"), (999, 7, 3), None),
    ],
)
def test_what_does_not_suit_a_plan_is_said(plan: LinearPlan, shape: tuple[int, int, int], reason: str | None) -> None:
    found = why_not(plan, *shape, torch.bfloat16)
    assert found is None if reason is None else found is not None and reason in found


@pytest.mark.parametrize(
    "plan",
    [LinearPlan("resident"), LinearPlan("warpgroup", 8, 64), LinearPlan("ring", 8, 64, stages=8)],
    ids=lambda plan: plan.variant,
)
def test_only_half_precision_goes_to_shared_memory(plan: LinearPlan) -> None:
    assert "float32" in (why_not(plan, 1, 64, 64, torch.float32) or "")
    assert why_not(plan, 1, 64, 64, torch.float16) is None


@pytest.mark.parametrize("variant", ["warpgroup", "ring"])
def test_warp_groups_read_no_eight_bit_weights(variant: Variant) -> None:
    plan = LinearPlan(variant, 8, 64, stages=8)
    assert "weights of 1 bytes" in (why_not(plan, 8, 64, 256, torch.bfloat16, 1) or "")


@pytest.mark.parametrize("splits", [1, 2, 3, 5])
def test_the_parts_of_a_product_add_up_to_it(splits: int) -> None:
    x, weight = made_up(7, 80, 272, torch.float16)
    found = linear_parts(x, weight, LinearPlan("warpgroup", 8, 64, splits))
    assert found.shape == ((7, 80) if splits == 1 else (splits, 7, 80))
    assert found.dtype == (torch.float16 if splits == 1 else torch.float32)
    assert_close(found.double().view(-1, 7, 80).sum(0).to(torch.float16), x.double() @ weight.double().T)
    if splits > 1:
        assert all(part.any() for part in found)
    out = torch.full_like(found, float("nan"))
    assert linear_parts(x, weight, LinearPlan("warpgroup", 8, 64, splits), out=out) is out and torch.equal(out, found)


def test_a_gated_product_in_parts_is_its_activation() -> None:
    x, weight = made_up(7, 96, 272, torch.float16)
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
    assert_close(linear_parts(x, weight, LinearPlan("warpgroup", 8, 64), gated=True), gate * gate.sigmoid() * up)


@pytest.mark.parametrize("gated", [False, True])
def test_a_product_of_sums_is_that_of_the_norm_which_adds_them(gated: bool) -> None:
    torch.manual_seed(0)
    weight, norm = made_up(1, 96, 64, torch.float16)[1], torch.rand(64).half() + 0.5
    sums, residual = torch.randn(3, 7, 64), torch.randn(7, 64).half()
    out, stream = linear_of_sums(
        sums, residual, norm, 1e-6, weight, LinearPlan("warpgroup", 8, 64, normed=True), gated=gated
    )
    # each rounding has its place: the product's alone, then the addition's
    assert torch.equal(stream, ((sums[0] + sums[1]) + sums[2]).half() + residual)
    normed, summed = rms_norm(sums, norm, 1e-6, residual)
    assert torch.equal(stream, summed)
    expected = normed.double() @ weight.double().T
    if gated:
        expected = expected[:, :48] * expected[:, :48].sigmoid() * expected[:, 48:]
    assert_close(out, expected)


def test_what_products_of_sums_refuse() -> None:
    for fields in ({"variant": "resident"}, {"variant": "warpgroup", "block_n": 64, "splits": 2}):
        with pytest.raises(ValueError, match="only warpgroup without splits takes in a norm"):
            LinearPlan(**fields, normed=True)
    normed = LinearPlan("warpgroup", 8, 64, normed=True)

    def call(plan: LinearPlan, num_rows: int, num_inputs: int) -> None:
        residual, weight = torch.zeros(num_rows, num_inputs).half(), torch.zeros(64, num_inputs).half()
        linear_of_sums.triton(torch.zeros(2, num_rows, num_inputs), residual, weight[0], 1e-6, weight, plan)

    with pytest.raises(ValueError, match="takes in no norm"):
        call(LinearPlan("warpgroup", 8, 64), 8, 256)
    with pytest.raises(ValueError, match="9 rows of 256: norms of 8 rows of a power of two at most"):
        call(normed, 9, 256)
    with pytest.raises(ValueError, match="8 rows of 272"):
        call(normed, 8, 272)


def test_what_products_in_parts_refuse() -> None:
    whole, split = LinearPlan("warpgroup", 8, 64), LinearPlan("warpgroup", 8, 64, splits=2)
    x, weight = made_up(7, 128, 512, torch.float16)
    with pytest.raises(ValueError, match="gate takes whole sums"):
        linear_parts.triton(x, weight, split, gated=True)
    with pytest.raises(ValueError, match="only warpgroup leaves sums"):
        linear_parts.triton(x, weight, LinearPlan("resident"))
    with pytest.raises(ValueError, match="float32"):
        linear_parts.triton(x.float(), weight.float(), whole)
    with pytest.raises(ValueError, match="outputs of 512 inputs: both must be multiples of 16"):
        # half of them stay behind the gate
        linear_parts.triton(x, weight[:48], whole, gated=True)
    with pytest.raises(ValueError, match="`linear_parts` takes partial ones"):
        linear.triton(x, weight, split)
    with pytest.raises(ValueError, match="16-bit weights only"):
        linear.triton(x, weight, whole, scale=torch.ones(128))
    with pytest.raises(ValueError, match="bare products only"):
        fused_linear.triton(x, weight, whole, gated=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"variant": "fast"},
        {"block_n": 24},
        {"splits": 0},
        {"num_warps": 3},
        # what another variant knows would be ignored
        {"early": True},
        {"early": True, "variant": "warpgroup"},
        {"release_late": True},
        {"release_late": True, "variant": "resident"},
        {"held": 2},
        {"held": 7, "variant": "warpgroup"},
        {"held": -1, "variant": "warpgroup"},
    ],
)
def test_plans_are_checked(fields: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        LinearPlan(**{"variant": "gemv"} | fields)


def test_a_norm_refuses_one_sum_and_too_many() -> None:
    """One would not be rounded, and what 32 bits cannot count would be read elsewhere."""
    weight = torch.ones(64)
    with pytest.raises(AssertionError, match="several partial sums"):
        rms_norm.triton(torch.zeros(1, 4, 64), weight, 1e-6)
    with pytest.raises(AssertionError, match=r"less than 2\^31 elements"):
        rms_norm.triton(torch.zeros(2, 1 << 24, 64, device="meta"), weight, 1e-6)
