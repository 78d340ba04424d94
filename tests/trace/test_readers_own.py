"""Saved traces, the side-car cache, the in-process recorder, and reports that an nsys exports."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from mrv2.instrument import Recorder
from mrv2.trace import OpKind, SyncType, Trace, TraceError, WaitKind, cache, from_recorder, load, save
from mrv2.trace.columns import TABLES, TEXT_COLUMNS
from nsight_files import NsightFile, worked_example

REQUIRES_ARROW = pytest.mark.usefixtures("_arrow")


@pytest.fixture
def _arrow() -> None:
    pytest.importorskip("pyarrow")


def _assert_same(a: Trace, b: Trace) -> None:
    """Compare everything but the path; text by what it says."""
    for name in TABLES:
        for column, values in a.table(name).columns().items():
            other = b.table(name).columns()[column]
            assert values.dtype == other.dtype, f"{name}.{column}"
            if column in TEXT_COLUMNS:
                values, other = a.name_of(values), b.name_of(other)
            assert np.array_equal(values, other), f"{name}.{column}"
    assert (a.coverage, a.diagnostics, a.thread_names) == (b.coverage, b.diagnostics, b.thread_names)
    assert {**a.meta, "path": 0} == {**b.meta, "path": 0}


def _example(folder: Path) -> Trace:
    file = worked_example()
    file.nvtx("open", 10, None)
    file.add("ThreadNames", nameId=file.text("worker"), globalTid=1 << 48 | 4000 << 24 | 4001)
    return load(file.write(folder / "t.sqlite"))


@REQUIRES_ARROW
@pytest.mark.parametrize("name", ["saved.npz", "saved"])
def test_a_saved_trace_comes_back_whole(tmp_path: Path, name: str) -> None:
    trace = _example(tmp_path)
    trace.meta["streams"] = {7: "main"}
    _assert_same(trace, load(save(trace, tmp_path / name)))
    _assert_same(Trace(), load(save(Trace(), tmp_path / name)))


@REQUIRES_ARROW
def test_any_file_of_a_folder_opens_the_folder(tmp_path: Path) -> None:
    trace = _example(tmp_path)
    folder = save(trace, tmp_path / "saved")
    _assert_same(trace, load(folder / "ops.parquet"))
    _assert_same(trace, load(folder / "trace.json"))


@REQUIRES_ARROW
def test_parquet_is_plain_for_other_tools(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    folder = save(_example(tmp_path), tmp_path / "saved")
    names = pq.read_table(folder / "ranges.parquet").column("name").to_pylist()
    assert names == ["step", "open", "request", "forward"]


@REQUIRES_ARROW
def test_a_folder_with_a_damaged_table_says_which(tmp_path: Path) -> None:
    folder = save(_example(tmp_path), tmp_path / "saved")
    (folder / "ops.parquet").write_bytes(b"PAR1")
    with pytest.raises(TraceError, match=r"ops\.parquet: damaged"):
        load(folder)


def test_without_pyarrow_the_message_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TraceError, match=r"pip install .*notebook.*\.npz"):
        save(Trace(), tmp_path / "saved")
    save(Trace(), tmp_path / "saved.npz")


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mrv2.trace.readers import own

    monkeypatch.setattr(own, "VERSION", 99)
    path = save(Trace(), tmp_path / "new.npz")
    monkeypatch.undo()
    with pytest.raises(TraceError, match="newer version"):
        load(path)


def test_the_sidecar_is_used_until_the_file_changes(tmp_path: Path) -> None:
    path = worked_example().write(tmp_path / "t.sqlite")
    first = load(path, cache=True)
    sidecar = cache.sidecar_path(path)
    assert sidecar.is_file()
    cached = cache.load_sidecar(path)
    assert cached is not None
    _assert_same(first, cached)
    _assert_same(first, load(path, cache=True))
    file = worked_example()
    file.kernel("added", 10, 20)
    file.write(path)
    assert cache.load_sidecar(path) is None
    assert len(load(path, cache=True).ops) == len(first.ops) + 1


def test_a_damaged_sidecar_is_written_anew(tmp_path: Path) -> None:
    path = worked_example().write(tmp_path / "t.sqlite")
    first = load(path, cache=True)
    cache.sidecar_path(path).write_bytes(b"PK\x03\x04 rubbish")
    _assert_same(first, load(path, cache=True))
    assert cache.load_sidecar(path) is not None


def test_another_version_of_the_readers_ignores_the_sidecar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = worked_example().write(tmp_path / "t.sqlite")
    load(path, cache=True)
    monkeypatch.setattr(cache, "READER_VERSION", cache.READER_VERSION + 1)
    assert cache.load_sidecar(path) is None


def test_small_files_get_no_sidecar_and_an_unwritable_folder_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = worked_example().write(tmp_path / "t.sqlite")
    load(path)
    assert not cache.sidecar_path(path).exists()
    monkeypatch.setattr(cache, "sidecar_path", lambda path: path / "not a folder" / "x")
    assert len(load(path, cache=True).ops) == 43


def test_the_recorder_becomes_a_trace() -> None:
    recorder = Recorder()
    recorder.add("host", "MainThread", "prepare_inputs", 100, 200, 7)
    recorder.add("host", "output", "detokenize", 150, 160, None)
    recorder.add("wait", "MainThread", "wait: output", 210, 260, 7)
    recorder.add("device", "main", "forward", 180, 250, 7)
    recorder.add("device", "copy", "output_copy", 250, 255, 7)
    trace = from_recorder(recorder, {"gpu_name": "none", "knobs": {"async": True}})
    assert trace.name_of(trace.ranges.name).tolist() == ["prepare_inputs", "detokenize"]
    assert trace.name_of(trace.ranges.domain).tolist() == ["mrv2", "mrv2"]
    assert trace.ranges.step.tolist() == [7, -1]
    assert set(trace.ops.kind.tolist()) == {OpKind.STAGE} and trace.ops.step.tolist() == [7, 7]
    assert [trace.meta["streams"][s] for s in trace.ops.stream.tolist()] == ["main", "copy"]
    assert trace.syncs.sync_type.tolist() == [SyncType.NAMED] and trace.waits.kind.tolist() == [WaitKind.NAMED]
    process = os.getpid()
    assert trace.thread_names == {(process, 0): "MainThread", (process, 1): "output"}
    assert trace.waits.thread.tolist() == [0]
    assert trace.meta["knobs"] == {"async": True}
    assert trace.coverage["ops.stage"].rows == 2 and not trace.coverage.has("ops.kernel")


def test_an_overrun_or_idle_recorder_says_so() -> None:
    recorder = Recorder(capacity=2)
    for i in range(5):
        recorder.add("host", "main", "stage", i, i + 1, i)
    assert "3 spans were overwritten" in from_recorder(recorder).diagnostics[0]
    empty = from_recorder(Recorder())
    assert not empty.coverage.has("ops") and empty.coverage["ranges"].status == "empty"


def _fake_nsys(folder: Path, body: str) -> Path:
    """Write a program that stands in for nsys; ``$out`` is the file it is asked for."""
    program = folder / "nsys"
    program.write_text(
        f'#!/bin/sh\nfor a in "$@"; do case "$a" in --output=*) out="${{a#--output=}}";; esac; done\n{body}\n'
    )
    program.chmod(0o755)
    return program


def test_a_report_goes_through_nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export = worked_example().write(tmp_path / "made.sqlite")
    report = tmp_path / "run.nsys-rep"
    report.write_bytes(b"a report")
    program = _fake_nsys(tmp_path, f'cp "{export}" "$out"')
    for named in (program, tmp_path):
        monkeypatch.setenv("MRV2_NSYS", str(named))
        trace = load(report)
        assert len(trace.ops) == 43 and trace.meta["path"] == str(report)


def test_a_report_that_nsys_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "run.nsys-rep"
    report.write_bytes(b"a report")
    _fake_nsys(tmp_path, "echo 'Importer error: newer version' >&2; exit 3")
    monkeypatch.delenv("MRV2_NSYS", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(TraceError, match=r"refused it \(status 3\): Importer error"):
        load(report)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(TraceError, match="needs nsys: put it on PATH, set MRV2_NSYS, or export"):
        load(report)
    monkeypatch.setenv("MRV2_NSYS", str(tmp_path / "absent"))
    with pytest.raises(TraceError, match="is not a program"):
        load(report)


def test_two_processes_keep_their_correlation_ids_apart(tmp_path: Path) -> None:
    file = NsightFile()
    for pid in (100, 200):
        file.api("cudaLaunchKernel", pid, pid + 5, 1, tid=pid, pid=pid)
        file.kernel(f"k{pid}", pid + 10, pid + 20, 1, pid=pid)
    trace = load(file.write(tmp_path / "two.sqlite"))
    assert trace.processes() == [100, 200]
    part = trace.select_process(200)
    assert trace.name_of(part.ops.name).tolist() == ["k200"] and len(part.api) == 1
