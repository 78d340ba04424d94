"""Prompt ids, positions, sequence lengths, and the merge of sampled and draft tokens."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from mrv2_kernels.inputs.combine import combine_sampled_and_draft_tokens
from mrv2_kernels.inputs.prepare import prepare_pos_seq_lens, prepare_prefill_inputs

NUM_ROWS, MAX_LEN = 8, 60


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass
class Batch:
    """A random mixed batch with its request state; K drafts, PAD unused tokens and requests."""

    idx_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    cu_num_logits: torch.Tensor
    seq_lens: torch.Tensor
    token_ids: torch.Tensor
    prefill_len: torch.Tensor
    num_computed_tokens: torch.Tensor
    last_sampled_tokens: torch.Tensor
    draft_tokens: torch.Tensor


def make_batch(num_reqs: int, num_drafts: int, seed: int) -> Batch:
    g = torch.Generator().manual_seed(seed)
    idx_mapping = torch.randperm(NUM_ROWS, generator=g)[:num_reqs].to(torch.int32)
    prefill_len = torch.randint(1, 40, (NUM_ROWS,), generator=g, dtype=torch.int32)
    num_computed = torch.randint(0, 45, (NUM_ROWS,), generator=g, dtype=torch.int32)
    query_lens = torch.randint(1, 12, (num_reqs,), generator=g)
    num_logits = torch.minimum(torch.randint(1, num_drafts + 2, (num_reqs,), generator=g), query_lens)
    query_start_loc = torch.cat([torch.zeros(1), query_lens.cumsum(0), torch.full((3,), 10**6)]).to(torch.int32)
    seq_lens = torch.full((num_reqs + 3,), 0, dtype=torch.int32)
    seq_lens[:num_reqs] = num_computed[idx_mapping] + query_lens
    return Batch(
        idx_mapping=idx_mapping,
        query_start_loc=query_start_loc,
        cu_num_logits=torch.cat([torch.zeros(1), num_logits.cumsum(0)]).to(torch.int32),
        seq_lens=seq_lens,
        token_ids=torch.randint(0, 1000, (NUM_ROWS, MAX_LEN), generator=g, dtype=torch.int32),
        prefill_len=prefill_len,
        num_computed_tokens=num_computed,
        last_sampled_tokens=torch.randint(1000, 2000, (NUM_ROWS,), generator=g),
        draft_tokens=torch.randint(2000, 3000, (NUM_ROWS, num_drafts), generator=g),
    )


BATCHES = [(num_reqs, num_drafts, seed) for num_reqs in (1, 3, 8) for num_drafts in (0, 1, 4) for seed in (0, 1)]


@pytest.mark.parametrize(("num_reqs", "num_drafts", "seed"), BATCHES)
def test_inputs_follow_the_definition_token_by_token(num_reqs, num_drafts, seed):
    b = make_batch(num_reqs, num_drafts, seed)
    num_tokens, num_rows = int(b.query_start_loc[num_reqs]), int(b.cu_num_logits[-1])
    for twin in ("torch", "triton"):
        input_ids = torch.full((num_tokens + 4,), -5, dtype=torch.int32)
        positions = torch.full((num_tokens + 4,), -5, dtype=torch.int32)
        seq_lens = torch.full((num_reqs + 3,), -5, dtype=torch.int32)
        logits_indices = torch.full((num_rows + 2,), -5, dtype=torch.int32)
        getattr(prepare_prefill_inputs, twin)(
            input_ids,
            b.idx_mapping,
            b.query_start_loc,
            b.token_ids,
            b.prefill_len,
            b.num_computed_tokens,
            max_query_len=11,
        )
        getattr(prepare_pos_seq_lens, twin)(
            positions, seq_lens, b.idx_mapping, b.query_start_loc, b.num_computed_tokens, max_query_len=11
        )
        getattr(combine_sampled_and_draft_tokens, twin)(
            input_ids,
            logits_indices,
            b.idx_mapping,
            b.query_start_loc,
            seq_lens,
            b.prefill_len,
            b.last_sampled_tokens,
            b.draft_tokens,
            b.cu_num_logits,
        )
        assert seq_lens.tolist() == b.seq_lens.tolist()
        assert positions[num_tokens:].tolist() == [0] * 4
        assert logits_indices[num_rows:].tolist() == [0, 0]
        assert input_ids[num_tokens:].tolist() == [-5] * 4
        for req, slot in enumerate(b.idx_mapping.tolist()):
            start, end = b.query_start_loc[req : req + 2].tolist()
            first, last = b.cu_num_logits[req : req + 2].tolist()
            rows = range(end - (last - first), end)
            assert logits_indices[first:last].tolist() == list(rows)
            news = [int(b.last_sampled_tokens[slot]), *b.draft_tokens[slot].tolist()]
            for token in range(start, end):
                position = int(b.num_computed_tokens[slot]) + token - start
                assert positions[token] == position
                if position < b.prefill_len[slot]:
                    assert input_ids[token] == b.token_ids[slot, position]
                elif token in rows:
                    assert input_ids[token] == news[token - rows[0]]
                else:
                    assert input_ids[token] == -5


@pytest.mark.parametrize("twin", ["torch", "triton"])
def test_drafts_behind_a_prompt_tail_keep_the_prompt(twin):
    """Prompt of 6, chunk of positions 4..8 with 4 logits rows: rows at 5 (prompt), 6, 7, 8 (drafts)."""
    input_ids = int32([14, 15, -1, -1, -1])
    logits_indices = torch.empty(4, dtype=torch.int32)
    getattr(combine_sampled_and_draft_tokens, twin)(
        input_ids,
        logits_indices,
        int32([0]),
        int32([0, 5]),
        int32([9]),
        int32([6]),
        torch.tensor([99]),
        torch.tensor([[71, 72, 73]]),
        int32([0, 4]),
    )
    assert input_ids.tolist() == [14, 15, 71, 72, 73]
    assert logits_indices.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("twin", ["torch", "triton"])
def test_last_sampled_tokens_may_be_a_column(twin):
    input_ids = int32([0, 0])
    getattr(combine_sampled_and_draft_tokens, twin)(
        input_ids,
        torch.empty(2, dtype=torch.int32),
        int32([2, 0]),
        int32([0, 1, 2]),
        int32([5, 9]),
        int32([3, 3, 3]),
        torch.tensor([[10], [11], [12]]),
        torch.empty(3, 0, dtype=torch.int64),
        int32([0, 1, 2]),
    )
    assert input_ids.tolist() == [12, 10]


@pytest.mark.parametrize("max_query_len", [1, 3000])
def test_max_query_len_only_sizes_the_grid(max_query_len):
    token_ids = torch.arange(5000, dtype=torch.int32).view(2, 2500)
    positions, input_ids = torch.zeros(2, 2400, dtype=torch.int32)
    seq_lens = torch.zeros(1, dtype=torch.int32)
    args = (int32([1]), int32([0, 2300]))
    prepare_prefill_inputs.triton(
        input_ids, *args, token_ids, int32([0, 2450]), int32([0, 100]), max_query_len=max_query_len
    )
    prepare_pos_seq_lens.triton(positions, seq_lens, *args, int32([0, 100]), max_query_len=max_query_len)
    assert input_ids[:2300].tolist() == list(range(2600, 4900))
    assert positions[:2300].tolist() == list(range(100, 2400))
    assert seq_lens.tolist() == [2400]


@pytest.mark.parametrize("twin", ["torch", "triton"])
def test_an_empty_batch_only_writes_padding(twin):
    positions, seq_lens = torch.ones(2, 3, dtype=torch.int32)
    empty = torch.empty(0, dtype=torch.int32)
    getattr(prepare_prefill_inputs, twin)(
        positions, empty, int32([0]), torch.zeros(2, 4, dtype=torch.int32), empty, empty, max_query_len=0
    )
    getattr(prepare_pos_seq_lens, twin)(positions, seq_lens, empty, int32([0]), empty, max_query_len=0)
    assert positions.tolist() == [0, 0, 0]
    assert seq_lens.tolist() == [0, 0, 0]
