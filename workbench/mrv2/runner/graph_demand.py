"""Which CUDA graphs are captured before the first request, and which when a step first asks for them.

A capture costs some tens of milliseconds and an engine has a hundred shapes, of which a load uses a few.  So a set of
graphs begins with its largest and its smallest shape: the largest first, so that the memory pool that all graphs share
has room for every other.  A step whose graph is missing runs launch by launch and names the key; the next step
boundary captures what was named.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


class GraphDemand:
    """Keys that steps have asked for in vain since the last capture; with `lazy` off every key counts as asked for."""

    def __init__(self, *, lazy: bool) -> None:
        self.lazy = lazy
        self.asked: set[Hashable] = set()

    def ask(self, key: Hashable) -> None:
        """Name a key that would have been replayed."""
        if self.lazy:
            self.asked.add(key)

    def missing(self, keys: Sequence[K], first: Collection[K], captured: Collection[K]) -> list[K]:
        """Return what to capture now of `keys`, in their order: of those not `captured` the `first` and the asked."""
        return [k for k in keys if k not in captured and (not self.lazy or k in first or k in self.asked)]
