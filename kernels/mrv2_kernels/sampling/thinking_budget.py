"""Force the end marker of a thought that has used up its budget, in place.

A request's markers lie packed in one row of int32 words: ``[budget, num_start, num_end | start | end]``.
A thought is open if the last start marker (in prompt, outputs or drafts) is followed by no end marker.
Once `budget` tokens were generated in it, the next token of the end marker is forced: the one behind the
longest tail of the thought that begins the marker.  A forced logit becomes 1e9, which no noise outweighs;
a row with NaN keeps it, so that it is still found out.

Legend: N logits rows, R request rows, L tokens a row can hold, T tokens of the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import tl, triton
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.sampling.bad_words import row_outputs

HEADER_WORDS = 3
FORCED_LOGIT = 1e9
_BLOCK = 1024


def thinking_row(budget: int, start: Sequence[int], end: Sequence[int]) -> np.ndarray:
    """Return the packed row of a request. [3 + start + end] int32"""
    return np.array([budget, len(start), len(end), *start, *end], dtype=np.int32)


def forced_token(
    tokens: Sequence[int], prompt_len: int, budget: int, start: Sequence[int], end: Sequence[int]
) -> int | None:
    """Return the token that must follow `tokens` (prompt and outputs); None = any."""
    begin = _behind_last(tokens, start)
    if begin < 0 or _behind_last(tokens, end) >= begin or len(tokens) - max(begin, prompt_len) < budget:
        return None
    thought = list(tokens[begin:])
    for size in range(min(len(end) - 1, len(thought)), 0, -1):
        if thought[len(thought) - size :] == list(end[:size]):
            return end[size]
    return end[0]


def _behind_last(tokens: Sequence[int], marker: Sequence[int]) -> int:
    """Return the index behind the last occurrence of `marker`, -1 if there is none."""
    size, wanted = len(marker), list(marker)
    for at in range(len(tokens) - size, -1, -1):
        if tokens[at] == wanted[0] and list(tokens[at : at + size]) == wanted:
            return at + size
    return -1


@triton.jit
def _token_at(place, history_ptr, drafts_ptr, total, mask):
    committed = tl.load(history_ptr + place, mask=mask & (place < total), other=-1)
    draft = tl.load(drafts_ptr + place - total + 1, mask=mask & (place >= total), other=-1)
    return tl.where(place < total, committed, draft)


@triton.jit
def _last_behind(marker_ptr, size, history_ptr, drafts_ptr, total, length, BLOCK: tl.constexpr):
    """Return the index behind the marker's last occurrence in `length` tokens, -1 if there is none."""
    last = tl.full([BLOCK], -1, tl.int32)
    for base in range(0, length, BLOCK):
        at = base + tl.arange(0, BLOCK)
        is_match = at + size <= length
        for i in range(size):
            token = _token_at(at + i, history_ptr, drafts_ptr, total, is_match)
            is_match = is_match & (token == tl.load(marker_ptr + i))
        last = tl.maximum(last, tl.where(is_match, at + size, -1))
    return tl.max(last, axis=0)


@triton.jit
def _thinking_budget_kernel(
    logits_ptr,
    logits_stride,
    logit_slots_ptr,
    markers_ptr,
    markers_stride,
    token_ids_ptr,
    row_len,
    prompt_len_ptr,
    total_len_ptr,
    local_positions_ptr,
    logits_indices_ptr,
    input_ids_ptr,
    FORCED: tl.constexpr,
    HEADER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(logit_slots_ptr + row).to(tl.int64)
    words_ptr = markers_ptr + slot * markers_stride
    num_end = tl.load(words_ptr + 2)
    if num_end > 0:
        budget = tl.load(words_ptr)
        num_start = tl.load(words_ptr + 1)
        start_ptr = words_ptr + HEADER
        end_ptr = start_ptr + num_start
        num_drafts = tl.load(local_positions_ptr + row)
        total = tl.minimum(tl.load(total_len_ptr + slot), row_len)
        length = total + num_drafts
        history_ptr = token_ids_ptr + slot * row_len
        drafts_ptr = input_ids_ptr + tl.load(logits_indices_ptr + row) - num_drafts
        begin = _last_behind(start_ptr, num_start, history_ptr, drafts_ptr, total, length, BLOCK)
        closed = _last_behind(end_ptr, num_end, history_ptr, drafts_ptr, total, length, BLOCK)
        spent = length - tl.maximum(begin, tl.load(prompt_len_ptr + slot))
        if (begin > closed) & (spent >= budget):
            num_done = 0
            for size in range(1, num_end):
                is_tail = (length - size >= begin).to(tl.int32)
                for i in range(size):
                    token = _token_at(length - size + i, history_ptr, drafts_ptr, total, is_tail > 0)
                    is_tail &= (token == tl.load(end_ptr + i)).to(tl.int32)
                num_done = tl.where(is_tail > 0, size, num_done)
            ptr = logits_ptr + row * logits_stride + tl.load(end_ptr + num_done)
            logit = tl.load(ptr).to(tl.float32)
            tl.store(ptr, tl.where(logit != logit, logit, FORCED))


def apply_thinking_budget_triton(
    # [N, V] any float dtype, any row stride, in and out
    logits: torch.Tensor,
    # [N] int32: row of the request state
    logit_slots: torch.Tensor,
    # [R, W] int32, packed as above; a row of zeros = off
    markers: torch.Tensor,
    # [R, L] int32
    token_ids: torch.Tensor,
    # [R] int32
    prompt_len: torch.Tensor,
    # [R] int32: committed tokens, prompt and outputs
    total_len: torch.Tensor,
    # [N] int32: place of the row in its request = drafts before it
    local_positions: torch.Tensor,
    # [N] int32: index of the row's input token in `input_ids`
    logits_indices: torch.Tensor,
    # [T] int32
    input_ids: torch.Tensor,
) -> None:
    """Force the end marker where a thought is over budget; other rows are not touched."""
    assert logits.stride(1) == 1, f"logits have inner stride {logits.stride(1)}: their rows must be contiguous"
    if logits.shape[0] == 0:
        return
    _thinking_budget_kernel[(logits.shape[0],)](
        logits,
        logits.stride(0),
        logit_slots,
        markers,
        markers.stride(0),
        token_ids,
        token_ids.shape[1],
        prompt_len,
        total_len,
        local_positions,
        logits_indices,
        input_ids,
        FORCED=FORCED_LOGIT,
        HEADER=HEADER_WORDS,
        BLOCK=_BLOCK,
    )


def apply_thinking_budget_torch(
    # [N, V] any float dtype, any row stride, in and out
    logits: torch.Tensor,
    # [N] int32: row of the request state
    logit_slots: torch.Tensor,
    # [R, W] int32, packed as above; a row of zeros = off
    markers: torch.Tensor,
    # [R, L] int32
    token_ids: torch.Tensor,
    # [R] int32
    prompt_len: torch.Tensor,
    # [R] int32: committed tokens, prompt and outputs
    total_len: torch.Tensor,
    # [N] int32: place of the row in its request = drafts before it
    local_positions: torch.Tensor,
    # [N] int32: index of the row's input token in `input_ids`
    logits_indices: torch.Tensor,
    # [T] int32
    input_ids: torch.Tensor,
) -> None:
    """Torch reference of `apply_thinking_budget`."""
    for row in markers[logit_slots, 2].nonzero().squeeze(1).tolist():
        slot = int(logit_slots[row])
        packed, prompt = markers[slot].tolist(), int(prompt_len[slot])
        budget, num_start, num_end = packed[:HEADER_WORDS]
        words = packed[HEADER_WORDS : HEADER_WORDS + num_start + num_end]
        tokens = token_ids[slot, :prompt].tolist() + row_outputs(
            row, slot, token_ids, prompt_len, total_len, local_positions, logits_indices, input_ids
        )
        token = forced_token(tokens, prompt, budget, words[:num_start], words[num_start:])
        if token is not None and not bool(logits[row, token].isnan()):
            logits[row, token] = FORCED_LOGIT


apply_thinking_budget = dispatch(apply_thinking_budget_triton, apply_thinking_budget_torch)


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    return [
        AotCase(
            kernel=_thinking_budget_kernel,
            signature={
                "logits_ptr": f"*{dtype}",
                "logits_stride": "i32",
                "logit_slots_ptr": "*i32",
                "markers_ptr": "*i32",
                "markers_stride": "i32",
                "token_ids_ptr": "*i32",
                "row_len": "i32",
                "prompt_len_ptr": "*i32",
                "total_len_ptr": "*i32",
                "local_positions_ptr": "*i32",
                "logits_indices_ptr": "*i32",
                "input_ids_ptr": "*i32",
            },
            constexprs={"FORCED": FORCED_LOGIT, "HEADER": HEADER_WORDS, "BLOCK": _BLOCK},
        )
        for dtype in ("bf16", "fp32", "fp64")
    ]
