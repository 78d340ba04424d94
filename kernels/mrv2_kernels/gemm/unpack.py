"""8-bit floats to bfloat16 in registers, four at a time, by integer instructions of full rate.

A byte of e4m3, its sign stretched to 16 bits, moved up by four and masked, is a bfloat16 with the same sign, exponent
field and mantissa: too small by the difference of the exponents' biases, 2 ** (127 - 7), which one exact product of
two values at a time puts right, subnormal ones included.  On compute capability 9.0 a compiler's own conversion takes
a detour over float16 by an instruction of a quarter of the rate.  NaN comes out as a number: `quantise_rows` of finite
weights makes none.
"""

from __future__ import annotations

import torch

from mrv2_kernels._triton import constant

# two registers of two bfloat16 from one of four e4m3, for `inline_asm_elementwise` with pack=4
E4M3_TO_BF16 = constant("""{
.reg .b32 low, high, up, none;
mov.b32 up, 0x7B807B80;
mov.b32 none, 0x80008000;
prmt.b32 low, $2, 0, 0x9180;
prmt.b32 high, $2, 0, 0xB3A2;
shl.b32 low, low, 4;
shl.b32 high, high, 4;
and.b32 low, low, 0x87F087F0;
and.b32 high, high, 0x87F087F0;
fma.rn.bf16x2 $0, low, up, none;
fma.rn.bf16x2 $1, high, up, none;
}""")


def unpacks(x: torch.Tensor, scale: torch.Tensor | None) -> bool:
    """Return whether a kernel converts its weights this way: 8-bit ones to bfloat16, on a device.

    For float16 the compiler's own way is as good; the interpreter runs no machine instructions.
    """
    return scale is not None and x.is_cuda and x.dtype == torch.bfloat16
