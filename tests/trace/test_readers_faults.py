"""Whatever is no recording ends in one `TraceError` of one line that names the file."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kineto_files import KinetoFile
from mrv2.trace import Trace, TraceError, load, save, scrub
from nsight_files import NsightFile, worked_example


def _sqlite(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


def _truncated_sqlite(path: Path) -> None:
    raw = worked_example().write(path).read_bytes()
    path.write_bytes(raw[: len(raw) // 2])


def _overwritten_sqlite(path: Path) -> None:
    raw = bytearray(worked_example().write(path).read_bytes())
    raw[4096:] = b"\xaa" * (len(raw) - 4096)
    path.write_bytes(bytes(raw))


def _truncated_gzip(path: Path) -> None:
    raw = worked_example().write(path.with_suffix(".gz")).read_bytes()
    path.write_bytes(raw[: len(raw) // 2])


def _truncated_json(path: Path) -> None:
    file = KinetoFile()
    file.op("aten::add", 0, 10)
    text = file.text()
    path.write_text(text[: len(text) // 2])


def _truncated_npz(path: Path) -> None:
    whole = save(Trace(), path.with_suffix(".npz"))
    path.write_bytes(whole.read_bytes()[:-100])


def _text_in_a_number_column(path: Path) -> None:
    worked_example().write(path)
    _sqlite(path, "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'soon' WHERE rowid = 3")


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "the file is empty"),
    "unknown": (lambda path: path.write_bytes(b"\x7fELF and so on"), "unknown kind of file; known: Nsight"),
    "only a gzip head": (lambda path: path.write_bytes(b"\x1f\x8b\x08"), "cannot be read"),
    "gzip of something": (lambda path: path.write_bytes(gzip.compress(b"hello")), "unknown kind of file"),
    "truncated gzip": (_truncated_gzip, "damaged or truncated"),
    "truncated sqlite": (_truncated_sqlite, "damaged or truncated SQLite"),
    "overwritten sqlite": (_overwritten_sqlite, "damaged or truncated SQLite"),
    "text in a number column": (_text_in_a_number_column, "not an integer"),
    "foreign sqlite": (lambda path: _sqlite(path, "CREATE TABLE a (b)"), "not an export of Nsight Systems"),
    "newer schema": (lambda path: NsightFile("3.28.1").write(path) and _major_4(path), "schema 4.0.0"),
    "truncated json": (_truncated_json, "truncated or damaged JSON"),
    "foreign json": (lambda path: path.write_text('{"a": 1}'), "no list 'traceEvents'"),
    "foreign events": (lambda path: path.write_text('[{"ph": "X", "cat": "x"}]'), "none of the torch profiler"),
    "json of numbers": (lambda path: path.write_text("[1, 2]"), "none of the torch profiler"),
    "deep json": (lambda path: path.write_text("[" * 200_000), "JSON"),
    "not utf-8": (lambda path: path.write_bytes(b'{"traceEvents": ["\xff"]}'), "JSON"),
    "foreign archive": (lambda path: _archive(path), "not a trace of this package"),
    "truncated archive": (_truncated_npz, "not a trace of this package|damaged or truncated"),
    "parquet alone": (lambda path: path.write_bytes(b"PAR1 and so on"), "not a trace of this package"),
    "folder": (lambda path: path.mkdir(), "a folder without trace.json"),
}


def _major_4(path: Path) -> None:
    _sqlite(path, "UPDATE META_DATA_EXPORT SET value = '4.0.0' WHERE name = 'EXPORT_SCHEMA_VERSION'")


def _archive(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, a=np.zeros(3))


@pytest.mark.parametrize("name", CASES)
def test_one_clear_error(tmp_path: Path, name: str) -> None:
    make, message = CASES[name]
    path = tmp_path / "recording"
    make(path)
    with pytest.raises(TraceError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value) or "table" in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        load(tmp_path / "absent.sqlite")


@pytest.mark.parametrize("cut", [10, 100, 1000, 5000, 20_000])
def test_no_length_of_a_truncated_file_escapes(tmp_path: Path, cut: int) -> None:
    raw = worked_example().write(tmp_path / "whole.sqlite").read_bytes()
    assert cut < len(raw), "the example is larger than every cut"
    path = tmp_path / "part.sqlite"
    path.write_bytes(raw[:cut])
    with pytest.raises(TraceError):
        load(path)


@pytest.mark.parametrize("seed", range(40))
def test_random_damage_is_read_or_refused(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    whole = worked_example().write(tmp_path / "whole.sqlite")
    source = (whole, save(load(whole), tmp_path / "whole.npz"))[seed % 2]
    raw = bytearray(source.read_bytes())
    for at in rng.integers(0, len(raw), 20):
        raw[at] = rng.integers(256)
    path = tmp_path / f"damaged{source.suffix}"
    path.write_bytes(bytes(raw))
    for read in (load, lambda path: scrub(path, tmp_path / f"out{source.suffix}")):
        try:
            read(path)
        except TraceError as error:
            assert "\n" not in str(error)  # noqa: PT017  # reading it is right as well


def test_odd_events_are_left_out_aloud(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "good", "pid": 1, "tid": 1, "ts": 5, "dur": 2},
        {"ph": "X", "cat": "cpu_op", "name": "no time", "pid": 1, "tid": 1, "dur": 2},
        {"ph": "X", "cat": "cpu_op", "name": "negative", "pid": 1, "tid": 1, "ts": 5, "dur": -2},
        {"ph": "X", "cat": "cpu_op", "name": "words", "pid": 1, "tid": 1, "ts": "soon", "dur": 2},
        {"ph": "X", "cat": "kernel", "name": "k", "pid": "0", "tid": "stream 7", "ts": 6, "dur": 1, "args": 3},
        "not an event",
    ]
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(events))
    trace = load(path)
    assert len(trace.ranges) == 1 and trace.ops.stream.tolist() == [7]
    assert trace.diagnostics == ["3 events without a valid time or with a negative length were left out"]
