"""Writing traces for other programs: Perfetto and Chrome JSON, CSV, Parquet."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from mrv2.errors import nearest
from mrv2.trace.perfetto import write_perfetto
from mrv2.trace.readers import own
from mrv2.trace.table import TABLES, TEXT_COLUMNS, Table, Trace, TraceError

Format = Literal["perfetto", "csv", "parquet", "npz"]
FORMATS: tuple[Format, ...] = ("perfetto", "csv", "parquet", "npz")
_BY_ENDING: tuple[tuple[str, Format], ...] = (
    (".json", "perfetto"),
    (".json.gz", "perfetto"),
    (".csv", "csv"),
    (".npz", "npz"),
    (".parquet", "parquet"),
)


def export(
    trace: Trace,
    path: str | Path,
    format: Format | None = None,
    tables: Sequence[str] | None = None,
) -> list[Path]:
    """Write `trace`; the ending of `path` chooses the format unless `format` does.

    ``.json`` and ``.json.gz`` are for Perfetto; ``.csv`` holds one table; another name with format "csv" is a folder
    with one file a table; "parquet" is a folder that `mrv2.trace.load` reads back, as it does ``.npz``.

    Args:
        tables: for CSV, the tables to write; default all that have rows.

    Returns:
        The files or folders written.

    Raises:
        TraceError: an unknown format or table, or the path cannot be written.
    """
    path = Path(path)
    chosen = format or next((kind for ending, kind in _BY_ENDING if path.name.endswith(ending)), None)
    if chosen not in FORMATS:
        hint = nearest(str(format), FORMATS) if format else ""
        raise TraceError(f"{path}: cannot tell the format{hint}; formats: {', '.join(FORMATS)}")
    try:
        if chosen == "perfetto":
            return [write_perfetto(trace, path)]
        if chosen == "csv":
            return _write_csv(trace, path, tables)
        if (chosen == "npz") != (path.suffix == ".npz"):
            raise TraceError(f"{path}: format {chosen!r} and the ending do not fit together")
        return [own.save(trace, path)]
    except OSError as error:
        raise TraceError(f"{path}: cannot be written ({error.strerror or error})") from error


def _write_csv(trace: Trace, path: Path, tables: Sequence[str] | None) -> list[Path]:
    picked = list(tables) if tables is not None else [name for name in TABLES if len(trace.table(name))]
    if path.suffix != ".csv":
        path.mkdir(parents=True, exist_ok=True)
        return [write_csv_table(trace, name, path / f"{name}.csv") for name in picked]
    if len(picked) != 1:
        raise TraceError(f"{path}: a .csv file holds one table; name one of {', '.join(picked)}, or give a folder")
    return [write_csv_table(trace, picked[0], path)]


def write_csv_table(trace: Trace, name: str, path: Path) -> Path:
    """Write one table with a heading; string ids become text.

    Raises:
        TraceError: there is no such table.
        OSError: the file cannot be written.
    """
    table: Table = trace.table(name)
    columns = {
        column: trace.name_of(array).tolist() if column in TEXT_COLUMNS else _plain(array)
        for column, array in table.columns().items()
    }
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def _plain(array: np.ndarray) -> list[int]:
    """Return integers; booleans as 0 and 1."""
    return array.astype(np.int64).tolist()
