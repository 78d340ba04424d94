"""Suffix drafts: what followed the longest match of a request's suffix in its own history or in recent requests'.

Documents are the request's own history and A histories of requests that have ended, the last W tokens of
each.  For an end position e inside a document of length D let n(e) be the length of the longest common
suffix of its first e tokens and of the request's history, at most max_n.  Among the (document, e) with
n(e) >= min_n and e < D the one of largest n(e) is chosen; of equals the request's own history wins, then the
document that was kept last, then the right-most.  A match of n tokens earns at most n drafts:

    drafts = t_e, t_{e+1}, ..  of the document, min(n, num_draft_tokens) of them, then -1

A block of end positions finds its best ``((n (A + 1) + preference) (L + 1) + e) + 1``, and one program a
request takes the best of all.  (Without the trees, the idea of Oliaro et al. 2024, "SuffixDecoding".)

Legend: B = requests, R = rows, L = row length.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import cdiv, next_power_of_2, tl, triton
from mrv2_kernels.aot_case import AotCase

_BLOCK = 512


@triton.jit(do_not_specialize=["row", "place"])
def _keep_kernel(
    documents_ptr,
    width,
    lengths_ptr,
    count_ptr,
    token_ids_ptr,
    token_stride,
    row_len,
    total_len_ptr,
    row,
    place,
    BLOCK: tl.constexpr,
):
    slot = tl.zeros([], tl.int64) + row
    total = tl.minimum(tl.load(total_len_ptr + slot), row_len)
    kept = tl.minimum(total, width)
    source_ptr = token_ids_ptr + slot * token_stride + total - kept
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tokens = tl.load(source_ptr + offset, mask=offset < kept, other=0)
    tl.store(documents_ptr + (tl.zeros([], tl.int64) + place) * width + offset, tokens, mask=offset < kept)
    if tl.program_id(0) == 0:
        tl.store(lengths_ptr + place, kept)
        tl.store(count_ptr, place + 1)


def keep_document_triton(
    # [A, W] int32, in and out
    documents: torch.Tensor,
    # [A] int32, in and out
    lengths: torch.Tensor,
    # [1] int32, out: the place behind this one
    count: torch.Tensor,
    # [R, L] int32
    token_ids: torch.Tensor,
    # [R] int32
    total_len: torch.Tensor,
    *,
    row: int,
    place: int,
) -> None:
    """Keep the last W tokens of a row's history as document number `place`."""
    _keep_kernel[(cdiv(documents.shape[1], _BLOCK),)](
        documents,
        documents.shape[1],
        lengths,
        count,
        token_ids,
        token_ids.stride(0),
        token_ids.shape[1],
        total_len,
        row,
        place,
        BLOCK=_BLOCK,
    )


def keep_document_torch(
    # [A, W] int32, in and out
    documents: torch.Tensor,
    # [A] int32, in and out
    lengths: torch.Tensor,
    # [1] int32, out
    count: torch.Tensor,
    # [R, L] int32
    token_ids: torch.Tensor,
    # [R] int32
    total_len: torch.Tensor,
    *,
    row: int,
    place: int,
) -> None:
    """Torch reference of `keep_document`."""
    total = min(int(total_len[row]), token_ids.shape[1])
    kept = min(total, documents.shape[1])
    documents[place, :kept] = token_ids[row, total - kept : total]
    lengths[place] = kept
    count[0] = place + 1


keep_document = dispatch(keep_document_triton, keep_document_torch)


@triton.jit(do_not_specialize=["num_own", "num_blocks", "num_documents"])
def _suffix_scan_kernel(
    partial_ptr,
    num_blocks,
    num_own,
    documents_ptr,
    width,
    lengths_ptr,
    count_ptr,
    num_documents,
    token_ids_ptr,
    token_stride,
    row_len,
    total_len_ptr,
    idx_mapping_ptr,
    MIN_N: tl.constexpr,
    MAX_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    slot = tl.load(idx_mapping_ptr + req).to(tl.int64)
    if slot < 0:
        return
    total = tl.minimum(tl.load(total_len_ptr + slot), row_len)
    own_ptr = token_ids_ptr + slot * token_stride
    blocks_each = (width + BLOCK - 1) // BLOCK
    if program < num_own:
        text_ptr = own_ptr
        length = total
        block = program
        preference = num_documents
    else:
        place = (program - num_own) // blocks_each
        block = (program - num_own) % blocks_each
        text_ptr = documents_ptr + place.to(tl.int64) * width
        length = tl.load(lengths_ptr + place)
        # the document kept last counts num_documents - 1, the oldest 0
        preference = (place - tl.load(count_ptr) + num_documents) % num_documents
    best = tl.zeros([], tl.int64)
    if block * BLOCK < length:
        end = block * BLOCK + tl.arange(0, BLOCK)
        still = end < length
        match = tl.zeros([BLOCK], tl.int32)
        for i in range(MAX_N):
            theirs = tl.load(text_ptr + end - 1 - i, mask=still & (end > i), other=-1)
            last = tl.load(own_ptr + total - 1 - i, mask=total > i, other=-2)
            still = still & (end > i) & (theirs == last)
            match += still.to(tl.int32)
        score = (match.to(tl.int64) * (num_documents + 1) + preference) * (row_len + 1) + end + 1
        best = tl.max(tl.where(match >= MIN_N, score, 0), axis=0)
    tl.store(partial_ptr + req * num_blocks + program, best)


@triton.jit(do_not_specialize=["num_blocks", "num_documents"])
def _suffix_finalize_kernel(
    draft_tokens_ptr,
    draft_stride,
    partial_ptr,
    num_blocks,
    documents_ptr,
    width,
    lengths_ptr,
    count_ptr,
    num_documents,
    token_ids_ptr,
    token_stride,
    row_len,
    total_len_ptr,
    idx_mapping_ptr,
    num_sampled_ptr,
    num_draft_tokens,
    max_drafts,
    BLOCK: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    slot = tl.load(idx_mapping_ptr + req).to(tl.int64)
    if slot < 0:
        return
    best = tl.zeros([], tl.int64)
    for base in range(0, num_blocks, BLOCK):
        column = base + tl.arange(0, BLOCK)
        scores = tl.load(partial_ptr + req * num_blocks + column, mask=column < num_blocks, other=0)
        best = tl.maximum(best, tl.max(scores, axis=0))
    found = (best > 0) & (tl.load(num_sampled_ptr + req) > 0)
    code = tl.where(best > 0, best - 1, 0)
    end = code % (row_len + 1)
    code = code // (row_len + 1)
    preference = code % (num_documents + 1)
    match = code // (num_documents + 1)
    is_own = preference == num_documents
    place = tl.where(is_own, 0, (preference + tl.load(count_ptr)) % num_documents)
    if is_own:
        text_ptr = token_ids_ptr + slot * token_stride
        length = tl.minimum(tl.load(total_len_ptr + slot), row_len)
    else:
        text_ptr = documents_ptr + place * width
        length = tl.load(lengths_ptr + place)
    j = tl.arange(0, DRAFTS)
    real = found & (j < num_draft_tokens) & (j < match) & (end + j < length)
    token = tl.load(text_ptr + end + j, mask=real, other=-1)
    tl.store(draft_tokens_ptr + slot * draft_stride + j, token.to(tl.int64), mask=j < max_drafts)


def propose_suffix_triton(
    # [R, K_max] int64, out: the rows of the batch are rewritten whole, -1 = no draft
    draft_tokens: torch.Tensor,
    # [B] int32, exactly B long; a negative entry is skipped
    idx_mapping: torch.Tensor,
    # [A, W] int32
    documents: torch.Tensor,
    # [A] int32, 0 = none
    lengths: torch.Tensor,
    # [1] int32: see `keep_document`
    count: torch.Tensor,
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
    """Draft up to `num_draft_tokens` <= K_max tokens a request; `max_len` bounds the histories of the batch."""
    num_reqs, row_len = idx_mapping.shape[0], token_ids.shape[1]
    num_documents, width = documents.shape
    num_own = max(1, cdiv(min(max_len, row_len), _BLOCK))
    num_blocks = num_own + num_documents * cdiv(width, _BLOCK)
    partial = torch.empty((num_reqs, num_blocks), dtype=torch.int64, device=token_ids.device)
    history = (token_ids, token_ids.stride(0), row_len, total_len, idx_mapping)
    kept = (documents, width, lengths, count, num_documents)
    _suffix_scan_kernel[(num_reqs, num_blocks)](
        partial, num_blocks, num_own, *kept, *history, MIN_N=min_n, MAX_N=max_n, BLOCK=_BLOCK
    )
    _suffix_finalize_kernel[(num_reqs,)](
        draft_tokens,
        draft_tokens.stride(0),
        partial,
        num_blocks,
        *kept,
        *history,
        num_sampled,
        num_draft_tokens,
        draft_tokens.shape[1],
        BLOCK=256,
        DRAFTS=next_power_of_2(max(1, draft_tokens.shape[1])),
    )


def propose_suffix_torch(
    # [R, K_max] int64, out
    draft_tokens: torch.Tensor,
    # [B] int32
    idx_mapping: torch.Tensor,
    # [A, W] int32
    documents: torch.Tensor,
    # [A] int32
    lengths: torch.Tensor,
    # [1] int32
    count: torch.Tensor,
    # [R, L] int32
    token_ids: torch.Tensor,
    # [R] int32
    total_len: torch.Tensor,
    # [B] int32
    num_sampled: torch.Tensor,
    *,
    num_draft_tokens: int,
    min_n: int,
    max_n: int,
    max_len: int,
) -> None:
    """Torch reference of `propose_suffix`."""
    num_documents, row_len = documents.shape[0], token_ids.shape[1]
    newest_first = [(int(count[0]) - 1 - i) % num_documents for i in range(num_documents)]
    kept = [documents[place, : int(lengths[place])] for place in newest_first]
    for row, speaks in zip(idx_mapping.tolist(), num_sampled.tolist(), strict=True):
        if row < 0:
            continue
        history = token_ids[row, : min(int(total_len[row]), row_len)]
        best, drafts = 0, history[:0]
        for text in (history, *kept):
            match = _matches(text, history, max_n)
            match[match < min_n] = 0
            longest = int(match.max()) if match.numel() else 0
            if longest > best:
                end = int((match == longest).nonzero()[-1])
                best, drafts = longest, text[end : end + min(num_draft_tokens, longest)]
        draft_tokens[row] = -1
        if speaks:
            draft_tokens[row, : drafts.shape[0]] = drafts.long()


# text [D], history [T] -> [D]: length of the common suffix of text[:e] and history
def _matches(text: torch.Tensor, history: torch.Tensor, max_n: int) -> torch.Tensor:
    end = torch.arange(text.shape[0], device=text.device)
    still = torch.ones_like(end, dtype=torch.bool)
    match = torch.zeros_like(end)
    for i in range(min(max_n, history.shape[0])):
        still &= (end > i) & (text[(end - 1 - i).clamp(min=0)] == history[-1 - i])
        match += still
    return match


propose_suffix = dispatch(propose_suffix_triton, propose_suffix_torch)


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    words = ("documents", "lengths", "count", "token_ids", "total_len")
    shared = {f"{name}_ptr": "*i32" for name in words} | dict.fromkeys(("width", "token_stride", "row_len"), "i32")
    scan = {"partial_ptr": "*i64", "num_blocks": "i32", "num_documents": "i32", "idx_mapping_ptr": "*i32"}
    drafts = {"draft_tokens_ptr": "*i64", "draft_stride": "i32", "num_sampled_ptr": "*i32"}
    drafts |= {"num_draft_tokens": "i32", "max_drafts": "i32"}
    return [
        AotCase(_keep_kernel, shared | {"row": "i32", "place": "i32"}, {"BLOCK": _BLOCK}),
        AotCase(_suffix_scan_kernel, shared | scan | {"num_own": "i32"}, {"MIN_N": 3, "MAX_N": 32, "BLOCK": _BLOCK}),
        AotCase(_suffix_finalize_kernel, shared | scan | drafts, {"BLOCK": 256, "DRAFTS": 4}),
    ]
