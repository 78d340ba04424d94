"""Statistics of the stateless noise: the draws follow softmax, the tail is there, draws are independent.

Seeds are fixed, so a test passes or fails for good; the bounds are 4 sigma.
"""

from __future__ import annotations

import pytest
import torch

from mrv2_kernels.sampling.gumbel import gumbel_sample
from mrv2_kernels.sampling.noise import exponential_noise, gumbel_noise_torch


def chi_square_z(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Return chi-square of counts against probs as a z-score (Wilson-Hilferty); rare cells are merged."""
    order = probs.argsort(descending=True)
    expected = probs[order].double() * counts.sum()
    observed = counts[order].double()
    num_cells = max(1, int((expected >= 5).sum()))
    expected = torch.cat([expected[:num_cells], expected[num_cells:].sum()[None]])
    observed = torch.cat([observed[:num_cells], observed[num_cells:].sum()[None]])
    used = expected >= 1
    dof = int(used.sum()) - 1
    chi_square = float(((observed - expected)[used] ** 2 / expected[used]).sum())
    spread = 2 / (9 * dof)
    return ((chi_square / dof) ** (1 / 3) - (1 - spread)) / spread**0.5


def draws(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return one draw from the same `logits` [V] for each pair of seed and position."""
    sampled = torch.empty(seeds.shape[0], dtype=torch.int64)
    slots = torch.arange(seeds.shape[0], dtype=torch.int32)
    rows = logits.expand(seeds.shape[0], -1)
    gumbel_sample.torch(rows, sampled, slots, positions, torch.full((seeds.shape[0],), temperature), seeds)
    return sampled


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vary", ["positions", "seeds", "both"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_eight_tokens_follow_softmax(dtype, vary, temperature):
    n = 20_000
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -3.0, -6.0, 1.5], dtype=dtype)
    steps = torch.arange(n)
    seeds = torch.full((n,), 17) if vary == "positions" else steps * (2**40 + 1) - 5
    positions = torch.full((n,), 3, dtype=torch.int32) if vary == "seeds" else steps.to(torch.int32)
    counts = draws(logits, seeds, positions, temperature).bincount(minlength=8)
    assert abs(chi_square_z(counts, (logits.double() / temperature).softmax(0))) < 4


def test_a_thousand_tokens_follow_softmax():
    logits = 1.5 * torch.randn(1000, generator=torch.Generator().manual_seed(1))
    counts = torch.zeros(1000, dtype=torch.int64)
    for seed in range(10):
        positions = torch.arange(2000, dtype=torch.int32)
        counts += draws(logits, torch.full((2000,), seed), positions, 1.0).bincount(minlength=1000)
    assert abs(chi_square_z(counts, logits.double().softmax(0))) < 4


@pytest.mark.parametrize("lag", ["positions", "seeds"])
def test_neighbouring_draws_are_independent(lag):
    n = 40_000
    logits = torch.tensor([0.3, 0.0, -0.5, 0.8])
    steps = torch.arange(n)
    fixed = torch.full((n,), 5)
    seeds, positions = (fixed, steps) if lag == "positions" else (steps, fixed)
    tokens = draws(logits, seeds, positions.to(torch.int32), 1.0)
    pairs = (tokens[:-1] * 4 + tokens[1:]).bincount(minlength=16)
    probs = logits.double().softmax(0)
    assert abs(chi_square_z(pairs, torch.outer(probs, probs).flatten())) < 4


def test_the_gumbel_tail_is_populated():
    """``P(g > t) = 1 - exp(-exp(-t))``; a 24-bit uniform would leave nothing beyond t = 16.6."""
    rows, vocab = 8, 1 << 19
    noise = gumbel_noise_torch(torch.arange(rows), torch.full((rows,), 9, dtype=torch.int32), vocab)
    for threshold in (2.0, 6.0, 8.0, 10.0, 12.0):
        expected = rows * vocab * -torch.expm1(-torch.exp(torch.tensor(-threshold, dtype=torch.float64)))
        assert abs(int((noise > threshold).sum()) - expected) < 4 * expected.sqrt(), f"beyond {threshold}"


def test_exponential_noise_covers_its_range():
    out = torch.empty(4, 1 << 20)
    exponential_noise.torch(out, torch.tensor([1, 2, 3, 4]), torch.zeros(4, dtype=torch.int32))
    n = out.numel()
    assert 0 < out.min() < 8 / n
    assert torch.tensor(n / 8.0).log() < out.max() < 40
    assert out.double().mean() == pytest.approx(1.0, abs=4 / n**0.5)
    assert out.double().var() == pytest.approx(1.0, abs=4 * (8 / n) ** 0.5)
