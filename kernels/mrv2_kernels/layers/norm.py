"""RMS norm, optionally fused with the residual addition before it.

    s = x + residual            (rounded to the dtype of x, as the unfused addition would)
    out = s / sqrt(mean(s^2) + eps) * weight

x may come as the partial sums of a product that split its inputs (`mrv2_kernels.gemm.warpgroup`): they are added in
their order and rounded, as that product would have done.

Sums are fp64 for fp64 input, else fp32; the result is rounded once.  A program reads its weights before it waits for
the kernel that makes x (`mrv2_kernels.gemm.pdl`).
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._numerics import accumulator_dtype
from mrv2_kernels._triton import next_power_of_2, tl, triton
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.gemm.linear import add_partials
from mrv2_kernels.gemm.pdl import gdc_launch_dependents, gdc_wait, has_pdl


@triton.jit
def normed_row(x, weight, hidden_size, EPS: tl.constexpr):
    """Return the norm of a row whose elements from `hidden_size` on are zeros."""
    inverse_rms = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / hidden_size + EPS)
    return x * inverse_rms * weight


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    summed_ptr,
    x_stride,
    part_stride,
    residual_stride,
    hidden_size,
    EPS: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    ACC: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    cols = tl.arange(0, BLOCK)
    mask = cols < hidden_size
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(ACC)
    if PDL:
        gdc_wait()
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + cols, mask=mask, other=0.0).to(ACC)
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(ACC)
    if PARTS > 1:
        for part in tl.static_range(1, PARTS):
            x += tl.load(x_ptr + part * part_stride + row * x_stride + cols, mask=mask, other=0.0)
        x = x.to(out_ptr.dtype.element_ty).to(ACC)
    if HAS_RESIDUAL:
        summed = (x + residual).to(summed_ptr.dtype.element_ty)
        tl.store(summed_ptr + row * hidden_size + cols, summed, mask=mask)
        x = summed.to(ACC)
    out = normed_row(x, weight, hidden_size, EPS)
    tl.store(out_ptr + row * hidden_size + cols, out.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm_triton(
    # [T, H], row stride free; or S > 1 partial sums [S, T, H] float32, contiguous, of less than 2^31 elements
    x: torch.Tensor,
    # [H]
    weight: torch.Tensor,
    eps: float,
    # [T, H], row stride free
    residual: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the norm [T, H]; with `residual`, the pair (norm, x + residual), both new tensors."""
    num_rows, hidden_size = x.shape[-2:]
    assert x.stride(-1) == 1, f"rms_norm needs contiguous rows, got strides {x.stride()}"
    if x.dim() == 3:
        assert x.is_contiguous(), f"partial sums must be contiguous, strides {x.stride()}"
        # the kernel rounds them where it has added some, and counts them in 32 bits
        assert x.shape[0] > 1 and x.numel() < 1 << 31, f"several partial sums of less than 2^31 elements: {x.shape}"
    out = torch.empty((num_rows, hidden_size), dtype=x.dtype if x.dim() == 2 else weight.dtype, device=x.device)
    summed = out if residual is None else torch.empty_like(out)
    if num_rows == 0:
        return out if residual is None else (out, summed)
    source = x if residual is None else residual
    assert source.stride(-1) == 1, f"rms_norm needs contiguous residual rows, got strides {source.stride()}"
    block, pdl = next_power_of_2(hidden_size), has_pdl(x)
    _rms_norm_kernel[(num_rows,)](
        x,
        source,
        weight,
        out,
        summed,
        x.stride(-2),
        num_rows * hidden_size,
        source.stride(-2),
        hidden_size,
        EPS=eps,
        PARTS=x.shape[0] if x.dim() == 3 else 1,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        PDL=pdl,
        num_warps=min(max(block // 256, 1), 8),
        launch_pdl=pdl,
    )
    return out if residual is None else (out, summed)


def rms_norm_torch(
    # [T, H], or partial sums [S, T, H] float32
    x: torch.Tensor,
    # [H]
    weight: torch.Tensor,
    eps: float,
    # [T, H]
    residual: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Reference of `rms_norm`, the implementation of the host backend."""
    if x.dim() == 3:
        x = add_partials(x, weight.dtype)
    summed = x if residual is None else x + residual
    acc = summed.to(accumulator_dtype(x.dtype))
    out = torch.nn.functional.rms_norm(acc, acc.shape[-1:], weight.to(acc.dtype), eps).to(x.dtype)
    return out if residual is None else (out, summed)


rms_norm = dispatch(rms_norm_triton, rms_norm_torch)


def aot_cases() -> list[AotCase]:
    """Return a representative signature of each kernel of this module."""
    pointers = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "out_ptr", "summed_ptr"), "*bf16")
    sizes = dict.fromkeys(("x_stride", "part_stride", "residual_stride", "hidden_size"), "i32")
    signature: dict[str, str] = {**pointers, **sizes}
    constants: dict[str, object] = {"EPS": 1e-6, "PARTS": 1, "HAS_RESIDUAL": True, "BLOCK": 1024, "PDL": True}
    return [
        AotCase(_rms_norm_kernel, signature, constants),
        AotCase(_rms_norm_kernel, signature | {"x_ptr": "*fp32"}, constants | {"PARTS": 8}),
    ]
