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

        triton = tl = _Absent()


def constant(value: Any) -> Any:
    """Return a value of a module such that kernels may read it."""
    return tl.core.constexpr(value) if HAS_TRITON else value


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up; on the host (Triton's own is a traced function, microseconds slower a call)."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is not below `n` >= 1; on the host."""
    return 1 << (n - 1).bit_length()


__all__ = ["HAS_TRITON", "cdiv", "constant", "next_power_of_2", "tl", "triton"]
