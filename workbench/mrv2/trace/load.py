"""`load(path)`: any recording as a `Trace`, told apart by content."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path

from mrv2.trace import cache as sidecar
from mrv2.trace.damage import reading
from mrv2.trace.readers import kineto, nsight_sqlite, nsys_rep, own
from mrv2.trace.readers.sqlite_source import is_gzip
from mrv2.trace.table import Trace, TraceError

_KNOWN = (
    "Nsight Systems (.nsys-rep, .sqlite, .sqlite.gz), torch profiler JSON (.json, .json.gz), saved trace (.npz, folder)"
)


def load(path: str | Path, *, cache: bool | None = None) -> Trace:
    """Read a recording of any known kind.

    Args:
        path: recording, saved trace, or folder of a saved trace.
        cache: True keeps a side-car file beside the recording, False neither reads nor writes one, None keeps one for
            recordings above 8 MiB.

    Raises:
        TraceError: missing, empty, truncated, of an unknown kind or schema.
    """
    path = Path(path).expanduser()
    reader = _reader(path)
    if reader is own.read:
        with reading(path):
            return reader(path)
    use_cache = path.stat().st_size >= sidecar.MIN_BYTES if cache is None else cache
    trace = sidecar.load_sidecar(path) if use_cache else None
    if trace is None:
        with reading(path):
            trace = reader(path)
        if use_cache:
            sidecar.store_sidecar(path, trace)
    return trace


def _reader(path: Path) -> Callable[[Path], Trace]:
    """Return the reader for `path`, from its first bytes."""
    if not path.exists():
        raise TraceError(f"{path}: no such file or folder")
    if path.is_dir():
        return own.read
    try:
        head = _head(path)
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read ({error})") from error
    if not head:
        raise TraceError(f"{path}: the file is empty")
    if head.startswith(b"SQLite format 3\0"):
        return nsight_sqlite.read
    if path.suffix in nsys_rep.SUFFIXES:
        return nsys_rep.read
    if head.startswith((b"PK\x03\x04", b"PAR1")) or path.name == own.HEADER_NAME:
        return own.read
    if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
        return kineto.read
    raise TraceError(f"{path}: unknown kind of file; known: {_KNOWN}")


def _head(path: Path) -> bytes:
    if is_gzip(path):
        with gzip.open(path) as file:
            return file.read(64)
    with path.open("rb") as file:
        return file.read(64)
