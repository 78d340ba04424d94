"""The recorder with a real Nsight Systems, where one is installed; its nvtx package must be one that it understands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mrv2.instrument import stages
from mrv2.trace import find_leaks, load
from mrv2.trace.readers.nsys_rep import find_nsys

pytestmark = pytest.mark.skipif(
    find_nsys() is None or shutil.which("env") is None, reason="no nsys: put it on PATH or set MRV2_NSYS"
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mrv2.cli", "record", *arguments]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=env, check=False)


def test_workload(tmp_path: Path) -> None:
    out = tmp_path / "c.sqlite.gz"
    done = run("--workload", "c", "--steps", "12", "--device", "host", "--level", "nsight", "-o", str(out))
    if "too old for this nvtx" in done.stderr:
        pytest.skip(
            "this nsys records no range of the installed nvtx package; see MRV2_NSYS and pip install nvtx==0.2.11"
        )
    assert done.returncode == 0, done.stderr
    trace = load(out)
    mine = trace.ranges.take(trace.ranges.name == trace.string_id(stages.SCHEDULE))
    assert len(mine) == 12 and set(mine.step[1:] - mine.step[:-1]) == {1}
    assert trace.meta["workload"] == "c/8" and trace.meta["knobs"]["runner"] == "v2"
    assert find_leaks(out) == []


def test_command(tmp_path: Path) -> None:
    out = tmp_path / "run.npz"
    done = run("--nsys", "--allow-no-ranges", "-o", str(out), "--", sys.executable, "-c", "print(6 * 7)")
    assert done.returncode == 0 and "42" in done.stdout, done.stderr
    assert load(out).meta["source"] == "nsight"
