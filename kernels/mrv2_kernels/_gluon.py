"""Gluon, Triton's language with explicit layouts and copies, or a stand-in where it is missing.

Gluon kernels are compiled only: Triton's interpreter does not run them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mrv2_kernels._triton import triton

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import ampere, blackwell, hopper

    HAS_GLUON = True
    # the barrier of a program's threads has had two names
    block_barrier: Any = getattr(gl, "barrier", None) or gl.thread_barrier
except ImportError:
    HAS_GLUON = False
    if not TYPE_CHECKING:
        # refuses a launch in the words of the stand-in for Triton
        gluon = gl = ampere = hopper = blackwell = triton
    block_barrier = None


def is_gluon(kernel: Any) -> bool:
    """Return whether a kernel was declared with ``@gluon.jit``."""
    return bool(getattr(kernel, "is_gluon", lambda: False)())


__all__ = ["HAS_GLUON", "ampere", "blackwell", "block_barrier", "gl", "gluon", "hopper", "is_gluon"]
