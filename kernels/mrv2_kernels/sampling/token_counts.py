"""Count a request's tokens beside its history, without a table over the vocabulary.

`token_counts[row, i]` belongs to the token at index i of the row's history:

    0       a later occurrence of the same token speaks for it
    1 + c   its last occurrence; it occurred c times among the outputs (0 = in the prompt only)

So the distinct tokens of a row, with their counts, are the entries above 0: as many words as the
history has, whatever the vocabulary.  A new row is built by comparing each token with each; after
that a new token takes its count over from the entry that spoke for it so far.

Legend: B requests of the step, R rows, L tokens a row can hold.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import cdiv, tl, triton
from mrv2_kernels.aot_case import AotCase

_BLOCK_I = 128
_BLOCK_J = 64
_BLOCK = 1024
# rows that lack more tokens than this are built anew by the reference
_FEW = 8


@triton.jit
def has_penalty(penalties_ptr, slot):
    """Say whether a row has any penalty: (repetition, frequency, presence), repetition 0 or 1 = off."""
    repetition = tl.load(penalties_ptr + slot * 3)
    frequency = tl.load(penalties_ptr + slot * 3 + 1)
    presence = tl.load(penalties_ptr + slot * 3 + 2)
    return ((repetition != 0.0) & (repetition != 1.0)) | (frequency != 0.0) | (presence != 0.0)


@triton.jit
def _build_counts_kernel(
    token_counts_ptr,
    counted_len_ptr,
    token_ids_ptr,
    row_len,
    prompt_len_ptr,
    total_len_ptr,
    penalties_ptr,
    idx_mapping_ptr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    slot = tl.load(idx_mapping_ptr + tl.program_id(0)).to(tl.int64)
    total = tl.minimum(tl.load(total_len_ptr + slot), row_len)
    start = tl.program_id(1) * BLOCK_I
    is_new = (tl.load(counted_len_ptr + slot) == 0) & (start < total)
    if is_new & has_penalty(penalties_ptr, slot):
        prompt_len = tl.load(prompt_len_ptr + slot)
        history_ptr = token_ids_ptr + slot * row_len
        i = start + tl.arange(0, BLOCK_I)
        tokens = tl.load(history_ptr + i, mask=i < total, other=-1)
        num_later = tl.zeros([BLOCK_I], tl.int32)
        num_outputs = tl.zeros([BLOCK_I], tl.int32)
        for base in range(0, total, BLOCK_J):
            j = base + tl.arange(0, BLOCK_J)
            others = tl.load(history_ptr + j, mask=j < total, other=-2)
            same = tokens[:, None] == others[None, :]
            num_later += tl.sum((same & (j[None, :] > i[:, None])).to(tl.int32), axis=1)
            num_outputs += tl.sum((same & (j[None, :] >= prompt_len)).to(tl.int32), axis=1)
        counts = tl.where(num_later > 0, 0, 1 + num_outputs)
        tl.store(token_counts_ptr + slot * row_len + i, counts, mask=i < total)


@triton.jit
def _extend_counts_kernel(
    token_counts_ptr,
    counted_len_ptr,
    token_ids_ptr,
    row_len,
    total_len_ptr,
    penalties_ptr,
    idx_mapping_ptr,
    BLOCK: tl.constexpr,
):
    slot = tl.load(idx_mapping_ptr + tl.program_id(0)).to(tl.int64)
    if has_penalty(penalties_ptr, slot):
        total = tl.minimum(tl.load(total_len_ptr + slot), row_len)
        counted = tl.load(counted_len_ptr + slot)
        history_ptr = token_ids_ptr + slot * row_len
        counts_ptr = token_counts_ptr + slot * row_len
        if counted > 0:
            for n in range(counted, total):
                token = tl.load(history_ptr + n)
                count = 1
                for base in range(0, n, BLOCK):
                    i = base + tl.arange(0, BLOCK)
                    counts = tl.load(counts_ptr + i, mask=i < n, other=0).to(tl.int32)
                    tokens = tl.load(history_ptr + i, mask=i < n, other=-1)
                    spoke = (counts > 0) & (tokens == token)
                    count = tl.maximum(count, tl.max(tl.where(spoke, counts, 0), axis=0))
                    tl.store(counts_ptr + i, tl.zeros([BLOCK], tl.int32), mask=spoke)
                tl.store(counts_ptr + n, count + 1)
                tl.debug_barrier()
        tl.store(counted_len_ptr + slot, total)


def update_token_counts_triton(
    # [R, L] int16 or int32, in and out
    token_counts: torch.Tensor,
    # [R] int32, in and out: tokens of the history that are counted, 0 = the row is new
    counted_len: torch.Tensor,
    # [R, L] int32
    token_ids: torch.Tensor,
    # [R] int32
    prompt_len: torch.Tensor,
    # [R] int32
    total_len: torch.Tensor,
    # [R, 3] float32: repetition (0 or 1 = off), frequency, presence
    penalties: torch.Tensor,
    # [B] int32
    idx_mapping: torch.Tensor,
    *,
    has_new: bool,
) -> None:
    """Count what was appended to the histories of rows with a penalty; others are not touched.

    `has_new` must be True if a row with `counted_len` 0 and a penalty may be among them.
    """
    _check(token_counts, token_ids)
    num_reqs, row_len = idx_mapping.shape[0], token_ids.shape[1]
    if num_reqs == 0:
        return
    if has_new:
        _build_counts_kernel[(num_reqs, cdiv(row_len, _BLOCK_I))](
            token_counts,
            counted_len,
            token_ids,
            row_len,
            prompt_len,
            total_len,
            penalties,
            idx_mapping,
            BLOCK_I=_BLOCK_I,
            BLOCK_J=_BLOCK_J,
        )
    _extend_counts_kernel[(num_reqs,)](
        token_counts, counted_len, token_ids, row_len, total_len, penalties, idx_mapping, BLOCK=_BLOCK
    )


def update_token_counts_torch(
    # [R, L] int16 or int32, in and out
    token_counts: torch.Tensor,
    # [R] int32, in and out: tokens of the history that are counted, 0 = the row is new
    counted_len: torch.Tensor,
    # [R, L] int32
    token_ids: torch.Tensor,
    # [R] int32
    prompt_len: torch.Tensor,
    # [R] int32
    total_len: torch.Tensor,
    # [R, 3] float32: repetition (0 or 1 = off), frequency, presence
    penalties: torch.Tensor,
    # [B] int32
    idx_mapping: torch.Tensor,
    *,
    has_new: bool,
) -> None:
    """Torch reference of `update_token_counts`."""
    _check(token_counts, token_ids)
    slots = idx_mapping[rows_with_penalty(penalties[idx_mapping])]
    totals = total_len[slots].clamp(max=token_ids.shape[1])
    columns = zip(slots.tolist(), totals.tolist(), counted_len[slots].tolist(), prompt_len[slots].tolist())
    for slot, total, counted, prompt in columns:
        tokens, counts = token_ids[slot, :total], token_counts[slot, :total]
        if counted == 0 or total - counted > _FEW:
            assert counted > 0 or has_new, f"row {slot} is new, but has_new is False"
            counts.copy_(_count(tokens, prompt))
            continue
        for n in range(counted, total):
            spoke = (tokens[:n] == tokens[n]) & (counts[:n] > 0)
            count = int((counts[:n] * spoke).max()) if n else 0
            counts[:n].masked_fill_(spoke, 0)
            counts[n] = max(count, 1) + 1
    counted_len[slots] = totals


update_token_counts = dispatch(update_token_counts_triton, update_token_counts_torch)


def rows_with_penalty(
    # [N, 3] float32
    penalties: torch.Tensor,
) -> torch.Tensor:
    """Return which rows have any penalty. [N] bool"""
    repetition = penalties[:, 0]
    return ((repetition != 0) & (repetition != 1)) | (penalties[:, 1:] != 0).any(dim=1)


# tokens [n] -> [n] int64
def _count(tokens: torch.Tensor, prompt_len: int) -> torch.Tensor:
    distinct, which = tokens.unique(return_inverse=True)
    index = torch.arange(len(tokens))
    last = torch.full((len(distinct),), -1).scatter_reduce_(0, which, index, "amax")
    num_outputs = torch.zeros(len(distinct), dtype=torch.int64).index_add_(0, which, (index >= prompt_len).long())
    return torch.zeros(len(tokens), dtype=torch.int64).index_copy_(0, last, 1 + num_outputs)


def _check(token_counts: torch.Tensor, token_ids: torch.Tensor) -> None:
    assert token_counts.shape == token_ids.shape, (
        f"counts {tuple(token_counts.shape)} do not fit the history {tuple(token_ids.shape)}"
    )
    assert token_counts.is_contiguous() and token_ids.is_contiguous(), "counts and history must be contiguous"


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    common = {
        "counted_len_ptr": "*i32",
        "token_ids_ptr": "*i32",
        "row_len": "i32",
        "total_len_ptr": "*i32",
        "penalties_ptr": "*fp32",
        "idx_mapping_ptr": "*i32",
    }
    cases = []
    for dtype in ("i16", "i32"):
        counts = {"token_counts_ptr": f"*{dtype}"}
        cases += [
            AotCase(
                kernel=_build_counts_kernel,
                signature={**counts, **common, "prompt_len_ptr": "*i32"},
                constexprs={"BLOCK_I": _BLOCK_I, "BLOCK_J": _BLOCK_J},
            ),
            AotCase(kernel=_extend_counts_kernel, signature={**counts, **common}, constexprs={"BLOCK": _BLOCK}),
        ]
    return cases
