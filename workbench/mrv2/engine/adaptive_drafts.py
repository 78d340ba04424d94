"""How many drafts are worth their while, from what was accepted lately.

With a_j the share of drafts j that are accepted after those before them, k drafts bring
``1 + a_1 + a_1 a_2 + ... + a_1 .. a_k`` tokens and cost ``1 + cost k`` steps.  The k of the best ratio is
taken, none included.  The shares are moving averages over outputs that have arrived, steps late; when
fewer drafts are taken than there might be, a probe now and then finds out whether that is still right.
"""

from __future__ import annotations

# weight of one more observation
_RATE = 1 / 32
# steps from probe to probe
_PROBE_EVERY = 32


class AdaptiveDrafts:
    """Chooses the drafts of each step; `cost` is the share of a decode step that one more draft takes."""

    def __init__(self, cost: float) -> None:
        self.cost = cost
        # by position; nothing is known yet, so all is hoped for
        self.shares: list[float] = []
        self._num_chosen = 0

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """A request had `num_drafts` drafts verified, of which the leading `num_accepted` were accepted."""
        self.shares += [1.0] * (num_drafts - len(self.shares))
        for position in range(min(num_drafts, num_accepted + 1)):
            self.shares[position] += _RATE * ((position < num_accepted) - self.shares[position])

    def best(self, most: int) -> int:
        """Return the number of drafts, at most `most`, that brings the most tokens for its cost."""
        choice, best_ratio = 0, 1.0
        tokens = survival = 1.0
        for position in range(most):
            survival *= self.shares[position] if position < len(self.shares) else 1.0
            tokens += survival
            ratio = tokens / (1.0 + self.cost * (position + 1))
            if ratio > best_ratio:
                choice, best_ratio = position + 1, ratio
        return choice

    def choose(self, most: int) -> int:
        """Return the drafts of the next step: the best number, or now and then all of them."""
        self._num_chosen += 1
        return most if self._num_chosen % _PROBE_EVERY == 0 else self.best(most)
