"""The rows of a table of token vectors, with the norm that reads them first.

    x = table[ids]
    normed = x / sqrt(mean(x^2) + eps) * weight

The norm is computed as `mrv2_kernels.layers.norm` computes it, bit by bit.

The launch is a gate between what prepares a step and its layers (`mrv2_kernels.gemm.pdl`): a program waits for its
predecessor, and only then lets the successor start, so that whatever was launched before this one has ended by the
time that anything behind it begins.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import next_power_of_2, tl, triton
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.gemm.pdl import gdc_launch_dependents, gdc_wait, has_pdl
from mrv2_kernels.layers.norm import normed_row, rms_norm_torch


@triton.jit
def _embed_norm_kernel(
    ids_ptr,
    table_ptr,
    weight_ptr,
    x_ptr,
    normed_ptr,
    hidden_size,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ACC: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    cols = tl.arange(0, BLOCK)
    mask = cols < hidden_size
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(ACC)
    if PDL:
        # in this order, which makes it a gate
        gdc_wait()
        gdc_launch_dependents()
    token = tl.load(ids_ptr + row).to(tl.int64)
    vector = tl.load(table_ptr + token * hidden_size + cols, mask=mask, other=0.0)
    tl.store(x_ptr + row * hidden_size + cols, vector, mask=mask)
    x = vector.to(ACC)
    out = normed_row(x, weight, hidden_size, EPS)
    tl.store(normed_ptr + row * hidden_size + cols, out.to(normed_ptr.dtype.element_ty), mask=mask)


def embed_norm_triton(
    # [T] int32 or int64, each a row of the table
    ids: torch.Tensor,
    # [V, H]
    table: torch.Tensor,
    # [H]
    weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows `x` [T, H] and their norm [T, H], both new tensors."""
    (num_rows,), hidden_size = ids.shape, table.shape[1]
    assert ids.is_contiguous() and table.is_contiguous(), f"contiguous only, strides {ids.stride()}, {table.stride()}"
    x = table.new_empty((num_rows, hidden_size))
    normed = torch.empty_like(x)
    if num_rows == 0:
        return x, normed
    block, pdl = next_power_of_2(hidden_size), has_pdl(table)
    _embed_norm_kernel[(num_rows,)](
        ids,
        table,
        weight,
        x,
        normed,
        hidden_size,
        EPS=eps,
        BLOCK=block,
        PDL=pdl,
        num_warps=min(max(block // 256, 1), 8),
        launch_pdl=pdl,
    )
    return x, normed


def embed_norm_torch(
    # [T] int32 or int64
    ids: torch.Tensor,
    # [V, H]
    table: torch.Tensor,
    # [H]
    weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `embed_norm`, the implementation of the host backend."""
    x = torch.nn.functional.embedding(ids, table)
    normed = rms_norm_torch(x, weight, eps)
    assert isinstance(normed, torch.Tensor), "a norm without a residual is one tensor"
    return x, normed


embed_norm = dispatch(embed_norm_triton, embed_norm_torch)


def aot_cases() -> list[AotCase]:
    """Return a representative signature."""
    pointers = dict.fromkeys(("table_ptr", "weight_ptr", "x_ptr", "normed_ptr"), "*bf16")
    signature: dict[str, str] = {"ids_ptr": "*i32", **pointers, "hidden_size": "i32"}
    return [AotCase(_embed_norm_kernel, signature, {"EPS": 1e-6, "BLOCK": 1024, "PDL": True})]
