"""Inputs of a drafter that follows the target's batch, written on the device from the history.

The drafter keeps the batch shape of the step that the target has just run, rejected drafts included,
so that the host need not know how many there were.  Its tokens come from the history, which is right
after the step was committed: with first = position of a request's first token in the step,

    head  (EXTRA = 0)   token i stands at position first + i and is history[first + i + 1]
    model (EXTRA = 1)   one token more a request: token i is history[first + i]

and 0 where the history ends.  The last position whose token is known, ``total_len - 2 + EXTRA``, is the
one to draft from; what stands behind it is garbage that no earlier position sees and that the next step
overwrites.  A request of the batch without tokens is padding: nothing of its row is touched.

Legend: B = requests (padding included), T = tokens, R = rows, L = row length, MB = blocks a row.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import cdiv, next_power_of_2, tl, triton
from mrv2_kernels.aot_case import AotCase

_BLOCK = 512
_ROWS = 128


@triton.jit(do_not_specialize=["num_reqs", "num_slots", "max_drafts"])
def _first_pass_kernel(
    ids_ptr,
    positions_out_ptr,
    slots_out_ptr,
    starts_out_ptr,
    seq_lens_out_ptr,
    sample_index_ptr,
    draft_tokens_ptr,
    draft_stride,
    max_drafts,
    positions_ptr,
    query_start_loc_ptr,
    idx_mapping_ptr,
    token_ids_ptr,
    token_stride,
    row_len,
    total_len_ptr,
    table_ptr,
    table_stride,
    num_blocks_ptr,
    num_reqs,
    num_slots,
    EXTRA: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0)
    chunk = tl.program_id(1)
    stride = tl.num_programs(1) * BLOCK
    start = tl.load(query_start_loc_ptr + req)
    out_start = start + req * EXTRA
    if req == num_reqs:
        for base in range(out_start + chunk * BLOCK, num_slots, stride):
            token = base + tl.arange(0, BLOCK)
            tl.store(ids_ptr + token, 0, mask=token < num_slots)
            if EXTRA:
                tl.store(positions_out_ptr + token, 0, mask=token < num_slots)
                tl.store(slots_out_ptr + token, -1, mask=token < num_slots)
        if EXTRA:
            tl.store(starts_out_ptr + req, out_start)
    else:
        query_len = tl.load(query_start_loc_ptr + req + 1) - start
        is_real = query_len > 0
        slot = tl.load(idx_mapping_ptr + req, mask=is_real, other=0).to(tl.int64)
        first = tl.load(positions_ptr + start, mask=is_real, other=0)
        total = tl.load(total_len_ptr + slot, mask=is_real, other=0)
        length = query_len + EXTRA
        known = tl.minimum(total, row_len)
        for base in range(chunk * BLOCK, length, stride):
            offset = base + tl.arange(0, BLOCK)
            mask = offset < length
            source = first + offset + 1 - EXTRA
            ids = tl.load(token_ids_ptr + slot * token_stride + source, mask=mask & (source < known), other=0)
            tl.store(ids_ptr + out_start + offset, ids, mask=mask)
            if EXTRA:
                position = first + offset
                column = position // BLOCK_SIZE
                has_block = is_real & (position < row_len) & (column < tl.load(num_blocks_ptr + slot))
                block = tl.load(table_ptr + slot * table_stride + column, mask=mask & has_block, other=0)
                kv_slot = tl.where(has_block, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
                tl.store(positions_out_ptr + out_start + offset, tl.minimum(position, row_len - 1), mask=mask)
                tl.store(slots_out_ptr + out_start + offset, kv_slot, mask=mask)
        if chunk == 0:
            place = tl.maximum(tl.minimum(total - 2 + EXTRA - first, length - 1), 0)
            tl.store(sample_index_ptr + req, tl.where(is_real, out_start + place, 0))
            if EXTRA:
                tl.store(starts_out_ptr + req, out_start)
                tl.store(seq_lens_out_ptr + req, tl.where(is_real, first + length, 0))
            j = tl.arange(0, DRAFTS)
            none = tl.zeros([DRAFTS], tl.int64) - 1
            tl.store(draft_tokens_ptr + slot * draft_stride + j, none, mask=is_real & (j < max_drafts))


def prepare_draft_inputs_triton(
    # [T + B * extra] int32, out
    ids: torch.Tensor,
    # [T + B * extra] int32, out with `extra`, else not touched
    positions_out: torch.Tensor,
    # [T + B * extra] int32, out with `extra`, else not touched
    slots_out: torch.Tensor,
    # [B + 1] int32, out with `extra`, else not touched
    starts_out: torch.Tensor,
    # [B] int32, out with `extra`, else not touched
    seq_lens_out: torch.Tensor,
    # [B] int32, out: index of the token to draft from
    sample_index: torch.Tensor,
    # [R, K_max] int64, out: -1 in the rows of the batch
    draft_tokens: torch.Tensor,
    # [T] int32
    positions: torch.Tensor,
    # [B + 1] int32, constant over padding
    query_start_loc: torch.Tensor,
    # [>= B] int32, anything over padding
    idx_mapping: torch.Tensor,
    # [R, L] int32
    token_ids: torch.Tensor,
    # [R] int32, this step's tokens included
    total_len: torch.Tensor,
    # [R, MB] int32
    block_table: torch.Tensor,
    # [R] int32
    num_blocks: torch.Tensor,
    *,
    extra: int,
    block_size: int,
    max_query_len: int,
) -> None:
    """Fill the drafter's first pass over a batch that was just committed; see the module.

    Positions without a block get slot -1.  With `extra`, padding becomes one inert token a request
    (context length 0).  `max_query_len` (tokens) only sizes the grid.
    """
    num_reqs = query_start_loc.shape[0] - 1
    _first_pass_kernel[(num_reqs + 1, max(1, cdiv(max_query_len + extra, _BLOCK)))](
        ids,
        positions_out,
        slots_out,
        starts_out,
        seq_lens_out,
        sample_index,
        draft_tokens,
        draft_tokens.stride(0),
        draft_tokens.shape[1],
        positions,
        query_start_loc,
        idx_mapping,
        token_ids,
        token_ids.stride(0),
        token_ids.shape[1],
        total_len,
        block_table,
        block_table.stride(0),
        num_blocks,
        num_reqs,
        ids.shape[0],
        EXTRA=extra,
        BLOCK_SIZE=block_size,
        DRAFTS=next_power_of_2(max(1, draft_tokens.shape[1])),
        BLOCK=_BLOCK,
    )


def prepare_draft_inputs_torch(
    # [T + B * extra] int32, out
    ids: torch.Tensor,
    # [T + B * extra] int32, out with `extra`, else not touched
    positions_out: torch.Tensor,
    # [T + B * extra] int32, out with `extra`, else not touched
    slots_out: torch.Tensor,
    # [B + 1] int32, out with `extra`, else not touched
    starts_out: torch.Tensor,
    # [B] int32, out with `extra`, else not touched
    seq_lens_out: torch.Tensor,
    # [B] int32, out
    sample_index: torch.Tensor,
    # [R, K_max] int64, out
    draft_tokens: torch.Tensor,
    # [T] int32
    positions: torch.Tensor,
    # [B + 1] int32
    query_start_loc: torch.Tensor,
    # [>= B] int32
    idx_mapping: torch.Tensor,
    # [R, L] int32
    token_ids: torch.Tensor,
    # [R] int32
    total_len: torch.Tensor,
    # [R, MB] int32
    block_table: torch.Tensor,
    # [R] int32
    num_blocks: torch.Tensor,
    *,
    extra: int,
    block_size: int,
    max_query_len: int,
) -> None:
    """Torch reference of `prepare_draft_inputs`."""
    num_reqs, row_len = query_start_loc.shape[0] - 1, token_ids.shape[1]
    number = torch.arange(num_reqs + 1, dtype=torch.int32, device=ids.device)
    starts = query_start_loc + number * extra
    lengths = query_start_loc.diff() + extra
    is_real = query_start_loc.diff() > 0
    rows = torch.where(is_real, idx_mapping[:num_reqs], 0)
    first = torch.where(is_real, positions[query_start_loc[:-1].clamp(max=positions.shape[0] - 1).long()], 0)
    total = torch.where(is_real, total_len[rows], 0)
    num_tokens = int(starts[-1])
    request = torch.repeat_interleave(number[:-1], lengths, output_size=num_tokens)
    offset = torch.arange(num_tokens, dtype=torch.int32, device=ids.device) - starts[request]
    source = first[request] + offset + 1 - extra
    known = total[request].clamp(max=row_len)
    found = token_ids[rows[request], source.clamp(max=row_len - 1)]
    ids[:num_tokens] = torch.where(source < known, found, 0)
    ids[num_tokens:] = 0
    place = (total - 2 + extra - first).minimum(lengths - 1).clamp(min=0)
    sample_index.copy_(torch.where(is_real, starts[:-1] + place, 0))
    draft_tokens[rows[is_real]] = -1
    if not extra:
        return
    position = first[request] + offset
    column = position // block_size
    has_block = is_real[request] & (position < row_len) & (column < num_blocks[rows[request]])
    block = block_table[rows[request], column.clamp(max=block_table.shape[1] - 1)]
    positions_out[:num_tokens] = position.clamp(max=row_len - 1)
    positions_out[num_tokens:] = 0
    slots_out[:num_tokens] = torch.where(has_block, block * block_size + position % block_size, -1)
    slots_out[num_tokens:] = -1
    starts_out.copy_(starts)
    seq_lens_out.copy_(torch.where(is_real, first + lengths, 0))


prepare_draft_inputs = dispatch(prepare_draft_inputs_triton, prepare_draft_inputs_torch)


@triton.jit(do_not_specialize=["num_reqs", "step"])
def _advance_kernel(
    ids_ptr,
    positions_out_ptr,
    seq_lens_out_ptr,
    slots_out_ptr,
    draft_tokens_ptr,
    draft_stride,
    drawn_ptr,
    to_target_ptr,
    query_start_loc_ptr,
    idx_mapping_ptr,
    total_len_ptr,
    num_computed_ptr,
    table_ptr,
    table_stride,
    num_blocks_ptr,
    row_len,
    num_reqs,
    step,
    EXTRA: tl.constexpr,
    MAPPED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    req = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = req < num_reqs
    start = tl.load(query_start_loc_ptr + req, mask=mask, other=0)
    is_real = mask & (tl.load(query_start_loc_ptr + req + 1, mask=mask, other=0) > start)
    slot = tl.load(idx_mapping_ptr + req, mask=is_real, other=0).to(tl.int64)
    total = tl.load(total_len_ptr + slot, mask=is_real, other=0)
    is_drafting = is_real & (tl.load(num_computed_ptr + slot, mask=is_real, other=0) == total - 1)
    drawn = tl.load(drawn_ptr + req, mask=mask, other=-1)
    has_draft = is_drafting & (drawn >= 0)
    token = drawn
    if MAPPED:
        token = tl.load(to_target_ptr + drawn, mask=has_draft, other=0)
    tl.store(draft_tokens_ptr + slot * draft_stride + step, tl.where(has_draft, token, -1), mask=is_real)
    position = tl.where(is_drafting, total - 1 + EXTRA + step, 0)
    column = position // BLOCK_SIZE
    num_blocks = tl.load(num_blocks_ptr + slot, mask=is_drafting, other=0)
    has_block = is_drafting & (position < row_len) & (column < num_blocks)
    block = tl.load(table_ptr + slot * table_stride + column, mask=has_block, other=0)
    tl.store(ids_ptr + req, tl.where(has_draft, token, 0).to(tl.int32), mask=mask)
    tl.store(positions_out_ptr + req, tl.minimum(position, row_len - 1), mask=mask)
    tl.store(seq_lens_out_ptr + req, tl.where(has_block, position + 1, 0), mask=mask)
    tl.store(slots_out_ptr + req, tl.where(has_block, block * BLOCK_SIZE + position % BLOCK_SIZE, -1), mask=mask)


def advance_draft_triton(
    # [B] int32, out
    ids: torch.Tensor,
    # [B] int32, out
    positions_out: torch.Tensor,
    # [B] int32, out
    seq_lens_out: torch.Tensor,
    # [B] int32, out
    slots_out: torch.Tensor,
    # [R, K_max] int64, out: column `step`
    draft_tokens: torch.Tensor,
    # [B] int64: ids of the draft vocabulary, -1 = none
    drawn: torch.Tensor,
    # [V_d] int64; None = both vocabularies are one
    to_target: torch.Tensor | None,
    # [B + 1] int32, of the target's step
    query_start_loc: torch.Tensor,
    # [>= B] int32
    idx_mapping: torch.Tensor,
    # [R] int32
    total_len: torch.Tensor,
    # [R] int32
    num_computed_tokens: torch.Tensor,
    # [R, MB] int32
    block_table: torch.Tensor,
    # [R] int32
    num_blocks: torch.Tensor,
    *,
    step: int,
    extra: int,
    block_size: int,
    row_len: int,
) -> None:
    """Keep draft number `step` of every request and make it the input of the next draft step.

    A request whose known tokens are not all computed drafts nothing (-1).  A position without a block
    gets slot -1 and an empty context.
    """
    num_reqs = ids.shape[0]
    _advance_kernel[(cdiv(num_reqs, _ROWS),)](
        ids,
        positions_out,
        seq_lens_out,
        slots_out,
        draft_tokens,
        draft_tokens.stride(0),
        drawn,
        drawn if to_target is None else to_target,
        query_start_loc,
        idx_mapping,
        total_len,
        num_computed_tokens,
        block_table,
        block_table.stride(0),
        num_blocks,
        row_len,
        num_reqs,
        step,
        EXTRA=extra,
        MAPPED=to_target is not None,
        BLOCK_SIZE=block_size,
        ROWS=_ROWS,
    )


def advance_draft_torch(
    # [B] int32, out
    ids: torch.Tensor,
    # [B] int32, out
    positions_out: torch.Tensor,
    # [B] int32, out
    seq_lens_out: torch.Tensor,
    # [B] int32, out
    slots_out: torch.Tensor,
    # [R, K_max] int64, out
    draft_tokens: torch.Tensor,
    # [B] int64
    drawn: torch.Tensor,
    # [V_d] int64
    to_target: torch.Tensor | None,
    # [B + 1] int32
    query_start_loc: torch.Tensor,
    # [>= B] int32
    idx_mapping: torch.Tensor,
    # [R] int32
    total_len: torch.Tensor,
    # [R] int32
    num_computed_tokens: torch.Tensor,
    # [R, MB] int32
    block_table: torch.Tensor,
    # [R] int32
    num_blocks: torch.Tensor,
    *,
    step: int,
    extra: int,
    block_size: int,
    row_len: int,
) -> None:
    """Torch reference of `advance_draft`."""
    num_reqs = ids.shape[0]
    is_real = query_start_loc.diff() > 0
    rows = torch.where(is_real, idx_mapping[:num_reqs], 0)
    total = total_len[rows]
    is_drafting = is_real & (num_computed_tokens[rows] == total - 1)
    has_draft = is_drafting & (drawn >= 0)
    token = drawn if to_target is None else to_target[drawn.clamp(min=0)]
    draft_tokens[rows[is_real], step] = torch.where(has_draft, token, -1)[is_real]
    position = torch.where(is_drafting, total - 1 + extra + step, 0)
    column = position // block_size
    has_block = is_drafting & (position < row_len) & (column < num_blocks[rows])
    block = block_table[rows, column.clamp(max=block_table.shape[1] - 1)]
    ids.copy_(torch.where(has_draft, token, 0))
    positions_out.copy_(position.clamp(max=row_len - 1))
    seq_lens_out.copy_(torch.where(has_block, position + 1, 0))
    slots_out.copy_(torch.where(has_block, block * block_size + position % block_size, -1))


advance_draft = dispatch(advance_draft_triton, advance_draft_torch)


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    pointers = ("query_start_loc", "idx_mapping", "total_len", "table", "num_blocks")
    shared = {f"{name}_ptr": "*i32" for name in pointers} | {"table_stride": "i32", "row_len": "i32"}
    shared |= {"draft_tokens_ptr": "*i64", "draft_stride": "i32", "num_reqs": "i32"}
    first = (
        "ids",
        "positions_out",
        "slots_out",
        "starts_out",
        "seq_lens_out",
        "sample_index",
        "positions",
        "token_ids",
    )
    numbers = dict.fromkeys(("max_drafts", "token_stride", "num_slots"), "i32")
    advance = {f"{name}_ptr": "*i32" for name in ("ids", "positions_out", "seq_lens_out", "slots_out", "num_computed")}
    advance |= {"drawn_ptr": "*i64", "to_target_ptr": "*i64", "step": "i32"}
    return [
        AotCase(
            kernel=_first_pass_kernel,
            signature=shared | {f"{name}_ptr": "*i32" for name in first} | numbers,
            constexprs={"EXTRA": extra, "BLOCK_SIZE": 16, "DRAFTS": 4, "BLOCK": _BLOCK},
        )
        for extra in (0, 1)
    ] + [
        AotCase(
            kernel=_advance_kernel,
            signature=shared | advance,
            constexprs={"EXTRA": 1, "MAPPED": True, "BLOCK_SIZE": 16, "ROWS": _ROWS},
        )
    ]
