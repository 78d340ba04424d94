"""Text as small integers: each distinct string of a trace is stored once."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class StringPool:
    """Hands out ids (0, 1, ...) for strings; `values` is the list that `Trace.strings` becomes."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        self.values: list[str] = []
        self._ids: dict[str, int] = {}
        for value in values:
            self.id(value)

    def __len__(self) -> int:
        return len(self.values)

    def id(self, text: str) -> int:
        """Return the id of `text`, adding it if it is new."""
        found = self._ids.get(text)
        if found is None:
            found = self._ids[text] = len(self.values)
            self.values.append(text)
        return found

    def ids(self, texts: Iterable[str]) -> np.ndarray:
        """Return the ids of `texts`; int32, one each."""
        return np.fromiter((self.id(text) for text in texts), np.int32)

    def map_keys(self, keys: np.ndarray, texts: dict[int, str], missing: str | None) -> np.ndarray:
        """Translate a file's own string keys (any shape of repetition) into ids of this pool; int32, one each.

        A key that `texts` lacks becomes the id of `missing`, or -1 when `missing` is None.
        """
        if not len(keys):
            return np.empty(0, np.int32)
        distinct, where = np.unique(keys, return_inverse=True)
        ids = np.empty(len(distinct), np.int32)
        for i, key in enumerate(distinct.tolist()):
            text = texts.get(key, missing)
            ids[i] = -1 if text is None else self.id(text)
        return ids[where]
