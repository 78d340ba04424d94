"""``2^x`` in one instruction.

`tl.exp2` guards denormal results: a comparison and two multiplications an element, where sums relative to a maximum
lose nothing by a flush to zero.
"""

from __future__ import annotations

import os

from mrv2_kernels._triton import tl, triton

if os.environ.get("TRITON_INTERPRET", "0") == "1":

    @triton.jit
    def flushed_exp2(x):
        """Return ``2^x`` of a float32 tensor."""
        return tl.exp2(x)

else:

    @triton.jit
    def flushed_exp2(x):
        """Return ``2^x`` of a float32 tensor; below 2^-126 it is 0."""
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
