"""Weights as 8-bit floats (e4m3: 4 bits of exponent, 3 of mantissa, up to 448), with a scale for each output:

    scale[n] = max_k |weight[n, k]| / 448        q[n, k] = e4m3(weight[n, k] / scale[n])

Activations stay as they are.  e4m3 is a subset of bfloat16, float16 and float32, so a product kernel converts without
loss, adds up as always and multiplies its sums by the scale: what is lost is lost here, once, at load.  A decode step
reads half the bytes of its products.

`dequantise_rows` gives the 16-bit weights back, for products of so many rows that reading them no longer counts.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._numerics import FP8, FP8_MAX, as_kept
from mrv2_kernels._triton import cdiv, tl, triton
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.gemm.pdl import gdc_launch_dependents, gdc_wait, has_pdl
from mrv2_kernels.gemm.picks import Pick, ProductPicks, picks_for, picks_of
from mrv2_kernels.gemm.plan import LIBRARY, LinearPlan
from mrv2_kernels.gemm.resident import why_not_resident

# compute capability from which on kernels convert the format
MIN_CAPABILITY = (8, 9)
# of the kernel that makes 16-bit weights again
_BLOCK_N, _BLOCK_K = 8, 1024


def quantise_rows(
    # [N, K]
    weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights as e4m3 [N, K] and their scales [N] float32; a row of zeros has scale 1."""
    values = weight.to(torch.float32)
    largest = values.abs().amax(dim=1)
    scale = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    return as_kept(values / scale[:, None], FP8), scale


@triton.jit
def _dequantise_rows_kernel(
    weight_ptr,
    scale_ptr,
    out_ptr,
    num_outputs,
    num_inputs,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (n < num_outputs)[:, None] & (k < num_inputs)[None, :]
    offsets = n.to(tl.int64)[:, None] * num_inputs + k[None, :]
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + n, mask=n < num_outputs, other=0.0)
    if PDL:
        gdc_wait()
    tl.store(out_ptr + offsets, (weight * scale[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


def dequantise_rows_triton(
    # [N, K] e4m3
    weight: torch.Tensor,
    # [N] float32
    scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return ``weight * scale`` [N, K], rounded to `dtype` once."""
    assert weight.is_contiguous(), f"weights must be contiguous, strides {weight.stride()}"
    num_outputs, num_inputs = weight.shape
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    pdl = has_pdl(weight)
    _dequantise_rows_kernel[(cdiv(num_outputs, _BLOCK_N), cdiv(num_inputs, _BLOCK_K))](
        weight, scale, out, num_outputs, num_inputs, BLOCK_N=_BLOCK_N, BLOCK_K=_BLOCK_K, PDL=pdl, launch_pdl=pdl
    )
    return out


def dequantise_rows_torch(
    # [N, K] e4m3
    weight: torch.Tensor,
    # [N] float32
    scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Reference of `dequantise_rows_triton`."""
    return (weight.to(torch.float32) * scale[:, None]).to(dtype)


dequantise_rows = dispatch(dequantise_rows_triton, dequantise_rows_torch)

# without measurement: (rows up to, plan where it suits the shape, else)
_RULE = (
    (2, LinearPlan("gemv", block_n=8), LinearPlan("streamed", block_m=16, block_n=32)),
    (16, LinearPlan("resident", block_m=16, block_n=16, stages=4), LinearPlan("streamed", block_m=16, block_n=32)),
    (32, LinearPlan("resident", block_m=32, block_n=16, stages=4), LinearPlan("streamed", block_m=32, block_n=32)),
    (256, LinearPlan("turned", block_m=64, block_n=64), LIBRARY),
)
# a row of inputs that `gemv` keeps in registers
_MAX_GEMV_INPUTS = 4096


def fp8_picks(device: torch.device, dtype: torch.dtype, num_outputs: int, num_inputs: int) -> ProductPicks:
    """Return how products with 8-bit weights are computed: as measured, or else by a rule of the number of rows.

    The host, and dtypes other than bfloat16 and float16, take the reference and the library.
    """
    if device.type != "cuda":
        return ProductPicks()
    measured = picks_of(picks_for(device, dtype, "fp8"), num_outputs, num_inputs)
    return measured if measured.picks else picks_by_rule(dtype, num_outputs, num_inputs)


def picks_by_rule(dtype: torch.dtype, num_outputs: int, num_inputs: int) -> ProductPicks:
    """Return how products with 8-bit weights are computed on a GPU that nobody measured."""
    if dtype not in (torch.bfloat16, torch.float16) or num_inputs % 16 or num_outputs % 16:
        return ProductPicks()
    picks = []
    for _, plan, instead in _RULE:
        if plan.variant == "gemv":
            suits = num_inputs <= _MAX_GEMV_INPUTS
        else:
            suits = plan.variant == "turned" or why_not_resident(plan, num_outputs, num_inputs, dtype, 1) is None
        chosen = plan if suits else instead
        picks.append(Pick(chosen, chosen if chosen.variant == "gemv" else None))
    return ProductPicks(tuple(rows for rows, _, _ in _RULE), tuple(picks))


def aot_cases() -> list[AotCase]:
    """Return representative signatures."""
    pointers = {"weight_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "out_ptr": "*bf16"}
    signature = pointers | {"num_outputs": "i32", "num_inputs": "i32"}
    constants: dict[str, object] = {"BLOCK_N": _BLOCK_N, "BLOCK_K": _BLOCK_K, "PDL": True}
    return [AotCase(_dequantise_rows_kernel, signature, constants, aligned=frozenset(signature))]
