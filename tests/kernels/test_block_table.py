"""Block-table gather and slot mapping."""

from __future__ import annotations

import pytest
import torch

from mrv2_kernels.state.block_table import compute_slot_mapping, gather_block_tables

BLOCK_SIZE = 16


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("gather", [gather_block_tables.torch, gather_block_tables.triton])
def test_gather_copies_used_blocks_and_nulls_the_rest(gather):
    tables = torch.arange(1, 31, dtype=torch.int32).view(5, 6)
    out = torch.full((4, 6), -77, dtype=torch.int32)
    gather(out, tables, int32([1, 2, 6, 0, 3]), int32([4, 2]))
    assert out.tolist() == [[25, 26, 27, 0, 0, 0], [13, 14, 15, 16, 17, 18], [0] * 6, [0] * 6]


@pytest.mark.parametrize("num_reqs", [0, 1, 5])
@pytest.mark.parametrize("width", [1, 7, 1500])
def test_gather_twins_agree(num_reqs, width):
    generator = torch.Generator().manual_seed(width)
    tables = torch.randint(1, 10**6, (9, width), generator=generator, dtype=torch.int32)
    num_blocks = torch.randint(0, width + 1, (9,), generator=generator, dtype=torch.int32)
    idx_mapping = torch.randperm(9, generator=generator)[:num_reqs].to(torch.int32)
    outs = [torch.full((num_reqs + 2, width), -1, dtype=torch.int32) for _ in range(2)]
    gather_block_tables.torch(outs[0], tables, num_blocks, idx_mapping)
    gather_block_tables.triton(outs[1], tables, num_blocks, idx_mapping)
    assert torch.equal(*outs)


@pytest.mark.parametrize("compute", [compute_slot_mapping.torch, compute_slot_mapping.triton])
def test_slots_of_a_mixed_batch(compute):
    tables = int32([7, 3, 9, 5]).view(2, 2)
    out = torch.full((8,), 99, dtype=torch.int32)
    # request 0 in slot 1: positions 15, 16, 17; request 1 in slot 0: position 0
    compute(out, tables, int32([1, 0]), int32([0, 3, 4]), int32([15, 16, 17, 0]), block_size=BLOCK_SIZE)
    assert out.tolist() == [9 * 16 + 15, 5 * 16, 5 * 16 + 1, 7 * 16, -1, -1, -1, -1]


@pytest.mark.parametrize("compute", [compute_slot_mapping.torch, compute_slot_mapping.triton])
def test_position_past_the_last_block_has_no_slot(compute):
    out = torch.full((3,), 99, dtype=torch.int32)
    compute(out, int32([4, 6]).view(1, 2), int32([0]), int32([0, 3]), int32([31, 32, 900]), block_size=BLOCK_SIZE)
    assert out.tolist() == [6 * 16 + 15, -1, -1]


@pytest.mark.parametrize("num_reqs", [0, 1, 6])
def test_slot_twins_agree(num_reqs):
    generator = torch.Generator().manual_seed(num_reqs)
    lens = torch.randint(0, 700, (num_reqs,), generator=generator)
    lens[: num_reqs // 3] = 1200
    query_start_loc = torch.cat([torch.zeros(1), lens.cumsum(0)]).to(torch.int32)
    num_tokens = int(query_start_loc[-1])
    tables = torch.randint(1, 10**5, (8, 100), generator=generator, dtype=torch.int32)
    positions = torch.randint(0, 1600, (num_tokens + 5,), generator=generator, dtype=torch.int32)
    idx_mapping = torch.randperm(8, generator=generator)[:num_reqs].to(torch.int32)
    outs = [torch.full((num_tokens + 5,), 99, dtype=torch.int32) for _ in range(2)]
    args = (tables, idx_mapping, query_start_loc, positions)
    compute_slot_mapping.torch(outs[0], *args, block_size=32)
    compute_slot_mapping.triton(outs[1], *args, block_size=32)
    assert torch.equal(*outs)
    assert outs[0][num_tokens:].eq(-1).all()
