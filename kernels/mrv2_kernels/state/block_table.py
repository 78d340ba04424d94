"""From per-request block tables to what attention reads: gathered rows, and the KV slot of each token.

A slot is ``block * block_size + offset``; -1 means "write nothing".  Block 0 is the null block, which
padded entries point at.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import tl, triton
from mrv2_kernels.aot_case import AotCase

_BLOCK = 1024


@triton.jit(do_not_specialize=["num_reqs"])
def _gather_block_tables_kernel(
    out_ptr,
    out_stride,
    block_tables_ptr,
    table_stride,
    num_blocks_ptr,
    idx_mapping_ptr,
    num_reqs,
    row_len,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.zeros([], tl.int64)
    length = 0
    if row < num_reqs:
        slot = tl.load(idx_mapping_ptr + row).to(tl.int64)
        length = tl.load(num_blocks_ptr + slot)
    for base in range(0, row_len, BLOCK):
        column = base + tl.arange(0, BLOCK)
        blocks = tl.load(block_tables_ptr + slot * table_stride + column, mask=column < length, other=0)
        tl.store(out_ptr + row * out_stride + column, blocks, mask=column < row_len)


def gather_block_tables_triton(
    # [B_pad, MB] int32
    out: torch.Tensor,
    # [R, MB] int32
    block_tables: torch.Tensor,
    # [R] int32
    num_blocks: torch.Tensor,
    # [B] int32, exactly B long
    idx_mapping: torch.Tensor,
) -> None:
    """Copy the used part of each scheduled request's block table; everything else becomes 0.

    ``out[b, :num_blocks[idx_mapping[b]]] = block_tables[idx_mapping[b], :...]``; rows at or beyond B
    and the tail of each row are filled with the null block.
    """
    _gather_block_tables_kernel[(out.shape[0],)](
        out,
        out.stride(0),
        block_tables,
        block_tables.stride(0),
        num_blocks,
        idx_mapping,
        idx_mapping.shape[0],
        out.shape[1],
        BLOCK=_BLOCK,
    )


def gather_block_tables_torch(
    # [B_pad, MB] int32
    out: torch.Tensor,
    # [R, MB] int32
    block_tables: torch.Tensor,
    # [R] int32
    num_blocks: torch.Tensor,
    # [B] int32, exactly B long
    idx_mapping: torch.Tensor,
) -> None:
    """Torch reference of `gather_block_tables`."""
    num_reqs, width = idx_mapping.shape[0], out.shape[1]
    used = torch.arange(width, device=out.device) < num_blocks[idx_mapping].unsqueeze(1)
    out[:num_reqs] = torch.where(used, block_tables[idx_mapping, :width], 0)
    out[num_reqs:] = 0


gather_block_tables = dispatch(gather_block_tables_triton, gather_block_tables_torch)


@triton.jit(do_not_specialize=["num_reqs", "num_slots"])
def _slot_mapping_kernel(
    out_ptr,
    block_tables_ptr,
    table_stride,
    row_len,
    idx_mapping_ptr,
    query_start_loc_ptr,
    positions_ptr,
    num_reqs,
    num_slots,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0)
    start = tl.load(query_start_loc_ptr + req)
    if req == num_reqs:
        for base in range(start, num_slots, BLOCK):
            token = base + tl.arange(0, BLOCK)
            tl.store(out_ptr + token, -1, mask=token < num_slots)
    else:
        row_ptr = block_tables_ptr + tl.load(idx_mapping_ptr + req).to(tl.int64) * table_stride
        end = tl.load(query_start_loc_ptr + req + 1)
        for base in range(start, end, BLOCK):
            token = base + tl.arange(0, BLOCK)
            position = tl.load(positions_ptr + token, mask=token < end, other=0)
            column = position // BLOCK_SIZE
            inside = column < row_len
            block = tl.load(row_ptr + column, mask=(token < end) & inside, other=0)
            slot = tl.where(inside, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
            tl.store(out_ptr + token, slot, mask=token < end)


def compute_slot_mapping_triton(
    # [T_pad] int32
    out: torch.Tensor,
    # [R, MB] int32
    block_tables: torch.Tensor,
    # [B] int32, exactly B long
    idx_mapping: torch.Tensor,
    # [>= B + 1] int32
    query_start_loc: torch.Tensor,
    # [>= T] int32
    positions: torch.Tensor,
    *,
    block_size: int,
) -> None:
    """Write the KV slot of every scheduled token; padding and positions past a row's end get -1."""
    num_reqs = idx_mapping.shape[0]
    _slot_mapping_kernel[(num_reqs + 1,)](
        out,
        block_tables,
        block_tables.stride(0),
        block_tables.shape[1],
        idx_mapping,
        query_start_loc,
        positions,
        num_reqs,
        out.shape[0],
        BLOCK_SIZE=block_size,
        BLOCK=_BLOCK,
    )


def compute_slot_mapping_torch(
    # [T_pad] int32
    out: torch.Tensor,
    # [R, MB] int32
    block_tables: torch.Tensor,
    # [B] int32, exactly B long
    idx_mapping: torch.Tensor,
    # [>= B + 1] int32
    query_start_loc: torch.Tensor,
    # [>= T] int32
    positions: torch.Tensor,
    *,
    block_size: int,
) -> None:
    """Torch reference of `compute_slot_mapping`."""
    num_reqs = idx_mapping.shape[0]
    num_tokens = int(query_start_loc[num_reqs])
    lengths = query_start_loc[: num_reqs + 1].diff()
    slots = torch.repeat_interleave(idx_mapping, lengths, output_size=num_tokens)
    position = positions[:num_tokens]
    column = position // block_size
    inside = column < block_tables.shape[1]
    block = block_tables[slots, column.clamp(max=block_tables.shape[1] - 1)]
    out[:num_tokens] = torch.where(inside, block * block_size + position % block_size, -1)
    out[num_tokens:] = -1


compute_slot_mapping = dispatch(compute_slot_mapping_triton, compute_slot_mapping_torch)


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    return [
        AotCase(
            kernel=_gather_block_tables_kernel,
            signature={
                "out_ptr": "*i32",
                "out_stride": "i32",
                "block_tables_ptr": "*i32",
                "table_stride": "i32",
                "num_blocks_ptr": "*i32",
                "idx_mapping_ptr": "*i32",
                "num_reqs": "i32",
                "row_len": "i32",
            },
            constexprs={"BLOCK": _BLOCK},
        ),
        AotCase(
            kernel=_slot_mapping_kernel,
            signature={
                "out_ptr": "*i32",
                "block_tables_ptr": "*i32",
                "table_stride": "i32",
                "row_len": "i32",
                "idx_mapping_ptr": "*i32",
                "query_start_loc_ptr": "*i32",
                "positions_ptr": "*i32",
                "num_reqs": "i32",
                "num_slots": "i32",
            },
            constexprs={"BLOCK_SIZE": 16, "BLOCK": _BLOCK},
        ),
    ]
