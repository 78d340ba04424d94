"""N-gram drafts on the device: what followed the last occurrence of the request's own suffix.

For a history t_0 .. t_{T-1} and an end position e <= T - 1, let n(e) be the length of the longest common
suffix of t_0 .. t_{e-1} and t_0 .. t_{T-1}, at most max_n.  Among the e with n(e) >= min_n the one of
largest n(e) is chosen, the right-most of equals; the drafts are t_e, t_{e+1}, .. up to the end of the
history, then -1 (no draft).  Two launches: every block of end positions finds its best score

    score(e) = n(e) * (L + 1) + (e - n(e)) + 1          (0 = no match; L the history's width)

and one program a request takes the best of its blocks and copies the continuation.  (Prompt lookup
decoding; Saxena 2023.)
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import cdiv, next_power_of_2, tl, triton
from mrv2_kernels.aot_case import AotCase

_BLOCK = 512


@triton.jit(do_not_specialize=["num_blocks"])
def _ngram_scan_kernel(
    partial_ptr,
    num_blocks,
    token_ids_ptr,
    token_stride,
    total_len_ptr,
    idx_mapping_ptr,
    width,
    MIN_N: tl.constexpr,
    MAX_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(idx_mapping_ptr + req).to(tl.int64)
    total = tl.load(total_len_ptr + slot, mask=slot >= 0, other=0)
    if block * BLOCK >= total:
        # nothing ends here: of padding, or behind the history
        tl.store(partial_ptr + req * num_blocks + block, 0)
        return
    row_ptr = token_ids_ptr + slot * token_stride
    end = block * BLOCK + tl.arange(0, BLOCK)
    inside = end < total
    length = tl.zeros([BLOCK], tl.int32)
    still = inside
    for i in tl.static_range(MAX_N):
        ours = tl.load(row_ptr + end - 1 - i, mask=still & (end > i), other=-1)
        last = tl.load(row_ptr + total - 1 - i, mask=total > i, other=-2)
        still = still & (end > i) & (ours == last)
        length += still.to(tl.int32)
    score = tl.where(length >= MIN_N, length * (width + 1) + end - length + 1, 0)
    tl.store(partial_ptr + req * num_blocks + block, tl.max(score, axis=0))


@triton.jit(do_not_specialize=["num_blocks"])
def _ngram_finalize_kernel(
    draft_tokens_ptr,
    draft_stride,
    partial_ptr,
    num_blocks,
    token_ids_ptr,
    token_stride,
    total_len_ptr,
    idx_mapping_ptr,
    num_sampled_ptr,
    width,
    num_draft_tokens,
    max_drafts,
    BLOCK: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    slot = tl.load(idx_mapping_ptr + req).to(tl.int64)
    if slot < 0:
        return
    total = tl.load(total_len_ptr + slot)
    best = 0
    for base in range(0, num_blocks, BLOCK):
        column = base + tl.arange(0, BLOCK)
        scores = tl.load(partial_ptr + req * num_blocks + column, mask=column < num_blocks, other=0)
        best = tl.maximum(best, tl.max(scores, axis=0))
    length = best // (width + 1)
    end = best % (width + 1) - 1 + length
    found = (best > 0) & (tl.load(num_sampled_ptr + req) > 0)
    j = tl.arange(0, DRAFTS)
    real = found & (j < num_draft_tokens) & (end + j < total)
    token = tl.load(token_ids_ptr + slot * token_stride + end + j, mask=real, other=-1)
    tl.store(draft_tokens_ptr + slot * draft_stride + j, token.to(tl.int64), mask=j < max_drafts)


def propose_ngram_triton(
    # [R, K_max] int64, out: the rows of the batch are rewritten whole, -1 = no draft
    draft_tokens: torch.Tensor,
    # [B] int32, exactly B long; a negative entry is skipped
    idx_mapping: torch.Tensor,
    # [R, L] int32
    token_ids: torch.Tensor,
    # [R] int32
    total_len: torch.Tensor,
    # [B] int32: a request that sampled nothing drafts nothing
    num_sampled: torch.Tensor,
    *,
    num_draft_tokens: int,
    min_n: int,
    max_n: int,
    max_len: int,
) -> None:
    """Draft `num_draft_tokens` <= K_max tokens a request; `max_len` bounds the histories of the batch."""
    num_reqs, width = idx_mapping.shape[0], token_ids.shape[1]
    num_blocks = max(1, cdiv(min(max_len, width), _BLOCK))
    partial = torch.empty((num_reqs, num_blocks), dtype=torch.int32, device=token_ids.device)
    _ngram_scan_kernel[(num_reqs, num_blocks)](
        partial,
        num_blocks,
        token_ids,
        token_ids.stride(0),
        total_len,
        idx_mapping,
        width,
        MIN_N=min_n,
        MAX_N=max_n,
        BLOCK=_BLOCK,
    )
    _ngram_finalize_kernel[(num_reqs,)](
        draft_tokens,
        draft_tokens.stride(0),
        partial,
        num_blocks,
        token_ids,
        token_ids.stride(0),
        total_len,
        idx_mapping,
        num_sampled,
        width,
        num_draft_tokens,
        draft_tokens.shape[1],
        BLOCK=64,
        DRAFTS=next_power_of_2(max(1, draft_tokens.shape[1])),
        num_warps=1,
    )


def propose_ngram_torch(
    # [R, K_max] int64, out: the rows of the batch are rewritten whole, -1 = no draft
    draft_tokens: torch.Tensor,
    # [B] int32, exactly B long; a negative entry is skipped
    idx_mapping: torch.Tensor,
    # [R, L] int32
    token_ids: torch.Tensor,
    # [R] int32
    total_len: torch.Tensor,
    # [B] int32: a request that sampled nothing drafts nothing
    num_sampled: torch.Tensor,
    *,
    num_draft_tokens: int,
    min_n: int,
    max_n: int,
    max_len: int,
) -> None:
    """Torch reference of `propose_ngram`."""
    width, is_real = token_ids.shape[1], idx_mapping >= 0
    idx_mapping, num_sampled = idx_mapping[is_real], num_sampled[is_real]
    total = total_len[idx_mapping].long().unsqueeze(1)
    history = token_ids[idx_mapping, : min(max_len, width)]
    end = torch.arange(history.shape[1], device=history.device).unsqueeze(0)
    still = end < total
    length = torch.zeros_like(history)
    for i in range(max_n):
        ours = torch.where(end > i, history.roll(i + 1, dims=1), -1)
        last = history.gather(1, (total - 1 - i).clamp(min=0, max=history.shape[1] - 1))
        still = still & (end > i) & (total > i) & (ours == last)
        length += still
    score = torch.where(length >= min_n, length * (width + 1) + end - length + 1, 0).amax(dim=1)
    matched = score // (width + 1)
    first = (score % (width + 1) - 1 + matched).unsqueeze(1)
    j = torch.arange(draft_tokens.shape[1], device=history.device).unsqueeze(0)
    found = (score > 0) & (num_sampled > 0)
    real = found.unsqueeze(1) & (j < num_draft_tokens) & (first + j < total)
    index = (first + j).clamp(min=0, max=history.shape[1] - 1)
    draft_tokens[idx_mapping] = torch.where(real, history.gather(1, index).long(), -1)


propose_ngram = dispatch(propose_ngram_triton, propose_ngram_torch)


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    history = {"token_ids_ptr": "*i32", "token_stride": "i32", "total_len_ptr": "*i32", "idx_mapping_ptr": "*i32"}
    partial = {"partial_ptr": "*i32", "num_blocks": "i32"}
    return [
        AotCase(
            kernel=_ngram_scan_kernel,
            signature=partial | history | {"width": "i32"},
            constexprs={"MIN_N": 2, "MAX_N": 4, "BLOCK": _BLOCK},
        ),
        AotCase(
            kernel=_ngram_finalize_kernel,
            signature={"draft_tokens_ptr": "*i64", "draft_stride": "i32"}
            | partial
            | history
            | {"num_sampled_ptr": "*i32", "width": "i32", "num_draft_tokens": "i32", "max_drafts": "i32"},
            constexprs={"BLOCK": 64, "DRAFTS": 4},
            num_warps=1,
        ),
    ]
