"""Commit a step with drafts, in one launch: its tokens to the host's output and to the request state.

For a batch in which every request had 1 + K tokens verified, b < B and row = idx_mapping[b], n = num_sampled[b]:

    outputs[slot, b, j]                   = sampled[b, j],   counts[slot, b] = n
    token_ids[row, total_len[row] + j]    = max(sampled[b, j], 0)   for j < n
    last_sampled_tokens[row]              = max(sampled[b, n - 1], 0)
    total_len[row] += n,   num_computed_tokens[row] += 1 + K - num_rejected[b]

What `post_update` does for such a batch, and the tokens' way out; B and the slot are read on the device.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import next_power_of_2, tl, triton
from mrv2_kernels.aot_case import AotCase


@triton.jit
def _commit_verified_kernel(
    outputs_ptr,
    outputs_stride,
    counts_ptr,
    counts_stride,
    output_slot_ptr,
    num_computed_tokens_ptr,
    total_len_ptr,
    last_sampled_tokens_ptr,
    token_ids_ptr,
    token_ids_stride,
    row_len,
    idx_mapping_ptr,
    num_reqs_ptr,
    sampled_ptr,
    num_sampled_ptr,
    num_rejected_ptr,
    QUERY_LEN: tl.constexpr,
    TOKENS: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    if req < tl.load(num_reqs_ptr):
        j = tl.arange(0, TOKENS)
        output_slot = tl.load(output_slot_ptr).to(tl.int64)
        num_sampled = tl.load(num_sampled_ptr + req)
        sampled = tl.load(sampled_ptr + req * QUERY_LEN + j, mask=j < QUERY_LEN, other=-1)
        out_ptrs = outputs_ptr + output_slot * outputs_stride + req * QUERY_LEN + j
        tl.store(out_ptrs, sampled, mask=j < QUERY_LEN)
        tl.store(counts_ptr + output_slot * counts_stride + req, num_sampled)

        row = tl.load(idx_mapping_ptr + req).to(tl.int64)
        tokens = tl.maximum(sampled, 0)
        total_len = tl.load(total_len_ptr + row)
        column = total_len + j
        history_ptrs = token_ids_ptr + row * token_ids_stride + column
        tl.store(history_ptrs, tokens.to(tl.int32), mask=(j < num_sampled) & (column < row_len))
        last_ptrs = last_sampled_tokens_ptr + row + tl.zeros([TOKENS], tl.int32)
        tl.store(last_ptrs, tokens, mask=j == num_sampled - 1)
        tl.store(total_len_ptr + row, total_len + num_sampled)
        num_computed = tl.load(num_computed_tokens_ptr + row)
        num_kept = QUERY_LEN - tl.load(num_rejected_ptr + req)
        tl.store(num_computed_tokens_ptr + row, num_computed + num_kept)


def commit_verified_triton(
    # [S, >= B_pad * (1 + K)] int64, out
    outputs: torch.Tensor,
    # [S, >= B_pad] int32, out
    counts: torch.Tensor,
    # [1] int32, on the device
    output_slot: torch.Tensor,
    # [R] int32, in and out
    num_computed_tokens: torch.Tensor,
    # [R] int32, in and out
    total_len: torch.Tensor,
    # [R] int64, out
    last_sampled_tokens: torch.Tensor,
    # [R, L] int32, in and out
    token_ids: torch.Tensor,
    # [B_pad] int32
    idx_mapping: torch.Tensor,
    # [1] int32: B, on the device
    num_reqs: torch.Tensor,
    # [B_pad, 1 + K] int64, contiguous
    sampled: torch.Tensor,
    # [B_pad] int32
    num_sampled: torch.Tensor,
    # [B_pad] int32
    num_rejected: torch.Tensor,
) -> None:
    """Append each request's tokens and advance its lengths; rows at or beyond B touch nothing.

    A history that is full drops tokens.  A sampled -1 (NaN logits) leaves as -1 and is stored as token 0, so that
    the state stays a legal input; the host ends such a request.
    """
    padded, query_len = sampled.shape
    _commit_verified_kernel[(padded,)](
        outputs,
        outputs.stride(0),
        counts,
        counts.stride(0),
        output_slot,
        num_computed_tokens,
        total_len,
        last_sampled_tokens,
        token_ids,
        token_ids.stride(0),
        token_ids.shape[1],
        idx_mapping,
        num_reqs,
        sampled,
        num_sampled,
        num_rejected,
        QUERY_LEN=query_len,
        TOKENS=next_power_of_2(query_len),
        num_warps=1,
    )


def commit_verified_torch(
    # [S, >= B_pad * (1 + K)] int64, out
    outputs: torch.Tensor,
    # [S, >= B_pad] int32, out
    counts: torch.Tensor,
    # [1] int32, on the device
    output_slot: torch.Tensor,
    # [R] int32, in and out
    num_computed_tokens: torch.Tensor,
    # [R] int32, in and out
    total_len: torch.Tensor,
    # [R] int64, out
    last_sampled_tokens: torch.Tensor,
    # [R, L] int32, in and out
    token_ids: torch.Tensor,
    # [B_pad] int32
    idx_mapping: torch.Tensor,
    # [1] int32: B, on the device
    num_reqs: torch.Tensor,
    # [B_pad, 1 + K] int64
    sampled: torch.Tensor,
    # [B_pad] int32
    num_sampled: torch.Tensor,
    # [B_pad] int32
    num_rejected: torch.Tensor,
) -> None:
    """Torch reference of `commit_verified`."""
    batch, slot, query_len = int(num_reqs), int(output_slot), sampled.shape[1]
    rows, drawn, count = idx_mapping[:batch].long(), sampled[:batch], num_sampled[:batch].long()
    outputs[slot, : batch * query_len] = drawn.reshape(-1)
    counts[slot, :batch] = num_sampled[:batch]
    tokens = drawn.clamp(min=0)
    j = torch.arange(query_len, device=tokens.device)
    column = total_len[rows].unsqueeze(1) + j
    stored = (j < count.unsqueeze(1)) & (column < token_ids.shape[1])
    token_ids[rows.unsqueeze(1).expand_as(column)[stored], column[stored].long()] = tokens[stored].to(token_ids.dtype)
    newest = tokens.gather(1, (count - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    last_sampled_tokens[rows] = torch.where(count > 0, newest, last_sampled_tokens[rows])
    total_len[rows] += num_sampled[:batch]
    num_computed_tokens[rows] += query_len - num_rejected[:batch]


commit_verified = dispatch(commit_verified_triton, commit_verified_torch)


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    int32 = ("counts", "output_slot", "num_computed_tokens", "total_len", "token_ids", "idx_mapping", "num_reqs")
    pointers = {f"{name}_ptr": "*i32" for name in (*int32, "num_sampled", "num_rejected")}
    pointers |= {f"{name}_ptr": "*i64" for name in ("outputs", "last_sampled_tokens", "sampled")}
    numbers = dict.fromkeys(("outputs_stride", "counts_stride", "token_ids_stride", "row_len"), "i32")
    return [
        AotCase(
            kernel=_commit_verified_kernel,
            signature=pointers | numbers,
            constexprs={"QUERY_LEN": 4, "TOKENS": 4},
            num_warps=1,
        )
    ]
