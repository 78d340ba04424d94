"""8-bit floats to bfloat16 in registers, four at a time, by integer instructions of full rate.

A byte of e4m3, its sign stretched to 16 bits, moved up by four and masked, is a bfloat16 with the same sign, exponent
field and mantissa: too small by the difference of the exponents' biases, 2 ** (127 - 7), which one exact product of
two values at a time puts right, subnormal ones included.  On compute capability 9.0 a compiler's own conversion takes
a detour over float16 by an instruction of a quarter of the rate.  NaN comes out as a number: finite
weights, keys and values make none.
"""

from __future__ import annotations

import torch

from mrv2_kernels._numerics import FP8
from mrv2_kernels._triton import constant

_TEMPLATE = """{{
.reg .b32 one, other, up, none;
mov.b32 up, 0x7B807B80;
mov.b32 none, 0x80008000;
prmt.b32 one, $2, 0, {one};
prmt.b32 other, $2, 0, {other};
shl.b32 one, one, 4;
shl.b32 other, other, 4;
and.b32 one, one, 0x87F087F0;
and.b32 other, other, 0x87F087F0;
fma.rn.bf16x2 $0, one, up, none;
fma.rn.bf16x2 $1, other, up, none;
}}"""
# two registers of two bfloat16 from one of four e4m3, for `inline_asm_elementwise` with pack=4
E4M3_TO_BF16 = constant(_TEMPLATE.format(one="0x9180", other="0xB3A2"))
# from two pairs of e4m3 the first ones of both, and the second ones; with pack=2 and two results
E4M3_PAIRS_TO_BF16 = constant(_TEMPLATE.format(one="0xA280", other="0xB391"))


def unpacks(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a kernel converts values of `dtype` this way: 8-bit ones for an x in bfloat16, on a device.

    For float16 the compiler's own way is as good; the interpreter runs no machine instructions.
    """
    return dtype == FP8 and x.is_cuda and x.dtype == torch.bfloat16
