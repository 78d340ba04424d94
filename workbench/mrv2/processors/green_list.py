"""A watermark: a keyed hash of the token before puts some tokens on a green list, whose logits are raised.

Text made so holds more green tokens than chance allows, which whoever knows the key can count
(Kirchenbauer et al., "A Watermark for Large Language Models", 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch

from mrv2.logits_processor import LogitsContext, LogitsProcessor, ProcessorSetup
from mrv2.runner.protocol import RowSampling
from mrv2.sampling_params import SamplingParams

_MASK = 0x7FFFFFFF


def is_green(
    # broadcast against each other, int64
    previous: torch.Tensor,
    tokens: torch.Tensor,
    keys: torch.Tensor,
    share: torch.Tensor | float,
) -> torch.Tensor:
    """Return which tokens are green behind the previous ones; on average a `share` of them. bool"""
    mixed = (previous * 0x9E3779B1 + keys * 0x85EBCA6B) & _MASK
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D + tokens * 0x297A2D39) & _MASK
    mixed = ((mixed ^ (mixed >> 12)) * 0x2545F491) & _MASK
    mixed = mixed ^ (mixed >> 15)
    return mixed.to(torch.float64) < share * float(_MASK)


def green_score(token_ids: Sequence[int], key: int, share: float = 0.25) -> float:
    """Return by how many standard deviations a text has more green tokens than chance; above 4 it is marked."""
    tokens = torch.tensor(token_ids, dtype=torch.int64)
    num = len(tokens) - 1
    green = int(is_green(tokens[:-1], tokens[1:], torch.tensor(key), share).sum())
    return (green - share * num) / sqrt(num * share * (1 - share))


class GreenList(LogitsProcessor):
    """``extra_args={"green_list": {"key": 7, "delta": 2.0, "share": 0.25}}``; the key alone is required."""

    argument = "green_list"

    def __init__(self, setup: ProcessorSetup) -> None:
        super().__init__(setup)
        # [R, 1], [R, 2]: delta, share
        self.keys = setup.table("key", 1)
        self.strengths = setup.table("strength", 2, torch.float32)

    def validate(self, params: SamplingParams) -> None:
        given = (params.extra_args or {})[self.argument]
        if not isinstance(given, dict) or not {"key"} <= given.keys() <= {"key", "delta", "share"}:
            raise ValueError(f"{given!r} must be a dict with 'key' and, if wanted, 'delta' and 'share'")
        key, delta, share = self._values(given)
        if not isinstance(key, int) or not 0 <= key <= _MASK:
            raise ValueError(f"key={key!r} must be an integer from 0 to {_MASK}")
        if not (isinstance(delta, (int, float)) and 0 <= delta <= 100):
            raise ValueError(f"delta={delta!r} must be a number in [0, 100], added to green logits")
        if not (isinstance(share, (int, float)) and 0 < share < 1):
            raise ValueError(f"share={share!r} must be a number in (0, 1), the green part of the vocabulary")

    def add_request(self, row: int, params: RowSampling) -> None:
        key, delta, share = self._values(params.extra_args[self.argument])
        self.keys.stage(row, [key])
        self.strengths.stage(row, [delta, share])

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> None:
        slots = ctx.slots.long()
        tokens = torch.arange(logits.shape[1], device=logits.device)
        delta, share = self.strengths.tensor[slots].to(logits.dtype).split(1, dim=1)
        green = is_green(ctx.last_tokens().unsqueeze(1), tokens, self.keys.tensor[slots].long(), share)
        logits += torch.where(green & ctx.used.unsqueeze(1), delta, 0.0)

    @staticmethod
    def _values(given: dict[str, Any]) -> tuple[Any, Any, Any]:
        return given["key"], given.get("delta", 2.0), given.get("share", 0.25)
