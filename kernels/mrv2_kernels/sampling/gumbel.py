"""Draw one token a logits row: ``argmax(logits / T + g)``, or ``argmax(logits)`` where T = 0.

No softmax and no [N, V] tensor: one program per block of the vocabulary keeps its best token, a second
kernel picks the best of a row's blocks.  Greedy and random rows share both launches.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._numerics import accumulator_dtype
from mrv2_kernels._triton import cdiv, next_power_of_2, tl, triton
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.sampling.noise import exponential_fp32, exponential_fp64, gumbel_noise_torch

_BLOCK = 1024
# token ids travel through the partial results as float32, exactly
_MAX_VOCAB = 1 << 24


@triton.jit
def gumbel_score(logits, temperature, seed, position, token, SCALED: tl.constexpr):
    """Return ``logits / temperature + g`` of tokens (any shape), in the dtype of `logits`: float32 or float64.

    `SCALED` logits are divided already.  All variants that promise the same tokens compare this.
    """
    if logits.dtype == tl.float64:
        noise = exponential_fp64(seed, position, token)
        if not SCALED:
            logits = logits / temperature.to(tl.float64)
    else:
        noise = exponential_fp32(seed, position, token)
        if not SCALED:
            logits = tl.div_rn(logits, temperature)
    return logits - tl.log(noise)


@triton.jit
def _block_argmax_kernel(
    partial_ptr,
    logits_ptr,
    logits_stride,
    logit_slots_ptr,
    positions_ptr,
    temperature_ptr,
    seeds_ptr,
    vocab,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    num_blocks = tl.num_programs(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits_ptr + row * logits_stride + token, mask=token < vocab, other=float("-inf"))
    score = score.to(partial_ptr.dtype.element_ty)
    slot = tl.load(logit_slots_ptr + row).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot)
    if temperature != 0.0:
        score = gumbel_score(score, temperature, tl.load(seeds_ptr + slot), tl.load(positions_ptr + row), token, SCALED)
    has_nan = tl.max((score != score).to(tl.int32), axis=0) > 0
    best, index = tl.max(score, axis=0, return_indices=True)
    best = tl.where(has_nan, float("nan"), best)
    out_ptr = partial_ptr + row * 2 * num_blocks + block
    tl.store(out_ptr, best)
    tl.store(out_ptr + num_blocks, (block * BLOCK + index).to(partial_ptr.dtype.element_ty))


@triton.jit
def _pick_block_kernel(sampled_ptr, sampled_stride, partial_ptr, num_blocks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    mask = block < num_blocks
    row_ptr = partial_ptr + row * 2 * num_blocks + block
    score = tl.load(row_ptr, mask=mask, other=float("-inf"))
    token = tl.load(row_ptr + num_blocks, mask=mask, other=0.0)
    has_nan = tl.max((score != score).to(tl.int32), axis=0) > 0
    best = tl.max(score, axis=0)
    winner = tl.min(tl.where(score == best, token, float("inf")), axis=0)
    none = has_nan | (best == float("-inf"))
    tl.store(sampled_ptr + row * sampled_stride, tl.where(none, -1.0, winner).to(tl.int64))


def gumbel_sample_triton(
    # [N, V] any float dtype, any row stride
    logits: torch.Tensor,
    # [N] int64, out
    sampled: torch.Tensor,
    # [N] int32: row of the request state
    logit_slots: torch.Tensor,
    # [N] int32: position of the input token that produced the row
    positions: torch.Tensor,
    # [R] float32, 0 = greedy
    temperature: torch.Tensor,
    # [R] int64
    seeds: torch.Tensor,
    *,
    scaled: bool = False,
) -> None:
    """Write the drawn token of each row; -1 where a row holds NaN or nothing above -inf.

    Ties go to the lowest id.  `scaled` says that the logits are already divided by the temperature,
    which then only tells greedy rows from random ones.  Arithmetic is float64 for float64 logits,
    else float32.
    """
    num_rows, vocab = check_logits(logits)
    if num_rows == 0:
        return
    num_blocks = cdiv(vocab, _BLOCK)
    partial = torch.empty(num_rows, 2, num_blocks, dtype=accumulator_dtype(logits.dtype), device=logits.device)
    _block_argmax_kernel[(num_rows, num_blocks)](
        partial,
        logits,
        logits.stride(0),
        logit_slots,
        positions,
        temperature,
        seeds,
        vocab,
        SCALED=scaled,
        BLOCK=_BLOCK,
    )
    _pick_block_kernel[(num_rows,)](
        sampled, sampled.stride(0), partial, num_blocks, BLOCK=next_power_of_2(num_blocks), num_warps=1
    )


def gumbel_sample_torch(
    # [N, V] any float dtype, any row stride
    logits: torch.Tensor,
    # [N] int64, out
    sampled: torch.Tensor,
    # [N] int32: row of the request state
    logit_slots: torch.Tensor,
    # [N] int32: position of the input token that produced the row
    positions: torch.Tensor,
    # [R] float32, 0 = greedy
    temperature: torch.Tensor,
    # [R] int64
    seeds: torch.Tensor,
    *,
    scaled: bool = False,
) -> None:
    """Torch reference of `gumbel_sample`."""
    num_rows, vocab = check_logits(logits)
    if num_rows == 0:
        return
    score = logits.to(accumulator_dtype(logits.dtype))
    row_temperature = temperature[logit_slots]
    random_rows = row_temperature.nonzero().squeeze(1)
    if random_rows.shape[0] > 0:
        noise = gumbel_noise_torch(seeds[logit_slots[random_rows]], positions[random_rows], vocab, score.dtype)
        divisor = 1.0 if scaled else row_temperature[random_rows].unsqueeze(1).to(score.dtype)
        noise += score[random_rows] / divisor
        score = noise if random_rows.shape[0] == num_rows else score.index_copy(0, random_rows, noise)
    best, token = score.max(dim=1)
    sampled.copy_(token.masked_fill(best.isnan() | (best == float("-inf")), -1))


gumbel_sample = dispatch(gumbel_sample_triton, gumbel_sample_torch)


def check_logits(logits: torch.Tensor) -> tuple[int, int]:
    """Return rows and vocabulary of [N, V] logits that the sampling kernels can take."""
    assert logits.stride(1) == 1, f"logits have inner stride {logits.stride(1)}: their rows must be contiguous"
    assert logits.shape[1] < _MAX_VOCAB, f"vocabulary of {logits.shape[1]} must be below {_MAX_VOCAB}"
    return logits.shape[0], logits.shape[1]


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    blocks = [
        AotCase(
            kernel=_block_argmax_kernel,
            signature={
                "partial_ptr": "*fp64" if dtype == "fp64" else "*fp32",
                "logits_ptr": f"*{dtype}",
                "logits_stride": "i32",
                "logit_slots_ptr": "*i32",
                "positions_ptr": "*i32",
                "temperature_ptr": "*fp32",
                "seeds_ptr": "*i64",
                "vocab": "i32",
            },
            constexprs={"SCALED": dtype == "fp32", "BLOCK": _BLOCK},
        )
        for dtype in ("bf16", "fp32", "fp64")
    ]
    picks = [
        AotCase(
            kernel=_pick_block_kernel,
            signature={
                "sampled_ptr": "*i64",
                "sampled_stride": "i32",
                "partial_ptr": f"*{dtype}",
                "num_blocks": "i32",
            },
            constexprs={"BLOCK": 256},
            num_warps=1,
        )
        for dtype in ("fp32", "fp64")
    ]
    return blocks + picks
