"""Numeric rules that layers and attention share."""

from __future__ import annotations

import torch


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are summed: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
