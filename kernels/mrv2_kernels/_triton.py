"""Triton, or a stand-in where it is not installed (the torch references still run there)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False
    if not TYPE_CHECKING:

        class _Absent:
            """Lets modules that declare kernels be imported; calling a kernel explains itself."""

            constexpr = None
            dtype = None

            def jit(self, fn: Any = None, **_: Any) -> Any:
                def refuse(*_args: Any, **_kwargs: Any) -> None:
                    raise RuntimeError("Triton is not installed: `pip install triton` (Linux), or use the host backend")

                return refuse if fn is not None else (lambda _fn: refuse)

            def cdiv(self, a: int, b: int) -> int:
                return -(-a // b)

            def next_power_of_2(self, n: int) -> int:
                return 1 << (n - 1).bit_length()

        triton = tl = _Absent()

__all__ = ["HAS_TRITON", "tl", "triton"]
