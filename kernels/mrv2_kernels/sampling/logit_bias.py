"""Allowed tokens, logit bias and minimum length, in place, in one launch.

A request's lists lie packed in one row of int32 words:

    [num_allowed, num_biased, num_stop, min_len | allowed ids | biased ids | their biases (float32 bits) | stop ids]

In this order: with any allowed ids every other logit becomes -inf; the bias is added; while the
sampled token would stand before position `min_len` (= prompt + min_tokens) the stop ids become -inf.
NaN stays NaN, so that a broken row is still found out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._numerics import accumulator_dtype
from mrv2_kernels._triton import tl, triton
from mrv2_kernels.aot_case import AotCase

HEADER_WORDS = 4
# most ids in a list of either kind
MAX_IDS = 1024
_BLOCK = 4096
_NUM_WARPS = 8


def bias_words(
    allowed: Sequence[int], biased: Sequence[int], biases: Sequence[float], stop_ids: Sequence[int], min_len: int
) -> np.ndarray:
    """Return the packed row of a request. [4 + allowed + 2 * biased + stop] int32"""
    return np.concatenate(
        [
            np.array([len(allowed), len(biased), len(stop_ids), min_len], dtype=np.int32),
            np.array(allowed, dtype=np.int32),
            np.array(biased, dtype=np.int32),
            np.array(biases, dtype=np.float32).view(np.int32),
            np.array(stop_ids, dtype=np.int32),
        ]
    )


@triton.jit
def mask_ids(row_ptr, ids, mask, ACC: tl.constexpr):
    """Set logits to -inf, except NaN."""
    logits = tl.load(row_ptr + ids, mask=mask, other=0.0).to(ACC)
    tl.store(row_ptr + ids, tl.where(logits != logits, logits, float("-inf")), mask=mask)


@triton.jit
def _bias_kernel(
    logits_ptr,
    logits_stride,
    logit_slots_ptr,
    positions_ptr,
    lists_ptr,
    lists_stride,
    vocab,
    ACC: tl.constexpr,
    HEADER: tl.constexpr,
    MAX_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    words_ptr = lists_ptr + tl.load(logit_slots_ptr + row).to(tl.int64) * lists_stride
    row_ptr = logits_ptr + row * logits_stride
    num_allowed = tl.load(words_ptr)
    num_biased = tl.load(words_ptr + 1)
    num_stop = tl.load(words_ptr + 2)
    min_len = tl.load(words_ptr + 3)
    entry = tl.arange(0, MAX_IDS)
    ids_ptr = words_ptr + HEADER
    if num_allowed > 0:
        mask = entry < num_allowed
        ids = tl.load(ids_ptr + entry, mask=mask, other=0)
        kept = tl.load(row_ptr + ids, mask=mask, other=0.0)
        tl.debug_barrier()
        for base in range(0, vocab, BLOCK):
            token = base + tl.arange(0, BLOCK)
            mask_ids(row_ptr, token, token < vocab, ACC)
        tl.debug_barrier()
        tl.store(row_ptr + ids, kept, mask=mask)
        tl.debug_barrier()
    ids_ptr += num_allowed
    if num_biased > 0:
        mask = entry < num_biased
        ids = tl.load(ids_ptr + entry, mask=mask, other=0)
        bias = tl.load(ids_ptr + num_biased + entry, mask=mask, other=0).to(tl.float32, bitcast=True)
        logits = tl.load(row_ptr + ids, mask=mask, other=0.0).to(ACC)
        tl.store(row_ptr + ids, logits + bias.to(ACC), mask=mask)
        tl.debug_barrier()
    ids_ptr += 2 * num_biased
    if (num_stop > 0) & (tl.load(positions_ptr + row) + 1 < min_len):
        mask = entry < num_stop
        mask_ids(row_ptr, tl.load(ids_ptr + entry, mask=mask, other=0), mask, ACC)


def apply_logit_bias_triton(
    # [N, V] any float dtype, any row stride, in and out
    logits: torch.Tensor,
    # [N] int32: row of the request state
    logit_slots: torch.Tensor,
    # [N] int32: position of the input token of the row
    positions: torch.Tensor,
    # [R, W] int32, packed as above; a row of zeros = off; ids are distinct within a list
    lists: torch.Tensor,
) -> None:
    """Mask what is not allowed, add biases, mask stop ids before the minimum length."""
    assert logits.stride(1) == 1, f"logits have inner stride {logits.stride(1)}: their rows must be contiguous"
    num_rows, vocab = logits.shape
    if num_rows == 0:
        return
    _bias_kernel[(num_rows,)](
        logits,
        logits.stride(0),
        logit_slots,
        positions,
        lists,
        lists.stride(0),
        vocab,
        ACC=tl.float64 if logits.dtype == torch.float64 else tl.float32,
        HEADER=HEADER_WORDS,
        MAX_IDS=MAX_IDS,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )


def apply_logit_bias_torch(
    # [N, V] any float dtype, any row stride, in and out
    logits: torch.Tensor,
    # [N] int32: row of the request state
    logit_slots: torch.Tensor,
    # [N] int32: position of the input token of the row
    positions: torch.Tensor,
    # [R, W] int32, packed as above; a row of zeros = off; ids are distinct within a list
    lists: torch.Tensor,
) -> None:
    """Torch reference of `apply_logit_bias`."""
    slots = logit_slots.tolist()
    headers = lists[logit_slots, :HEADER_WORDS].tolist()
    acc = accumulator_dtype(logits.dtype)
    for row, (num_allowed, num_biased, num_stop, min_len) in enumerate(headers):
        ids, bias_ids, biases, stop_ids = lists[slots[row], HEADER_WORDS:].split_with_sizes(
            [num_allowed, num_biased, num_biased, lists.shape[1] - HEADER_WORDS - num_allowed - 2 * num_biased]
        )
        if num_allowed:
            is_dropped = torch.ones(logits.shape[1], dtype=torch.bool, device=logits.device)
            is_dropped[ids.long()] = False
            logits[row].masked_fill_(is_dropped & ~logits[row].isnan(), float("-inf"))
        if num_biased:
            old = logits[row, bias_ids.long()].to(acc)
            logits[row, bias_ids.long()] = (old + biases.view(torch.float32)).to(logits.dtype)
        if num_stop and int(positions[row]) + 1 < min_len:
            stop = stop_ids[:num_stop].long()
            logits[row, stop] = torch.where(logits[row, stop].isnan(), logits[row, stop], float("-inf"))


apply_logit_bias = dispatch(apply_logit_bias_triton, apply_logit_bias_torch)


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    return [
        AotCase(
            kernel=_bias_kernel,
            signature={
                "logits_ptr": f"*{dtype}",
                "logits_stride": "i32",
                "logit_slots_ptr": "*i32",
                "positions_ptr": "*i32",
                "lists_ptr": "*i32",
                "lists_stride": "i32",
                "vocab": "i32",
            },
            constexprs={
                "ACC": tl.float64 if dtype == "fp64" else tl.float32,
                "HEADER": HEADER_WORDS,
                "MAX_IDS": MAX_IDS,
                "BLOCK": _BLOCK,
            },
            num_warps=_NUM_WARPS,
        )
        for dtype in ("bf16", "fp32", "fp64")
    ]
