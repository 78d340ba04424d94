"""What to compile ahead of time: one representative signature of a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AotCase:
    """A kernel with the types of its run-time arguments and the values of its constants.

    `signature` maps each run-time parameter to a Triton type (``"*bf16"``, ``"i32"``, ``"fp32"``);
    `constexprs` maps each ``tl.constexpr`` parameter to its value.  Together they name every parameter.
    `aligned` names run-time parameters that are multiples of 16, as a launch would find out by itself;
    asynchronous copies of 16 bytes need to know.
    `archs` names the compute capabilities that it is for, 90 = sm_90; None = all.
    `may_spill` = False asks that all registers of a thread fit, `may_share` = False that nothing pass from warp to warp
    through shared memory; only cases of kernels that rely on it say so.
    """

    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, object]
    num_warps: int = 4
    # that a thread may hold; None = as many as the compiler likes
    max_registers: int | None = None
    aligned: frozenset[str] = frozenset()
    archs: tuple[int, ...] | None = None
    may_spill: bool = True
    may_share: bool = True
