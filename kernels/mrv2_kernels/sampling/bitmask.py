"""Set to -inf, in place, the logits that a grammar does not allow.

``logits[rows[g], t] = -inf  where bit t % 32 of bits[g, t // 32] is 0``
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import cdiv, tl, triton
from mrv2_kernels.aot_case import AotCase

# tokens of a program: a multiple of 32
_BLOCK = 4096


@triton.jit
def _bitmask_kernel(logits_ptr, logits_stride, bits_ptr, bits_stride, rows_ptr, vocab, BLOCK: tl.constexpr):
    mask_row = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + mask_row).to(tl.int64)
    first_word = tl.program_id(1) * (BLOCK // 32)
    word = first_word + tl.arange(0, BLOCK // 32)
    bits = tl.load(bits_ptr + mask_row * bits_stride + word, mask=word * 32 < vocab, other=0)
    # [BLOCK // 32, 32]: one load a word, one bit a lane
    is_allowed = (bits[:, None] >> tl.arange(0, 32)[None, :]) & 1
    token = word[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(logits_ptr + row * logits_stride + token, float("-inf"), mask=(is_allowed == 0) & (token < vocab))


def apply_bitmask_triton(
    # [N, V] any float dtype, any row stride, in and out
    logits: torch.Tensor,
    # [G, ceil(V / 32)] int32, 1 = allowed
    bits: torch.Tensor,
    # [G] int32: the logits row of each mask; no row twice
    rows: torch.Tensor,
) -> None:
    """Mask G of the N rows; the others are neither read nor written."""
    assert logits.stride(1) == 1, f"logits have inner stride {logits.stride(1)}: their rows must be contiguous"
    assert bits.stride(1) == 1, f"bits have inner stride {bits.stride(1)}: their rows must be contiguous"
    num_masks, vocab = bits.shape[0], logits.shape[1]
    assert bits.shape[1] * 32 >= vocab, f"masks of {bits.shape[1]} words cover {bits.shape[1] * 32} of {vocab} tokens"
    if num_masks == 0:
        return
    _bitmask_kernel[(num_masks, cdiv(vocab, _BLOCK))](
        logits, logits.stride(0), bits, bits.stride(0), rows, vocab, BLOCK=_BLOCK
    )


def apply_bitmask_torch(
    # [N, V] any float dtype, any row stride, in and out
    logits: torch.Tensor,
    # [G, ceil(V / 32)] int32, 1 = allowed
    bits: torch.Tensor,
    # [G] int32: the logits row of each mask; no row twice
    rows: torch.Tensor,
) -> None:
    """Torch reference of `apply_bitmask`."""
    vocab = logits.shape[1]
    lanes = torch.arange(32, dtype=torch.int32, device=bits.device)
    is_masked = (bits.unsqueeze(2).bitwise_right_shift(lanes) & 1).flatten(1)[:, :vocab] == 0
    logits[rows] = logits[rows].masked_fill_(is_masked, float("-inf"))


apply_bitmask = dispatch(apply_bitmask_triton, apply_bitmask_torch)


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    return [
        AotCase(
            kernel=_bitmask_kernel,
            signature={
                "logits_ptr": f"*{dtype}",
                "logits_stride": "i32",
                "bits_ptr": "*i32",
                "bits_stride": "i32",
                "rows_ptr": "*i32",
                "vocab": "i32",
            },
            constexprs={"BLOCK": _BLOCK},
        )
        for dtype in ("bf16", "fp32", "fp64")
    ]
