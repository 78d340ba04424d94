"""Matrix products of few rows, which are bound by reading their weights."""

from mrv2_kernels.gemm.gemv import gemv
from mrv2_kernels.gemm.linear import linear, why_not, workspace_for
from mrv2_kernels.gemm.picks import ProductPicks, picks_for, picks_of
from mrv2_kernels.gemm.plan import LIBRARY, VARIANTS, LinearPlan, LinearWorkspace

__all__ = [
    "LIBRARY",
    "VARIANTS",
    "LinearPlan",
    "LinearWorkspace",
    "ProductPicks",
    "gemv",
    "linear",
    "picks_for",
    "picks_of",
    "why_not",
    "workspace_for",
]
