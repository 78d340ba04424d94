"""Draw in plain torch: sort, cut off, sum up, and look up one uniform number in the sums.

The textbook's sampler, for comparison: every row is sorted whole.  One number decides, a pure function of
(seed, position), so a draw is as stateless as the others', with other tokens.
"""

from __future__ import annotations

import torch

from mrv2_kernels._numerics import accumulator_dtype
from mrv2_kernels.sampling.gumbel import check_logits
from mrv2_kernels.sampling.noise import exponential_noise
from mrv2_kernels.sampling.truncation import Truncation


def torch_sort_sample(
    # [N, V] any float dtype; raw
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
    truncation: Truncation | None = None,
) -> None:
    """Write the drawn token of each row; -1 where a row holds NaN or nothing above -inf.

    Min-p, top-k and top-p mean what they mean in `Truncation`; ties keep the lowest ids.
    """
    num_rows, _ = check_logits(logits)
    if num_rows == 0:
        return
    # [N, 1] from here on
    is_greedy = (temperature[logit_slots] == 0.0).unsqueeze(1)
    divisor = torch.where(is_greedy, 1.0, temperature[logit_slots].unsqueeze(1))
    scaled = logits.to(accumulator_dtype(logits.dtype)) / divisor
    ranked, ids = scaled.sort(dim=1, descending=True, stable=True)
    top = ranked[:, :1]
    # summed in float64: rare tokens stand at the end, where float32 sums no longer grow
    mass = (ranked - top).exp().double()
    if truncation is not None:
        mass = mass.where(_is_kept(ranked, mass, logit_slots, truncation), 0.0)
    total = mass.cumsum(dim=1)
    race = torch.empty(num_rows, 1, dtype=torch.float64, device=logits.device)
    exponential_noise(race, seeds[logit_slots], positions)
    uniform = race.neg().expm1().neg()
    place = torch.searchsorted(total, uniform * total[:, -1:], right=True)
    # a product rounded up to the whole sum
    place = place.minimum((mass > 0.0).sum(dim=1, keepdim=True) - 1).clamp(min=0)
    # NaN sorts first; an infinite logit beats every noise
    place = torch.where(is_greedy | ~top.isfinite(), 0, place)
    token = ids.gather(1, place)
    sampled.copy_(token.masked_fill(top.isnan() | (top == float("-inf")), -1).squeeze(1))


def _is_kept(
    # [N, V], descending
    ranked: torch.Tensor,
    # [N, V] float64
    mass: torch.Tensor,
    # [N]
    logit_slots: torch.Tensor,
    truncation: Truncation,
) -> torch.Tensor:
    """Return which ranks take part. [N, V] bool"""
    vocab = ranked.shape[1]
    min_p, top_k, top_p = (values[logit_slots].unsqueeze(1) for values in truncation[:3])
    top_k = torch.where((top_k <= 0) | (top_k >= vocab), vocab, top_k)
    is_kept = torch.arange(vocab, device=ranked.device) < top_k
    # log(0) = -inf drops nothing
    is_kept = is_kept & (ranked >= ranked[:, :1] + min_p.to(ranked.dtype).log())
    mass = mass.where(is_kept, 0.0)
    total = mass.cumsum(dim=1)
    is_within = total - mass < top_p.double() * total[:, -1:]
    is_within[:, 0] = True
    return is_kept & (is_within | (top_p >= 1.0))
