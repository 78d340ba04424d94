"""Products of one to four rows, with what surrounds them in a layer:

    s = x                                       or, with `norm`,      rms_norm(x) * norm
    p = s @ weight.T                            or, if `gated`,       silu(s @ gate.T) * (s @ up.T), weight = [gate; up]
    out = p                                     or, with `residual`,  p + residual

Weights may be 8-bit floats with a scale for each output (`gemm.fp8`); the scale is applied to the sums.

A program loads its rows of weights into registers before it waits for the kernel that makes x
(`mrv2_kernels.gemm.pdl`).  The norm is computed by every program anew: a row is little beside the weights.  s is
rounded to the dtype of x, as the separate kernel would; p is not rounded before what follows it.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._numerics import accumulator_dtype
from mrv2_kernels._triton import cdiv, next_power_of_2, tl, triton
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.gemm.pdl import gdc_launch_dependents, gdc_wait, has_pdl
from mrv2_kernels.gemm.plan import LinearPlan

MAX_ROWS = 4


@triton.jit
def _gemv_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    num_outputs,
    num_inputs,
    x_stride,
    residual_stride,
    ROWS: tl.constexpr,
    EPS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    ACC: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    k_mask = k < num_inputs
    mask = (n < num_outputs)[:, None] & k_mask[None, :]
    w_ptrs = weight_ptr + n.to(tl.int64)[:, None] * num_inputs + k[None, :]
    weight = tl.load(w_ptrs, mask=mask, other=0.0)
    if GATED:
        up_weight = tl.load(w_ptrs + num_outputs.to(tl.int64) * num_inputs, mask=mask, other=0.0)
    if HAS_SCALE:
        scale = tl.load(scale_ptr + n, mask=n < num_outputs, other=0.0).to(ACC)
        if GATED:
            up_scale = tl.load(scale_ptr + num_outputs + n, mask=n < num_outputs, other=0.0).to(ACC)
    if HAS_NORM:
        norm = tl.load(norm_ptr + k, mask=k_mask, other=0.0)
    if PDL:
        gdc_wait()
    for row in tl.static_range(ROWS):
        x = tl.load(x_ptr + row * x_stride + k, mask=k_mask, other=0.0).to(ACC)
        if HAS_NORM:
            x = x * (1.0 / tl.sqrt(tl.sum(x * x, axis=0) / num_inputs + EPS)) * norm.to(ACC)
            x = x.to(x_ptr.dtype.element_ty).to(ACC)
        out = tl.sum(weight.to(ACC) * x[None, :], axis=1)
        if HAS_SCALE:
            out = out * scale
        if GATED:
            up = tl.sum(up_weight.to(ACC) * x[None, :], axis=1)
            if HAS_SCALE:
                up = up * up_scale
            out = out / (1.0 + tl.exp(-out)) * up
        if HAS_RESIDUAL:
            residual = residual_ptr + row * residual_stride + n
            out += tl.load(residual, mask=n < num_outputs, other=0.0).to(ACC)
        out_ptrs = out_ptr + row * num_outputs + n
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=n < num_outputs)


def gemv_triton(
    # [M, K], row stride free
    x: torch.Tensor,
    # [N, K]; [2 N, K] if gated
    weight: torch.Tensor,
    plan: LinearPlan | None = None,
    *,
    # [K]
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    # [M, N], row stride free; may be `out`
    residual: torch.Tensor | None = None,
    # [N] float32, [2 N] if gated: of 8-bit weights
    scale: torch.Tensor | None = None,
    # [M, N]
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the product [M, N] with what surrounds it; of `plan` only `block_n` and `num_warps` matter.

    Raises `ValueError` for more than four rows.
    """
    plan = plan or LinearPlan("gemv")
    (num_rows, num_inputs), num_outputs = x.shape, weight.shape[0] // (2 if gated else 1)
    if num_rows > MAX_ROWS:
        raise ValueError(f"{plan.label}: {num_rows} rows, at most {MAX_ROWS}")
    assert x.stride(1) == 1, f"rows must be contiguous, strides {x.stride()}"
    assert weight.is_contiguous(), f"weights must be contiguous, strides {weight.stride()}"
    assert residual is None or residual.stride(1) == 1, "rows of the residual must be contiguous"
    out = x.new_empty((num_rows, num_outputs)) if out is None else out
    if num_rows == 0:
        return out
    pdl = plan.ahead and has_pdl(x)
    _gemv_kernel[(cdiv(num_outputs, plan.block_n),)](
        x,
        weight,
        x if scale is None else scale,
        x if norm is None else norm,
        x if residual is None else residual,
        out,
        num_outputs,
        num_inputs,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        ROWS=num_rows,
        EPS=eps,
        HAS_SCALE=scale is not None,
        HAS_NORM=norm is not None,
        GATED=gated,
        HAS_RESIDUAL=residual is not None,
        BLOCK_N=plan.block_n,
        BLOCK_K=next_power_of_2(num_inputs),
        PDL=pdl,
        num_warps=plan.num_warps,
        launch_pdl=pdl,
    )
    return out


def gemv_torch(
    # [M, K]
    x: torch.Tensor,
    # [N, K]; [2 N, K] if gated
    weight: torch.Tensor,
    plan: LinearPlan | None = None,
    *,
    # [K]
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    # [M, N]
    residual: torch.Tensor | None = None,
    # [N] float32, [2 N] if gated: of 8-bit weights
    scale: torch.Tensor | None = None,
    # [M, N]
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference of `gemv_triton`, for any number of rows; `plan` is not looked at."""
    acc = accumulator_dtype(x.dtype)
    s = x.to(acc)
    if norm is not None:
        s = torch.nn.functional.rms_norm(s, s.shape[-1:], norm.to(acc), eps).to(x.dtype).to(acc)
    p = s @ weight.to(acc).T
    p = p if scale is None else p * scale.to(acc)
    if gated:
        gate, up = p.chunk(2, dim=-1)
        p = torch.nn.functional.silu(gate) * up
    p = (p if residual is None else p + residual.to(acc)).to(x.dtype)
    return p if out is None else out.copy_(p)


gemv = dispatch(gemv_triton, gemv_torch)


def aot_cases() -> list[AotCase]:
    """Return representative signatures: the bare product, one with everything, and that with 8-bit weights."""
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "norm_ptr", "residual_ptr", "out_ptr"), "*bf16")
    sizes = dict.fromkeys(("num_outputs", "num_inputs", "x_stride", "residual_stride"), "i32")
    constants: dict[str, object] = {"EPS": 1e-6, "ROWS": 1, "BLOCK_N": 8, "BLOCK_K": 1024, "PDL": True}
    signature: dict[str, str] = {**pointers, "scale_ptr": "*fp32", **sizes}
    aligned = frozenset(signature)
    fused = ("HAS_NORM", "GATED", "HAS_RESIDUAL")
    return [
        AotCase(
            _gemv_kernel,
            signature | ({"weight_ptr": "*fp8e4nv"} if scaled else {}),
            constants | {"HAS_SCALE": scaled} | dict.fromkeys(fused, everything),
            aligned=aligned,
        )
        for everything, scaled in ((False, False), (True, False), (True, True))
    ]
