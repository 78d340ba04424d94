"""How long the parts of an engine's start take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter


class StartupClock:
    """Seconds of the host in each part, in the order in which the parts were first entered.

    What passes in a part inside another counts for the inner one alone.  Device work that a part has launched and not
    waited for falls to the part that waits.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        # of the parts that are open, the seconds that parts inside them took
        self._inside: list[float] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add what passes inside the block to part `name`."""
        self.seconds.setdefault(name, 0.0)
        self._inside.append(0.0)
        start = perf_counter()
        try:
            yield
        finally:
            took = perf_counter() - start
            self.seconds[name] += took - self._inside.pop()
            if self._inside:
                self._inside[-1] += took
