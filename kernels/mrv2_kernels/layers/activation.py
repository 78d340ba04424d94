"""The gated activation of a SwiGLU MLP:  out = silu(gate) * up,  x = [gate | up]."""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._numerics import accumulator_dtype
from mrv2_kernels._triton import cdiv, tl, triton
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.gemm.pdl import gdc_launch_dependents, gdc_wait, has_pdl

BLOCK = 1024


@triton.jit
def _silu_and_mul_kernel(x_ptr, out_ptr, x_stride, intermediate_size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    ACC: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < intermediate_size
    gate = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(ACC)
    up = tl.load(x_ptr + row * x_stride + intermediate_size + cols, mask=mask, other=0.0).to(ACC)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * intermediate_size + cols, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul_triton(
    # [T, 2 * I], row stride free
    x: torch.Tensor,
) -> torch.Tensor:
    """Return silu(x[:, :I]) * x[:, I:] as a new [T, I] tensor."""
    num_rows, width = x.shape
    assert x.stride(1) == 1, f"silu_and_mul needs contiguous rows, got strides {x.stride()}"
    intermediate_size = width // 2
    out = torch.empty((num_rows, intermediate_size), dtype=x.dtype, device=x.device)
    if num_rows > 0:
        grid = (num_rows, cdiv(intermediate_size, BLOCK))
        pdl = has_pdl(x)
        _silu_and_mul_kernel[grid](
            x, out, x.stride(0), intermediate_size, BLOCK=BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl
        )
    return out


def silu_and_mul_torch(
    # [T, 2 * I]
    x: torch.Tensor,
) -> torch.Tensor:
    """Reference of `silu_and_mul`, the implementation of the host backend."""
    gate, up = x.to(accumulator_dtype(x.dtype)).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


silu_and_mul = dispatch(silu_and_mul_triton, silu_and_mul_torch)


def aot_cases() -> list[AotCase]:
    """Return a representative signature of each kernel of this module."""
    signature = {"x_ptr": "*bf16", "out_ptr": "*bf16", "x_stride": "i32", "intermediate_size": "i32"}
    return [AotCase(_silu_and_mul_kernel, signature, {"BLOCK": BLOCK, "PDL": True})]
