"""Matrix products of few rows, which are bound by reading their weights."""

from mrv2_kernels.gemm.linear import fused_linear, linear, why_not, workspace_for
from mrv2_kernels.gemm.picks import ProductPicks, picks_for, picks_of
from mrv2_kernels.gemm.plan import LIBRARY, VARIANTS, LinearPlan, LinearWorkspace

__all__ = [
    "LIBRARY",
    "VARIANTS",
    "LinearPlan",
    "LinearWorkspace",
    "ProductPicks",
    "fused_linear",
    "linear",
    "picks_for",
    "picks_of",
    "why_not",
    "workspace_for",
]
