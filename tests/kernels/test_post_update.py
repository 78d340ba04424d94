"""Committing a step: counts, then request state."""

from __future__ import annotations

import pytest
import torch

from mrv2_kernels.inputs.post_update import count_sampled_and_rejected, post_update

TWINS = ["torch", "triton"]


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("twin", TWINS)
def test_counts_are_zero_for_a_non_final_chunk(twin):
    num_sampled, num_rejected = int32([1, 2, 1, 9]), int32([-1, -1, -1, -1])
    # request 0: chunk ends inside the prefill; request 1: 4 rows, 2 sampled; request 2: chunk ends the prefill
    getattr(count_sampled_and_rejected, twin)(
        num_sampled,
        num_rejected,
        int32([2, 0, 1]),
        int32([5, 20, 7, 0]),
        int32([10, 7, 6]),
        int32([0, 1, 5, 6]),
    )
    assert num_sampled.tolist() == [0, 2, 1, 9]
    assert num_rejected.tolist() == [0, 2, 0, -1]


@pytest.mark.parametrize("num_reqs", [0, 1, 131])
def test_count_twins_agree(num_reqs):
    g = torch.Generator().manual_seed(num_reqs)
    idx_mapping = torch.randperm(200, generator=g)[:num_reqs].to(torch.int32)
    seq_lens = torch.randint(0, 20, (num_reqs + 3,), generator=g, dtype=torch.int32)
    prefill_len = torch.randint(0, 20, (200,), generator=g, dtype=torch.int32)
    num_logits = torch.randint(1, 5, (num_reqs,), generator=g)
    cu_num_logits = torch.cat([torch.zeros(1), num_logits.cumsum(0)]).to(torch.int32)
    results = []
    for twin in TWINS:
        num_sampled = torch.cat([torch.ones(num_reqs), torch.full((3,), 7)]).to(torch.int32)
        num_rejected = torch.full((num_reqs + 3,), 7, dtype=torch.int32)
        getattr(count_sampled_and_rejected, twin)(
            num_sampled, num_rejected, idx_mapping, seq_lens, prefill_len, cu_num_logits
        )
        results.append(torch.stack([num_sampled, num_rejected]))
    assert torch.equal(*results)


@pytest.mark.parametrize("twin", TWINS)
def test_state_after_a_step(twin):
    num_computed, total_len = int32([4, 0, 9, 3]), int32([5, 8, 10, 4])
    last_sampled, token_ids = torch.tensor([50, 51, 52, 53]), torch.zeros(4, 12, dtype=torch.int32)
    getattr(post_update, twin)(
        num_computed,
        total_len,
        last_sampled,
        token_ids,
        # slot 2 decodes with drafts, slot 1 is a non-final chunk, -1 is skipped, slot 0 got NaN logits
        int32([2, 1, -1, 0]),
        int32([0, 4, 7, 9, 10]),
        torch.tensor([[7, 8, -1, -1], [-1, -1, -1, -1], [9, 9, 9, 9], [-1, -1, -1, -1]]),
        int32([2, 0, 4, 1]),
        int32([2, 0, 0, 0]),
    )
    assert num_computed.tolist() == [5, 3, 11, 3]
    assert total_len.tolist() == [6, 8, 12, 4]
    assert last_sampled.tolist() == [0, 51, 8, 53]
    assert token_ids[2].tolist() == [0] * 10 + [7, 8]
    assert token_ids[[0, 1, 3]].eq(0).all()


@pytest.mark.parametrize("twin", TWINS)
def test_history_stops_at_the_end_of_the_row(twin):
    token_ids = torch.zeros(2, 6, dtype=torch.int32)
    total_len, last_sampled = int32([5, 0]), torch.zeros(2, 1, dtype=torch.int64)
    getattr(post_update, twin)(
        int32([4, 0]),
        total_len,
        last_sampled,
        token_ids,
        int32([0]),
        int32([0, 3]),
        torch.tensor([[3, 4, 5]]),
        int32([3]),
        int32([0]),
    )
    assert token_ids.tolist() == [[0, 0, 0, 0, 0, 3], [0] * 6]
    assert total_len.tolist() == [8, 0]
    assert last_sampled.tolist() == [[5], [0]]


@pytest.mark.parametrize("num_drafts", [0, 1, 5, 40])
def test_post_update_twins_agree(num_drafts):
    g = torch.Generator().manual_seed(num_drafts)
    num_reqs, num_rows, max_len = 7, 9, 64
    idx_mapping = torch.randperm(num_rows, generator=g)[:num_reqs].to(torch.int32)
    idx_mapping[3] = -1
    num_sampled = torch.randint(0, num_drafts + 2, (num_reqs,), generator=g, dtype=torch.int32)
    num_rejected = num_drafts + 1 - num_sampled
    query_start_loc = torch.arange(num_reqs + 1, dtype=torch.int32) * (num_drafts + 1)
    sampled = torch.randint(-1, 100, (num_reqs, num_drafts + 1), generator=g)
    state = [
        torch.randint(0, 30, (num_rows,), generator=g, dtype=torch.int32),
        torch.randint(30, max_len, (num_rows,), generator=g, dtype=torch.int32),
        torch.randint(0, 100, (num_rows,), generator=g),
        torch.zeros(num_rows, max_len, dtype=torch.int32),
    ]
    results = []
    for twin in TWINS:
        mine = [t.clone() for t in state]
        getattr(post_update, twin)(*mine, idx_mapping, query_start_loc, sampled, num_sampled, num_rejected)
        results.append(mine)
    for torch_side, triton_side in zip(*results, strict=True):
        assert torch.equal(torch_side, triton_side)
