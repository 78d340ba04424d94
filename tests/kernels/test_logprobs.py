"""Top-k log-probabilities: equal twins, log-softmax values, ranks, odd rows."""

from __future__ import annotations

import pytest
import torch

from mrv2_kernels.sampling import logprobs
from mrv2_kernels.sampling.logprobs import topk_logprobs

INF = float("inf")
TWINS = ["torch", "triton"]


def run(twin: str, logits: torch.Tensor, sampled: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
    num_rows = logits.shape[0]
    out = (
        torch.full((num_rows, k + 1), -7),
        torch.full((num_rows, k + 1), 9.0),
        torch.full((num_rows,), -7),
    )
    getattr(topk_logprobs, twin)(logits, sampled, *out)
    return out


@pytest.mark.parametrize("block", [64, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "vocab", "k"), [(1, 49, 0), (9, 333, 5), (2, 1000, 20), (2, 49, 49)])
def test_twins_agree_with_log_softmax(block, dtype, num_rows, vocab, k, monkeypatch):
    monkeypatch.setattr(logprobs, "_BLOCK", block)
    generator = torch.Generator().manual_seed(vocab)
    buffer = torch.full((num_rows, vocab + 7), float("nan"), dtype=dtype)
    logits = buffer[:, :vocab]
    logits.copy_(3 * torch.randn(num_rows, vocab, generator=generator))
    sampled = torch.randint(0, vocab, (num_rows,), generator=generator)
    ids, values, ranks = run("torch", logits, sampled, k)
    expected = logits.double().log_softmax(dim=1)
    torch.testing.assert_close(values.double(), expected.gather(1, ids), rtol=0, atol=2e-5)
    assert torch.equal(ids[:, 0], sampled)
    assert torch.equal(ids[:, 1:], logits.double().sort(dim=1, descending=True, stable=True).indices[:, :k])
    chosen = logits.gather(1, sampled.unsqueeze(1))
    assert torch.equal(ranks, (logits >= chosen).sum(dim=1))

    triton_ids, triton_values, triton_ranks = run("triton", logits, sampled, k)
    assert torch.equal(triton_ids, ids)
    assert torch.equal(triton_ranks, ranks)
    torch.testing.assert_close(triton_values, values, rtol=0, atol=2e-5)


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("block", [16, 4096])
def test_ties_and_masked_logits_are_ranked_by_id(twin, block, monkeypatch):
    monkeypatch.setattr(logprobs, "_BLOCK", block)
    flat = torch.zeros(1, 40)
    ids, values, ranks = run(twin, flat, torch.tensor([30]), 4)
    assert ids.tolist() == [[30, 0, 1, 2, 3]]
    assert ranks.tolist() == [40]
    torch.testing.assert_close(values, torch.full((1, 5), 1 / 40).log())

    masked = torch.full((1, 40), -INF)
    masked[0, [33, 7]] = 0.0
    ids, values, ranks = run(twin, masked, torch.tensor([7]), 4)
    assert ids.tolist() == [[7, 7, 33, 0, 1]]
    assert ranks.tolist() == [2]
    assert values[0, 3:].tolist() == [-INF, -INF]


@pytest.mark.parametrize("twin", TWINS)
def test_rows_without_a_distribution(twin):
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    logits[1, 3] = float("nan")
    logits[2] = -INF
    ids, values, ranks = run(twin, logits, torch.tensor([4, 5, 6, -1]), 2)
    assert ids[1:].eq(-1).all()
    assert ids[0, 0] == 4
    assert values[1:].isnan().all()
    assert ranks[1:].tolist() == [0, 0, 0]


def test_more_logprobs_than_tokens_are_refused():
    for twin in TWINS:
        with pytest.raises(AssertionError, match="6 logprobs of 5 tokens"):
            run(twin, torch.zeros(1, 5), torch.tensor([0]), 6)
