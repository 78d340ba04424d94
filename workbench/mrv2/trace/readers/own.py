"""This package's own formats: one ``.npz`` file, or a folder of Parquet files that other tools read as well.

A folder holds ``trace.json`` and one ``<table>.parquet`` for each table with rows, text spelled out.
"""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mrv2.trace.damage import reading
from mrv2.trace.strings import StringPool
from mrv2.trace.table import TABLE_TYPES, TEXT_COLUMNS, Coverage, TableCoverage, Trace, TraceError

FORMAT = "mrv2-trace"
VERSION = 1
HEADER_NAME = "trace.json"


def save(trace: Trace, path: str | Path) -> Path:
    """Write `trace` to a ``.npz`` file, or for any other name to a folder of Parquet files.

    Raises:
        TraceError: the path cannot be written, or a folder is asked for and pyarrow is not installed.
    """
    path = Path(path)
    try:
        if path.suffix == ".npz":
            return write_npz(trace, path, compressed=True)
        return _write_folder(trace, path)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written ({error.strerror or error})") from error


def read(path: str | Path) -> Trace:
    """Read what `save` wrote: the ``.npz`` file, the folder, or any file inside the folder.

    Raises:
        TraceError: not such a file, damaged, or of a newer version.
    """
    path = Path(path)
    if path.is_dir():
        return _read_folder(path)
    if path.suffix == ".npz" or zipfile.is_zipfile(path):
        return read_npz(path)
    if (path.parent / HEADER_NAME).is_file():
        return _read_folder(path.parent)
    raise TraceError(f"{path}: not a trace of this package (no {HEADER_NAME} beside it)")


def write_npz(trace: Trace, path: Path, *, compressed: bool) -> Path:
    """Write one NumPy archive; a column with a single value is stored as that value."""
    arrays: dict[str, np.ndarray] = {}
    for name in TABLE_TYPES:
        for column, array in trace.table(name).columns().items():
            constant = len(array) > 1 and bool((array == array[0]).all())
            arrays[f"{name}.{column}"] = array[0] if constant else array
    header = json.dumps(_header(trace, strings=True)).encode()
    arrays["header"] = np.frombuffer(header, np.uint8)
    # a reader never sees half a file
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            write: Any = np.savez_compressed if compressed else np.savez
            write(file, **arrays)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def read_npz(path: Path) -> Trace:
    """Read one NumPy archive written by `write_npz`."""
    with reading(path, "trace file"), np.load(path, allow_pickle=False) as archive:
        if "header" not in archive:
            raise TraceError(f"{path}: a NumPy archive, but not a trace of this package")
        header = _check(json.loads(archive["header"].tobytes()), path)
        tables = {}
        for name, kind in TABLE_TYPES.items():
            size = header["rows"][name]
            columns = {column: archive[f"{name}.{column}"] for column in kind.column_types()}
            filled = {c: a if a.ndim else np.full(size, a, kind.column_types()[c]) for c, a in columns.items()}
            tables[name] = kind(**filled)
    return _restore(header, tables, header["strings"])


def _header(trace: Trace, *, strings: bool) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "rows": {name: len(trace.table(name)) for name in TABLE_TYPES},
        "meta": json.loads(json.dumps(trace.meta, default=_plain)),
        "coverage": {key: [e.status, e.rows, e.reason] for key, e in trace.coverage.entries.items()},
        "diagnostics": trace.diagnostics,
        "threads": [[process, thread, name] for (process, thread), name in trace.thread_names.items()],
        **({"strings": trace.strings} if strings else {}),
    }


def _plain(value: Any) -> Any:
    """Return a JSON form of what `json` does not know."""
    return value.item() if isinstance(value, np.generic) else str(value)


def _check(header: Any, path: Path) -> dict[str, Any]:
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise TraceError(f"{path}: not a trace of this package")
    if header.get("version", 0) > VERSION:
        raise TraceError(f"{path}: written by a newer version of this package (format {header['version']})")
    return header


def _restore(header: dict[str, Any], tables: dict[str, Any], strings: list[str]) -> Trace:
    meta = header["meta"]
    if "streams" in meta:
        # JSON keys are text
        meta["streams"] = {int(key): name for key, name in meta["streams"].items()}
    return Trace(
        **tables,
        strings=strings,
        thread_names={(process, thread): name for process, thread, name in header["threads"]},
        meta=meta,
        coverage=Coverage({key: TableCoverage(*entry) for key, entry in header["coverage"].items()}),
        diagnostics=header["diagnostics"],
    )


def _arrow() -> tuple[ModuleType, ModuleType]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise TraceError(
            "Parquet needs pyarrow: pip install 'mrv2-workbench[notebook]', or use a file name that ends in .npz"
        ) from error
    return pyarrow, pyarrow.parquet


def _write_folder(trace: Trace, folder: Path) -> Path:
    pa, pq = _arrow()
    folder.mkdir(parents=True, exist_ok=True)
    for name in TABLE_TYPES:
        file = folder / f"{name}.parquet"
        file.unlink(missing_ok=True)
        if len(trace.table(name)):
            columns = {c: _to_arrow(trace, c, array, pa) for c, array in trace.table(name).columns().items()}
            pq.write_table(pa.table(columns), file, compression="zstd")
    (folder / HEADER_NAME).write_text(json.dumps(_header(trace, strings=False), indent=1))
    return folder


def _to_arrow(trace: Trace, column: str, array: np.ndarray, pa: ModuleType) -> Any:
    """Return an Arrow array; string ids become text, -1 becomes null."""
    if column not in TEXT_COLUMNS:
        return pa.array(array)
    used, codes = np.unique(array, return_inverse=True)
    missing = array < 0
    texts = [str(text) for text in trace.name_of(used)]
    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32), mask=missing), texts)


def _read_folder(folder: Path) -> Trace:
    try:
        header = _check(json.loads((folder / HEADER_NAME).read_text()), folder)
    except FileNotFoundError:
        raise TraceError(f"{folder}: a folder without {HEADER_NAME}; give a recording or a saved trace") from None
    except ValueError as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{folder / HEADER_NAME}: damaged ({error})") from error
    pa, pq = _arrow()
    pool = StringPool()
    tables = {}
    for name, kind in TABLE_TYPES.items():
        file = folder / f"{name}.parquet"
        if not header["rows"].get(name):
            tables[name] = kind.make()
            continue
        try:
            # older traces may lack a column that has a default
            arrow = pq.read_table(file)
            columns = {c: _from_arrow(arrow.column(c), c, pool) for c in arrow.column_names if c in kind.column_types()}
            tables[name] = kind.make(**columns)
        except (OSError, pa.ArrowException, ValueError) as error:
            raise TraceError(f"{file}: damaged or missing ({str(error).splitlines()[0]})") from error
        if len(tables[name]) != header["rows"][name]:
            raise TraceError(f"{file}: has {len(tables[name])} rows, {HEADER_NAME} says {header['rows'][name]}")
    return _restore(header, tables, pool.values)


def _from_arrow(array: Any, column: str, pool: StringPool) -> np.ndarray:
    if column not in TEXT_COLUMNS:
        return array.to_numpy()
    array = array.combine_chunks()
    array = array if hasattr(array, "dictionary") else array.dictionary_encode()
    ids = pool.ids(array.dictionary.to_pylist())
    codes = array.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    # index -1 finds the missing value at the end
    return np.append(ids, np.int32(-1))[codes]
