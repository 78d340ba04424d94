"""Commit a step with drafts, in one launch: its tokens to the host's output and to the request state.

For a batch of decodes and verifications, with row = idx_mapping[b] and n = num_sampled[b]:

    outputs[slot, b, j]                   = sampled[b, j],   counts[slot, b] = n
    token_ids[row, total_len[row] + j]    = max(sampled[b, j], 0)   for j < n
    last_sampled_tokens[row]              = max(sampled[b, n - 1], 0)
    total_len[row] += n,   num_computed_tokens[row] += tokens of the request - num_rejected[b]

What `post_update` does for such a batch, and the tokens' way out, whose slot is read on the device.
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
    query_start_loc_ptr,
    sampled_ptr,
    num_sampled_ptr,
    num_rejected_ptr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    query_len = tl.load(query_start_loc_ptr + req + 1) - tl.load(query_start_loc_ptr + req)
    if query_len > 0:
        j = tl.arange(0, TOKENS)
        output_slot = tl.load(output_slot_ptr).to(tl.int64)
        num_sampled = tl.load(num_sampled_ptr + req)
        sampled = tl.load(sampled_ptr + req * WIDTH + j, mask=j < WIDTH, other=-1)
        out_ptrs = outputs_ptr + output_slot * outputs_stride + req * WIDTH + j
        tl.store(out_ptrs, sampled, mask=j < WIDTH)
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
        num_kept = query_len - tl.load(num_rejected_ptr + req)
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
    # [B_pad + 1] int32, constant over padding
    query_start_loc: torch.Tensor,
    # [B_pad, 1 + K] int64, contiguous
    sampled: torch.Tensor,
    # [B_pad] int32
    num_sampled: torch.Tensor,
    # [B_pad] int32
    num_rejected: torch.Tensor,
) -> None:
    """Append each request's tokens and advance its lengths; padding touches nothing.

    A history that is full drops tokens.  A sampled -1 (NaN logits) leaves as -1 and is stored as token 0, so that
    the state stays a legal input; the host ends such a request.
    """
    padded, width = sampled.shape
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
        query_start_loc,
        sampled,
        num_sampled,
        num_rejected,
        WIDTH=width,
        TOKENS=next_power_of_2(width),
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
    # [B_pad + 1] int32, constant over padding
    query_start_loc: torch.Tensor,
    # [B_pad, 1 + K] int64
    sampled: torch.Tensor,
    # [B_pad] int32
    num_sampled: torch.Tensor,
    # [B_pad] int32
    num_rejected: torch.Tensor,
) -> None:
    """Torch reference of `commit_verified`."""
    width, slot = sampled.shape[1], int(output_slot)
    lengths = query_start_loc[: sampled.shape[0] + 1].diff()
    batch = int((lengths > 0).sum())
    rows, drawn, count = idx_mapping[:batch].long(), sampled[:batch], num_sampled[:batch].long()
    outputs[slot, : batch * width] = drawn.reshape(-1)
    counts[slot, :batch] = num_sampled[:batch]
    tokens = drawn.clamp(min=0)
    j = torch.arange(width, device=tokens.device)
    column = total_len[rows].unsqueeze(1) + j
    stored = (j < count.unsqueeze(1)) & (column < token_ids.shape[1])
    token_ids[rows.unsqueeze(1).expand_as(column)[stored], column[stored].long()] = tokens[stored].to(token_ids.dtype)
    newest = tokens.gather(1, (count - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    last_sampled_tokens[rows] = torch.where(count > 0, newest, last_sampled_tokens[rows])
    total_len[rows] += num_sampled[:batch]
    num_computed_tokens[rows] += lengths[:batch] - num_rejected[:batch]


commit_verified = dispatch(commit_verified_triton, commit_verified_torch)


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    int32 = ("counts", "output_slot", "num_computed_tokens", "total_len", "token_ids", "idx_mapping")
    pointers = {f"{name}_ptr": "*i32" for name in (*int32, "query_start_loc", "num_sampled", "num_rejected")}
    pointers |= {f"{name}_ptr": "*i64" for name in ("outputs", "last_sampled_tokens", "sampled")}
    numbers = dict.fromkeys(("outputs_stride", "counts_stride", "token_ids_stride", "row_len"), "i32")
    return [
        AotCase(
            kernel=_commit_verified_kernel,
            signature=pointers | numbers,
            constexprs={"WIDTH": 4, "TOKENS": 4},
            num_warps=1,
        )
    ]
