"""Every operation has two twins of one signature: a Triton kernel and a torch reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def dispatch(triton_twin: Callable[P, R], torch_twin: Callable[P, R]) -> Callable[P, R]:
    """Return one callable: the Triton twin for CUDA tensors, the torch twin for all others.

    The first positional argument must be a tensor; it decides.  The twins stay reachable as
    ``op.triton`` and ``op.torch`` for tests and for comparisons.
    """

    @wraps(triton_twin)
    def op(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        assert isinstance(first, torch.Tensor), f"first argument must be a tensor, not {type(first).__name__}"
        return (triton_twin if first.is_cuda else torch_twin)(*args, **kwargs)

    op.triton = triton_twin  # type: ignore[attr-defined]  # the twins ride on the function object
    op.torch = torch_twin  # type: ignore[attr-defined]  # (same)
    return op
