"""Mask the last token of every forbidden sequence whose beginning has just been generated, in place.

A request's sequences lie packed in one row of int32 words: ``[num_words | ends | tokens]``, `ends` being
their cumulative lengths.  A sequence of m tokens matches if its first m - 1 are the last m - 1 outputs
(never tokens of the prompt), drafts before the row included; a sequence of one token always does.

Legend: N logits rows, R request rows, L tokens a row can hold, T tokens of the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import tl, triton
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.sampling.logit_bias import mask_ids


def bad_words_row(words: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the packed row of a request. [1 + words + tokens] int32"""
    ends = np.cumsum([len(word) for word in words])
    tokens = [token for word in words for token in word]
    return np.array([len(words), *ends.tolist(), *tokens], dtype=np.int32)


@triton.jit
def _bad_words_kernel(
    logits_ptr,
    logits_stride,
    logit_slots_ptr,
    words_ptr,
    words_stride,
    token_ids_ptr,
    row_len,
    prompt_len_ptr,
    total_len_ptr,
    local_positions_ptr,
    logits_indices_ptr,
    input_ids_ptr,
    ACC: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1)
    slot = tl.load(logit_slots_ptr + row).to(tl.int64)
    packed_ptr = words_ptr + slot * words_stride
    num_words = tl.load(packed_ptr)
    if word < num_words:
        start = tl.load(packed_ptr + word, mask=word > 0, other=0)
        num_prefix = tl.load(packed_ptr + 1 + word) - start - 1
        tokens_ptr = packed_ptr + 1 + num_words + start
        num_drafts = tl.load(local_positions_ptr + row)
        total = tl.minimum(tl.load(total_len_ptr + slot), row_len)
        drafts_ptr = input_ids_ptr + tl.load(logits_indices_ptr + row) - num_drafts
        begin = total + num_drafts - num_prefix
        is_match = (begin >= tl.load(prompt_len_ptr + slot)).to(tl.int32)
        # a prefix that does not fit is not read
        for i in range(tl.where(is_match > 0, num_prefix, 0)):
            place = begin + i
            committed = tl.load(token_ids_ptr + slot * row_len + place, mask=place < total, other=-1)
            draft = tl.load(drafts_ptr + place - total + 1, mask=place >= total, other=-1)
            token = tl.where(place < total, committed, draft)
            is_match &= (token == tl.load(tokens_ptr + i)).to(tl.int32)
        if is_match > 0:
            last = tl.load(tokens_ptr + num_prefix) + tl.arange(0, 1)
            mask_ids(logits_ptr + row * logits_stride, last, last >= 0, ACC)


def apply_bad_words_triton(
    # [N, V] any float dtype, any row stride, in and out
    logits: torch.Tensor,
    # [N] int32: row of the request state
    logit_slots: torch.Tensor,
    # [R, W] int32, packed as above; a row that begins with 0 = off
    words: torch.Tensor,
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
    *,
    max_words: int,
) -> None:
    """Set the logits that would complete a forbidden sequence to -inf; no row has more than `max_words`."""
    assert logits.stride(1) == 1, f"logits have inner stride {logits.stride(1)}: their rows must be contiguous"
    num_rows = logits.shape[0]
    if num_rows == 0 or max_words == 0:
        return
    _bad_words_kernel[(num_rows, max_words)](
        logits,
        logits.stride(0),
        logit_slots,
        words,
        words.stride(0),
        token_ids,
        token_ids.shape[1],
        prompt_len,
        total_len,
        local_positions,
        logits_indices,
        input_ids,
        ACC=tl.float64 if logits.dtype == torch.float64 else tl.float32,
        num_warps=1,
    )


def apply_bad_words_torch(
    # [N, V] any float dtype, any row stride, in and out
    logits: torch.Tensor,
    # [N] int32: row of the request state
    logit_slots: torch.Tensor,
    # [R, W] int32, packed as above; a row that begins with 0 = off
    words: torch.Tensor,
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
    *,
    max_words: int,
) -> None:
    """Torch reference of `apply_bad_words`."""
    counts = words[logit_slots, 0]
    assert not len(counts) or int(counts.max()) <= max_words, f"a row has more than {max_words} bad words"
    for row in counts.nonzero().squeeze(1).tolist():
        slot, num_words = int(logit_slots[row]), int(counts[row])
        packed = words[slot].tolist()
        ends, tokens = packed[1 : 1 + num_words], packed[1 + num_words :]
        outputs = row_outputs(row, slot, token_ids, prompt_len, total_len, local_positions, logits_indices, input_ids)
        hits = []
        for start, end in zip([0, *ends], ends):
            prefix = tokens[start : end - 1]
            if outputs[len(outputs) - len(prefix) :] == prefix and len(prefix) <= len(outputs):
                hits.append(tokens[end - 1])
        masked = torch.tensor(hits, dtype=torch.int64, device=logits.device)
        logits[row, masked] = torch.where(logits[row, masked].isnan(), logits[row, masked], float("-inf"))


apply_bad_words = dispatch(apply_bad_words_triton, apply_bad_words_torch)


def row_outputs(
    row: int,
    slot: int,
    # [R, L], [R], [R], [N], [N], [T] int32, as in `apply_bad_words`
    token_ids: torch.Tensor,
    prompt_len: torch.Tensor,
    total_len: torch.Tensor,
    local_positions: torch.Tensor,
    logits_indices: torch.Tensor,
    input_ids: torch.Tensor,
) -> list[int]:
    """Return the outputs that precede what logits row `row` samples, drafts included; for references."""
    num_drafts, last = int(local_positions[row]), int(logits_indices[row])
    drafts = input_ids[last - num_drafts + 1 : last + 1].tolist() if num_drafts else []
    return token_ids[slot, int(prompt_len[slot]) : int(total_len[slot])].tolist() + drafts


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    return [
        AotCase(
            kernel=_bad_words_kernel,
            signature={
                "logits_ptr": f"*{dtype}",
                "logits_stride": "i32",
                "logit_slots_ptr": "*i32",
                "words_ptr": "*i32",
                "words_stride": "i32",
                "token_ids_ptr": "*i32",
                "row_len": "i32",
                "prompt_len_ptr": "*i32",
                "total_len_ptr": "*i32",
                "local_positions_ptr": "*i32",
                "logits_indices_ptr": "*i32",
                "input_ids_ptr": "*i32",
            },
            constexprs={"ACC": tl.float64 if dtype == "fp64" else tl.float32},
            num_warps=1,
        )
        for dtype in ("bf16", "fp32", "fp64")
    ]
