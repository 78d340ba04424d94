"""One launch for a decode batch yields what the four general kernels yield."""

from __future__ import annotations

import pytest
import torch

from mrv2_kernels.inputs.combine import combine_sampled_and_draft_tokens
from mrv2_kernels.inputs.decode import prepare_decode_inputs
from mrv2_kernels.inputs.prepare import prepare_pos_seq_lens
from mrv2_kernels.state.block_table import compute_slot_mapping, gather_block_tables

ROWS, WIDTH, BLOCK_SIZE = 7, 5, 16


def state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    computed = torch.randint(1, WIDTH * BLOCK_SIZE, (ROWS,), generator=generator, dtype=torch.int32)
    return {
        "computed": computed,
        "prefill_len": torch.minimum(computed, torch.tensor(9, dtype=torch.int32)),
        "last": torch.randint(0, 500, (ROWS,), generator=generator),
        "tables": torch.randint(1, 99, (ROWS, WIDTH), generator=generator, dtype=torch.int32),
        "num_blocks": computed // BLOCK_SIZE + 1,
    }


def count(n: int) -> torch.Tensor:
    return torch.tensor([n], dtype=torch.int32)


def outputs(padded: int) -> list[torch.Tensor]:
    vectors = [torch.full((padded,), 77, dtype=torch.int32) for _ in range(4)]
    return [*vectors, torch.full((padded, WIDTH), 77, dtype=torch.int32)]


def by_general_kernels(s: dict[str, torch.Tensor], rows: torch.Tensor, padded: int) -> list[torch.Tensor]:
    num_reqs = rows.shape[0]
    ids, positions, seq_lens, slots, table = outputs(padded)
    ids[:] = 0
    starts = torch.arange(padded + 1, dtype=torch.int32).clamp(max=num_reqs)
    gather_block_tables.torch(table, s["tables"], s["num_blocks"], rows)
    prepare_pos_seq_lens.torch(positions, seq_lens, rows, starts, s["computed"], max_query_len=1)
    drafts = torch.zeros((ROWS, 0), dtype=torch.int64)
    logits_indices = torch.zeros((padded,), dtype=torch.int32)
    combine_sampled_and_draft_tokens.torch(
        ids, logits_indices, rows, starts, seq_lens, s["prefill_len"], s["last"], drafts, starts[: num_reqs + 1]
    )
    compute_slot_mapping.torch(slots, s["tables"], rows, starts, positions, block_size=BLOCK_SIZE)
    return [ids, positions, seq_lens, slots, table]


@pytest.mark.parametrize("twin", [prepare_decode_inputs.torch, prepare_decode_inputs.triton])
@pytest.mark.parametrize(("num_reqs", "padded"), [(1, 1), (3, 4), (7, 7), (5, 8)])
def test_equals_the_general_kernels(twin, num_reqs: int, padded: int) -> None:
    s = state(num_reqs)
    rows = torch.randperm(ROWS, generator=torch.Generator().manual_seed(padded))[:num_reqs].to(torch.int32)
    # whatever the mapping holds past the batch is never used
    rows = torch.cat((rows, torch.full((padded - num_reqs,), 1 << 30, dtype=torch.int32)))
    got = outputs(padded)
    twin(*got, rows, s["computed"], s["last"], s["tables"], s["num_blocks"], count(num_reqs), block_size=BLOCK_SIZE)
    for mine, want in zip(got, by_general_kernels(s, rows[:num_reqs], padded), strict=True):
        assert torch.equal(mine, want)


@pytest.mark.parametrize("twin", [prepare_decode_inputs.torch, prepare_decode_inputs.triton])
def test_a_position_past_the_table_writes_nothing(twin) -> None:
    s = state(0)
    s["computed"][2] = WIDTH * BLOCK_SIZE
    rows = torch.tensor([2, 1], dtype=torch.int32)
    got = outputs(2)
    twin(*got, rows, s["computed"], s["last"], s["tables"], s["num_blocks"], count(2), block_size=BLOCK_SIZE)
    assert got[3][0] == -1 and got[3][1] >= BLOCK_SIZE
