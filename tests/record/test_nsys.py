"""Level "nsight": the session of this process, driven from inside; here with a program that plays nsys."""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path

import pytest

from mrv2.record import RecordError, record
from mrv2.record import nsight as nsight_module
from mrv2.record import verify as verify_module
from mrv2.record.nsys import SESSION_ENV, clean_env, current_session, find_nsys, launch_command
from mrv2.record.verify import why_no_foreign_ranges
from mrv2.record.wrap import record_command
from mrv2.trace import find_leaks, load
from nsight_files import NsightFile
from record.engines import drain, running_core
from record.fake_nsys import SESSION, FakeNsys


@pytest.fixture
def no_nsys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without nsys."""
    for name in ("MRV2_NSYS", SESSION_ENV, "NSYS_PROFILING_SESSION_ID", "LD_PRELOAD", "NVTX_INJECTION64_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr("mrv2.trace.readers.nsys_rep.KNOWN_PLACES", ())


@pytest.fixture
def launched(no_nsys: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeNsys:
    """This process as if nsys had launched it, with ranges that arrive."""
    fake = FakeNsys(tmp_path / "target-linux-x64")
    monkeypatch.setenv("LD_PRELOAD", str(fake.library))
    monkeypatch.setenv("NVTX_INJECTION64_PATH", str(fake.library))
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", SESSION)
    monkeypatch.setenv("QUADD_AGENT_PID", "1")
    for module in (nsight_module, verify_module):
        monkeypatch.setattr(module, "nvtx_status", lambda: "on")
    return fake


def test_steps_are_captured_scrubbed_and_loaded(launched: FakeNsys, tmp_path: Path) -> None:
    with running_core() as core:
        with record(steps=3, level="nsight", core=core) as rec:
            drain(core)
        knobs = core.knobs.as_dict()
    verbs = [args[0] for args in launched.calls()]
    assert verbs == ["sessions", "start", "stop", "export"]
    assert f"--session={SESSION}" in launched.calls()[1]
    assert not launched.traced_variables(), "nsys itself must not be traced"
    trace = rec.trace()
    assert trace.meta["source"] == "nsight" and trace.meta["knobs"] == knobs and len(trace.ops) == 3
    for name in ("a.sqlite.gz", "a.sqlite", "a.npz"):
        path = rec.save(tmp_path / name)
        again = load(path, cache=False)
        assert len(again.ranges) == len(trace.ranges) and again.meta["knobs"] == knobs
        assert again.meta["command"] and again.meta["config"]["model"] == "tiny-llama"
    assert find_leaks(tmp_path / "a.sqlite") == [] and b"SECRET_TOKEN" not in (tmp_path / "a.sqlite").read_bytes()
    with pytest.raises(RecordError, match=r"saved as .sqlite, .sqlite.gz, .npz"):
        rec.save(tmp_path / "a.json")


def test_without_a_session_the_error_says_how_to_get_one(no_nsys: None) -> None:
    assert current_session() is None
    with pytest.raises(RecordError, match="use `mrv2 record --level nsight`, or start the process"):
        record(level="nsight")
    with pytest.raises(RecordError, match="install Nsight Systems"):
        find_nsys()


def test_lost_ranges_are_foretold(launched: FakeNsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsight_module, "nvtx_status", lambda: "off: MRV2_NVTX=0")
    with pytest.raises(RecordError, match="the capture would hold no ranges: NVTX is off: MRV2_NVTX=0"):
        record(level="nsight")


@pytest.mark.parametrize(
    "status, why",
    [
        ("off: MRV2_NVTX=0", "MRV2_NVTX=0"),
        ("off: the package nvtx is not installed (pip install nvtx)", "not installed"),
        ("on", "no stage began and ended"),
    ],
)
def test_missing_ranges_are_an_error(
    launched: FakeNsys, monkeypatch: pytest.MonkeyPatch, status: str, why: str
) -> None:
    empty = NsightFile()
    empty.nvtx("foreign", 0, 10)
    empty.write(launched.folder / "export.sqlite")
    monkeypatch.setattr(verify_module, "nvtx_status", lambda: status)
    with running_core() as core:
        rec = record(level="nsight", core=core).start()
        core.step()
        with pytest.raises(RecordError, match=f"no range of domain 'mrv2': .*{why}"):
            rec.stop()


def test_the_session_may_be_gone_or_busy(launched: FakeNsys, monkeypatch: pytest.MonkeyPatch) -> None:
    (launched.folder / "busy").write_text("x")
    with pytest.raises(RecordError, match="recording already; .*`nsys launch`, not `nsys profile`"):
        record(level="nsight").start()
    monkeypatch.setenv(SESSION_ENV, "other")
    with pytest.raises(RecordError, match="session 'other' has ended"):
        record(level="nsight").start()


def test_a_missing_importer_is_named(launched: FakeNsys) -> None:
    (launched.folder / "no-importer").touch()
    rec = record(level="nsight").start()
    with pytest.raises(RecordError, match=r"only capture.qdstrm: its importer"):
        rec.stop()


def test_session_without_a_number_is_looked_up(launched: FakeNsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NSYS_PROFILING_SESSION_ID")
    session = current_session()
    assert session is not None and session.key == SESSION
    # variables that a process inherits without being traced do not count
    monkeypatch.delenv("LD_PRELOAD")
    monkeypatch.delenv("NVTX_INJECTION64_PATH")
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", SESSION)
    assert current_session() is None


def test_environment_of_children(launched: FakeNsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", f"{launched.library}:/usr/lib/other.so")
    cleaned = clean_env()
    assert cleaned["LD_PRELOAD"] == "/usr/lib/other.so"
    assert not {"NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID", "QUADD_AGENT_PID"} & set(cleaned)
    assert find_nsys() == str(launched.program)
    line = launch_command("s", ["python", "x.py"], granularity="node")
    assert line[:2] == [str(launched.program), "launch"] and line[-2:] == ["python", "x.py"]
    assert "--cuda-graph-trace=node" in line


def test_newest_known_place_wins(no_nsys: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for version in ("2024.9.1", "2025.10.1", "2025.3.1"):
        FakeNsys(tmp_path / version / "host" / "target-linux-x64")
    pattern = str(tmp_path / "*" / "host" / "target-linux-*" / "nsys")
    monkeypatch.setattr("mrv2.trace.readers.nsys_rep.KNOWN_PLACES", (pattern,))
    assert "2025.10.1" in find_nsys()
    monkeypatch.setenv("MRV2_NSYS", str(tmp_path / "2024.9.1" / "host" / "target-linux-x64"))
    assert "2024.9.1" in find_nsys()


@pytest.fixture
def installed(no_nsys: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeNsys:
    """A machine with nsys, and a process that it did not launch."""
    fake = FakeNsys(tmp_path / "nsys-folder")
    monkeypatch.setenv("MRV2_NSYS", str(fake.program))
    return fake


def test_a_command_is_wrapped(installed: FakeNsys, tmp_path: Path) -> None:
    out = tmp_path / "run.sqlite.gz"
    done = record_command(
        [sys.executable, "-c", "import sys; sys.exit(5)"], out, granularity="node", extra=["--delay=1"]
    )
    assert done.status == 5 and done.no_ranges is None and len(done.trace.ranges) == 6
    profile = installed.calls()[0]
    assert profile[0] == "profile" and {"--cuda-graph-trace=node", "--delay=1", "--sample=none"} <= set(profile)
    assert find_leaks(out) == [] and load(out, cache=False).meta["level"] == "nsight"


def test_a_command_without_ranges_says_why(installed: FakeNsys, tmp_path: Path) -> None:
    silent = NsightFile()
    silent.launch("kernel", 0, 10, 20, 30, 1)
    silent.domain(1, "theirs")
    raw = silent.write(installed.folder / "export.sqlite")
    done = record_command([sys.executable, "-c", "0"], tmp_path / "run.npz")
    assert "NVTX domain theirs, yet no range arrived: its package nvtx is too new" in str(done.no_ranges)
    assert "2026.4" in str(done.no_ranges)
    assert why_no_foreign_ranges(raw, "1", "cuda,osrt") == "NVTX was not traced (--trace cuda,osrt)"
    with sqlite3.connect(raw) as connection:
        connection.execute("DROP TABLE NVTX_EVENTS")
    assert "opened none" in why_no_foreign_ranges(raw, "1", "cuda,nvtx")


def test_wrapping_fails_in_words(installed: FakeNsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecordError, match="'nonesuch' is not a program"):
        record_command(["nonesuch"], tmp_path / "a.npz")
    with pytest.raises(RecordError, match="holds the environment"):
        record_command([sys.executable], tmp_path / "a.nsys-rep")
    (installed.folder / "no-importer").touch()
    with pytest.raises(RecordError, match=r"only capture.qdstrm"):
        record_command([sys.executable, "-c", "0"], tmp_path / "a.npz")
