"""One product of few rows, computed as a plan says: bare, ``out = x @ weight.T``, or with what surrounds it.

Of 8-bit weights it is ``(x @ weight.T) * scale``.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._numerics import accumulator_dtype
from mrv2_kernels._triton import cdiv
from mrv2_kernels.gemm.fp8 import dequantise_rows
from mrv2_kernels.gemm.gemv import MAX_ROWS, gemv_torch, gemv_triton
from mrv2_kernels.gemm.plan import LIBRARY, LinearPlan, LinearWorkspace
from mrv2_kernels.gemm.resident import resident_linear, why_not_resident
from mrv2_kernels.gemm.ring import ring_linear, why_not_ring
from mrv2_kernels.gemm.streamed import streamed_linear, why_not_streamed
from mrv2_kernels.gemm.warpgroup import warpgroup_linear, warpgroup_linear_of_sums, why_not_warpgroup


def why_not(
    plan: LinearPlan, num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, weight_bytes: int = 2
) -> str | None:
    """Return why a plan does not suit a product with weights of so many bytes each, or None."""
    if plan.variant == "gemv":
        return None if num_rows <= MAX_ROWS else f"{num_rows} rows, at most {MAX_ROWS}"
    if plan.variant in ("streamed", "turned"):
        return why_not_streamed(plan, num_outputs, num_inputs, dtype)
    if plan.variant == "resident":
        return why_not_resident(plan, num_outputs, num_inputs, dtype, weight_bytes)
    if plan.variant == "warpgroup":
        if weight_bytes != 2:
            return f"weights of {weight_bytes} bytes: only 2"
        return why_not_warpgroup(plan, num_rows, num_outputs, num_inputs, dtype)
    if plan.variant == "ring":
        return why_not_ring(plan, num_rows, num_outputs, num_inputs, dtype, weight_bytes)
    return None


def linear_triton(
    # [M, K], row stride free
    x: torch.Tensor,
    # [N, K]
    weight: torch.Tensor,
    plan: LinearPlan = LIBRARY,
    workspace: LinearWorkspace | None = None,
    # [M, N]
    out: torch.Tensor | None = None,
    # [N] float32: of 8-bit weights
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x @ weight.T [M, N] in the dtype of x.

    Raises `ValueError` for a shape that the plan does not suit, or if the plan splits the inputs and `workspace` is
    missing or too small.
    """
    if plan.variant == "gemv":
        return gemv_triton(x, weight, plan, scale=scale, out=out)
    if plan.variant in ("streamed", "turned"):
        return streamed_linear(x, weight, plan, workspace, out, scale)
    if plan.variant == "resident":
        return resident_linear(x, weight, plan, workspace, out, scale)
    if plan.variant == "warpgroup":
        if scale is not None or plan.splits > 1:
            raise ValueError(f"{plan.label}: whole sums of 16-bit weights only; `linear_parts` takes partial ones")
        return warpgroup_linear(x, weight, plan, out)
    if plan.variant == "ring":
        if scale is not None:
            raise ValueError(f"{plan.label}: 16-bit weights only")
        return ring_linear(x, weight, plan, out)
    if scale is not None:
        # the library multiplies 16 bits by 16 bits: at many rows the weights' bytes are not what counts
        weight = dequantise_rows(weight, scale, x.dtype)
    return linear_torch(x, weight, plan, workspace, out)


def linear_torch(
    # [M, K]
    x: torch.Tensor,
    # [N, K]
    weight: torch.Tensor,
    plan: LinearPlan = LIBRARY,
    workspace: LinearWorkspace | None = None,
    # [M, N]
    out: torch.Tensor | None = None,
    # [N] float32: of 8-bit weights
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference of `linear_triton`, and the ``library`` plan; plan and workspace are not looked at."""
    if scale is not None:
        acc = accumulator_dtype(x.dtype)
        product = (F.linear(x.to(acc), weight.to(acc)) * scale.to(acc)).to(x.dtype)
        return product if out is None else out.copy_(product)
    return F.linear(x, weight) if out is None else torch.mm(x, weight.T, out=out)


linear = dispatch(linear_triton, linear_torch)


def fused_linear_triton(
    # [M, K], row stride free
    x: torch.Tensor,
    # [N, K]; [2 N, K] if gated
    weight: torch.Tensor,
    plan: LinearPlan,
    *,
    # [K]
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    # [M, N], row stride free; may be `out`
    residual: torch.Tensor | None = None,
    # [M, N]
    out: torch.Tensor | None = None,
    # [N] float32, [2 N] if gated: of 8-bit weights
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the product [M, N] with what surrounds it in a layer (`gemm.gemv` says what).

    Raises `ValueError` for a plan that cannot take that in, or that does not suit the shape.
    """
    around = {"norm": norm, "eps": eps, "gated": gated, "residual": residual, "scale": scale}
    if plan.variant == "gemv":
        return gemv_triton(x, weight, plan, out=out, **around)
    if plan.variant == "resident":
        return resident_linear(x, weight, plan, out=out, **around)
    raise ValueError(f"{plan.label} computes bare products only")


def fused_linear_torch(
    # [M, K]
    x: torch.Tensor,
    # [N, K]; [2 N, K] if gated
    weight: torch.Tensor,
    plan: LinearPlan,
    *,
    # [K]
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    # [M, N]
    residual: torch.Tensor | None = None,
    # [M, N]
    out: torch.Tensor | None = None,
    # [N] float32, [2 N] if gated: of 8-bit weights
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference of `fused_linear_triton`; the plan is not looked at."""
    return gemv_torch(x, weight, plan, norm=norm, eps=eps, gated=gated, residual=residual, out=out, scale=scale)


fused_linear = dispatch(fused_linear_triton, fused_linear_torch)


def linear_parts_triton(
    # [M, K], row stride free
    x: torch.Tensor,
    # [N, K]; [2 N, K] if gated
    weight: torch.Tensor,
    plan: LinearPlan,
    *,
    gated: bool = False,
    # [M, N], or [S, M, N] float32 if the plan has S > 1 splits
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the product [M, N], behind a gate ``silu(x @ gate.T) * (x @ up.T)``, or its S partial sums [S, M, N].

    Raises `ValueError` for a plan of another variant than ``warpgroup``, or that does not suit the shape.
    """
    if plan.variant != "warpgroup":
        raise ValueError(f"{plan.label}: only warpgroup leaves sums to the norm behind it")
    return warpgroup_linear(x, weight, plan, out, gated=gated)


def linear_parts_torch(
    # [M, K]
    x: torch.Tensor,
    # [N, K]; [2 N, K] if gated
    weight: torch.Tensor,
    plan: LinearPlan,
    *,
    gated: bool = False,
    # [M, N], or [S, M, N] float32
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference of `linear_parts_triton`; of the plan only the number of splits is looked at."""
    acc = accumulator_dtype(x.dtype)
    if gated:
        gate, up = F.linear(x.to(acc), weight.to(acc)).chunk(2, dim=1)
        result = (F.silu(gate) * up).to(x.dtype)
    elif plan.splits == 1:
        result = F.linear(x, weight)
    else:
        parts = zip(x.to(acc).tensor_split(plan.splits, 1), weight.to(acc).tensor_split(plan.splits, 1), strict=True)
        result = torch.stack([F.linear(a, b) for a, b in parts])
    return result if out is None else out.copy_(result)


linear_parts = dispatch(linear_parts_triton, linear_parts_torch)


# partials [S, M, N] -> [M, N]
def add_partials(partials: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum of a product's partial sums, added in their order and rounded once."""
    total = partials[0]
    for part in partials[1:]:
        total = total + part
    return total.to(dtype)


def linear_of_sums_triton(
    # [S', M, K] float32
    x: torch.Tensor,
    # [M, K]
    residual: torch.Tensor,
    # [K]
    norm: torch.Tensor,
    eps: float,
    # [N, K]; [2 N, K] if gated
    weight: torch.Tensor,
    plan: LinearPlan,
    *,
    gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the product [M, N] of the norm of s, and s [M, K], the partial sums x and the residual added.

    Raises `ValueError` for a plan that is not `LinearPlan.normed`, or that does not suit the shape.
    """
    return warpgroup_linear_of_sums(x, residual, norm, eps, weight, plan, gated=gated)


def linear_of_sums_torch(
    # [S', M, K] float32
    x: torch.Tensor,
    # [M, K]
    residual: torch.Tensor,
    # [K]
    norm: torch.Tensor,
    eps: float,
    # [N, K]; [2 N, K] if gated
    weight: torch.Tensor,
    plan: LinearPlan,
    *,
    gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `linear_of_sums_triton`."""
    summed = add_partials(x, residual.dtype) + residual
    acc = accumulator_dtype(residual.dtype)
    normed = F.rms_norm(summed.to(acc), summed.shape[-1:], norm.to(acc), eps).to(residual.dtype)
    return linear_parts_torch(normed, weight, plan, gated=gated), summed


linear_of_sums = dispatch(linear_of_sums_triton, linear_of_sums_torch)


def workspace_for(
    # (plan, rows, outputs) of every product
    products: Iterable[tuple[LinearPlan, int, int]],
    device: torch.device | str,
) -> LinearWorkspace | None:
    """Return a workspace that suits all the products, or None if none of them splits its inputs."""
    split = [(plan, m, n) for plan, m, n in products if plan.splits > 1]
    if not split:
        return None
    return LinearWorkspace.of(
        device,
        num_partials=max(plan.splits * m * n for plan, m, n in split),
        num_tiles=max(cdiv(m, plan.block_m) * cdiv(n, plan.block_n) for plan, m, n in split),
    )
