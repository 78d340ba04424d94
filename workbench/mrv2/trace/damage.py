"""A damaged file may break its reader anywhere; whoever gave the file sees one line."""

from __future__ import annotations

import sqlite3
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mrv2.trace.table import TraceError

# what parsers raise at bytes that make no sense; a RuntimeError is too deep nesting, or zipfile's unknown version
_DATA_ERRORS = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    RuntimeError,
    EOFError,
    OSError,
    sqlite3.Error,
    zipfile.BadZipFile,
    zlib.error,
)


@contextmanager
def reading(path: Path, kind: str = "file") -> Iterator[None]:
    """Turn what goes wrong while `path` is read into a `TraceError` of one line."""
    try:
        yield
    except TraceError:
        raise
    except _DATA_ERRORS as error:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise TraceError(f"{path}: damaged or truncated {kind} ({said})") from error
