"""Result tables: named columns that people can print, iterate and turn into a data frame."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import numpy as np

from mrv2.trace.table import TraceError

if TYPE_CHECKING:
    import pandas as pd

# columns, [num_rows]; `Number` is int64, or float64 where it is a mean over several devices
Float64 = Annotated[np.ndarray, np.dtype(np.float64)]
Number = Annotated[np.ndarray, "int64 or float64"]
_F = TypeVar("_F", bound="Frame")
Column = Any


@dataclass(frozen=True, eq=False, repr=False)
class Frame:
    """Columns of equal length: NumPy arrays or lists of text, or None for a figure that has no evidence.

    NaN in a column is a single undefined figure.  Fields whose name starts with an underscore are no columns.
    """

    def columns(self) -> dict[str, Column]:
        """Return the columns by name, in order."""
        return {f.name: getattr(self, f.name) for f in fields(self) if not f.name.startswith("_")}

    def __len__(self) -> int:
        return next((len(column) for column in self.columns().values() if column is not None), 0)

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict a row; undefined figures are None."""
        columns = {name: _plain(column, len(self)) for name, column in self.columns().items()}
        return [dict(zip(columns, values)) for values in zip(*columns.values())]

    def take(self: _F, rows: np.ndarray | slice | list[int]) -> _F:
        """Return the rows that a mask, an index array or a slice selects."""
        index = np.arange(len(self))[rows]
        changes = {name: _select(column, index) for name, column in self.columns().items()}
        kept = {f.name: getattr(self, f.name) for f in fields(self) if f.name.startswith("_")}
        return type(self)(**changes, **kept)

    def to_pandas(self) -> pd.DataFrame:
        """Return a data frame.

        Raises:
            TraceError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise TraceError("data frames need pandas: pip install 'mrv2-workbench[notebook]'") from error
        return pd.DataFrame({name: _plain(column, len(self)) for name, column in self.columns().items()})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} rows)"

    def __str__(self) -> str:
        return text_table(self.rows())


def _plain(column: Column, size: int) -> list[Any]:
    if column is None:
        return [None] * size
    values = column.tolist() if isinstance(column, np.ndarray) else list(column)
    if isinstance(column, np.ndarray) and column.dtype.kind == "f":
        return [None if value != value else value for value in values]
    return values


def _select(column: Column, index: np.ndarray) -> Column:
    if column is None:
        return None
    return column[index] if isinstance(column, np.ndarray) else [column[i] for i in index.tolist()]


def text_table(rows: list[dict[str, Any]], limit: int = 50) -> str:
    """Return rows as aligned text; columns that end in ``_ns`` are shown in microseconds."""
    if not rows:
        return "(no rows)"
    heads = [name.removesuffix("_ns") + " us" if name.endswith("_ns") else name for name in rows[0]]
    cells = [[cell_text(name, value) for name, value in row.items()] for row in rows[:limit]]
    widths = [max(len(head), *(len(row[i]) for row in cells)) for i, head in enumerate(heads)]
    numeric = [isinstance(value, (int, float)) for value in rows[0].values()]
    lines = [
        "  ".join(text.rjust(width) if right else text.ljust(width) for text, width, right in zip(row, widths, numeric))
        for row in [heads, *cells]
    ]
    if len(rows) > limit:
        lines.append(f"... and {len(rows) - limit} more rows")
    return "\n".join(line.rstrip() for line in lines)


def cell_text(name: str, value: Any) -> str:
    """Return one figure as text: n/a for None, microseconds for ``_ns`` columns, per cent for shares."""
    if value is None:
        return "n/a"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_ns"):
        return f"{value / 1e3:,.1f}"
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and not name.startswith("overlap") else f"{value:.3f}"
    return str(value)
