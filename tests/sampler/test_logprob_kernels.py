"""Log-probabilities of given tokens, of whole rows, and the targets of prompts: equal twins, against log-softmax."""

from __future__ import annotations

import pytest
import torch

from mrv2_kernels.sampling import logprobs, token_logprobs
from mrv2_kernels.sampling.logprobs import topk_logprobs
from mrv2_kernels.sampling.prompt_targets import prompt_targets

INF = float("inf")
TWINS = ["torch", "triton"]


def empty(num_rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.full((num_rows, width), -7), torch.full((num_rows, width), 9.0), torch.full((num_rows,), -7)


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_given_tokens_get_their_log_softmax(twin, shared, dtype, monkeypatch):
    monkeypatch.setattr(token_logprobs, "_BLOCK", 32)
    generator = torch.Generator().manual_seed(1)
    logits = torch.full((5, 109), float("nan"), dtype=dtype)[:, :101]
    logits.copy_(3 * torch.randn(5, 101, generator=generator))
    logits[3] = -INF
    logits[3, 40] = 0.0
    chosen = torch.tensor([0, 100, 50, 40, 7])
    tokens = torch.randint(0, 101, (40,) if shared else (5, 40), generator=generator, dtype=torch.int32)
    ids, values, ranks = empty(5, 41)
    getattr(token_logprobs.token_logprobs, twin)(logits, chosen, tokens, ids, values, ranks)
    want = torch.cat([chosen.unsqueeze(1), tokens.long().expand(5, 40)], dim=1)
    assert torch.equal(ids, want)
    torch.testing.assert_close(values.double(), logits.double().log_softmax(1).gather(1, want), rtol=0, atol=2e-5)
    assert torch.equal(ranks, (logits >= logits.gather(1, chosen.unsqueeze(1))).sum(dim=1))


@pytest.mark.parametrize("twin", TWINS)
def test_rows_without_a_distribution_are_marked(twin):
    logits = torch.zeros(4, 9)
    logits[1, 3] = float("nan")
    logits[2] = -INF
    ids, values, ranks = empty(4, 3)
    tokens = torch.tensor([1, 2])
    getattr(token_logprobs.token_logprobs, twin)(logits, torch.tensor([0, 0, 0, -1]), tokens, ids, values, ranks)
    assert ids[0].tolist() == [0, 1, 2] and ids[1:].eq(-1).all()
    assert values[1:].isnan().all() and ranks.tolist() == [9, 0, 0, 0]


def test_a_whole_row_is_sorted_by_the_kernel_as_by_the_reference(monkeypatch):
    monkeypatch.setattr(logprobs, "_MAX_SEARCHED", 8)
    logits = torch.randn(3, 70, generator=torch.Generator().manual_seed(2)).round(decimals=1)
    sampled = torch.tensor([5, 0, 69])
    outs = empty(3, 71), empty(3, 71)
    topk_logprobs.triton(logits, sampled, *outs[0])
    topk_logprobs.torch(logits, sampled, *outs[1])
    assert torch.equal(outs[0][0], outs[1][0]) and torch.equal(outs[0][2], outs[1][2])
    torch.testing.assert_close(outs[0][1], outs[1][1])


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize(("first", "num"), [(0, 14), (3, 9), (13, 1)])
def test_targets_are_the_next_prompt_tokens(twin, first, num):
    token_ids = torch.arange(60, dtype=torch.int32).reshape(4, 15)
    prompt_len = torch.tensor([9, 3, 15, 4], dtype=torch.int32)
    # row 2 computes 0..6, row 0 computes its last prompt token, row 3 is decoding, row 1 computes 0..2 of 3
    idx_mapping = torch.tensor([2, 0, 3, 1], dtype=torch.int32)
    query_start_loc = torch.tensor([0, 7, 9, 10, 14, 14], dtype=torch.int32)
    positions = torch.tensor([*range(7), 7, 8, 6, 0, 1, 2, 3], dtype=torch.int32)
    want = [31, 32, 33, 34, 35, 36, 37, 8, -1, -1, 16, 17, -1, -1]
    targets = torch.full((num,), -9)
    getattr(prompt_targets, twin)(targets, positions, idx_mapping, query_start_loc, token_ids, prompt_len, first=first)
    assert targets.tolist() == want[first : first + num]
