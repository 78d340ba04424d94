"""Mask tokens whose probability is below `min_p` times that of the best token, in place.

``p_i < min_p * p_max`` is ``logit_i < logit_max + log(min_p)``: two sweeps over a row, no softmax.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._numerics import accumulator_dtype
from mrv2_kernels._triton import tl, triton
from mrv2_kernels.aot_case import AotCase

_BLOCK = 4096
_NUM_WARPS = 16


@triton.jit
def _min_p_kernel(logits_ptr, logits_stride, logit_slots_ptr, min_p_ptr, vocab, ACC: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    min_p = tl.load(min_p_ptr + tl.load(logit_slots_ptr + row).to(tl.int64))
    if min_p > 0.0:
        row_ptr = logits_ptr + row * logits_stride
        lane_max = tl.full([BLOCK], float("-inf"), ACC)
        for base in range(0, vocab, BLOCK):
            token = base + tl.arange(0, BLOCK)
            logits = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf")).to(ACC)
            lane_max = tl.maximum(lane_max, logits, propagate_nan=tl.PropagateNan.ALL)
        has_nan = tl.max((lane_max != lane_max).to(tl.int32), axis=0) > 0
        if not has_nan:
            threshold = tl.max(lane_max, axis=0) + tl.log(min_p.to(ACC))
            for base in range(0, vocab, BLOCK):
                token = base + tl.arange(0, BLOCK)
                logits = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf")).to(ACC)
                # whole vectors are stored, kept logits too: single words would cost four times the stores
                tl.store(row_ptr + token, tl.where(logits < threshold, float("-inf"), logits), mask=token < vocab)


def apply_min_p_triton(
    # [N, V] any float dtype, any row stride, in and out
    logits: torch.Tensor,
    # [N] int32: row of the request state
    logit_slots: torch.Tensor,
    # [R] float32 in [0, 1], 0 = off
    min_p: torch.Tensor,
) -> None:
    """Set logits below ``max + log(min_p)`` to -inf; rows with min_p 0 or with NaN are not touched."""
    assert logits.stride(1) == 1, f"logits have inner stride {logits.stride(1)}: their rows must be contiguous"
    num_rows, vocab = logits.shape
    if num_rows == 0:
        return
    _min_p_kernel[(num_rows,)](
        logits,
        logits.stride(0),
        logit_slots,
        min_p,
        vocab,
        ACC=tl.float64 if logits.dtype == torch.float64 else tl.float32,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )


def apply_min_p_torch(
    # [N, V] any float dtype, any row stride, in and out
    logits: torch.Tensor,
    # [N] int32: row of the request state
    logit_slots: torch.Tensor,
    # [R] float32 in [0, 1], 0 = off
    min_p: torch.Tensor,
) -> None:
    """Torch reference of `apply_min_p`."""
    acc = accumulator_dtype(logits.dtype)
    # log(0) = -inf masks nothing, and neither does a NaN maximum
    threshold = logits.amax(dim=1).to(acc) + min_p[logit_slots].to(acc).log()
    logits.masked_fill_(logits.to(acc) < threshold.unsqueeze(1), float("-inf"))


apply_min_p = dispatch(apply_min_p_triton, apply_min_p_torch)


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    return [
        AotCase(
            kernel=_min_p_kernel,
            signature={
                "logits_ptr": f"*{dtype}",
                "logits_stride": "i32",
                "logit_slots_ptr": "*i32",
                "min_p_ptr": "*fp32",
                "vocab": "i32",
            },
            constexprs={"ACC": tl.float64 if dtype == "fp64" else tl.float32, "BLOCK": _BLOCK},
            num_warps=_NUM_WARPS,
        )
        for dtype in ("bf16", "fp32", "fp64")
    ]
