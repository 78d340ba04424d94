"""Everything a decode step needs, in one launch: token, position, length, KV slot and block-table row.

For a batch in which every request computes exactly the token it sampled last:

    input_ids[b]    = last_sampled_tokens[row]          row = idx_mapping[b]
    positions[b]    = num_computed_tokens[row]
    seq_lens[b]     = positions[b] + 1
    slot_mapping[b] = table[row, positions[b] // BS] * BS + positions[b] % BS,   -1 past the table

What `gather_block_tables`, `prepare_pos_seq_lens`, `combine_sampled_and_draft_tokens` and
`compute_slot_mapping` yield for such a batch; they remain for all others.

It waits at once where it is launched ahead (`mrv2_kernels.gemm.pdl`): all that it reads, the launch in front of it or
the step before has written.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import tl, triton
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.gemm.pdl import gdc_launch_dependents, gdc_wait, has_pdl

_BLOCK = 1024


@triton.jit
def _decode_inputs_kernel(
    input_ids_ptr,
    positions_ptr,
    seq_lens_ptr,
    slot_mapping_ptr,
    out_table_ptr,
    out_stride,
    idx_mapping_ptr,
    num_computed_tokens_ptr,
    last_sampled_tokens_ptr,
    block_tables_ptr,
    table_stride,
    num_blocks_ptr,
    num_reqs_ptr,
    row_len,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    req = tl.program_id(0).to(tl.int64)
    row = tl.zeros([], tl.int64)
    num_blocks = 0
    if req < tl.load(num_reqs_ptr):
        row = tl.load(idx_mapping_ptr + req).to(tl.int64)
        num_blocks = tl.load(num_blocks_ptr + row)
        position = tl.load(num_computed_tokens_ptr + row)
        column = position // BLOCK_SIZE
        block = tl.load(block_tables_ptr + row * table_stride + column, mask=column < row_len, other=0)
        slot = tl.where(column < row_len, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(input_ids_ptr + req, tl.load(last_sampled_tokens_ptr + row).to(tl.int32))
        tl.store(positions_ptr + req, position)
        tl.store(seq_lens_ptr + req, position + 1)
        tl.store(slot_mapping_ptr + req, slot)
    else:
        tl.store(input_ids_ptr + req, 0)
        tl.store(positions_ptr + req, 0)
        tl.store(seq_lens_ptr + req, 0)
        tl.store(slot_mapping_ptr + req, -1)
    for base in range(0, row_len, BLOCK):
        columns = base + tl.arange(0, BLOCK)
        blocks = tl.load(block_tables_ptr + row * table_stride + columns, mask=columns < num_blocks, other=0)
        tl.store(out_table_ptr + req * out_stride + columns, blocks, mask=columns < row_len)


def prepare_decode_inputs_triton(
    # [B_pad] int32, out
    input_ids: torch.Tensor,
    # [B_pad] int32, out
    positions: torch.Tensor,
    # [B_pad] int32, out
    seq_lens: torch.Tensor,
    # [B_pad] int32, out
    slot_mapping: torch.Tensor,
    # [B_pad, MB] int32, out
    out_table: torch.Tensor,
    # [>= B] int32
    idx_mapping: torch.Tensor,
    # [R] int32
    num_computed_tokens: torch.Tensor,
    # [R] int64
    last_sampled_tokens: torch.Tensor,
    # [R, MB] int32
    block_tables: torch.Tensor,
    # [R] int32
    num_blocks: torch.Tensor,
    # [1] int32: B, on the device, so that one graph serves every B up to B_pad
    num_reqs: torch.Tensor,
    *,
    block_size: int,
) -> None:
    """Fill the inputs of a decode batch; rows at or beyond B become inert (length 0, slot -1, null blocks)."""
    pdl = has_pdl(input_ids)
    _decode_inputs_kernel[(input_ids.shape[0],)](
        input_ids,
        positions,
        seq_lens,
        slot_mapping,
        out_table,
        out_table.stride(0),
        idx_mapping,
        num_computed_tokens,
        last_sampled_tokens,
        block_tables,
        block_tables.stride(0),
        num_blocks,
        num_reqs,
        out_table.shape[1],
        BLOCK_SIZE=block_size,
        BLOCK=_BLOCK,
        PDL=pdl,
        launch_pdl=pdl,
    )


def prepare_decode_inputs_torch(
    # [B_pad] int32, out
    input_ids: torch.Tensor,
    # [B_pad] int32, out
    positions: torch.Tensor,
    # [B_pad] int32, out
    seq_lens: torch.Tensor,
    # [B_pad] int32, out
    slot_mapping: torch.Tensor,
    # [B_pad, MB] int32, out
    out_table: torch.Tensor,
    # [>= B] int32
    idx_mapping: torch.Tensor,
    # [R] int32
    num_computed_tokens: torch.Tensor,
    # [R] int64
    last_sampled_tokens: torch.Tensor,
    # [R, MB] int32
    block_tables: torch.Tensor,
    # [R] int32
    num_blocks: torch.Tensor,
    # [1] int32: B, on the device, so that one graph serves every B up to B_pad
    num_reqs: torch.Tensor,
    *,
    block_size: int,
) -> None:
    """Torch reference of `prepare_decode_inputs`."""
    batch, width = int(num_reqs), out_table.shape[1]
    idx_mapping = idx_mapping[:batch]
    position = num_computed_tokens[idx_mapping]
    column = position // block_size
    block = block_tables[idx_mapping, column.clamp(max=width - 1)]
    for tensor, value in ((input_ids, 0), (positions, 0), (seq_lens, 0), (slot_mapping, -1), (out_table, 0)):
        tensor[batch:] = value
    input_ids[:batch] = last_sampled_tokens[idx_mapping]
    positions[:batch] = position
    seq_lens[:batch] = position + 1
    slot_mapping[:batch] = torch.where(column < width, block * block_size + position % block_size, -1)
    used = torch.arange(width, device=out_table.device) < num_blocks[idx_mapping].unsqueeze(1)
    out_table[:batch] = torch.where(used, block_tables[idx_mapping, :width], 0)


prepare_decode_inputs = dispatch(prepare_decode_inputs_triton, prepare_decode_inputs_torch)


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    pointers = ("input_ids", "positions", "seq_lens", "slot_mapping", "out_table", "idx_mapping", "num_computed_tokens")
    signature = {f"{name}_ptr": "*i32" for name in (*pointers, "block_tables", "num_blocks", "num_reqs")}
    numbers = dict.fromkeys(("out_stride", "table_stride", "row_len"), "i32")
    return [
        AotCase(
            kernel=_decode_inputs_kernel,
            signature=signature | {"last_sampled_tokens_ptr": "*i64"} | numbers,
            constexprs={"BLOCK_SIZE": 16, "BLOCK": _BLOCK, "PDL": True},
        )
    ]
