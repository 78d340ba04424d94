"""Tables of the rotary embedding.

Rotation i of a head turns by ``position * theta ** (-2i / D)``.  `linear` divides every frequency by a
factor.  `llama3` divides only the slow ones: with ``turns`` = rotations inside the original context,
frequencies with turns >= high keep their value, turns <= low are divided, and between them the two
are blended linearly in ``turns``.
"""

from __future__ import annotations

import math

import torch

from mrv2_models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return ``[head_dim / 2]`` float64 radians per token."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequency = rope.theta**-exponent
    if rope.rope_type == "linear":
        return frequency / rope.factor
    if rope.rope_type == "llama3":
        turns = rope.original_max_position_embeddings * frequency / (2 * math.pi)
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = keep.clamp(0.0, 1.0)
        return frequency * (keep + (1.0 - keep) / rope.factor)
    return frequency


def cos_sin_table(rope: RopeConfig, head_dim: int, length: int) -> torch.Tensor:
    """Return ``[length, head_dim]`` float64, each row cosines then sines of the half-split layout."""
    angle = torch.outer(torch.arange(length, dtype=torch.float64), inverse_frequencies(rope, head_dim))
    return torch.cat([angle.cos(), angle.sin()], dim=-1)
