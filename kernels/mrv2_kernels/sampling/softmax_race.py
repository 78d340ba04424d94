"""Draw ``argmax(p / E)`` from probability tensors: softmax, [N, V] of exponential noise, a division, arg-max.

``-log`` turns it into ``argmax(log p + g)``, so that the tokens are those of `gumbel_sample`, up to scores that
rounding makes equal; a row whose maximum is +inf has no softmax and gives -1.
"""

from __future__ import annotations

import torch

from mrv2_kernels.sampling.gumbel import check_logits
from mrv2_kernels.sampling.noise import exponential_noise


def softmax_race_sample(
    # [N, V] float32 or float64, divided by the temperature; not changed
    logits: torch.Tensor,
    # [N] int64, out
    sampled: torch.Tensor,
    # [N] int32: row of the request state
    logit_slots: torch.Tensor,
    # [N] int32: position of the input token that produced the row
    positions: torch.Tensor,
    # [R] float32, 0 = greedy
    temperature: torch.Tensor,
    # [R] int64
    seeds: torch.Tensor,
    *,
    has_greedy: bool = True,
) -> None:
    """Write the drawn token of each row; -1 where a row holds NaN or nothing above -inf.

    Ties go to the lowest id.  Without `has_greedy` no row's temperature is 0.
    """
    check_logits(logits)
    probs = logits.softmax(dim=-1)
    noise = torch.empty_like(probs)
    exponential_noise(noise, seeds[logit_slots], positions)
    drawn = _best(probs.div_(noise))
    if has_greedy:
        drawn = torch.where(temperature[logit_slots] == 0.0, _best(logits), drawn)
    sampled.copy_(drawn)


def _best(scores: torch.Tensor) -> torch.Tensor:
    """Return the argmax of each row; -1 where it is NaN or -inf. [N] int64"""
    best, token = scores.max(dim=-1)
    return token.masked_fill(best.isnan() | (best == float("-inf")), -1)
