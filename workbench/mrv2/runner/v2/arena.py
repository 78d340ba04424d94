"""All request state of the V2 runner: one device buffer, edited by one launch a step.

Every section (token history, block tables, lengths, sampling parameters) is a view of one int32
buffer.  What the host changes in a step, whichever sections it touches, becomes a list of ragged
runs (start word, content); one pinned slot carries them to the device together with the batch
header, and one kernel applies them.  Cost follows the number of changes, not of sections.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import numpy as np
import torch

from mrv2.device import Device

_NO_RUNS = np.zeros(0, dtype=np.int32), np.zeros(1, dtype=np.int32), np.zeros(0, dtype=np.int32), 0
_WORDS = {torch.int32: 1, torch.float32: 1, torch.int64: 2}


@lru_cache(maxsize=1024)
def _bits_of(value: float) -> int:
    """Return a float32 as the int32 of the same bits; requests rarely have parameters of their own."""
    return int(np.float32(value).view(np.int32))


class DeviceArena:
    """Named sections of one device buffer, and the runs staged for them."""

    def __init__(self, device: Device, sections: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        ordered = sorted(sections.items(), key=lambda item: -_WORDS[item[1][1]])
        self._dtypes = {name: dtype for name, (_, dtype) in sections.items()}
        self._start: dict[str, int] = {}
        self._row_words: dict[str, int] = {}
        total = 0
        for name, (shape, dtype) in ordered:
            self._start[name] = total
            self._row_words[name] = prod(shape[1:]) * _WORDS[dtype]
            total += prod(shape) * _WORDS[dtype]
        assert total < 2**31, (
            f"request state of {total} words exceeds int32 offsets: lower max_num_seqs or max_model_len"
        )
        # [1, words]
        self.words = device.zeros((1, total), torch.int32)
        self.views: dict[str, torch.Tensor] = {}
        for name, (shape, dtype) in sections.items():
            begin = self._start[name]
            flat = self.words[0, begin : begin + prod(shape) * _WORDS[dtype]]
            self.views[name] = flat.view(dtype).view(shape)
        self._run_starts: list[int] = []
        self._run_contents: list[np.ndarray] = []
        # scalars of one word each: a request has ten, and an array for each took a third of its admission
        self._scalar_starts: list[int] = []
        self._scalar_words: list[int] = []
        # runs of one word each, staged together: their starts and their contents
        self._words: list[tuple[np.ndarray, np.ndarray]] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.views[name]

    def stage(self, name: str, row: int, values: Sequence[int] | np.ndarray, start: int = 0) -> None:
        """Stage int32 `values` for ``section[row, start:]``."""
        self._run_starts.append(self._start[name] + row * self._row_words[name] + start)
        self._run_contents.append(np.asarray(values, dtype=np.int32))

    def stage_scalar(self, name: str, row: int, value: int | float) -> None:
        """Stage one element of a one-dimensional section, in the section's own dtype."""
        start, dtype = self._start[name] + row * self._row_words[name], self._dtypes[name]
        if dtype == torch.int64:
            self._run_starts.append(start)
            self._run_contents.append(np.array([int(value) & (2**64 - 1)], dtype=np.uint64).view(np.int32))
            return
        self._scalar_starts.append(start)
        self._scalar_words.append(_bits_of(value) if dtype == torch.float32 else int(value))

    def stage_words(
        self,
        name: str,
        # [n]
        rows: np.ndarray,
        # [n], or one for all
        columns: np.ndarray | int,
        # [n] int32
        values: np.ndarray,
    ) -> None:
        """Stage ``section[rows[i], columns[i]] = values[i]`` of an int32 section."""
        self._words.append((self._start[name] + rows * self._row_words[name] + columns, values))

    def take_runs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """Return the staged runs and forget them: starts [n], cu_lens [n+1], contents [m], longest run.

        Runs that end in the same section are disjoint by construction: a row's scalars are staged
        once when the row is taken, blocks only ever append.
        """
        if not self.has_runs:
            return _NO_RUNS
        starts, contents = [at for at, _ in self._words], [values for _, values in self._words]
        if self._scalar_starts:
            starts.append(np.array(self._scalar_starts, dtype=np.int32))
            contents.append(np.array(self._scalar_words, dtype=np.int32))
            self._scalar_starts, self._scalar_words = [], []
        if not self._run_starts:
            self._words = []
            flat = np.concatenate(contents)
            # one word a run
            return np.concatenate(starts), np.arange(len(flat) + 1, dtype=np.int32), flat, 1
        words = np.ones(sum(map(len, contents)), dtype=np.int32)
        longer = np.fromiter((len(c) for c in self._run_contents), dtype=np.int32, count=len(self._run_contents))
        lengths = np.concatenate((longer, words))
        cu_lens = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(lengths, out=cu_lens[1:])
        starts = np.concatenate((np.array(self._run_starts, dtype=np.int32), *starts))
        contents = np.concatenate((*self._run_contents, *contents))
        self._run_starts, self._run_contents, self._words = [], [], []
        return starts, cu_lens, contents, int(lengths.max())

    @property
    def has_runs(self) -> bool:
        return bool(self._run_starts or self._words or self._scalar_starts)
