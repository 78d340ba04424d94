"""The probability-tensor sampler: softmax, divide by exponential noise, take the largest.

Its noise is the stateless one of the V2 sampler: ``argmax(p / E)`` and ``argmax(log p - log E)`` are the
same token, so that both runners give a request the same tokens.

Legend: B logits rows (one a request, and one behind each draft), V vocabulary.
"""

from __future__ import annotations

import torch

from mrv2.runner.v1.features import FeatureTensors, apply_features
from mrv2.runner.v1.logprobs import LogprobWork, gather_logprobs
from mrv2.runner.v1.sampling_metadata import SamplingMetadata
from mrv2_kernels.sampling.min_p import apply_min_p
from mrv2_kernels.sampling.noise import exponential_noise
from mrv2_kernels.sampling.top_k_top_p import apply_top_k_top_p


def sample(
    # [B, V], raw; not changed
    logits: torch.Tensor,
    # [B] int32, position of the input token that produced the row
    positions: torch.Tensor,
    metadata: SamplingMetadata,
    # [B] int64, out
    sampled: torch.Tensor,
    logprobs: LogprobWork | None = None,
    features: FeatureTensors | None = None,
) -> None:
    """Draw one token a row, -1 where the row holds NaN or nothing finite; device code."""
    raw_logprobs = log_softmax(logits) if logprobs is not None else None
    sampled.copy_(draw(process(logits, features), positions, metadata))
    if logprobs is not None and raw_logprobs is not None:
        gather_all(raw_logprobs, sampled, logprobs)


# logits [B, V] -> [B, V] float32 or float64
def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Return raw log-probabilities; device code."""
    return logits.log_softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


# logits [B, V] -> [B, V] float32 or float64
def process(logits: torch.Tensor, features: FeatureTensors | None) -> torch.Tensor:
    """Return a copy, to which the sampling features are applied; device code."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    if features is not None:
        apply_features(logits, features)
    return logits


def gather_all(
    # [B, V]
    raw_logprobs: torch.Tensor,
    # [B] int64, -1 = none
    sampled: torch.Tensor,
    logprobs: LogprobWork,
) -> None:
    """Write the log-probabilities of every row's token; device code."""
    if logprobs.narrow is not None:
        gather_logprobs(raw_logprobs, sampled, logprobs.narrow)
    for first, count, out, named in logprobs.wide:
        own = slice(first, first + count)
        gather_logprobs(raw_logprobs[own], sampled[own], out, named)


def draw(
    # [B, V] float32 or float64; changed
    logits: torch.Tensor,
    # [B] int32
    positions: torch.Tensor,
    metadata: SamplingMetadata,
) -> torch.Tensor:
    """Return one token a row: greedy and random ones are both computed and merged; device code. [B] int64"""
    greedy = None if metadata.all_random else _best(logits)
    if metadata.all_greedy:
        assert greedy is not None, "a batch cannot be all greedy and all random"
        return greedy
    temperature, seeds = metadata.temperature, metadata.seeds
    assert temperature is not None and seeds is not None, "random rows need their parameters"
    shape(logits, metadata)
    probs = logits.softmax(dim=-1)
    noise = torch.empty_like(probs)
    exponential_noise(noise, seeds, positions)
    drawn = _best(probs.div_(noise))
    return drawn if greedy is None else torch.where(temperature == 0.0, greedy, drawn)


def shape(
    # [B, V] float32 or float64, in and out
    logits: torch.Tensor,
    metadata: SamplingMetadata,
) -> None:
    """Divide by the temperature (greedy rows: by 1), then mask by min-p, top-k and top-p; device code."""
    rows, temperature = metadata.rows, metadata.temperature
    assert rows is not None and temperature is not None, "random rows need their parameters"
    divisor = temperature if metadata.all_random else torch.where(temperature == 0.0, 1.0, temperature)
    logits.div_(divisor.unsqueeze(1))
    if metadata.min_p is not None:
        apply_min_p(logits, rows, metadata.min_p)
    if metadata.top_k is not None and metadata.top_p is not None:
        apply_top_k_top_p(logits, rows, metadata.top_k, metadata.top_p)


# scores [B, V] -> [B] int64
def _best(scores: torch.Tensor) -> torch.Tensor:
    """Return the argmax of each row; -1 where it is NaN or -inf."""
    best, token = scores.max(dim=-1)
    return token.masked_fill(best.isnan() | (best == float("-inf")), -1)
