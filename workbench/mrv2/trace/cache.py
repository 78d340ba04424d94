"""A side-car beside a big recording, so that its second reading takes a fraction of a second."""

from __future__ import annotations

from pathlib import Path

from mrv2.trace.readers import own
from mrv2.trace.table import Trace, TraceError

# raise it with every change of what any reader makes of a file
READER_VERSION = 2
# smaller recordings are read about as fast as their side-car would be
MIN_BYTES = 8 << 20
SUFFIX = ".mrv2-cache.npz"


def sidecar_path(path: Path) -> Path:
    """Return where the side-car of `path` lies."""
    return path.with_name(f".{path.name}{SUFFIX}")


def _key(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, READER_VERSION]


def load_sidecar(path: Path) -> Trace | None:
    """Return the cached trace, or None if there is none or it belongs to another state of the file."""
    sidecar = sidecar_path(path)
    if not sidecar.is_file():
        return None
    try:
        trace = own.read_npz(sidecar)
    except TraceError:
        # damaged: read the recording itself, and write the side-car anew
        return None
    if trace.meta.pop("cache_key", None) != _key(path):
        return None
    trace.meta["path"] = str(path)
    return trace


def store_sidecar(path: Path, trace: Trace) -> bool:
    """Write the side-car of `path`; returns whether its folder allowed that."""
    try:
        key = _key(path)
        trace.meta["cache_key"] = key
        own.write_npz(trace, sidecar_path(path), compressed=False)
    except OSError:
        return False
    finally:
        trace.meta.pop("cache_key", None)
    return True
