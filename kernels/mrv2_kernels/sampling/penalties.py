"""Repetition, frequency and presence penalties, in place, from the counts beside the token history.

For every distinct token t of the row's prompt and outputs, with c_t the times it occurred among the
outputs (the committed ones and the drafts before the row in its request):

    x_t = x_t / repetition  if x_t > 0  else  x_t * repetition
    x_t = x_t - frequency * c_t - presence * [c_t > 0]

Only logits of tokens that occurred are read and written.

Legend: N logits rows, R request rows, L tokens a row can hold, T tokens of the step.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._numerics import accumulator_dtype
from mrv2_kernels._triton import cdiv, tl, triton
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.sampling.token_counts import has_penalty, rows_with_penalty

_BLOCK = 1024


@triton.jit
def _penalise(logits, count, repetition, frequency, presence, ACC: tl.constexpr):
    x = logits.to(ACC)
    if x.dtype == tl.float64:
        x = tl.where(x > 0, x / repetition.to(ACC), x * repetition.to(ACC))
    else:
        x = tl.where(x > 0, tl.div_rn(x, repetition + tl.zeros_like(x)), x * repetition)
    return x - frequency.to(ACC) * count.to(ACC) - tl.where(count > 0, presence.to(ACC), 0.0)


@triton.jit
def _penalties_kernel(
    logits_ptr,
    logits_stride,
    logit_slots_ptr,
    penalties_ptr,
    token_ids_ptr,
    token_counts_ptr,
    row_len,
    total_len_ptr,
    local_positions_ptr,
    logits_indices_ptr,
    input_ids_ptr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(logit_slots_ptr + row).to(tl.int64)
    if has_penalty(penalties_ptr, slot):
        repetition = tl.load(penalties_ptr + slot * 3)
        repetition = tl.where(repetition == 0.0, 1.0, repetition)
        frequency = tl.load(penalties_ptr + slot * 3 + 1)
        presence = tl.load(penalties_ptr + slot * 3 + 2)
        row_ptr = logits_ptr + row * logits_stride
        history_ptr = token_ids_ptr + slot * row_len
        counts_ptr = token_counts_ptr + slot * row_len
        total = tl.minimum(tl.load(total_len_ptr + slot), row_len)
        num_drafts = tl.load(local_positions_ptr + row)
        # draft k = 1, 2, ... of the request is the input token k places behind its first
        drafts_ptr = input_ids_ptr + tl.load(logits_indices_ptr + row) - num_drafts
        start = tl.program_id(1) * BLOCK
        if start < total:
            i = start + tl.arange(0, BLOCK)
            tokens = tl.load(history_ptr + i, mask=i < total, other=0)
            counts = tl.load(counts_ptr + i, mask=i < total, other=0).to(tl.int32)
            is_entry = counts > 0
            counts -= 1
            for k in range(1, num_drafts + 1):
                counts += (tokens == tl.load(drafts_ptr + k)).to(tl.int32)
            logits = tl.load(row_ptr + tokens, mask=is_entry, other=0.0)
            new = _penalise(logits, counts, repetition, frequency, presence, ACC)
            tl.store(row_ptr + tokens, new, mask=is_entry)
        if start == 0:
            # drafts that the history does not hold, each at its first place
            for k in range(1, num_drafts + 1):
                token = tl.load(drafts_ptr + k)
                num_before = 0
                count = 0
                for other in range(1, num_drafts + 1):
                    is_same = (tl.load(drafts_ptr + other) == token).to(tl.int32)
                    count += is_same
                    num_before += tl.where(other < k, is_same, 0)
                for base in range(0, total, BLOCK):
                    i = base + tl.arange(0, BLOCK)
                    tokens = tl.load(history_ptr + i, mask=i < total, other=-1)
                    num_before += tl.sum((tokens == token).to(tl.int32), axis=0)
                if num_before == 0:
                    one = tl.arange(0, 1)
                    logits = tl.load(row_ptr + token + one)
                    new = _penalise(logits, count + one, repetition, frequency, presence, ACC)
                    tl.store(row_ptr + token + one, new)


def apply_penalties_triton(
    # [N, V] any float dtype, any row stride, in and out
    logits: torch.Tensor,
    # [N] int32: row of the request state
    logit_slots: torch.Tensor,
    # [R, 3] float32: repetition (0 or 1 = off), frequency, presence
    penalties: torch.Tensor,
    # [R, L] int32
    token_ids: torch.Tensor,
    # [R, L] int16 or int32, up to date (`update_token_counts`)
    token_counts: torch.Tensor,
    # [R] int32: committed tokens, prompt and outputs
    total_len: torch.Tensor,
    # [N] int32: place of the row in its request = drafts before it
    local_positions: torch.Tensor,
    # [N] int32: index of the row's input token in `input_ids`
    logits_indices: torch.Tensor,
    # [T] int32
    input_ids: torch.Tensor,
) -> None:
    """Penalise the tokens that occurred; rows without a penalty are not touched."""
    assert logits.stride(1) == 1, f"logits have inner stride {logits.stride(1)}: their rows must be contiguous"
    num_rows, row_len = logits.shape[0], token_ids.shape[1]
    if num_rows == 0:
        return
    _penalties_kernel[(num_rows, cdiv(row_len, _BLOCK))](
        logits,
        logits.stride(0),
        logit_slots,
        penalties,
        token_ids,
        token_counts,
        row_len,
        total_len,
        local_positions,
        logits_indices,
        input_ids,
        ACC=tl.float64 if logits.dtype == torch.float64 else tl.float32,
        BLOCK=_BLOCK,
    )


def apply_penalties_torch(
    # [N, V] any float dtype, any row stride, in and out
    logits: torch.Tensor,
    # [N] int32: row of the request state
    logit_slots: torch.Tensor,
    # [R, 3] float32: repetition (0 or 1 = off), frequency, presence
    penalties: torch.Tensor,
    # [R, L] int32
    token_ids: torch.Tensor,
    # [R, L] int16 or int32, up to date (`update_token_counts`)
    token_counts: torch.Tensor,
    # [R] int32: committed tokens, prompt and outputs
    total_len: torch.Tensor,
    # [N] int32: place of the row in its request = drafts before it
    local_positions: torch.Tensor,
    # [N] int32: index of the row's input token in `input_ids`
    logits_indices: torch.Tensor,
    # [T] int32
    input_ids: torch.Tensor,
) -> None:
    """Torch reference of `apply_penalties`."""
    rows = rows_with_penalty(penalties[logit_slots]).nonzero().squeeze(1)
    slots = logit_slots[rows].long()
    within = torch.arange(token_ids.shape[1], device=logits.device) < total_len[slots].unsqueeze(1)
    which, place = ((token_counts[slots] > 0) & within).nonzero(as_tuple=True)
    tokens = token_ids[slots[which], place].long()
    counts = token_counts[slots[which], place].long() - 1
    num_drafts, first = local_positions[rows].long(), logits_indices[rows].long() - local_positions[rows].long()
    if bool(num_drafts.any()):
        # a draft is one more entry of its row; entries of one token are added up
        owner = torch.arange(len(rows), device=logits.device).repeat_interleave(num_drafts)
        nth = torch.arange(len(owner), device=logits.device) - (num_drafts.cumsum(0) - num_drafts)[owner]
        drafts = input_ids[first[owner] + 1 + nth].long()
        vocab = logits.shape[1]
        keys = torch.cat([which * vocab + tokens, owner * vocab + drafts])
        keys, back = keys.unique(return_inverse=True)
        added = torch.cat([counts, torch.ones_like(drafts)])
        counts = torch.zeros(len(keys), dtype=torch.int64, device=logits.device).index_add_(0, back, added)
        which, tokens = keys // vocab, keys % vocab
    acc = accumulator_dtype(logits.dtype)
    repetition, frequency, presence = penalties[slots[which]].to(acc).unbind(dim=1)
    repetition = torch.where(repetition == 0, 1.0, repetition)
    x = logits[rows[which], tokens].to(acc)
    x = torch.where(x > 0, x / repetition, x * repetition)
    x = x - frequency * counts.to(acc) - presence * (counts > 0)
    logits[rows[which], tokens] = x.to(logits.dtype)


apply_penalties = dispatch(apply_penalties_triton, apply_penalties_torch)


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    return [
        AotCase(
            kernel=_penalties_kernel,
            signature={
                "logits_ptr": f"*{dtype}",
                "logits_stride": "i32",
                "logit_slots_ptr": "*i32",
                "penalties_ptr": "*fp32",
                "token_ids_ptr": "*i32",
                "token_counts_ptr": f"*{counts}",
                "row_len": "i32",
                "total_len_ptr": "*i32",
                "local_positions_ptr": "*i32",
                "logits_indices_ptr": "*i32",
                "input_ids_ptr": "*i32",
            },
            constexprs={"ACC": tl.float64 if dtype == "fp64" else tl.float32, "BLOCK": _BLOCK},
        )
        for dtype, counts in (("bf16", "i16"), ("fp32", "i16"), ("fp32", "i32"), ("fp64", "i16"))
    ]
