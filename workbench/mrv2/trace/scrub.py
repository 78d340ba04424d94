"""`scrub(source, target)`: a copy of a recording that tells of the run, not of the machine it ran on."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mrv2.trace import redact as rd
from mrv2.trace.damage import reading
from mrv2.trace.load import load
from mrv2.trace.readers import own
from mrv2.trace.readers.kineto_json import load_json
from mrv2.trace.readers.sqlite_source import plain_file
from mrv2.trace.scrub_sqlite import scrub_sqlite
from mrv2.trace.strings import StringPool
from mrv2.trace.table import TABLE_TYPES, TABLES, TEXT_COLUMNS, Trace, TraceError

# of a torch profiler recording; everything else at its top is left out
_JSON_HEADER = (
    "schemaVersion",
    "deviceProperties",
    "with_stack",
    "record_shapes",
    "displayTimeUnit",
    "baseTimeNanoseconds",
    "cuda_runtime_version",
    "cuda_driver_version",
    "cupti_version",
    "torch_version",
    # what this package's recorder notes about the run
    "mrv2",
)


# wherever they occur
_JSON_DROPPED = frozenset({"uuid", "host_name", "env", "environ", "environment", "process_labels"})
# a number that `_scrub_json` kept as text
_MARKED = re.compile(r'"\\u0000([^"]+)"')


def scrub(source: str | Path, target: str | Path, names: Iterable[str] = ()) -> list[str]:
    """Write a copy of `source` without environment, host and user names, other processes, and paths.

    Works on SQLite exports of Nsight Systems, torch profiler JSON, and saved traces.  The copy is searched
    afterwards; it appears only if nothing was found.  A target that ends in ``.gz`` is packed.

    Args:
        names: further words to remove, for example other hosts of a cluster.

    Returns:
        What was removed, one line each.

    Raises:
        TraceError: the source cannot be read, source and target are one file, or something still leaks.
    """
    source, target = Path(source), Path(target)
    if not source.exists():
        raise TraceError(f"{source}: no such file or folder")
    if target.exists() and target.samefile(source):
        raise TraceError(f"{target}: source and target are one file; scrub writes a copy")
    extra = rd.telling([*names, *rd.own_names()])
    if source.is_dir() or source.suffix == ".npz":
        return _scrub_saved(source, target, extra)
    with tempfile.TemporaryDirectory(prefix="mrv2-scrub-") as folder, reading(source):
        clean = Path(folder) / "clean"
        with plain_file(source) as plain:
            with plain.open("rb") as file:
                head = file.read(16)
            if head == b"SQLite format 3\0":
                done, found_names = scrub_sqlite(plain, clean, source, extra)
            elif head.lstrip()[:1] in (b"{", b"["):
                done, found_names = _scrub_json(source, clean, extra)
            else:
                raise TraceError(f"{source}: scrub knows SQLite exports, torch profiler JSON and saved traces")
        _refuse_leaks(rd.find_leaks(clean, found_names), target)
        try:
            rd.write_packed(clean, target)
        except OSError as error:
            raise TraceError(f"{target}: cannot be written ({error.strerror or error})") from error
    return done


def _refuse_leaks(found: list[str], target: Path) -> None:
    if found:
        shown = ", ".join(repr(piece[:80]) for piece in found[:5])
        raise TraceError(f"{target}: not written, the copy would still tell of: {shown} ({len(found)} findings)")


def _scrub_json(source: Path, clean: Path, names: list[str]) -> tuple[list[str], list[str]]:
    """Scrub a torch profiler recording; returns what was done and the names that must not be left."""
    # numbers pass through as marked text, so that none loses a digit
    document = load_json(source, parse_float=lambda text: f"\0{text}")
    header = document if isinstance(document, dict) else {"traceEvents": document}
    if not isinstance(header.get("traceEvents"), list):
        raise TraceError(f"{source}: JSON, but not a trace of the torch profiler (no list 'traceEvents')")
    names = rd.telling([*names, str(header.get("host_name", ""))])
    dropped = sorted(set(header) - {*_JSON_HEADER, "traceEvents"})
    out = {key: header[key] for key in _JSON_HEADER if key in header}
    out["traceEvents"] = header["traceEvents"]
    text = json.dumps(_walk(out, names), separators=(",", ":"))
    clean.write_text(_MARKED.sub(r"\1", text), encoding="utf-8")
    return [f"header: {', '.join(dropped) or 'nothing'}", "paths cut to their last part"], names


def _walk(value: Any, names: list[str]) -> Any:
    """Return a JSON value with every text redacted, keys of objects included."""
    if isinstance(value, dict):
        return {rd.redact(k, names): _walk(v, names) for k, v in value.items() if k not in _JSON_DROPPED}
    if isinstance(value, list):
        return [_walk(item, names) for item in value]
    return rd.redact(value, names) if isinstance(value, str) else value


def scrub_trace(trace: Trace, names: Iterable[str] = ()) -> Trace:
    """Return `trace` with every text redacted, and without its path."""
    words = rd.telling([*names, *rd.own_names()])
    meta = {key: value for key, value in trace.meta.items() if key != "path"}
    pool = StringPool()
    # two texts may become one; the last entry stands for id -1
    ids = np.append(pool.ids(rd.redact(text, words) for text in trace.strings), np.int32(-1))
    tables = {}
    for name in TABLES:
        columns = trace.table(name).columns()
        columns |= {column: ids[columns[column]] for column in TEXT_COLUMNS if column in columns}
        tables[name] = TABLE_TYPES[name](**columns)
    return replace(
        trace,
        **tables,
        strings=pool.values,
        thread_names={key: rd.redact(name, words) for key, name in trace.thread_names.items()},
        meta=json.loads(rd.redact(json.dumps(meta, default=str), words)),
        diagnostics=[rd.redact(line, words) for line in trace.diagnostics],
    )


def _scrub_saved(source: Path, target: Path, names: list[str]) -> list[str]:
    trace = scrub_trace(load(source, cache=False), names)
    texts = [*trace.strings, *trace.thread_names.values(), *trace.diagnostics, json.dumps(trace.meta, default=str)]
    _refuse_leaks(rd.leaks("\n".join(texts), names), target)
    own.save(trace, target)
    return ["paths cut to their last part", "path of the file"]
