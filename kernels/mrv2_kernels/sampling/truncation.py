"""The parameters that leave tokens out of a draw, and the way of applying them that every variant must equal."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mrv2_kernels._numerics import accumulator_dtype
from mrv2_kernels._triton import tl, triton
from mrv2_kernels.sampling.min_p import apply_min_p
from mrv2_kernels.sampling.temperature import apply_temperature
from mrv2_kernels.sampling.top_k_top_p import apply_top_k_top_p


class Truncation(NamedTuple):
    """Min-p, top-k and top-p by row of the request state; applied in this order, after the temperature."""

    # [R] float32, 0 = off
    min_p: torch.Tensor
    # [R] int32, 0 = off
    top_k: torch.Tensor
    # [R] float32, 1 = off
    top_p: torch.Tensor
    # the caller knows that every row of the batch is random and has at least one of them
    all_rows: bool = False

    def apply(self, logits: torch.Tensor, logit_slots: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        """Return a scaled and masked copy of raw `logits` [N, V], in float32 or float64."""
        processed = logits.to(accumulator_dtype(logits.dtype), copy=True)
        apply_temperature(processed, logit_slots, temperature)
        self.mask(processed, logit_slots)
        return processed

    def mask(self, logits: torch.Tensor, logit_slots: torch.Tensor) -> None:
        """Set what is left out to -inf in scaled `logits` [N, V]."""
        apply_min_p(logits, logit_slots, self.min_p)
        apply_top_k_top_p(logits, logit_slots, self.top_k, self.top_p)

    def rows(self, logit_slots: torch.Tensor, temperature: torch.Tensor, vocab: int) -> torch.Tensor:
        """Return which rows' draws may leave out tokens. [N] bool"""
        top_k = self.top_k[logit_slots]
        is_on = ((top_k > 0) & (top_k < vocab)) | (self.top_p[logit_slots] < 1.0) | (self.min_p[logit_slots] > 0.0)
        return is_on & (temperature[logit_slots] != 0.0)


@triton.jit
def is_truncated(min_p_ptr, top_k_ptr, top_p_ptr, temperature, vocab):
    """Return whether a draw from a row with these parameters may leave out tokens; a greedy one need not."""
    top_k = tl.load(top_k_ptr)
    is_on = ((top_k > 0) & (top_k < vocab)) | (tl.load(top_p_ptr) < 1.0) | (tl.load(min_p_ptr) > 0.0)
    return is_on & (temperature != 0.0)
