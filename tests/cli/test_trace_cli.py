"""mrv2 trace."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mrv2.cli import main
from mrv2.trace import find_leaks, load
from nsight_files import NsightFile, speculating_steps, worked_example
from record.fake_nsys import own_capture

US = 1000


def engine_file(*, sync: bool = False, slower: int = 0) -> NsightFile:
    """Return 24 steps of 100 us: schedule, a launch, 60 us on the GPU, and the wait for the output, named or not."""
    file = NsightFile()
    file.domain(1, "mrv2")
    file.category(1, 4, "host stage")
    file.category(1, 5, "wait")
    for step in range(24):
        at, corr = (100 + slower) * US * step, 10 * step + 1
        file.nvtx("schedule", at, at + 10 * US, domainId=1, category=4, int64Value=step)
        file.nvtx("execute_model", at + 10 * US, at + 30 * US, domainId=1, category=4, int64Value=step)
        file.launch("gemm_kernel", at + 12 * US, 5 * US, at + 20 * US, at + 80 * US, corr)
        name = "wait: output" if not sync else "bookkeep"
        file.nvtx(name, at + 40 * US, at + 85 * US, domainId=1, category=5 if not sync else 4, int64Value=step)
        file.api("cudaStreamSynchronize_v3020", at + 41 * US, at + 84 * US, corr + 1)
        file.sync(3, at + 42 * US, at + 83 * US, corr + 1, streamId=7)
    file.add("META_DATA_CAPTURE", name="MRV2:knobs", value=json.dumps({"runner": "v1" if sync else "v2"}))
    return file


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Paths by what they hold."""
    made = {
        "named": engine_file().write(tmp_path / "named.sqlite.gz"),
        "hidden": engine_file(sync=True, slower=40).write(tmp_path / "hidden.sqlite"),
        "example": worked_example().write(tmp_path / "example.sqlite"),
        "whole": worked_example(graph_rows=True).write(tmp_path / "whole.sqlite"),
    }
    return {name: str(path) for name, path in made.items()}


def run(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert main(["trace", *argv]) == code, capsys.readouterr()
    return capsys.readouterr().out


def run_json(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> Any:
    return json.loads(run(capsys, *argv, "--json", code=code))


def test_show(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "show", files["named"])
    for words in (
        "nsight",
        "runner=v2",
        "24, turns of the step loop",
        "collected (24 rows)",
        "ranges of mrv2",
        "not collected:",
    ):
        assert words in text
    found = run_json(capsys, "show", files["named"])
    assert found["steps"]["count"] == 24 and found["coverage"]["waits.os"]["status"] == "not collected"
    assert found["meta"]["knobs"] == {"runner": "v2"}


def test_stats_of_one_file(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "stats", files["named"], "--kernels", "3")
    assert found["steps"] == 24 and found["step_median_ns"] == 100 * US
    assert found["gpu_busy_a_step_ns"] == 60 * US and found["syncs_a_step"] == 1.0
    assert sum(found["bubble_causes_ns"].values()) == 23 * 40 * US
    assert {row["name"] for row in found["stages"]} >= {"schedule", "execute_model"}
    assert found["kernels"][0]["name"] == "gemm_kernel" and found["kernels"][0]["count"] == 24
    text = run(capsys, "stats", files["named"], "--kernels", "3")
    assert "host syncs a step" in text and "gemm_kernel" in text and "bubbles by cause, us a step" in text
    assert "time per step (1 warm-up left out)" in text


def test_stats_side_by_side(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "stats", files["named"], files["hidden"])
    header = text.splitlines()[0]
    assert "named.sqlite.gz" in header and "hidden.sqlite" in header and "time per step" not in text
    both = run_json(capsys, "stats", files["named"], files["hidden"])
    assert [each["step_median_ns"] for each in both] == [100 * US, 140 * US]


def test_without_evidence_there_is_no_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    silent = NsightFile()
    silent.domain(1, "mrv2")
    silent.nvtx("schedule", 0, 10, domainId=1, int64Value=0)
    path = str(silent.write(tmp_path / "silent.sqlite"))
    found = run_json(capsys, "stats", path)
    for name in ("overlap_cpu", "gpu_utilization", "gpu_idle", "bubble_a_step_ns", "syncs_a_step", "launch_bound"):
        assert found[name] is None, f"{name} has no evidence"
    assert "n/a" in run(capsys, "stats", path)
    assert "bubbles: n/a" in run(capsys, "bubbles", path) and "host waits: n/a" in run(capsys, "syncs", path)
    assert run_json(capsys, "bubbles", path) is None


def test_whole_graphs_are_said_to_be_an_upper_bound(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "GPU busy: an upper bound" in run(capsys, "stats", files["whole"])
    assert "upper bound, whole" not in run(capsys, "stats", files["example"])


def test_syncs(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = run_json(capsys, "syncs", files["named"])
    assert (row["name"], row["reason"], row["count"]) == ("cudaStreamSynchronize", "output", 24)
    assert len(run_json(capsys, "syncs", files["named"], "--each", "--limit", "5")) == 5
    text = run(capsys, "syncs", files["hidden"], "--stacks", "--limit", "1")
    assert "cudaStreamSynchronize" in text and "bookkeep" in text and "(ranges):" in text


def test_bubbles(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "bubbles", files["named"], "--limit", "3")
    assert found["count"] == 23 and len(found["longest"]) == 3
    assert sum(found["causes_ns"].values()) == sum(found["rollup_ns"].values()) == found["total_ns"]
    text = run(capsys, "bubbles", files["named"])
    assert "23 bubbles" in text and "host:schedule" in text and "in HTA's terms" in text
    # a longer threshold leaves none
    assert run_json(capsys, "bubbles", files["named"], "--min-bubble-us", "50")["count"] == 0


def test_compare(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "compare", files["named"], files["hidden"])
    assert text.startswith("A step of hidden.sqlite is 40 us (40 %) slower") and "knobs.runner: v2 -> v1" in text
    argv = ("compare", files["named"], files["hidden"], "--fail-if-slower")
    assert run_json(capsys, *argv, "10", code=1)["align"] == "step_id"
    run(capsys, *argv, "50")
    run(capsys, "compare", files["hidden"], files["named"], "--fail-if-slower", "0")


def test_assertions(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    text = run(
        capsys, "assert", files["named"], "--no-sync", "--allow", "output", "--overlap", "0.3", "--max-bubble-us", "41"
    )
    assert text.count("ok ") == 3 and "no sync within 'step' but output" in text
    text = run(capsys, "assert", files["named"], files["hidden"], "--no-sync", "--allow", "output", code=1)
    assert "ok      named.sqlite.gz" in text
    assert "FAILED  hidden.sqlite: no sync within 'step': 24 host waits" in text and "bookkeep" in text
    text = run(capsys, "assert", files["named"], "--overlap", "schedule=0.95", "--max-bubble-p95-us", "10", code=1)
    assert "overlap of schedule at least 95.0 %: it is" in text and "at most 10000 ns" in text
    # a statement about other ranges
    run(capsys, "assert", files["hidden"], "--no-sync", "--within", "schedule")
    run(capsys, "assert", files["hidden"], "--no-sync", "--within", "bookkeep", code=1)
    results = run_json(capsys, "assert", files["named"], "--step-bubble-p95-us", "1", code=1)
    assert [result["ok"] for result in results] == [False]


def test_stages_and_graphs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(speculating_steps(idle_us=4).write(tmp_path / "run.sqlite"))
    gap = ("--stage-gap-p95-us", "verify..draft")
    found = run_json(capsys, "assert", path, "--max-graph-idle", "0.5", gap[0], f"{gap[1]}=6")
    assert [(each["ok"], each["statement"]) for each in found] == [
        (True, "95th percentile of the idle time between 'verify' and 'draft' at most 6 us"),
        (True, "idle between CUDA graphs at most 50 %"),
    ]
    text = run(capsys, "assert", path, "--max-graph-idle", "0.4", gap[0], f"{gap[1]}=5.9", code=1)
    assert text.count("FAILED") == 2
    stats = run_json(capsys, "stats", path, "--warmup", "4")
    assert stats["graph_executions"] == 20
    assert stats["idle_between_graphs"] == pytest.approx(19 * 48 / (19 * 100 + 52))
    assert stats["idle_inside_graphs"] == pytest.approx(20 * 6 / (19 * 100 + 52))
    assert "GPU idle between graphs" in run(capsys, "stats", path)


def test_missing_evidence_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    silent = NsightFile()
    silent.domain(1, "mrv2")
    silent.nvtx("schedule", 0, 10, domainId=1, int64Value=0)
    path = str(silent.write(tmp_path / "silent.sqlite"))
    for statement in (["--no-sync"], ["--overlap", "0"], ["--max-bubble-us", "1e9"]):
        assert "not collected" in run(capsys, "assert", path, *statement, code=1)


def test_export(files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("out.json", "out.json.gz", "out.npz"):
        assert run(capsys, "export", files["named"], str(tmp_path / name)).strip() == str(tmp_path / name)
    assert "traceEvents" in json.loads((tmp_path / "out.json").read_text())
    assert len(load(tmp_path / "out.npz").ops) == 24
    run(capsys, "export", files["named"], str(tmp_path / "ops.csv"), "--table", "ops")
    assert len((tmp_path / "ops.csv").read_text().splitlines()) == 25
    run(capsys, "export", files["named"], str(tmp_path / "tables"), "--format", "csv")
    assert {path.name for path in (tmp_path / "tables").iterdir()} >= {"ops.csv", "ranges.csv"}


def test_export_page(files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotly", reason="the page needs plotly: pip install 'mrv2-workbench[notebook]'")
    run(capsys, "export", files["named"], str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text()
    from mrv2.viz import payload

    packed = re.findall(r"<script type='text/plain' id='mrv2-(?!plotly)[^>]*>([^<]*)</script>", page)
    assert any("gemm_kernel" in payload.unpacked(text).decode(errors="replace") for text in packed)


def test_scrub(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = own_capture().write(tmp_path / "raw.sqlite")
    out = tmp_path / "clean.sqlite.gz"
    text = run(capsys, "scrub", str(raw), str(out), "--name", "secretive")
    assert "removed: META_DATA_CAPTURE: 1 of 1 rows" in text and find_leaks(out) == []
    assert len(load(out).ranges) == 6


@pytest.mark.parametrize(
    "argv, code, message",
    [
        (["stats", "nonesuch"], 1, "nonesuch: no such file"),
        (["stats", "EMPTY"], 1, "the file is empty"),
        (["show", "FOREIGN"], 1, "unknown kind of file"),
        (["stats", "EMPTY", "EMPTY"], 2, "a file is given twice"),
        (["syncs", "EMPTY", "--limit", "0"], 2, "must be at least 1"),
        (["stats", "EMPTY", "--warmup", "-1"], 2, "must be at least 0"),
        (["stats", "EMPTY", "--step-span", "turn"], 2, "--step-span needs --step-name"),
        (["assert", "EMPTY"], 2, "nothing to check"),
        (["assert", "EMPTY", "--allow", "x", "--overlap", "0.5"], 2, "--allow: needs --no-sync"),
        (["assert", "EMPTY", "--overlap", "1.5"], 2, "expected a share from 0 to 1"),
        (["assert", "EMPTY", "--overlap", "schedule="], 2, "expected a share from 0 to 1"),
        (["assert", "EMPTY", "--max-bubble-us", "-1"], 2, "must be at least 0"),
        (["assert", "EMPTY", "--max-graph-idle", "2"], 2, "expected a share from 0 to 1"),
        (["assert", "EMPTY", "--stage-gap-p95-us", "verify=10"], 2, "as in verify..draft=10"),
        (["assert", "EMPTY", "--stage-gap-p95-us", "verify..draft"], 2, "as in verify..draft=10"),
        (["scrub", "FOREIGN", "out"], 1, "scrub knows"),
    ],
)
def test_errors_are_one_line(
    argv: list[str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "foreign").write_text("a text\n")
    places = {"EMPTY": str(tmp_path / "empty"), "FOREIGN": str(tmp_path / "foreign"), "out": str(tmp_path / "out")}
    assert main(["trace", *(places.get(word, word) for word in argv)]) == code
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error and "Traceback" not in error
