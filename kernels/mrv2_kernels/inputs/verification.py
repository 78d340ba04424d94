"""Everything a step of 1 + K tokens a request needs, in one launch: tokens, positions, lengths, slots, tables, rows.

For a batch in which every request computes the token it sampled last and its K drafts, j = 0 .. K:

    input_ids[b, j]    = last_sampled_tokens[row] if j = 0, else max(draft_tokens[row, j - 1], 0)
    positions[b, j]    = num_computed_tokens[row] + j                      row = idx_mapping[b]
    seq_lens[b]        = num_computed_tokens[row] + 1 + K
    slot_mapping[b, j] = table[row, position // BS] * BS + position % BS,   -1 past the table
    logit_slots[b, j]  = row,   local_positions[b, j] = j,   live_rows[b] = row

What `gather_block_tables`, `prepare_pos_seq_lens`, `combine_sampled_and_draft_tokens`, `compute_slot_mapping`
and `expand_logit_rows` yield for such a batch; they remain for all others.  K = 0 is a decode.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import next_power_of_2, tl, triton
from mrv2_kernels.aot_case import AotCase

_BLOCK = 1024


@triton.jit
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
    num_computed_tokens_ptr,
    last_sampled_tokens_ptr,
    draft_tokens_ptr,
    draft_stride,
    block_tables_ptr,
    table_stride,
    num_blocks_ptr,
    num_reqs_ptr,
    row_len,
    QUERY_LEN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, TOKENS)
    mask = j < QUERY_LEN
    is_real = req < tl.load(num_reqs_ptr)
    row = tl.load(idx_mapping_ptr + req, mask=is_real, other=0).to(tl.int64)
    num_blocks = tl.load(num_blocks_ptr + row, mask=is_real, other=0)
    first = tl.load(num_computed_tokens_ptr + row, mask=is_real, other=0)
    position = first + j
    column = position // BLOCK_SIZE
    in_table = is_real & (column < row_len)
    block = tl.load(block_tables_ptr + row * table_stride + column, mask=in_table, other=0)
    slot = tl.where(in_table, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    last = tl.load(last_sampled_tokens_ptr + row, mask=is_real, other=0)
    draft = tl.load(draft_tokens_ptr + row * draft_stride + j - 1, mask=is_real & mask & (j > 0), other=0)
    token = tl.where(j == 0, last, tl.maximum(draft, 0))
    out = req * QUERY_LEN + j
    tl.store(input_ids_ptr + out, token.to(tl.int32), mask=mask)
    tl.store(positions_ptr + out, tl.where(is_real, position, 0), mask=mask)
    tl.store(slot_mapping_ptr + out, slot, mask=mask)
    tl.store(logit_slots_ptr + out, tl.zeros([TOKENS], tl.int32) + row.to(tl.int32), mask=mask)
    tl.store(local_positions_ptr + out, j, mask=mask)
    tl.store(seq_lens_ptr + req, tl.where(is_real, first + QUERY_LEN, 0))
    tl.store(live_rows_ptr + req, tl.where(is_real, row, -1).to(tl.int32))
    for base in range(0, row_len, BLOCK):
        columns = base + tl.arange(0, BLOCK)
        blocks = tl.load(block_tables_ptr + row * table_stride + columns, mask=columns < num_blocks, other=0)
        tl.store(out_table_ptr + req * out_stride + columns, blocks, mask=columns < row_len)


def prepare_verification_inputs_triton(
    # [B_pad * (1 + K)] int32, out
    input_ids: torch.Tensor,
    # [B_pad * (1 + K)] int32, out
    positions: torch.Tensor,
    # [B_pad] int32, out
    seq_lens: torch.Tensor,
    # [B_pad * (1 + K)] int32, out
    slot_mapping: torch.Tensor,
    # [B_pad, MB] int32, out
    out_table: torch.Tensor,
    # [B_pad * (1 + K)] int32, out: request row of each token, 0 in padding
    logit_slots: torch.Tensor,
    # [B_pad * (1 + K)] int32, out: place of each token among its request's
    local_positions: torch.Tensor,
    # [B_pad] int32, out: request rows, -1 in padding
    live_rows: torch.Tensor,
    # [B_pad] int32
    idx_mapping: torch.Tensor,
    # [R] int32
    num_computed_tokens: torch.Tensor,
    # [R] int64
    last_sampled_tokens: torch.Tensor,
    # [R, >= K] int64, -1 = no draft
    draft_tokens: torch.Tensor,
    # [R, MB] int32
    block_tables: torch.Tensor,
    # [R] int32
    num_blocks: torch.Tensor,
    # [1] int32: B, on the device, so that one graph serves every B up to B_pad
    num_reqs: torch.Tensor,
    *,
    block_size: int,
) -> None:
    """Fill the inputs of a batch of verifications; rows at or beyond B become inert (length 0, slot -1, null blocks)."""
    padded = seq_lens.shape[0]
    query_len = input_ids.shape[0] // padded
    _verification_inputs_kernel[(padded,)](
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
        num_computed_tokens,
        last_sampled_tokens,
        draft_tokens,
        draft_tokens.stride(0),
        block_tables,
        block_tables.stride(0),
        num_blocks,
        num_reqs,
        out_table.shape[1],
        QUERY_LEN=query_len,
        BLOCK_SIZE=block_size,
        TOKENS=next_power_of_2(query_len),
        BLOCK=_BLOCK,
    )


def prepare_verification_inputs_torch(
    # [B_pad * (1 + K)] int32, out
    input_ids: torch.Tensor,
    # [B_pad * (1 + K)] int32, out
    positions: torch.Tensor,
    # [B_pad] int32, out
    seq_lens: torch.Tensor,
    # [B_pad * (1 + K)] int32, out
    slot_mapping: torch.Tensor,
    # [B_pad, MB] int32, out
    out_table: torch.Tensor,
    # [B_pad * (1 + K)] int32, out
    logit_slots: torch.Tensor,
    # [B_pad * (1 + K)] int32, out
    local_positions: torch.Tensor,
    # [B_pad] int32, out
    live_rows: torch.Tensor,
    # [B_pad] int32
    idx_mapping: torch.Tensor,
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
    # [1] int32: B, on the device
    num_reqs: torch.Tensor,
    *,
    block_size: int,
) -> None:
    """Torch reference of `prepare_verification_inputs`."""
    padded, width = seq_lens.shape[0], out_table.shape[1]
    shape = padded, input_ids.shape[0] // padded
    batch, num_drafts = int(num_reqs), shape[1] - 1
    rows = idx_mapping[:batch].long()
    j = torch.arange(shape[1], dtype=torch.int32, device=input_ids.device)
    position = num_computed_tokens[rows].unsqueeze(1) + j
    column = position // block_size
    block = block_tables[rows].gather(1, column.clamp(max=width - 1).long())
    outs = ((input_ids, 0), (positions, 0), (slot_mapping, -1), (logit_slots, 0))
    for tensor, value in (*outs, (seq_lens, 0), (out_table, 0), (live_rows, -1)):
        tensor.view(padded, -1)[batch:] = value
    drafts = draft_tokens[rows, :num_drafts].clamp(min=0)
    input_ids.view(shape)[:batch] = torch.cat((last_sampled_tokens[rows].unsqueeze(1), drafts), dim=1).int()
    positions.view(shape)[:batch] = position
    slot_mapping.view(shape)[:batch] = torch.where(column < width, block * block_size + position % block_size, -1)
    logit_slots.view(shape)[:batch] = idx_mapping[:batch].unsqueeze(1)
    local_positions.view(shape).copy_(j.expand(shape))
    seq_lens[:batch] = position[:, -1] + 1
    live_rows[:batch] = idx_mapping[:batch]
    used = torch.arange(width, device=out_table.device) < num_blocks[rows].unsqueeze(1)
    out_table[:batch] = torch.where(used, block_tables[rows, :width], 0)


prepare_verification_inputs = dispatch(prepare_verification_inputs_triton, prepare_verification_inputs_torch)


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    outputs = ("input_ids", "positions", "seq_lens", "slot_mapping", "out_table", "logit_slots", "local_positions")
    inputs = ("live_rows", "idx_mapping", "num_computed_tokens", "block_tables", "num_blocks", "num_reqs")
    signature = {f"{name}_ptr": "*i32" for name in (*outputs, *inputs)}
    signature |= {f"{name}_ptr": "*i64" for name in ("last_sampled_tokens", "draft_tokens")}
    signature |= dict.fromkeys(("out_stride", "draft_stride", "table_stride", "row_len"), "i32")
    return [
        AotCase(
            kernel=_verification_inputs_kernel,
            signature=signature,
            constexprs={"QUERY_LEN": 4, "BLOCK_SIZE": 16, "TOKENS": 4, "BLOCK": _BLOCK},
        )
    ]
