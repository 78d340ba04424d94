"""Commit a decode step, in one launch: its tokens to the host's output and to the request state.

For a batch in which every request computed one token and drew one, b < B and row = idx_mapping[b]:

    outputs[slot, b]                  = sampled[b]
    token_ids[row, total_len[row]]    = last_sampled_tokens[row] = max(sampled[b], 0)
    total_len[row] += 1,  num_computed_tokens[row] += 1

What `post_update` does for such a batch, and the token's way out; B and the slot are read on the device.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import cdiv, tl, triton
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.gemm.pdl import gdc_launch_dependents, gdc_wait, has_pdl

_BLOCK = 32


@triton.jit
def _commit_kernel(
    outputs_ptr,
    outputs_stride,
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
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    req = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = req < tl.load(num_reqs_ptr)
    sampled = tl.load(sampled_ptr + req, mask=mask, other=0)
    output_slot = tl.load(output_slot_ptr).to(tl.int64)
    tl.store(outputs_ptr + output_slot * outputs_stride + req, sampled, mask=mask)

    row = tl.load(idx_mapping_ptr + req, mask=mask, other=0).to(tl.int64)
    token = tl.maximum(sampled, 0)
    total_len = tl.load(total_len_ptr + row, mask=mask, other=0)
    num_computed = tl.load(num_computed_tokens_ptr + row, mask=mask, other=0)
    history_ptrs = token_ids_ptr + row * token_ids_stride + total_len
    tl.store(history_ptrs, token.to(tl.int32), mask=mask & (total_len < row_len))
    tl.store(last_sampled_tokens_ptr + row, token, mask=mask)
    tl.store(total_len_ptr + row, total_len + 1, mask=mask)
    tl.store(num_computed_tokens_ptr + row, num_computed + 1, mask=mask)


def commit_decode_triton(
    # [S, R] int64, out
    outputs: torch.Tensor,
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
    # [B_pad] int64
    sampled: torch.Tensor,
) -> None:
    """Append each request's token and advance its lengths by one; rows at or beyond B touch nothing.

    A history that is full drops the token.  A sampled -1 (NaN logits) leaves as -1 and is stored as token 0, so that
    the state stays a legal input; the host ends such a request.
    """
    pdl = has_pdl(sampled)
    _commit_kernel[(cdiv(sampled.shape[0], _BLOCK),)](
        outputs,
        outputs.stride(0),
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
        BLOCK=_BLOCK,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )


def commit_decode_torch(
    # [S, R] int64, out
    outputs: torch.Tensor,
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
    # [B_pad] int64
    sampled: torch.Tensor,
) -> None:
    """Torch reference of `commit_decode`."""
    batch = int(num_reqs)
    rows, tokens = idx_mapping[:batch].long(), sampled[:batch]
    outputs[int(output_slot), :batch] = tokens
    tokens = tokens.clamp(min=0)
    fits = total_len[rows] < token_ids.shape[1]
    token_ids[rows[fits], total_len[rows[fits]].long()] = tokens[fits].to(token_ids.dtype)
    last_sampled_tokens[rows] = tokens
    total_len[rows] += 1
    num_computed_tokens[rows] += 1


commit_decode = dispatch(commit_decode_triton, commit_decode_torch)


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    int32 = ("output_slot", "num_computed_tokens", "total_len", "token_ids", "idx_mapping", "num_reqs")
    pointers = {f"{name}_ptr": "*i32" for name in int32}
    pointers |= {f"{name}_ptr": "*i64" for name in ("outputs", "last_sampled_tokens", "sampled")}
    numbers = dict.fromkeys(("outputs_stride", "token_ids_stride", "row_len"), "i32")
    return [
        AotCase(
            kernel=_commit_kernel,
            signature=pointers | numbers,
            constexprs={"BLOCK": _BLOCK, "PDL": True},
            num_warps=1,
        )
    ]
