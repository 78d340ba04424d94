"""Scrubbed copies tell of the run and of nothing else; the search for leaks finds what it should."""

from __future__ import annotations

import gzip
import json
import socket
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from kineto_files import KinetoFile
from mrv2.trace import Trace, TraceError, find_leaks, load, save, scrub, scrub_trace
from mrv2.trace.redact import leaks, redact
from nsight_files import NEW, OLD, PID, TID, NsightFile, global_pid, global_tid, worked_example

HOST, USER, OTHER_PROCESS = "gpu-node-17", "carol", "secretd"
HOME = "/" + "home/carol/engine/run.py"
SECRETS = [HOST, USER, OTHER_PROCESS, "engine/run.py", "hunter2", "libtorch", "GPU-1234", "0000:0f:00.0"]


@pytest.mark.parametrize(
    "text, clean",
    [
        ("/usr/lib/python3.11/threading.py(12): run", "threading.py(12): run"),
        (f"File '{HOME}', line 3", "File 'run.py', line 3"),
        ("file:///opt/models/qwen", "qwen"),
        ("in /tmp now", "in <path> now"),
        ("~/models/x.bin and ~carol/y", "x.bin and y"),
        (r"C:\Users\carol\x.py", "x.py"),
        ("HF_TOKEN=hunter2 PATH=/usr/bin:/bin", "<variable> <variable>"),
        (f"on {HOST}:8000", "on <name>:8000"),
        ("/usr//lib//x.so", "lib//x.so"),
    ],
)
def test_redact(text: str, clean: str) -> None:
    assert redact(text, [HOST, USER]) == clean
    assert leaks(text, [HOST, USER]) and not leaks(clean, [HOST, USER])


@pytest.mark.parametrize(
    "text",
    [
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int, T2, T3)",
        "torch/nn/modules/linear.py(134): forward",
        "Memcpy DtoH (Device -> Pinned)",
        "https://example.org/a/b",
        "tokens/s = 100 / 3",
        "cutlass_80_tensorop_s16816gemm_bf16_128x64_64x4_tn_align8",
    ],
)
def test_harmless_text_stays(text: str) -> None:
    assert redact(text, [HOST]) == text and leaks(text, [HOST]) == []


def _private(schema: str) -> NsightFile:
    """Return the worked example with everything that a raw export carries."""
    file = worked_example(schema)
    file.api("cudaStreamSynchronize_v3020", 750_000, 760_000, 9, callchainId=1)
    file.add("CUDA_CALLCHAINS", id=1, symbol=file.text("sync"), module=file.text("/opt/x/libtorch.so"), stackDepth=0)
    file.nvtx(f"load {HOME}", 2_000_000, 2_100_000)
    file.nvtx("own text", 2_200_000, 2_300_000, textId=None, text=f"read {HOME}", jsonText='{"p": "/opt/x/y"}')
    for name, value in (("EXPORT_HOST", HOST), ("EXPORT_USER", USER), ("EXPORT_PARAM_INPUT_PATH", HOME)):
        file.add("META_DATA_EXPORT", name=name, value=value)
    file.add("META_DATA_CAPTURE", name="PROCESS_0:ENVIRONMENT", value="API_KEY=hunter2")
    file.add("META_DATA_CAPTURE", name="CAPTURE_EVENT_TYPE", value="NvtxEvents")
    file.add("TARGET_INFO_SYSTEM_ENV", name="Hostname", value=HOST)
    file.add("TARGET_INFO_GPU", vmId=0, id=0, name="NVIDIA H200", busLocation="0000:0f:00.0", uuid="GPU-1234")
    file.add("ProcessStreams", globalPid=global_pid(PID), filenameId=file.text(HOME), contentId=file.text("hunter2"))
    for pid, name in ((PID, "python3"), (77, OTHER_PROCESS)):
        file.add("PROCESSES", globalPid=global_pid(pid), pid=pid, name=name)
        file.add("ThreadNames", nameId=file.text(f"{name} main"), globalTid=global_tid(TID if pid == PID else 77, pid))
    file.add("DIAGNOSTIC_EVENT", severity=2, text=f"could not read {HOME} on {HOST}", timestamp=0)
    return file


def _bytes(path: Path) -> bytes:
    raw = path.read_bytes()
    return gzip.decompress(raw) if path.suffix == ".gz" else raw


@pytest.mark.parametrize("schema", [OLD, NEW])
@pytest.mark.parametrize("name", ["clean.sqlite", "clean.sqlite.gz"])
def test_an_export_loses_what_is_private_and_keeps_the_run(tmp_path: Path, schema: str, name: str) -> None:
    source = _private(schema).write(tmp_path / "raw.sqlite")
    assert find_leaks(source), "the raw file holds paths"
    done = scrub(source, tmp_path / name, names=[OTHER_PROCESS])
    raw = _bytes(tmp_path / name)
    assert [secret for secret in SECRETS if secret.encode() in raw] == []
    assert find_leaks(tmp_path / name, [HOST, USER]) == []
    assert any(line.startswith("META_DATA_CAPTURE: 1 of 2") for line in done)
    before, after = load(source), load(tmp_path / name)
    for table in ("ops", "api", "ranges", "syncs"):
        for column, values in before.table(table).columns().items():
            if column not in ("name", "domain", "category", "stack"):
                assert np.array_equal(values, after.table(table).columns()[column]), f"{table}.{column}"
    assert after.name_of(after.api.name).tolist() == before.name_of(before.api.name).tolist()
    assert after.name_of(after.ranges.name).tolist()[-2:] == ["load run.py", "read run.py"]
    assert after.name_of(after.syncs.stack).tolist() == ["sync"]
    assert after.thread_names == {(PID, TID): "python3 main"}
    assert after.meta["gpu_name"] == "NVIDIA H200" and after.meta["versions"] == before.meta["versions"]


def test_a_scrubbed_export_has_every_table_and_scrubs_to_itself(tmp_path: Path) -> None:
    source = _private(NEW).write(tmp_path / "raw.sqlite")
    scrub(source, tmp_path / "once.sqlite", names=[OTHER_PROCESS])
    scrub(tmp_path / "once.sqlite", tmp_path / "twice.sqlite", names=[OTHER_PROCESS])
    dumps = []
    for name in ("once", "twice"):
        connection = sqlite3.connect(tmp_path / f"{name}.sqlite")
        dumps.append(list(connection.iterdump()))
        connection.close()
    assert dumps[0] == dumps[1]
    tables = set(_private(NEW).rows) | {"StringIds"}
    assert all(any(f"CREATE TABLE {table} " in line or f'"{table}"' in line for line in dumps[0]) for table in tables)


def test_packed_output_is_the_same_each_time(tmp_path: Path) -> None:
    source = worked_example().write(tmp_path / "raw.sqlite")
    for name in ("a.sqlite.gz", "b.sqlite.gz"):
        scrub(source, tmp_path / name)
    assert (tmp_path / "a.sqlite.gz").read_bytes() == (tmp_path / "b.sqlite.gz").read_bytes()


def _private_json() -> KinetoFile:
    file = KinetoFile(
        host_name=HOST,
        traceName=HOME,
        distributedInfo={"backend": "nccl", "pg": HOST},
        deviceProperties=[{"name": "NVIDIA H200", "uuid": "GPU-1234"}],
    )
    file.add("python_function", f"{HOME}(12): main", 1_234_567_890_123_456_789, 1_234_567_890_123_466_790)
    file.op(
        "aten::add",
        1_234_567_890_123_456_800,
        1_234_567_890_123_456_900,
        path=[HOME, {"env": "x=hunter2"}, "API_KEY=hunter2"],
    )
    return file


@pytest.mark.parametrize("name", ["clean.json", "clean.json.gz"])
def test_a_profiler_recording_likewise_and_its_times_stay_exact(tmp_path: Path, name: str) -> None:
    source = _private_json().write(tmp_path / "raw.json")
    done = scrub(source, tmp_path / name, names=[USER])
    raw = _bytes(tmp_path / name)
    assert [secret for secret in SECRETS if secret.encode() in raw] == []
    assert "host_name" in done[0]
    assert json.loads(raw)["deviceProperties"] == [{"name": "NVIDIA H200"}]
    before, after = load(source), load(tmp_path / name)
    assert before.python.start.tolist() == after.python.start.tolist() == [1_234_567_890_123_456_789]
    assert after.name_of(after.python.name).tolist() == ["run.py(12): main"]
    times = [event["ts"] for event in json.loads(raw)["traceEvents"] if event["ph"] == "X"]
    assert all(isinstance(time, float) for time in times), "times stay numbers"


def test_a_saved_trace_likewise(tmp_path: Path) -> None:
    trace = load(_private_json().write(tmp_path / "raw.json"))
    trace.diagnostics.append(f"on {HOST}: {HOME}")
    source = save(trace, tmp_path / "raw.npz")
    scrub(source, tmp_path / "clean.npz", names=[HOST, USER])
    clean = load(tmp_path / "clean.npz")
    assert clean.diagnostics == ["on <name>: run.py"]
    assert "path" not in scrub_trace(trace).meta
    assert leaks("\n".join([*clean.strings, *clean.diagnostics]), [HOST, USER]) == []


def test_two_texts_that_become_one_share_an_id() -> None:
    trace = Trace(strings=["/a/b/x.py", "/c/d/x.py", "y"])
    assert scrub_trace(trace).strings == ["x.py", "y"]


def test_this_hosts_own_name_goes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: HOST)
    file = worked_example()
    file.nvtx(f"serving on {HOST}", 0, 10)
    scrub(file.write(tmp_path / "raw.sqlite"), tmp_path / "clean.sqlite")
    assert HOST.encode() not in (tmp_path / "clean.sqlite").read_bytes()


def test_what_would_still_leak_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrv2.trace.redact.redact", lambda text, names=(): text)
    source = _private(NEW).write(tmp_path / "raw.sqlite")
    with pytest.raises(TraceError, match="not written, the copy would still tell of"):
        scrub(source, tmp_path / "clean.sqlite")
    assert not (tmp_path / "clean.sqlite").exists()


def test_scrub_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"\x7fELF")
    with pytest.raises(TraceError, match="scrub knows SQLite exports"):
        scrub(tmp_path / "x.bin", tmp_path / "y")
    source = worked_example().write(tmp_path / "raw.sqlite")
    with pytest.raises(TraceError, match="source and target are one file"):
        scrub(source, source)
    with pytest.raises(TraceError, match="no such file"):
        scrub(tmp_path / "absent", tmp_path / "y")
    with pytest.raises(TraceError, match="cannot be written"):
        scrub(source, tmp_path / "no folder" / "y.sqlite")


def test_text_in_free_pages_is_found(tmp_path: Path) -> None:
    path = tmp_path / "deleted.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA secure_delete = OFF")
    connection.execute("CREATE TABLE a (b TEXT)")
    connection.execute("INSERT INTO a VALUES (?)", ["\n" + f"{HOME} on {HOST}"])
    connection.commit()
    connection.execute("DELETE FROM a")
    connection.commit()
    connection.close()
    found = find_leaks(path, [HOST])
    assert HOST in found and any(HOME.startswith(piece) for piece in found)


def test_numbers_that_look_like_paths_are_numbers(tmp_path: Path) -> None:
    """Times and addresses of a large recording spell every short text somewhere."""
    path = tmp_path / "numbers.sqlite"
    spelt = (b"/aA@/fl@", b"~N/E~SAB", b"/8v@/9XY", b" /MS~/~/", b" abc def")
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE numbers (value INTEGER, other INTEGER)")
        db.executemany("INSERT INTO numbers VALUES (?, ?)", [2 * (int.from_bytes(text, "big"),) for text in spelt])
    raw = path.read_bytes()
    assert all(text in raw for text in spelt)
    assert find_leaks(path, ["abc"]) == []
