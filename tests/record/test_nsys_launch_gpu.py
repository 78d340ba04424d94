"""A process under `nsys launch` records parts of its own run, as a notebook kernel does cell by cell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from mrv2.record.nsys import clean_env, find_nsys, launch_command
from mrv2.trace.readers.nsys_rep import find_nsys as find_installed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_installed() is None, reason="no nsys: put it on PATH or set MRV2_NSYS"),
]

# the cells of a notebook, one after the other
KERNEL = textwrap.dedent("""
    import json, sys
    from mrv2.config import EngineConfig
    from mrv2.engine.core import EngineCore
    from mrv2.record import record
    from mrv2.trace import OpKind
    from mrv2.trace.analysis import Analysis
    from record.engines import OPTIONS, add_requests, drain

    core = EngineCore(EngineConfig(model="tiny-llama", device="cuda", dtype="bfloat16", **OPTIONS))
    found = []
    for steps in (6, 9):
        add_requests(core)
        for _ in range(6):
            core.step()
        with record(steps=steps, level="nsight", core=core) as rec:
            drain(core)
        trace = rec.trace()
        syncs = Analysis(trace).syncs()
        print(trace.diagnostics, sorted(set(trace.ranges.step.tolist())), flush=True)
        found.append({
            "windows": len(Analysis(trace).windows),
            "scheduled": int((trace.ranges.name == trace.string_id("schedule")).sum()),
            "kernels": int((trace.ops.kind == OpKind.KERNEL).sum()),
            "syncs": None if syncs is None else sorted(set(syncs.in_steps.reason)),
        })
    core.shutdown()
    print("FOUND " + json.dumps(found))
""")


def test_two_recordings_of_one_process(tmp_path: Path) -> None:
    script = tmp_path / "kernel.py"
    script.write_text(KERNEL)
    session = f"mrv2-test-{os.getpid()}"
    env = {**clean_env(), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = launch_command(session, [sys.executable, str(script)], granularity="node")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env, check=False)
    finally:
        subprocess.run([find_nsys(), "shutdown", f"--session={session}"], capture_output=True, env=env, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    first, second = json.loads(lines[0].removeprefix("FOUND "))
    about = done.stdout[-3000:]
    assert first["scheduled"] == 6 and second["scheduled"] == 9, about
    assert first["windows"] == 6 and second["windows"] == 9, about
    assert first["kernels"] > 6 * 5 and second["kernels"] > 9 * 5
    assert set(first["syncs"]) <= {"output"} and set(second["syncs"]) <= {"output"}
