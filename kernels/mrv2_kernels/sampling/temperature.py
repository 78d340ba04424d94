"""Divide logits by their request's temperature, in place."""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import cdiv, tl, triton
from mrv2_kernels.aot_case import AotCase

_BLOCK = 4096


@triton.jit
def _temperature_kernel(logits_ptr, logits_stride, logit_slots_ptr, temperature_ptr, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + tl.load(logit_slots_ptr + row).to(tl.int64))
    if (temperature != 0.0) & (temperature != 1.0):
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        ptrs = logits_ptr + row * logits_stride + token
        logits = tl.load(ptrs, mask=token < vocab)
        if logits_ptr.dtype.element_ty == tl.float64:
            scaled = logits / temperature.to(tl.float64)
        else:
            scaled = tl.div_rn(logits.to(tl.float32), temperature)
        tl.store(ptrs, scaled, mask=token < vocab)


def apply_temperature_triton(
    # [N, V] any float dtype, any row stride, in and out
    logits: torch.Tensor,
    # [N] int32: row of the request state
    logit_slots: torch.Tensor,
    # [R] float32
    temperature: torch.Tensor,
) -> None:
    """Divide each row by its temperature; rows with temperature 0 (greedy) or 1 are not touched."""
    assert logits.stride(1) == 1, f"logits have inner stride {logits.stride(1)}: their rows must be contiguous"
    num_rows, vocab = logits.shape
    if num_rows == 0:
        return
    _temperature_kernel[(num_rows, cdiv(vocab, _BLOCK))](
        logits, logits.stride(0), logit_slots, temperature, vocab, BLOCK=_BLOCK
    )


def apply_temperature_torch(
    # [N, V] any float dtype, any row stride, in and out
    logits: torch.Tensor,
    # [N] int32: row of the request state
    logit_slots: torch.Tensor,
    # [R] float32
    temperature: torch.Tensor,
) -> None:
    """Torch reference of `apply_temperature`."""
    divisor = temperature[logit_slots]
    divisor = torch.where(divisor == 0, 1.0, divisor).unsqueeze(1)
    logits.copy_(logits / divisor.to(torch.promote_types(logits.dtype, torch.float32)))


apply_temperature = dispatch(apply_temperature_triton, apply_temperature_torch)


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    return [
        AotCase(
            kernel=_temperature_kernel,
            signature={
                "logits_ptr": f"*{dtype}",
                "logits_stride": "i32",
                "logit_slots_ptr": "*i32",
                "temperature_ptr": "*fp32",
                "vocab": "i32",
            },
            constexprs={"BLOCK": _BLOCK},
        )
        for dtype in ("bf16", "fp32", "fp64")
    ]
