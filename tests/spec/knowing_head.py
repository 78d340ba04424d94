"""A draft head that knows what requests will say, spoilt here and there: accepted runs of every length, on any runner.

It goes the way of every head: its guess depends on the ids and positions that the runner's input preparation gave it,
on the index of the token to draft from, and on hidden states that pass from draft step to draft step.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from mrv2.engine.core import EngineCore
from mrv2.runner.loaded_drafter import HeadDrafter
from mrv2_models.attention import AttentionMetadata


class KnowingHead:
    """Rewrites a loaded head: hidden states carry position and token, logits what follows them in known texts."""

    def __init__(self, drafter: HeadDrafter, vocab_size: int, *, wrong_every: int = 5) -> None:
        self._drafter, self.vocab_size, self.wrong_every = drafter, vocab_size, wrong_every
        # (position of a token, the token) -> the token behind it
        self.following: dict[tuple[int, int], int] = {}
        # the real head still runs, for its keys and values
        self._real_run = drafter.run
        drafter.run = self._run  # type: ignore[method-assign]
        drafter.logits = self._logits  # type: ignore[method-assign]

    def learn(self, text: list[int]) -> None:
        """Know a text, prompt included."""
        for position, (token, follower) in enumerate(pairwise(text)):
            wrong = (position * 7 + token) % self.wrong_every == 0
            self.following[position, token] = (follower + 1) % self.vocab_size if wrong else follower

    def _run(
        self,
        input_ids: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        attn: AttentionMetadata,
    ) -> torch.Tensor:
        hidden = self._real_run(input_ids, features, positions, attn).clone()
        # a head at position p reads the token at p + 1
        hidden[:, 0], hidden[:, 1] = positions + 1, input_ids
        return hidden

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(hidden), self.vocab_size, dtype=hidden.dtype)
        keys = [(int(p), int(t)) for p, t in hidden[:, :2].tolist()] if len(hidden) else []
        for row, key in enumerate(keys):
            logits[row, self.following.get(key, 7)] = 50.0
        return logits


def make_knowing(core: EngineCore, **options: Any) -> KnowingHead:
    """Let the engine's one head draft what it is told to know."""
    (drafter,) = core.executor.drafters
    assert isinstance(drafter, HeadDrafter), f"{drafter.method} is no head"
    return KnowingHead(drafter, core.executor.vocab_size, **options)
