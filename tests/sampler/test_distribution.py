"""Chi-square: what is drawn after a feature changed the logits follows the softmax of the changed logits."""

from __future__ import annotations

from statistics import NormalDist

import pytest
import torch

from mrv2_kernels.sampling.bad_words import apply_bad_words, bad_words_row
from mrv2_kernels.sampling.gumbel import gumbel_sample
from mrv2_kernels.sampling.logit_bias import apply_logit_bias, bias_words
from mrv2_kernels.sampling.penalties import apply_penalties
from mrv2_kernels.sampling.token_counts import update_token_counts

VOCAB, NUM_DRAWS = 23, 20_000
# one request: prompt 3, 4, 5, outputs 5, 5, 6, 7
TOKENS = torch.tensor([[3, 4, 5, 5, 5, 6, 7]], dtype=torch.int32)
PROMPT, TOTAL = torch.tensor([3], dtype=torch.int32), torch.tensor([7], dtype=torch.int32)
NUM_ROWS = 4
SLOTS = torch.zeros(NUM_ROWS, dtype=torch.int32)
NO_DRAFTS = (SLOTS, SLOTS, SLOTS)


def penalties(logits: torch.Tensor) -> None:
    values = torch.tensor([[1.4, 0.5, 0.3]])
    counts, counted = torch.zeros(1, 7, dtype=torch.int16), torch.zeros(1, dtype=torch.int32)
    update_token_counts(counts, counted, TOKENS, PROMPT, TOTAL, values, SLOTS[:1], has_new=True)
    apply_penalties(logits, SLOTS, values, TOKENS, counts, TOTAL, *NO_DRAFTS)


def bias(logits: torch.Tensor) -> None:
    words = torch.from_numpy(bias_words(range(15), [2, 9], [1.5, -0.7], [4], 99)).unsqueeze(0)
    apply_logit_bias(logits, SLOTS, SLOTS, words)


def bad_words(logits: torch.Tensor) -> None:
    words = torch.from_numpy(bad_words_row([[1], [6, 7, 8], [4, 5, 5, 9]])).unsqueeze(0)
    apply_bad_words(logits, SLOTS, words, TOKENS, PROMPT, TOTAL, *NO_DRAFTS, max_words=3)


def softmax_after(name: str, raw: torch.Tensor) -> torch.Tensor:
    """The float64 definition of each feature, for the one request."""
    x = raw.double().clone()
    if name == "penalties":
        for token, count in ((3, 0), (4, 0), (5, 2), (6, 1), (7, 1)):
            x[token] = x[token] / 1.4 if x[token] > 0 else x[token] * 1.4
            x[token] -= 0.5 * count + 0.3 * (count > 0)
    elif name == "bias":
        x[[2, 9]] += torch.tensor([1.5, -0.7]).double()
        x[15:] = x[4] = float("-inf")
    else:
        x[[1, 8]] = float("-inf")
    return x.softmax(0)


@pytest.mark.parametrize("feature", [penalties, bias, bad_words], ids=lambda feature: feature.__name__)
def test_draws_follow_the_changed_distribution(feature) -> None:
    raw = 1.5 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))
    logits = raw.repeat(NUM_ROWS, 1)
    feature(logits)
    assert (logits == logits[0]).all(), "rows of one request differ"
    sampled = torch.empty(NUM_DRAWS, dtype=torch.int64)
    positions = torch.arange(NUM_DRAWS, dtype=torch.int32)
    same_row = torch.zeros(NUM_DRAWS, dtype=torch.int32)
    drawn_from = logits[:1].expand(NUM_DRAWS, -1)
    gumbel_sample(drawn_from, sampled, same_row, positions, torch.ones(1), torch.tensor([17]))
    expected = softmax_after(feature.__name__, raw) * NUM_DRAWS
    observed = sampled.bincount(minlength=VOCAB)
    assert observed[expected == 0].sum() == 0
    kept = expected > 0
    statistic = float(((observed[kept] - expected[kept]) ** 2 / expected[kept]).sum())
    degrees = int(kept.sum()) - 1
    # Wilson and Hilferty: (chi2 / k) ** (1 / 3) is close to normal
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / (2 / (9 * degrees)) ** 0.5
    assert NormalDist().cdf(z) < 1 - 1e-5, f"chi-square {statistic:.1f} with {degrees} degrees of freedom"
