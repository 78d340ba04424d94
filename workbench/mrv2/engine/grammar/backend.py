"""What a grammar library must do for the engine: check, compile, and follow one request token by token.

Legend: V = the model's vocabulary, W = ``ceil(V / 32)`` words of a mask, K = drafted tokens of a row.
Bit t of a mask (word t // 32, bit t % 32) is 1 if token t may come next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

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


def fill_draft_rows(
    matcher: GrammarMatcher,
    drafts: Sequence[int],
    # [rows, W] int32, C-contiguous, written in place
    bits: np.ndarray,
    first_row: int,
) -> int:
    """Write the K + 1 masks of a row with drafts: mask i is that of the state after drafts 1..i.

    From the first draft that the grammar refuses on, the last legal mask is repeated: verification
    stops there, so that no later mask is ever used.  The matcher is left as it was.  Returns the
    number of drafts that may be accepted.
    """
    num_accepted = 0
    matcher.fill(bits, first_row)
    try:
        for token in drafts:
            if token < 0 or matcher.terminated or not matcher.accept(token):
                break
            num_accepted += 1
            row = first_row + num_accepted
            if matcher.terminated:
                # what follows the end token is discarded
                bits[row] = ALL_ALLOWED
            else:
                matcher.fill(bits, row)
    finally:
        matcher.rollback(num_accepted)
    bits[first_row + num_accepted + 1 : first_row + len(drafts) + 1] = bits[first_row + num_accepted]
    return num_accepted
