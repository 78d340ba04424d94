"""Sampling kernels on a GPU against the float64 reference: odd vocabularies, rare tails, far offsets."""

from __future__ import annotations

import pytest
import torch

from mrv2_kernels.sampling.gumbel import gumbel_sample
from mrv2_kernels.sampling.logprobs import topk_logprobs
from mrv2_kernels.sampling.min_p import apply_min_p
from mrv2_kernels.sampling.noise import exponential_noise, gumbel_noise_torch
from mrv2_kernels.sampling.temperature import apply_temperature
from mrv2_kernels.sampling.top_k_top_p import apply_top_k_top_p

pytestmark = pytest.mark.gpu

INF = float("inf")
VOCABS = [49152, 151936, 151937]
TOP_K = [0, 50, 0, 1, 1000, 30000, 20]
TOP_P = [0.9, 1.0, 0.999, 0.5, 0.8, 0.7, 0.95]
NUM_ROWS = len(TOP_K)


@pytest.fixture(autouse=True)
def on_cuda():
    with torch.device("cuda"):
        yield


def make_logits(vocab: int, dtype: torch.dtype = torch.float32, scale: float = 3.0) -> torch.Tensor:
    """Return [NUM_ROWS, vocab] logits in a padded buffer (padding NaN)."""
    generator = torch.Generator("cuda").manual_seed(vocab)
    buffer = torch.full((NUM_ROWS, vocab + 64 - vocab % 64), float("nan"), dtype=dtype)
    buffer[:, :vocab] = scale * torch.randn(NUM_ROWS, vocab, generator=generator)
    return buffer[:, :vocab]


def slots() -> torch.Tensor:
    return torch.arange(NUM_ROWS, dtype=torch.int32)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gumbel_picks_the_best_score(vocab, dtype):
    logits = make_logits(vocab, dtype)
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.3, 0.0, 2.0, 0.3])
    seeds = torch.arange(NUM_ROWS) * 2**33 + 1
    sampled = torch.empty(NUM_ROWS, dtype=torch.int64)
    gumbel_sample(logits, sampled, slots(), slots(), temperature, seeds)
    noise = gumbel_noise_torch(seeds, slots(), vocab, torch.float64)
    is_random = (temperature > 0).unsqueeze(1)
    score = logits.double() / torch.where(is_random, temperature.unsqueeze(1), 1.0) + noise * is_random
    chosen = score.gather(1, sampled.unsqueeze(1)).squeeze(1)
    assert (score.amax(dim=1) - chosen).max() < (1e-12 if dtype == torch.float64 else 2e-5)
    greedy = temperature == 0
    assert torch.equal(sampled[greedy], logits[greedy].argmax(dim=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_twins_agree(dtype):
    args = (torch.tensor([3, -(2**50)]), torch.tensor([7, 2**30], dtype=torch.int32))
    outs = [torch.empty(2, 151937, dtype=dtype) for _ in range(2)]
    exponential_noise.triton(outs[0], *args)
    exponential_noise.torch(outs[1], *args)
    torch.testing.assert_close(*outs, rtol=1e-6 if dtype == torch.float32 else 1e-14, atol=0)


@pytest.mark.parametrize(("gap", "expected"), [(20.5, 32.8), (18.0, 397.7)])
def test_rare_tail_tokens_win_as_often_as_they_should(gap, expected):
    """One head logit, 262,144 logits `gap` below it, 1e5 draws; the rows share one logits vector."""
    num_draws, vocab = 100_000, 262_145
    logits = torch.full((vocab,), -gap)
    logits[77] = 0.0
    sampled = torch.empty(num_draws, dtype=torch.int64)
    steps = torch.arange(num_draws, dtype=torch.int32)
    gumbel_sample(
        logits.expand(num_draws, -1),
        sampled,
        torch.zeros(num_draws, dtype=torch.int32),
        steps,
        torch.tensor([1.0]),
        torch.tensor([20]),
    )
    assert abs(int((sampled != 77).sum()) - expected) < 4 * expected**0.5


def test_draws_follow_softmax_over_a_real_vocabulary():
    """Chi-square over 1,000 bins of about equal mass, as a z-score."""
    vocab, num_draws, num_bins = 151_936, 400_000, 1000
    logits = 2 * torch.randn(vocab, generator=torch.Generator("cuda").manual_seed(0))
    sampled = torch.empty(num_draws, dtype=torch.int64)
    gumbel_sample(
        logits.expand(num_draws, -1),
        sampled,
        torch.zeros(num_draws, dtype=torch.int32),
        torch.arange(num_draws, dtype=torch.int32),
        torch.tensor([1.0]),
        torch.tensor([1234567]),
    )
    probs = logits.double().softmax(0)
    bins = (probs.cumsum(0) * num_bins).long().clamp(max=num_bins - 1)
    expected = torch.zeros(num_bins, dtype=torch.float64).index_add_(0, bins, probs) * num_draws
    observed = bins[sampled].bincount(minlength=num_bins).double()
    used = expected > 5
    dof = int(used.sum()) - 1
    chi_square = float(((observed - expected)[used] ** 2 / expected[used]).sum())
    assert abs(chi_square - dof) < 4 * (2 * dof) ** 0.5


def test_noise_is_finer_than_24_bits():
    """2^26 draws reach below 2^-24, where a 24-bit uniform stops, and never 0 or infinity."""
    out = torch.empty(64, 1 << 20)
    exponential_noise(out, torch.arange(64), torch.zeros(64, dtype=torch.int32))
    assert 0 < out.min() < 2.0**-24
    assert 15 < out.max() < 25
    assert abs(float(out.double().mean()) - 1) < 4 / 2**13


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_temperature_and_min_p(vocab, dtype):
    logits = make_logits(vocab, dtype)
    twin = logits.clone()
    temperature = torch.linspace(0, 2, NUM_ROWS)
    min_p = torch.tensor([0.0, 0.01, 0.1, 0.5, 1.0, 0.03, 0.2])
    apply_temperature.triton(logits, slots(), temperature)
    apply_temperature.torch(twin, slots(), temperature)
    assert torch.equal(logits, twin)
    ratio = (logits.double() - logits.double().amax(dim=1, keepdim=True)).exp()
    floor = min_p.double().unsqueeze(1)
    border = (ratio - floor).abs() < 1e-5 * floor
    apply_min_p.triton(logits, slots(), min_p)
    assert torch.equal((logits > -INF) | border, (ratio >= floor) | border)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [0.05, 3.0])
def test_top_k_top_p_keeps_what_the_float64_reference_keeps(vocab, dtype, scale):
    """A scale of 0.05 is flat: the nucleus holds most of the vocabulary.  bf16 logits are full of ties."""
    logits = make_logits(vocab, dtype, scale)
    reference = logits.double()
    top_k, top_p = torch.tensor(TOP_K, dtype=torch.int32), torch.tensor(TOP_P)
    ranked, ids = reference.sort(dim=1, descending=True, stable=True)
    limit = torch.where(top_k == 0, vocab, top_k).unsqueeze(1)
    mass = (ranked - ranked[:, :1]).exp() * (torch.arange(vocab) < limit)
    before = (mass.cumsum(1) - mass) / mass.sum(1, keepdim=True)
    border = torch.zeros_like(ids, dtype=torch.bool)
    border.scatter_(1, ids, (before - top_p.double().unsqueeze(1)).abs() < 3e-6)
    apply_top_k_top_p.triton(logits, slots(), top_k, top_p)
    apply_top_k_top_p.torch(reference, slots(), top_k, top_p)
    border &= (top_p < 1).unsqueeze(1)
    assert torch.equal((logits > -INF) | border, (reference > -INF) | border)
    assert (logits > -INF).any(dim=1).all()


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("k", [0, 5, 20, 300])
def test_logprobs(vocab, dtype, k):
    logits = make_logits(vocab, dtype)
    logits[1] = 0.0
    logits[2, 5:] = -INF
    sampled = torch.arange(NUM_ROWS)
    results = []
    for twin, source in (("triton", logits), ("torch", logits.double())):
        ids = torch.empty(NUM_ROWS, k + 1, dtype=torch.int64)
        values, ranks = torch.empty(NUM_ROWS, k + 1), torch.empty(NUM_ROWS, dtype=torch.int64)
        getattr(topk_logprobs, twin)(source, sampled, ids, values, ranks)
        results.append((ids, values, ranks))
    for mine, reference in zip(*results, strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=2e-5)


def far_rows(vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Return [3, vocab] logits whose last row starts 2^31 elements into its storage."""
    buffer = torch.empty((1 << 31) + vocab, dtype=dtype)
    rows = buffer.as_strided((3, vocab), (1 << 30, 1))
    rows.copy_(3 * torch.randn(3, vocab, generator=torch.Generator("cuda").manual_seed(3)))
    return rows


def test_offsets_beyond_two_to_the_31():
    far = far_rows(50_001, torch.bfloat16)
    near = far.contiguous()
    zeros = torch.zeros(3, dtype=torch.int32)
    ones = torch.ones(3, dtype=torch.int32)
    for logits in (far, near):
        apply_temperature(logits, zeros, torch.tensor([0.7]))
        apply_min_p(logits, zeros, torch.tensor([1e-4]))
        apply_top_k_top_p(logits, zeros, torch.tensor([900], dtype=torch.int32), torch.tensor([0.9]))
    assert torch.equal(far, near)
    results = []
    for logits in (far, near):
        sampled, ranks = torch.empty(2, 3, dtype=torch.int64)
        ids, values = torch.empty(3, 6, dtype=torch.int64), torch.empty(3, 6)
        gumbel_sample(logits, sampled, zeros, ones, torch.tensor([1.0]), torch.tensor([5]))
        topk_logprobs(logits, sampled, ids, values, ranks)
        results.append((sampled, ranks, ids, values))
    # the order of a sum may follow the alignment of the rows
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_sampling_can_be_captured_in_a_graph():
    logits, static = make_logits(49152), make_logits(49152).clone()
    temperature, min_p = torch.full((NUM_ROWS,), 0.9), torch.full((NUM_ROWS,), 1e-4)
    top_k, top_p = torch.tensor(TOP_K, dtype=torch.int32), torch.tensor(TOP_P)
    seeds, sampled = torch.arange(NUM_ROWS), torch.empty(NUM_ROWS, dtype=torch.int64)
    positions = slots()

    def step() -> None:
        apply_temperature(static, slots_static, temperature)
        apply_min_p(static, slots_static, min_p)
        apply_top_k_top_p(static, slots_static, top_k, top_p)
        gumbel_sample(static, sampled, slots_static, positions, temperature, seeds, scaled=True)

    slots_static = slots()
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    draws = []
    for position in (3, 4, 3):
        static.copy_(logits)
        positions.fill_(position)
        graph.replay()
        draws.append(sampled.tolist())
    assert draws[0] == draws[2] != draws[1]
