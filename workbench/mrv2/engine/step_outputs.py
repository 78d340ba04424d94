"""What turns of the engine bring, as columns: a token for each of B sequences is one object, not B of them.

A front end that looks at every sequence iterates, and each `EngineOutput` is made as it is looked at; one that only
counts or keeps tokens takes the columns as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsIndex, overload

import numpy as np

from mrv2.engine.messages import EngineOutput


@dataclass(slots=True, eq=False)
class TokenColumn:
    """One token of a step for each of B sequences, of most of them nothing else."""

    # B ids; the very list of the column before, unchanged: the same sequences once more
    req_ids: list[str]
    # [B] int64
    tokens: np.ndarray
    step: int
    # row -> its whole output, where that is more than the token (an end), or not the token (an error)
    special: dict[int, EngineOutput] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.req_ids)

    def __iter__(self) -> Iterator[EngineOutput]:
        for row, token in enumerate(self.tokens.tolist()):
            yield self.special[row] if row in self.special else self._plain(row, token)

    def of_rows(self, rows: Iterable[int]) -> Iterator[EngineOutput]:
        """Yield the outputs of some rows."""
        for row in rows:
            yield self.special[row] if row in self.special else self._plain(row, int(self.tokens[row]))

    def _plain(self, row: int, token: int) -> EngineOutput:
        # as the constructor would leave it: what is not set here is read from the class
        output = EngineOutput.__new__(EngineOutput)
        output.req_id, output.new_token_ids, output.step = self.req_ids[row], [token], self.step
        return output


class EngineOutputs(Sequence[EngineOutput]):
    """Outputs in the order in which they became known; equal to a list of the same."""

    __slots__ = ("parts",)

    def __init__(self, outputs: Iterable[EngineOutput] = ()) -> None:
        self.parts: list[TokenColumn | list[EngineOutput]] = []
        self.__iadd__(outputs)

    def __iadd__(self, other: Iterable[EngineOutput]) -> EngineOutputs:
        """Append outputs; columns stay columns."""
        if isinstance(other, EngineOutputs):
            self.parts += other.parts
        elif isinstance(other, TokenColumn):
            if len(other):
                self.parts.append(other)
        elif outputs := list(other):
            self.parts.append(outputs)
        return self

    def append(self, output: EngineOutput) -> None:
        """Append one output."""
        self.parts.append([output])

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __bool__(self) -> bool:
        return bool(self.parts)

    def __iter__(self) -> Iterator[EngineOutput]:
        for part in self.parts:
            yield from part

    @overload
    def __getitem__(self, index: SupportsIndex) -> EngineOutput: ...

    @overload
    def __getitem__(self, index: slice) -> list[EngineOutput]: ...

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, (EngineOutputs, list)) else NotImplemented

    def __repr__(self) -> str:
        return f"EngineOutputs({list(self)!r})"


class ColumnWire:
    """One end of a pipe for outputs: ids that go on from column to column pass it once."""

    def __init__(self) -> None:
        # of the last column that passed
        self._req_ids: list[str] = []

    def pack(self, outputs: EngineOutputs) -> EngineOutputs:
        """Return `outputs` as they are sent: no ids where they are those of the column before."""
        packed = EngineOutputs()
        for part in outputs.parts:
            if isinstance(part, TokenColumn):
                repeated, self._req_ids = part.req_ids is self._req_ids, part.req_ids
                part = TokenColumn([] if repeated else part.req_ids, part.tokens, part.step, part.special)
            packed.parts.append(part)
        return packed

    def unpack(self, packed: EngineOutputs) -> EngineOutputs:
        """Return what the other end has packed; ids that go on are one list again."""
        for part in packed.parts:
            if isinstance(part, TokenColumn):
                part.req_ids = self._req_ids = part.req_ids or self._req_ids
        return packed


class TokenLog:
    """Tokens by sequence, kept as columns while the same sequences go on, until somebody wants them."""

    def __init__(self) -> None:
        # the last output of those that have ended
        self.ends: dict[str, EngineOutput] = {}
        self._tokens: dict[str, list[int]] = {}
        self._req_ids: list[str] = []
        # [B] each, of `_req_ids`, not yet in `_tokens`
        self._columns: list[np.ndarray] = []

    def take(self, outputs: EngineOutputs) -> None:
        """Keep the tokens of `outputs`."""
        for part in outputs.parts:
            if not isinstance(part, TokenColumn) or part.special or part.req_ids is not self._req_ids:
                self._sort()
            if isinstance(part, TokenColumn) and not part.special:
                self._req_ids = part.req_ids
                self._columns.append(part.tokens)
                continue
            for output in part:
                self._tokens.setdefault(output.req_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    self.ends[output.req_id] = output

    def tokens(self) -> dict[str, list[int]]:
        """Return the tokens of every sequence that had an output."""
        self._sort()
        return self._tokens

    def _sort(self) -> None:
        columns, self._columns = self._columns, []
        for req_id, new in zip(self._req_ids, by_row(columns), strict=False):
            self._tokens.setdefault(req_id, []).extend(new)


def by_row(columns: Sequence[np.ndarray]) -> list[list[int]]:
    """Return the tokens of each row of `columns`, [B] each; no list if there are no columns."""
    return np.stack(columns).T.tolist() if columns else []
