"""What to compile ahead of time: one representative signature of a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AotCase:
    """A kernel with the types of its run-time arguments and the values of its constants.

    `signature` maps each run-time parameter to a Triton type (``"*bf16"``, ``"i32"``, ``"fp32"``);
    `constexprs` maps each ``tl.constexpr`` parameter to its value.  Together they name every parameter.
    """

    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, object]
    num_warps: int = 4
