"""Put last sampled and draft tokens into `input_ids`, and find the rows that need logits.

A request with m logits rows asks for them at its last m query positions.  Row 0 sits on the last
sampled token, row j on draft j - 1.  A position inside the prefill keeps its prompt token, so that a
chunk that crosses the end of the prompt, with drafts behind it, stays correct.  A missing draft (-1)
becomes token 0, which the model can read and verification never accepts.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import next_power_of_2, tl, triton
from mrv2_kernels.aot_case import AotCase

_WARP = 32


@triton.jit(do_not_specialize=["num_reqs", "num_rows"])
def _combine_kernel(
    input_ids_ptr,
    logits_indices_ptr,
    idx_mapping_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    prefill_len_ptr,
    last_sampled_tokens_ptr,
    last_sampled_stride,
    draft_tokens_ptr,
    draft_stride,
    cu_num_logits_ptr,
    num_reqs,
    num_rows,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0)
    first_row = tl.load(cu_num_logits_ptr + req)
    j = tl.arange(0, BLOCK)
    if req == num_reqs:
        for base in range(first_row, num_rows, BLOCK):
            tl.store(logits_indices_ptr + base + j, 0, mask=base + j < num_rows)
    else:
        num_logits = tl.load(cu_num_logits_ptr + req + 1) - first_row
        is_row = j < num_logits
        token = tl.load(query_start_loc_ptr + req + 1) - num_logits + j
        tl.store(logits_indices_ptr + first_row + j, token, mask=is_row)

        slot = tl.load(idx_mapping_ptr + req).to(tl.int64)
        position = tl.load(seq_lens_ptr + req) - num_logits + j
        is_new = is_row & (position >= tl.load(prefill_len_ptr + slot))
        last = tl.load(last_sampled_tokens_ptr + slot * last_sampled_stride)
        draft = tl.load(draft_tokens_ptr + slot * draft_stride + j - 1, mask=is_new & (j > 0), other=0)
        ids = tl.maximum(tl.where(j == 0, last, draft), 0)
        tl.store(input_ids_ptr + token, ids.to(tl.int32), mask=is_new)


def combine_sampled_and_draft_tokens_triton(
    # [T_pad] int32, in and out
    input_ids: torch.Tensor,
    # [N_pad] int32, out
    logits_indices: torch.Tensor,
    # [B] int32, exactly B long
    idx_mapping: torch.Tensor,
    # [>= B + 1] int32
    query_start_loc: torch.Tensor,
    # [>= B] int32
    seq_lens: torch.Tensor,
    # [R] int32
    prefill_len: torch.Tensor,
    # [R] or [R, 1] int64
    last_sampled_tokens: torch.Tensor,
    # [R, K] int64, K may be 0
    draft_tokens: torch.Tensor,
    # [>= B + 1] int32, at most K + 1 rows a request
    cu_num_logits: torch.Tensor,
) -> None:
    """Write the ids of tokens behind the prefill and the index of each logits row into `input_ids`.

    Entries of `logits_indices` behind the last row become 0 (a valid index, for padded batches).
    """
    num_reqs = idx_mapping.shape[0]
    _combine_kernel[(num_reqs + 1,)](
        input_ids,
        logits_indices,
        idx_mapping,
        query_start_loc,
        seq_lens,
        prefill_len,
        last_sampled_tokens,
        last_sampled_tokens.stride(0),
        draft_tokens,
        draft_tokens.stride(0),
        cu_num_logits,
        num_reqs,
        logits_indices.shape[0],
        BLOCK=max(_WARP, next_power_of_2(draft_tokens.shape[1] + 1)),
        num_warps=1,
    )


def combine_sampled_and_draft_tokens_torch(
    # [T_pad] int32, in and out
    input_ids: torch.Tensor,
    # [N_pad] int32, out
    logits_indices: torch.Tensor,
    # [B] int32, exactly B long
    idx_mapping: torch.Tensor,
    # [>= B + 1] int32
    query_start_loc: torch.Tensor,
    # [>= B] int32
    seq_lens: torch.Tensor,
    # [R] int32
    prefill_len: torch.Tensor,
    # [R] or [R, 1] int64
    last_sampled_tokens: torch.Tensor,
    # [R, K] int64, K may be 0
    draft_tokens: torch.Tensor,
    # [>= B + 1] int32, at most K + 1 rows a request
    cu_num_logits: torch.Tensor,
) -> None:
    """Torch reference of `combine_sampled_and_draft_tokens`."""
    num_reqs, num_drafts = idx_mapping.shape[0], draft_tokens.shape[1]
    num_logits = cu_num_logits[: num_reqs + 1].diff().unsqueeze(1)
    j = torch.arange(num_drafts + 1, dtype=torch.int32, device=input_ids.device)
    is_row = j < num_logits
    token = query_start_loc[1 : num_reqs + 1].unsqueeze(1) - num_logits + j
    num_rows = int(cu_num_logits[num_reqs])
    logits_indices[:num_rows] = token[is_row]
    logits_indices[num_rows:] = 0

    position = seq_lens[:num_reqs].unsqueeze(1) - num_logits + j
    is_new = is_row & (position >= prefill_len[idx_mapping].unsqueeze(1))
    last = last_sampled_tokens[idx_mapping].reshape(num_reqs, 1)
    ids = torch.cat([last, draft_tokens[idx_mapping]], dim=1).clamp(min=0)
    input_ids[token[is_new].long()] = ids[is_new].to(input_ids.dtype)


combine_sampled_and_draft_tokens = dispatch(
    combine_sampled_and_draft_tokens_triton, combine_sampled_and_draft_tokens_torch
)


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    return [
        AotCase(
            kernel=_combine_kernel,
            signature={
                "input_ids_ptr": "*i32",
                "logits_indices_ptr": "*i32",
                "idx_mapping_ptr": "*i32",
                "query_start_loc_ptr": "*i32",
                "seq_lens_ptr": "*i32",
                "prefill_len_ptr": "*i32",
                "last_sampled_tokens_ptr": "*i64",
                "last_sampled_stride": "i32",
                "draft_tokens_ptr": "*i64",
                "draft_stride": "i32",
                "cu_num_logits_ptr": "*i32",
                "num_reqs": "i32",
                "num_rows": "i32",
            },
            constexprs={"BLOCK": _WARP},
            num_warps=1,
        )
    ]
