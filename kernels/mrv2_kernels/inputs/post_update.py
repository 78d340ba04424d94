"""Commit a step to the request state on the device: last token, history, lengths.

The host never needs these numbers to build the next step; it learns them later, from the output copy.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import cdiv, next_power_of_2, tl, triton
from mrv2_kernels.aot_case import AotCase

_BLOCK = 128
_WARP = 32


@triton.jit(do_not_specialize=["num_reqs"])
def _count_kernel(
    num_sampled_ptr,
    num_rejected_ptr,
    idx_mapping_ptr,
    seq_lens_ptr,
    prefill_len_ptr,
    cu_num_logits_ptr,
    num_reqs,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = req < num_reqs
    slot = tl.load(idx_mapping_ptr + req, mask=mask, other=0).to(tl.int64)
    prefill_len = tl.load(prefill_len_ptr + slot, mask=mask, other=0)
    yields = tl.load(seq_lens_ptr + req, mask=mask, other=0) >= prefill_len
    last_row = tl.load(cu_num_logits_ptr + req + 1, mask=mask, other=0)
    num_logits = last_row - tl.load(cu_num_logits_ptr + req, mask=mask, other=0)
    num_sampled = tl.load(num_sampled_ptr + req, mask=mask, other=0)
    tl.store(num_rejected_ptr + req, tl.where(yields, num_logits - num_sampled, 0), mask=mask)
    tl.store(num_sampled_ptr + req, tl.where(yields, num_sampled, 0), mask=mask)


def count_sampled_and_rejected_triton(
    # [>= B] int32, in and out
    num_sampled: torch.Tensor,
    # [>= B] int32, out
    num_rejected: torch.Tensor,
    # [B] int32, exactly B long
    idx_mapping: torch.Tensor,
    # [>= B] int32
    seq_lens: torch.Tensor,
    # [R] int32
    prefill_len: torch.Tensor,
    # [>= B + 1] int32
    cu_num_logits: torch.Tensor,
) -> None:
    """Set ``num_rejected = num_logits - num_sampled``; both become 0 for a non-final prefill chunk."""
    num_reqs = idx_mapping.shape[0]
    if num_reqs == 0:
        return
    _count_kernel[(cdiv(num_reqs, _BLOCK),)](
        num_sampled,
        num_rejected,
        idx_mapping,
        seq_lens,
        prefill_len,
        cu_num_logits,
        num_reqs,
        BLOCK=_BLOCK,
    )


def count_sampled_and_rejected_torch(
    # [>= B] int32, in and out
    num_sampled: torch.Tensor,
    # [>= B] int32, out
    num_rejected: torch.Tensor,
    # [B] int32, exactly B long
    idx_mapping: torch.Tensor,
    # [>= B] int32
    seq_lens: torch.Tensor,
    # [R] int32
    prefill_len: torch.Tensor,
    # [>= B + 1] int32
    cu_num_logits: torch.Tensor,
) -> None:
    """Torch reference of `count_sampled_and_rejected`."""
    num_reqs = idx_mapping.shape[0]
    yields = seq_lens[:num_reqs] >= prefill_len[idx_mapping]
    num_logits = cu_num_logits[: num_reqs + 1].diff()
    num_rejected[:num_reqs] = (num_logits - num_sampled[:num_reqs]) * yields
    num_sampled[:num_reqs] *= yields


count_sampled_and_rejected = dispatch(count_sampled_and_rejected_triton, count_sampled_and_rejected_torch)


@triton.jit
def _post_update_kernel(
    num_computed_tokens_ptr,
    total_len_ptr,
    last_sampled_tokens_ptr,
    last_sampled_stride,
    token_ids_ptr,
    token_ids_stride,
    row_len,
    idx_mapping_ptr,
    query_start_loc_ptr,
    sampled_tokens_ptr,
    sampled_stride,
    num_sampled_ptr,
    num_rejected_ptr,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0)
    slot = tl.load(idx_mapping_ptr + req).to(tl.int64)
    if slot >= 0:
        query_len = tl.load(query_start_loc_ptr + req + 1) - tl.load(query_start_loc_ptr + req)
        num_computed = tl.load(num_computed_tokens_ptr + slot)
        num_rejected = tl.load(num_rejected_ptr + req)
        tl.store(num_computed_tokens_ptr + slot, num_computed + query_len - num_rejected)

        num_sampled = tl.load(num_sampled_ptr + req)
        total_len = tl.load(total_len_ptr + slot)
        j = tl.arange(0, BLOCK)
        sampled_ptrs = sampled_tokens_ptr + req.to(tl.int64) * sampled_stride + j
        tokens = tl.maximum(tl.load(sampled_ptrs, mask=j < num_sampled, other=0), 0)
        column = total_len + j
        history_ptrs = token_ids_ptr + slot * token_ids_stride + column
        tl.store(history_ptrs, tokens.to(tl.int32), mask=(j < num_sampled) & (column < row_len))
        last_ptrs = last_sampled_tokens_ptr + slot * last_sampled_stride + tl.zeros([BLOCK], tl.int32)
        tl.store(last_ptrs, tokens, mask=j == num_sampled - 1)
        tl.store(total_len_ptr + slot, total_len + num_sampled)


def post_update_triton(
    # [R] int32, in and out
    num_computed_tokens: torch.Tensor,
    # [R] int32, in and out
    total_len: torch.Tensor,
    # [R] or [R, 1] int64, in and out
    last_sampled_tokens: torch.Tensor,
    # [R, L] int32, in and out
    token_ids: torch.Tensor,
    # [B] int32, exactly B long; a negative entry is skipped
    idx_mapping: torch.Tensor,
    # [>= B + 1] int32
    query_start_loc: torch.Tensor,
    # [>= B, K + 1] int64
    sampled_tokens: torch.Tensor,
    # [>= B] int32
    num_sampled: torch.Tensor,
    # [>= B] int32
    num_rejected: torch.Tensor,
) -> None:
    """Append the sampled tokens and advance the lengths of every scheduled request.

    ``last = sampled[num_sampled - 1]``, history gets the sampled tokens at `total_len` (those past
    the row's end are dropped), ``total_len += num_sampled``,
    ``num_computed_tokens += query_len - num_rejected``.  A sampled -1 (NaN logits) is stored as
    token 0, so that the state stays a legal input; the host ends such a request.
    """
    num_reqs = idx_mapping.shape[0]
    if num_reqs == 0:
        return
    _post_update_kernel[(num_reqs,)](
        num_computed_tokens,
        total_len,
        last_sampled_tokens,
        last_sampled_tokens.stride(0),
        token_ids,
        token_ids.stride(0),
        token_ids.shape[1],
        idx_mapping,
        query_start_loc,
        sampled_tokens,
        sampled_tokens.stride(0),
        num_sampled,
        num_rejected,
        BLOCK=max(_WARP, next_power_of_2(sampled_tokens.shape[1])),
        num_warps=1,
    )


def post_update_torch(
    # [R] int32, in and out
    num_computed_tokens: torch.Tensor,
    # [R] int32, in and out
    total_len: torch.Tensor,
    # [R] or [R, 1] int64, in and out
    last_sampled_tokens: torch.Tensor,
    # [R, L] int32, in and out
    token_ids: torch.Tensor,
    # [B] int32, exactly B long; a negative entry is skipped
    idx_mapping: torch.Tensor,
    # [>= B + 1] int32
    query_start_loc: torch.Tensor,
    # [>= B, K + 1] int64
    sampled_tokens: torch.Tensor,
    # [>= B] int32
    num_sampled: torch.Tensor,
    # [>= B] int32
    num_rejected: torch.Tensor,
) -> None:
    """Torch reference of `post_update`."""
    num_reqs = idx_mapping.shape[0]
    active = idx_mapping >= 0
    slot = idx_mapping[active].long()
    query_len = query_start_loc[: num_reqs + 1].diff()
    num_computed_tokens[slot] += (query_len - num_rejected[:num_reqs])[active]

    count = num_sampled[:num_reqs][active].long().unsqueeze(1)
    tokens = sampled_tokens[:num_reqs][active].clamp(min=0)
    j = torch.arange(tokens.shape[1], device=tokens.device)
    column = total_len[slot].unsqueeze(1) + j
    stored = (j < count) & (column < token_ids.shape[1])
    token_ids[slot.unsqueeze(1).expand_as(column)[stored], column[stored]] = tokens[stored].to(token_ids.dtype)

    last = last_sampled_tokens.view(-1)
    newest = tokens.gather(1, (count - 1).clamp(min=0)).squeeze(1)
    last[slot] = torch.where(count.squeeze(1) > 0, newest, last[slot])
    total_len[slot] += count.squeeze(1).to(total_len.dtype)


post_update = dispatch(post_update_triton, post_update_torch)


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    return [
        AotCase(
            kernel=_count_kernel,
            signature={
                "num_sampled_ptr": "*i32",
                "num_rejected_ptr": "*i32",
                "idx_mapping_ptr": "*i32",
                "seq_lens_ptr": "*i32",
                "prefill_len_ptr": "*i32",
                "cu_num_logits_ptr": "*i32",
                "num_reqs": "i32",
            },
            constexprs={"BLOCK": _BLOCK},
        ),
        AotCase(
            kernel=_post_update_kernel,
            signature={
                "num_computed_tokens_ptr": "*i32",
                "total_len_ptr": "*i32",
                "last_sampled_tokens_ptr": "*i64",
                "last_sampled_stride": "i32",
                "token_ids_ptr": "*i32",
                "token_ids_stride": "i32",
                "row_len": "i32",
                "idx_mapping_ptr": "*i32",
                "query_start_loc_ptr": "*i32",
                "sampled_tokens_ptr": "*i64",
                "sampled_stride": "i32",
                "num_sampled_ptr": "*i32",
                "num_rejected_ptr": "*i32",
            },
            constexprs={"BLOCK": _WARP},
            num_warps=1,
        ),
    ]
