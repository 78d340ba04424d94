"""What a grammar library must do for the engine: check, compile, and follow one request token by token.

Legend: V = the model's vocabulary, W = ``ceil(V / 32)`` words of a mask, K = drafted tokens of a row.
Bit t of a mask (word t // 32, bit t % 32) is 1 if token t may come next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from mrv2.structured_outputs import StructuredOutputsParams

ALL_ALLOWED = np.int32(-1)


class GrammarMatcher(ABC):
    """The state of one sequence within its grammar; not thread-safe."""

    @abstractmethod
    def accept(self, token: int) -> bool:
        """Advance by a token; return False, and stay, if the grammar does not allow it here."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` accepted tokens."""

    @abstractmethod
    def fill(
        self,
        # [rows, W] int32, C-contiguous, written in place
        bits: np.ndarray,
        row: int,
    ) -> None:
        """Write which tokens may come next; a row of zeros says that none may (a dead end)."""

    @classmethod
    def fill_many(
        cls,
        matchers: Sequence[Self],
        # [rows, W] int32, C-contiguous, written in place
        bits: np.ndarray,
        # of each matcher, no row twice
        rows: Sequence[int],
    ) -> None:
        """Fill the row of each matcher, as `fill` does; a library that has threads may use them."""
        for matcher, row in zip(matchers, rows, strict=True):
            matcher.fill(bits, row)

    @property
    @abstractmethod
    def terminated(self) -> bool:
        """True once the end token was accepted: nothing can follow."""


class GrammarBackend(ABC):
    """A grammar library bound to one vocabulary; `check` and `compile` may run in any thread."""

    name: str

    @abstractmethod
    def check(self, params: StructuredOutputsParams) -> None:
        """Raise `RequestError`, with the place, for what is malformed or would not be enforced."""

    @abstractmethod
    def compile(self, params: StructuredOutputsParams) -> Any:
        """Return the compiled grammar, which any number of matchers share; may take seconds."""

    @abstractmethod
    def matcher(self, compiled: Any, end_token_ids: Sequence[int]) -> GrammarMatcher:
        """Return a matcher at the start; where the grammar may end it allows `end_token_ids`."""


class AnyTokenMatcher(GrammarMatcher):
    """Allows everything: exercises the mask's path before there is a grammar (warm-up)."""

    def accept(self, token: int) -> bool:
        return True

    def rollback(self, num_tokens: int) -> None:
        pass

    def fill(self, bits: np.ndarray, row: int) -> None:
        bits[row] = ALL_ALLOWED

    @property
    def terminated(self) -> bool:
        return False
