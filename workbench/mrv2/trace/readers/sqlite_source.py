"""An Nsight Systems SQLite file as NumPy columns: opened read-only, columns taken by name."""

from __future__ import annotations

import gzip
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from urllib.parse import quote

import numpy as np

from mrv2.trace.damage import reading
from mrv2.trace.table import TraceError

SUPPORTED_MAJOR = 3


def quote_name(name: str) -> str:
    """Return `name` as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


class SqliteSource:
    """Bulk access to the tables of one export; missing tables and columns are asked for, never assumed."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        self.tables: set[str] = {name for (name,) in names}
        self._columns: dict[str, frozenset[str]] = {}

    def columns(self, table: str) -> frozenset[str]:
        """Return the column names of `table`; empty if the file has no such table."""
        if table not in self._columns:
            info = self._connection.execute(f"PRAGMA table_info({quote_name(table)})")
            self._columns[table] = frozenset(row[1] for row in info)
        return self._columns[table]

    def count(self, table: str) -> int:
        """Return the number of rows; 0 if the file has no such table."""
        if table not in self.tables:
            return 0
        return self._connection.execute(f"SELECT COUNT(*) FROM {quote_name(table)}").fetchone()[0]

    def integers(self, table: str, wanted: dict[str, int], where: str = "") -> dict[str, np.ndarray]:
        """Return integer columns, int64 [rows] each.

        Args:
            wanted: column name to the value that stands for NULL, and for a column that this file lacks.
            where: SQL condition on the rows.
        """
        present = [name for name in wanted if name in self.columns(table)]
        out = {name: np.empty(0, np.int64) for name in wanted}
        if not present:
            return out
        # one pass that flattens the rows: no tuple outlives its row, so memory stays at the columns' own size
        fields = ", ".join(f"IFNULL({quote_name(name)}, {wanted[name]})" for name in present)
        query = f"SELECT {fields} FROM {quote_name(table)}" + (f" WHERE {where}" if where else "")
        rows = self._connection.execute(query)
        try:
            flat = np.fromiter(chain.from_iterable(rows), np.int64).reshape(-1, len(present))
        except (ValueError, TypeError, OverflowError) as error:
            raise TraceError(f"table {table} holds a value that is not an integer: {error}") from error
        out |= {name: np.ascontiguousarray(flat[:, i]) for i, name in enumerate(present)}
        for name in wanted.keys() - set(present):
            out[name] = np.full(len(flat), wanted[name], np.int64)
        return out

    def rows(self, table: str, wanted: list[str], where: str = "") -> list[tuple]:
        """Return small tables as rows; a column that this file lacks is None throughout."""
        present = self.columns(table)
        if not present:
            return []
        fields = ", ".join(quote_name(name) if name in present else "NULL" for name in wanted)
        query = f"SELECT {fields} FROM {quote_name(table)}" + (f" WHERE {where}" if where else "")
        return self._connection.execute(query).fetchall()

    def strings(self) -> dict[int, str]:
        """Return the file's string table."""
        return {key: value or "" for key, value in self.rows("StringIds", ["id", "value"])}


def is_gzip(path: Path) -> bool:
    """Return whether the file begins as gzip does."""
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


@contextmanager
def plain_file(path: Path) -> Iterator[Path]:
    """Yield `path` itself, or for a gzip file a temporary unpacked copy."""
    if not is_gzip(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="mrv2-trace-") as folder:
        unpacked = Path(folder) / "trace"
        with reading(path, "gzip file"), gzip.open(path) as packed, unpacked.open("wb") as out:
            shutil.copyfileobj(packed, out, 1 << 20)
        yield unpacked


@contextmanager
def open_sqlite(path: Path) -> Iterator[sqlite3.Connection]:
    """Open `path` (plain or gzip) read-only; SQLite's own errors become one-line `TraceError`."""
    with plain_file(path) as plain, reading(path, "SQLite file"):
        # immutable: no journal, no lock file beside a recording that may lie on a read-only disk
        connection = sqlite3.connect(f"file:{quote(str(plain.resolve()))}?mode=ro&immutable=1", uri=True)
        with closing(connection):
            # a name that is not UTF-8 must not hide the rest of the recording
            connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
            yield connection


def export_info(source: SqliteSource, path: Path) -> dict[str, str]:
    """Return the export's own description; refuses files that are no Nsight Systems export of schema 3.

    Raises:
        TraceError: foreign SQLite file, or an unknown schema.
    """
    info = {name: value or "" for name, value in source.rows("META_DATA_EXPORT", ["name", "value"])}
    version = info.get("EXPORT_SCHEMA_VERSION", "")
    if "StringIds" not in source.tables or not version:
        raise TraceError(
            f"{path}: an SQLite file, but not an export of Nsight Systems "
            "(no StringIds table or no EXPORT_SCHEMA_VERSION); make one with: nsys export -t sqlite FILE.nsys-rep"
        )
    if version.split(".")[0] != str(SUPPORTED_MAJOR):
        raise TraceError(
            f"{path}: export schema {version}; this reader knows schema {SUPPORTED_MAJOR}.x. "
            "Export again with an nsys of 2023 to 2026, or update this package"
        )
    return info
