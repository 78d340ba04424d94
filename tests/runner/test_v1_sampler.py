"""The probability-tensor sampler draws the tokens of the fused Gumbel sampler, feature by feature."""

from __future__ import annotations

import pytest
import torch

from mrv2.runner.async_logprobs import LogprobTensors
from mrv2.runner.v1.logprobs import LogprobWork
from mrv2.runner.v1.sampler import sample
from mrv2.runner.v1.sampling_metadata import SamplingMetadata
from mrv2_kernels.sampling.gumbel import gumbel_sample
from mrv2_kernels.sampling.logprobs import topk_logprobs
from mrv2_kernels.sampling.min_p import apply_min_p
from mrv2_kernels.sampling.temperature import apply_temperature
from mrv2_kernels.sampling.top_k_top_p import apply_top_k_top_p

NUM_ROWS, VOCAB = 24, 300


def metadata(temperature: torch.Tensor, seeds: torch.Tensor, **features: torch.Tensor) -> SamplingMetadata:
    return SamplingMetadata(
        all_greedy=bool((temperature == 0).all()),
        all_random=bool((temperature > 0).all()),
        rows=torch.arange(len(temperature), dtype=torch.int32),
        temperature=temperature,
        seeds=seeds,
        **features,
    )


def problem(seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits [N, V], seeds [N] and positions [N]."""
    gen = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(NUM_ROWS, VOCAB, generator=gen, dtype=torch.float64)).to(dtype)
    seeds = torch.randint(-(2**63), 2**63 - 1, (NUM_ROWS,), generator=gen)
    positions = torch.randint(0, 5000, (NUM_ROWS,), generator=gen, dtype=torch.int32)
    return logits, seeds, positions


TEMPERATURES = {
    "greedy": torch.zeros(NUM_ROWS),
    "random": torch.linspace(0.1, 2.0, NUM_ROWS),
    "mixed": torch.linspace(-0.8, 1.5, NUM_ROWS).clamp(min=0.0),
}
FEATURES = {
    "plain": {},
    "min_p": {"min_p": torch.linspace(0.0, 0.5, NUM_ROWS)},
    "top_k": {"top_k": torch.arange(NUM_ROWS, dtype=torch.int32), "top_p": torch.ones(NUM_ROWS)},
    "top_p": {"top_k": torch.zeros(NUM_ROWS, dtype=torch.int32), "top_p": torch.linspace(0.05, 1.0, NUM_ROWS)},
    "all": {
        "min_p": torch.full((NUM_ROWS,), 0.01),
        "top_k": torch.full((NUM_ROWS,), 40, dtype=torch.int32),
        "top_p": torch.full((NUM_ROWS,), 0.9),
    },
}


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("temperatures", TEMPERATURES)
def test_same_noise_gives_the_same_tokens(temperatures: str, features: str) -> None:
    temperature, used = TEMPERATURES[temperatures], FEATURES[features]
    for seed in range(5):
        logits, seeds, positions = problem(seed, torch.float64)
        raw = logits.clone()
        drawn = torch.empty(NUM_ROWS, dtype=torch.int64)
        meta = metadata(temperature, seeds, **used)
        sample(logits, positions, meta, drawn)
        assert torch.equal(logits, raw), "the raw logits are left for the log-probabilities"

        rows = torch.arange(NUM_ROWS, dtype=torch.int32)
        apply_temperature(logits, rows, temperature)
        if "min_p" in used:
            apply_min_p(logits, rows, used["min_p"])
        if "top_k" in used:
            apply_top_k_top_p(logits, rows, used["top_k"], used["top_p"])
        expected = torch.empty_like(drawn)
        gumbel_sample(logits, expected, rows, positions, (temperature > 0).float(), seeds)
        assert torch.equal(drawn, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_arithmetic_is_float32_at_least(dtype: torch.dtype) -> None:
    logits, seeds, positions = problem(0, dtype)
    temperature = TEMPERATURES["mixed"]
    in_low, in_high = (torch.empty(NUM_ROWS, dtype=torch.int64) for _ in range(2))
    sample(logits, positions, metadata(temperature, seeds), in_low)
    sample(logits.float(), positions, metadata(temperature, seeds), in_high)
    assert torch.equal(in_low, in_high)


@pytest.mark.parametrize("temperatures", TEMPERATURES)
def test_a_row_without_a_token_samples_minus_one_and_harms_no_other(temperatures: str) -> None:
    logits, seeds, positions = problem(1, torch.float64)
    meta = metadata(TEMPERATURES[temperatures], seeds)
    clean, drawn = (torch.empty(NUM_ROWS, dtype=torch.int64) for _ in range(2))
    sample(logits, positions, meta, clean)
    logits[3, 17] = float("nan")
    logits[20] = float("-inf")
    ids = torch.empty(NUM_ROWS, 3, dtype=torch.int64)
    logprobs, ranks = torch.empty(NUM_ROWS, 3), torch.empty(NUM_ROWS, dtype=torch.int64)
    work = LogprobWork(torch.empty(0), LogprobTensors(ids, logprobs, ranks), [], [])
    sample(logits, positions, meta, drawn, work)
    clean[[3, 20]] = -1
    assert torch.equal(drawn, clean)


@pytest.mark.parametrize("num_best", [0, 1, 5])
def test_logprobs_are_those_of_the_raw_logits(num_best: int) -> None:
    logits, seeds, positions = problem(2, torch.float64)
    shapes = (
        ((NUM_ROWS, 1 + num_best), torch.int64),
        ((NUM_ROWS, 1 + num_best), torch.float32),
        (NUM_ROWS, torch.int64),
    )
    mine, expected = (tuple(torch.empty(shape, dtype=dtype) for shape, dtype in shapes) for _ in range(2))
    drawn = torch.empty(NUM_ROWS, dtype=torch.int64)
    meta = metadata(TEMPERATURES["mixed"], seeds, **FEATURES["all"])
    sample(logits, positions, meta, drawn, LogprobWork(torch.empty(0), LogprobTensors(*mine), [], []))
    topk_logprobs(logits, drawn, *expected)
    assert torch.equal(mine[0], expected[0])
    torch.testing.assert_close(mine[1], expected[1])
    assert torch.equal(mine[2], expected[2])
