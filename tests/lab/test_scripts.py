"""The scripts that drive a workbench without a notebook, on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from checks.source_tree import REPO
from mrv2.lab import open_session

pytest.importorskip("plotly")
TINY = ["--model", "tiny-llama", "--users", "2"]


def run(script: str, *args: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script on a tiny model; its exit status is the caller's to judge."""
    roots = os.pathsep.join(str(REPO / root) for root in ("workbench", "models", "kernels"))
    return subprocess.run(
        [sys.executable, str(REPO / "scripts" / script), *TINY, *args],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": roots, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_the_tour_turns_the_knobs_and_leaves_a_session_and_a_report(tmp_path: Path) -> None:
    done = run("lab_tour.py", "--seconds", "0.6", "--requests", "2", "--max-tokens", "8", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    turned = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(turned) == 7 and "graphs captured" in next(line for line in turned if "'cuda_graphs': 'step'" in line)
    assert "2 of 2 requests got the same tokens" in done.stdout
    session = open_session(tmp_path / "tour")
    assert len(session.about["changes"]) == 7 and session.about["ab"]["verdict"]
    assert "tiny-llama" in (tmp_path / "tour.html").read_text(encoding="utf-8")


def test_switching_reports_seconds_and_what_was_captured(tmp_path: Path) -> None:
    done = run("lab_switching.py", "--rounds", "1", "--max-tokens", "48", folder=tmp_path)
    # how fast this machine is says nothing: 1 = slower than the bar
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == bool(report["over_the_bar"])
    assert {"runner=v1", "cuda_graphs=model", "spec_method=ngram"} <= set(report["applied_s"])
    assert [each["changes"] for each in report["captures"]] == ["cuda_graphs=step"]


def test_the_overhead_is_reported(tmp_path: Path) -> None:
    pytest.importorskip("anywidget")
    done = run("lab_overhead.py", "--seconds", "0.5", "--passes", "1", "--max-tokens", "48", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert set(report["cost"]) == {"windows", "panel"} and report["panel"]["kB_s"] > 0
