"""Drafts from chains: what a request is expected to say from an absolute position on.

A chain c_0 .. c_{m-1} begins at position s of its request's history t_0 .. t_{T-1}.  It holds if ``0 <= d < m`` for
``d = T - s``, and ``t_{s+i} = c_i`` for every i < d: what was said since is what was expected.  Then the drafts are

    draft_j = c_{d+j}            where d + j < m
    draft_j = what lies there    behind the chain, if whoever drafted it agrees with the whole chain before it
    draft_j = -1                 otherwise (no draft)

A chain that does not hold leaves its row as it is, or without drafts if nobody else drafts.  One program a chain.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import next_power_of_2, tl, triton
from mrv2_kernels.aot_case import AotCase


@triton.jit
def _chain_kernel(
    draft_tokens_ptr,
    draft_stride,
    batch_rows_ptr,
    starts_ptr,
    lengths_ptr,
    chains_ptr,
    chain_stride,
    idx_mapping_ptr,
    token_ids_ptr,
    token_stride,
    total_len_ptr,
    num_draft_tokens,
    max_drafts,
    KEEP: tl.constexpr,
    WIDTH: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    chain = tl.program_id(0).to(tl.int64)
    slot = tl.load(idx_mapping_ptr + tl.load(batch_rows_ptr + chain)).to(tl.int64)
    start = tl.load(starts_ptr + chain)
    length = tl.load(lengths_ptr + chain)
    chain_ptr = chains_ptr + chain * chain_stride
    done = tl.load(total_len_ptr + slot) - start
    i = tl.arange(0, WIDTH)
    said = (i < done) & (i < length)
    expected = tl.load(chain_ptr + i, mask=said, other=0)
    found = tl.load(token_ids_ptr + slot * token_stride + start + i, mask=said, other=0)
    num_wrong = tl.sum((said & (expected != found)).to(tl.int32), axis=0)
    holds = (done >= 0) & (done < length) & (num_wrong == 0)
    j = tl.arange(0, DRAFTS)
    row_ptr = draft_tokens_ptr + slot * draft_stride + j
    from_chain = holds & (done + j < length) & (j < num_draft_tokens)
    drafts = tl.load(chain_ptr + done + j, mask=from_chain, other=-1).to(tl.int64)
    if KEEP:
        others = tl.load(row_ptr, mask=j < max_drafts, other=-1)
        num_differing = tl.sum((from_chain & (others != drafts)).to(tl.int32), axis=0)
        drafts = tl.where(from_chain | (holds & (num_differing > 0)), drafts, others)
    tl.store(row_ptr, drafts, mask=j < max_drafts)


def draft_from_chains_triton(
    # [R, K_max] int64, in and out: the rows that have a chain, -1 = no draft
    draft_tokens: torch.Tensor,
    # [C] int32: batch row of each chain, none twice
    batch_rows: torch.Tensor,
    # [C] int32: position of a chain's first token in the history
    starts: torch.Tensor,
    # [C] int32, at most M
    lengths: torch.Tensor,
    # [C, M] int32, contiguous rows
    chains: torch.Tensor,
    # [B] int32
    idx_mapping: torch.Tensor,
    # [R, L] int32
    token_ids: torch.Tensor,
    # [R] int32
    total_len: torch.Tensor,
    *,
    num_draft_tokens: int,
    keep_others: bool,
) -> None:
    """Draft up to `num_draft_tokens` <= K_max tokens of each chain that holds, before what others have drafted."""
    if not len(batch_rows):
        return
    _chain_kernel[(len(batch_rows),)](
        draft_tokens,
        draft_tokens.stride(0),
        batch_rows,
        starts,
        lengths,
        chains,
        chains.stride(0),
        idx_mapping,
        token_ids,
        token_ids.stride(0),
        total_len,
        num_draft_tokens,
        draft_tokens.shape[1],
        KEEP=keep_others,
        WIDTH=next_power_of_2(chains.shape[1]),
        DRAFTS=next_power_of_2(max(1, draft_tokens.shape[1])),
        num_warps=1,
    )


def draft_from_chains_torch(
    # [R, K_max] int64, in and out: the rows that have a chain, -1 = no draft
    draft_tokens: torch.Tensor,
    # [C] int32: batch row of each chain, none twice
    batch_rows: torch.Tensor,
    # [C] int32: position of a chain's first token in the history
    starts: torch.Tensor,
    # [C] int32, at most M
    lengths: torch.Tensor,
    # [C, M] int32, contiguous rows
    chains: torch.Tensor,
    # [B] int32
    idx_mapping: torch.Tensor,
    # [R, L] int32
    token_ids: torch.Tensor,
    # [R] int32
    total_len: torch.Tensor,
    *,
    num_draft_tokens: int,
    keep_others: bool,
) -> None:
    """Torch reference of `draft_from_chains`."""
    slots = idx_mapping[batch_rows.long()].long()
    start, length = starts.long().unsqueeze(1), lengths.long().unsqueeze(1)
    done = total_len[slots].long().unsqueeze(1) - start
    i = torch.arange(chains.shape[1], device=chains.device)
    history = token_ids[slots.unsqueeze(1), (start + i).clamp(0, token_ids.shape[1] - 1)]
    is_wrong = (i < done) & (i < length) & (history != chains)
    holds = (done >= 0) & (done < length) & ~is_wrong.any(dim=1, keepdim=True)
    j = torch.arange(draft_tokens.shape[1], device=chains.device)
    from_chain = holds & (done + j < length) & (j < num_draft_tokens)
    drafts = torch.where(from_chain, chains.long().gather(1, (done + j).clamp(0, chains.shape[1] - 1)), -1)
    if keep_others:
        others = draft_tokens[slots]
        differs = (from_chain & (others != drafts)).any(dim=1, keepdim=True)
        drafts = torch.where(from_chain | (holds & differs), drafts, others)
    draft_tokens[slots] = drafts


draft_from_chains = dispatch(draft_from_chains_triton, draft_from_chains_torch)


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    pointers = ("batch_rows", "starts", "lengths")
    return [
        AotCase(
            kernel=_chain_kernel,
            signature={"draft_tokens_ptr": "*i64", "draft_stride": "i32"}
            | {f"{name}_ptr": "*i32" for name in pointers}
            | {"chains_ptr": "*i32", "chain_stride": "i32", "idx_mapping_ptr": "*i32"}
            | {"token_ids_ptr": "*i32", "token_stride": "i32", "total_len_ptr": "*i32"}
            | {"num_draft_tokens": "i32", "max_drafts": "i32"},
            constexprs={"KEEP": keep, "WIDTH": 16, "DRAFTS": 4},
            num_warps=1,
        )
        for keep in (False, True)
    ]
