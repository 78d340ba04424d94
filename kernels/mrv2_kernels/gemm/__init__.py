"""Matrix products of few rows, which are bound by reading their weights."""

from mrv2_kernels.gemm.fp8 import FP8, fp8_picks, quantise_rows
from mrv2_kernels.gemm.linear import (
    add_partials,
    fused_linear,
    linear,
    linear_of_sums,
    linear_parts,
    why_not,
    workspace_for,
)
from mrv2_kernels.gemm.picks import Pick, ProductPicks, picks_for, picks_of
from mrv2_kernels.gemm.plan import LIBRARY, VARIANTS, LinearPlan, LinearWorkspace

__all__ = [
    "FP8",
    "LIBRARY",
    "VARIANTS",
    "LinearPlan",
    "LinearWorkspace",
    "Pick",
    "ProductPicks",
    "add_partials",
    "fp8_picks",
    "fused_linear",
    "linear",
    "linear_of_sums",
    "linear_parts",
    "picks_for",
    "picks_of",
    "quantise_rows",
    "why_not",
    "workspace_for",
]
