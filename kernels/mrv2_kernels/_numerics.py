"""Numeric rules that layers and attention share."""

from __future__ import annotations

import torch

# 8-bit floats: 4 bits of exponent, 3 of mantissa, and their largest number
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are summed: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_kept(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values as something of `dtype` keeps them; 8-bit floats take what is too large as their largest."""
    if dtype == FP8:
        values = values.to(torch.float32).clamp(-FP8_MAX, FP8_MAX)
    return values.to(dtype)


def bytes_of(values: torch.Tensor) -> torch.Tensor:
    """Return 8-bit floats as the bytes they are, which torch moves about on every device; others as they are."""
    return values.view(torch.uint8) if values.dtype == FP8 else values
