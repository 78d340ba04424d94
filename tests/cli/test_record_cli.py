"""mrv2 record."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from mrv2.cli import main
from mrv2.instrument import stages
from mrv2.trace import Trace, load
from record.fake_nsys import FakeNsys

WORKLOAD = ["record", "--workload", "c", "--device", "host", "--model", "tiny-llama", "--steps", "6", "--skip", "4"]


def schedules(trace: Trace) -> int:
    return int((trace.ranges.name == trace.string_id(stages.SCHEDULE)).sum())


@pytest.mark.parametrize("level, name", [("stages", "a.npz"), ("kernels", "a.json.gz")])
def test_a_workload(level: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "folder" / name
    assert main([*WORKLOAD, "--level", level, "--runner", "v1", "--sync", "-o", str(out)]) == 0
    printed = capsys.readouterr()
    assert "ranges    collected" in printed.out and str(out) in printed.out
    trace = load(out, cache=False)
    assert schedules(trace) == 6
    if level == "stages":
        assert trace.meta["workload"] == "c/8" and trace.meta["num_steps"] == 6
        assert trace.meta["knobs"]["runner"] == "v1" and trace.meta["knobs"]["async_scheduling"] is False


def test_arrivals_prefill_between_decodes(tmp_path: Path) -> None:
    out = tmp_path / "a.npz"
    assert main([*WORKLOAD, "--arrive-every", "3", "--arrival-len", "20", "-o", str(out)]) == 0
    plain, mixed = tmp_path / "b.npz", load(out)
    assert main([*WORKLOAD, "-o", str(plain)]) == 0
    # a step with new rows has uploads and staged writes that a pure decode lacks
    new_rows = stages.STAGED_WRITES
    assert (mixed.ops.name == mixed.string_id(new_rows)).sum() >= 2 > load(plain).strings.count(new_rows)


def test_drafts_are_recorded_with_the_workload(tmp_path: Path) -> None:
    out = tmp_path / "a.npz"
    drafting = ["--speculators", "eagle3", "--spec-method", "eagle3", "--num-spec-tokens", "3"]
    assert main([*WORKLOAD, *drafting, "--async", "-o", str(out)]) == 0
    trace = load(out)
    gaps = trace.stage_gaps(stages.VERIFY, stages.DRAFT)
    assert trace.meta["knobs"]["spec_method"] == "eagle3" and gaps is not None and len(gaps) >= 4


def test_a_workload_that_ends_early(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["record", "--workload", "a", "--device", "host", "--model", "tiny-llama", "--scale", "64"]
    assert main([*argv, "--skip", "4", "-o", str(tmp_path / "a.npz")]) == 0
    assert "ended after" in capsys.readouterr().err
    assert main([*argv, "--skip", "50", "-o", str(tmp_path / "a.npz")]) == 2
    assert "ends within the 50 steps that are skipped" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, message",
    [
        (["-o", "x.npz"], "give either --workload NAME or, after --, a command"),
        (["--workload", "c", "-o", "x.npz", "--", "python"], "give either --workload NAME"),
        (["--workload", "zz", "-o", "x.npz"], "unknown workload 'zz'"),
        (["--workload", "c", "-o", "x.sqlite"], "level stages writes .npz or a folder"),
        (["--workload", "c", "--level", "kernels", "-o", "x.sqlite"], "writes .json, .json.gz, .npz or a folder"),
        (["--workload", "c", "--granularity", "node", "-o", "x.npz"], "need --level nsight"),
        (["--workload", "c", "--with-stack", "-o", "x.npz"], "--with-stack needs --level kernels"),
        (["--workload", "c", "--nsys", "--level", "stages", "-o", "x.npz"], "exclude each other"),
        (["--workload", "c", "--steps", "0", "-o", "x.npz", "--device", "host"], "steps=0"),
        (["--level", "stages", "-o", "x.npz", "--", "python"], "a command is recorded with --nsys"),
        (["--steps", "3", "--runner", "v1", "-o", "x.npz", "--", "python"], "--steps, --runner: of no effect"),
    ],
)
def test_usage_errors(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", *argv]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeNsys:
    fake = FakeNsys(tmp_path / "nsys-folder")
    for name in ("MRV2_NSYS_SESSION", "NSYS_PROFILING_SESSION_ID", "LD_PRELOAD", "NVTX_INJECTION64_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MRV2_NSYS", str(fake.program))
    return fake


def test_a_command(fake: FakeNsys, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.sqlite.gz"
    code = [sys.executable, "-c", "import sys; print('-o', sys.argv[1:])", "--steps", "--", "7"]
    assert main(["record", "--nsys", "--granularity", "node", "-o", str(out), "--", *code]) == 0
    printed = capfd.readouterr()
    # everything after the first -- belongs to the command
    assert "-o ['--steps', '--', '7']" in printed.out
    assert "--cuda-graph-trace=node" in fake.calls()[0]
    assert len(load(out).ranges) == 6
    assert main(["record", "-o", str(out), "--", sys.executable, "-c", "raise SystemExit(3)"]) == 1
    assert "ended with status 3" in capfd.readouterr().err


def test_a_workload_under_nsys_starts_itself_anew(
    fake: FakeNsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    argv = [*WORKLOAD, "--level", "nsight", "--granularity", "node", "-o", str(tmp_path / "a.sqlite")]
    # the program that plays nsys starts the command, which then finds that no range would arrive
    assert main(argv) == 1
    assert "the capture would hold no ranges" in capfd.readouterr().err
    launch = fake.calls()[0]
    assert launch[0] == "launch" and "--cuda-graph-trace=node" in launch
    assert launch[-len(argv) :] == argv
