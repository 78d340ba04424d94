"""Everything a step of decodes and verifications needs, in one launch: tokens, positions, slots, tables, rows.

For a batch in which request b computes the token it sampled last and its K_b drafts, at t = query_start_loc[b] + j
for j = 0 .. K_b, with row = idx_mapping[b]:

    input_ids[t]    = last_sampled_tokens[row] if j = 0, else max(draft_tokens[row, j - 1], 0)
    positions[t]    = num_computed_tokens[row] + j
    seq_lens[b]     = num_computed_tokens[row] + 1 + K_b
    slot_mapping[t] = table[row, positions[t] // BS] * BS + positions[t] % BS,   -1 past the table
    logit_slots[t]  = row,   local_positions[t] = j,   live_rows[b] = row

What `gather_block_tables`, `prepare_pos_seq_lens`, `combine_sampled_and_draft_tokens`, `compute_slot_mapping`
and `expand_logit_rows` yield for such a batch; they remain for all others.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import next_power_of_2, tl, triton
from mrv2_kernels.aot_case import AotCase

_BLOCK = 1024


@triton.jit(do_not_specialize=["num_tokens", "num_reqs"])
def _verification_inputs_kernel(
    input_ids_ptr,
    positions_ptr,
    seq_lens_ptr,
    slot_mapping_ptr,
    out_table_ptr,
    out_stride,
    logit_slots_ptr,
    local_positions_ptr,
    live_rows_ptr,
    idx_mapping_ptr,
    query_start_loc_ptr,
    num_computed_tokens_ptr,
    last_sampled_tokens_ptr,
    draft_tokens_ptr,
    draft_stride,
    block_tables_ptr,
    table_stride,
    num_blocks_ptr,
    row_len,
    num_tokens,
    num_reqs,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    start = tl.load(query_start_loc_ptr + req)
    if req == num_reqs:
        for base in range(start, num_tokens, BLOCK):
            token = base + tl.arange(0, BLOCK)
            zeros = tl.zeros([BLOCK], tl.int32)
            tl.store(input_ids_ptr + token, zeros, mask=token < num_tokens)
            tl.store(positions_ptr + token, zeros, mask=token < num_tokens)
            tl.store(slot_mapping_ptr + token, zeros - 1, mask=token < num_tokens)
            tl.store(logit_slots_ptr + token, zeros, mask=token < num_tokens)
            tl.store(local_positions_ptr + token, zeros, mask=token < num_tokens)
    else:
        query_len = tl.load(query_start_loc_ptr + req + 1) - start
        is_real = query_len > 0
        row = tl.load(idx_mapping_ptr + req, mask=is_real, other=0).to(tl.int64)
        num_blocks = tl.load(num_blocks_ptr + row, mask=is_real, other=0)
        first = tl.load(num_computed_tokens_ptr + row, mask=is_real, other=0)
        j = tl.arange(0, TOKENS)
        mask = j < query_len
        position = first + j
        column = position // BLOCK_SIZE
        block = tl.load(block_tables_ptr + row * table_stride + column, mask=mask & (column < row_len), other=0)
        slot = tl.where(column < row_len, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        last = tl.load(last_sampled_tokens_ptr + row, mask=is_real, other=0)
        draft = tl.load(draft_tokens_ptr + row * draft_stride + j - 1, mask=mask & (j > 0), other=0)
        ids = tl.where(j == 0, last, tl.maximum(draft, 0))
        token = start + j
        tl.store(input_ids_ptr + token, ids.to(tl.int32), mask=mask)
        tl.store(positions_ptr + token, position, mask=mask)
        tl.store(slot_mapping_ptr + token, slot, mask=mask)
        tl.store(logit_slots_ptr + token, tl.zeros([TOKENS], tl.int32) + row.to(tl.int32), mask=mask)
        tl.store(local_positions_ptr + token, j, mask=mask)
        tl.store(seq_lens_ptr + req, tl.where(is_real, first + query_len, 0))
        tl.store(live_rows_ptr + req, tl.where(is_real, row, -1).to(tl.int32))
        for base in range(0, row_len, BLOCK):
            columns = base + tl.arange(0, BLOCK)
            blocks = tl.load(block_tables_ptr + row * table_stride + columns, mask=columns < num_blocks, other=0)
            tl.store(out_table_ptr + req * out_stride + columns, blocks, mask=columns < row_len)


def prepare_verification_inputs_triton(
    # [T_pad] int32, out
    input_ids: torch.Tensor,
    # [T_pad] int32, out
    positions: torch.Tensor,
    # [B_pad] int32, out
    seq_lens: torch.Tensor,
    # [T_pad] int32, out
    slot_mapping: torch.Tensor,
    # [B_pad, MB] int32, out
    out_table: torch.Tensor,
    # [T_pad] int32, out: request row of each token, 0 in padding
    logit_slots: torch.Tensor,
    # [T_pad] int32, out: place of each token among its request's
    local_positions: torch.Tensor,
    # [B_pad] int32, out: request rows, -1 in padding
    live_rows: torch.Tensor,
    # [B_pad] int32, anything over padding
    idx_mapping: torch.Tensor,
    # [B_pad + 1] int32, constant over padding; 1 + K_b tokens a request
    query_start_loc: torch.Tensor,
    # [R] int32
    num_computed_tokens: torch.Tensor,
    # [R] int64
    last_sampled_tokens: torch.Tensor,
    # [R, K] int64, K the most drafts of a request; -1 = no draft
    draft_tokens: torch.Tensor,
    # [R, MB] int32
    block_tables: torch.Tensor,
    # [R] int32
    num_blocks: torch.Tensor,
    *,
    block_size: int,
) -> None:
    """Fill the inputs of decodes and verifications; padding becomes inert (length 0, slot -1, null blocks)."""
    padded, num_tokens = seq_lens.shape[0], input_ids.shape[0]
    _verification_inputs_kernel[(padded + 1,)](
        input_ids,
        positions,
        seq_lens,
        slot_mapping,
        out_table,
        out_table.stride(0),
        logit_slots,
        local_positions,
        live_rows,
        idx_mapping,
        query_start_loc,
        num_computed_tokens,
        last_sampled_tokens,
        draft_tokens,
        draft_tokens.stride(0),
        block_tables,
        block_tables.stride(0),
        num_blocks,
        out_table.shape[1],
        num_tokens,
        padded,
        BLOCK_SIZE=block_size,
        TOKENS=next_power_of_2(1 + draft_tokens.shape[1]),
        BLOCK=_BLOCK,
    )


def prepare_verification_inputs_torch(
    # [T_pad] int32, out
    input_ids: torch.Tensor,
    # [T_pad] int32, out
    positions: torch.Tensor,
    # [B_pad] int32, out
    seq_lens: torch.Tensor,
    # [T_pad] int32, out
    slot_mapping: torch.Tensor,
    # [B_pad, MB] int32, out
    out_table: torch.Tensor,
    # [T_pad] int32, out
    logit_slots: torch.Tensor,
    # [T_pad] int32, out
    local_positions: torch.Tensor,
    # [B_pad] int32, out
    live_rows: torch.Tensor,
    # [B_pad] int32, anything over padding
    idx_mapping: torch.Tensor,
    # [B_pad + 1] int32, constant over padding; 1 + K_b tokens a request
    query_start_loc: torch.Tensor,
    # [R] int32
    num_computed_tokens: torch.Tensor,
    # [R] int64
    last_sampled_tokens: torch.Tensor,
    # [R, >= K] int64
    draft_tokens: torch.Tensor,
    # [R, MB] int32
    block_tables: torch.Tensor,
    # [R] int32
    num_blocks: torch.Tensor,
    *,
    block_size: int,
) -> None:
    """Torch reference of `prepare_verification_inputs`."""
    width, device = out_table.shape[1], input_ids.device
    lengths = query_start_loc[: seq_lens.shape[0] + 1].diff()
    is_real = lengths > 0
    batch, total = int(is_real.sum()), int(query_start_loc[seq_lens.shape[0]])
    live, lengths = idx_mapping[:batch], lengths[:batch]
    rows = live.long()
    request = torch.repeat_interleave(torch.arange(batch, device=device), lengths, output_size=total)
    j = torch.arange(total, dtype=torch.int32, device=device) - query_start_loc[request]
    row = rows[request]
    position = num_computed_tokens[row] + j
    column = position // block_size
    block = block_tables[row, column.clamp(max=width - 1)]
    outs = ((input_ids, 0), (positions, 0), (slot_mapping, -1), (logit_slots, 0), (local_positions, 0))
    for tensor, value in outs:
        tensor[total:] = value
    for tensor, value in ((seq_lens, 0), (out_table, 0), (live_rows, -1)):
        tensor[batch:] = value
    known = torch.cat((last_sampled_tokens[rows].unsqueeze(1), draft_tokens[rows].clamp(min=0)), dim=1)
    input_ids[:total] = known[request, j.long()].int()
    positions[:total] = position
    slot_mapping[:total] = torch.where(column < width, block * block_size + position % block_size, -1)
    logit_slots[:total] = live[request]
    local_positions[:total] = j
    seq_lens[:batch] = num_computed_tokens[rows] + lengths
    live_rows[:batch] = live
    used = torch.arange(width, device=device) < num_blocks[rows].unsqueeze(1)
    out_table[:batch] = torch.where(used, block_tables[rows, :width], 0)


prepare_verification_inputs = dispatch(prepare_verification_inputs_triton, prepare_verification_inputs_torch)


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    outputs = ("input_ids", "positions", "seq_lens", "slot_mapping", "out_table", "logit_slots", "local_positions")
    inputs = ("live_rows", "idx_mapping", "query_start_loc", "num_computed_tokens", "block_tables", "num_blocks")
    signature = {f"{name}_ptr": "*i32" for name in (*outputs, *inputs)}
    signature |= {f"{name}_ptr": "*i64" for name in ("last_sampled_tokens", "draft_tokens")}
    signature |= dict.fromkeys(
        ("out_stride", "draft_stride", "table_stride", "row_len", "num_tokens", "num_reqs"), "i32"
    )
    return [
        AotCase(
            kernel=_verification_inputs_kernel,
            signature=signature,
            constexprs={"BLOCK_SIZE": 16, "TOKENS": 4, "BLOCK": _BLOCK},
        )
    ]
