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


# a workload whose graphs are captured inside the recording
CAPTURING = textwrap.dedent("""
    import json
    from mrv2.bench.workloads import make_workload
    from mrv2.engine.core import EngineCore
    from mrv2.options import build_config
    from mrv2.record.workload import Window, record_workload

    sizes = dict(max_num_seqs=16, max_model_len=256, max_num_batched_tokens=256, num_gpu_blocks=200)
    core = EngineCore(build_config("tiny-llama", device="cuda", dtype="bfloat16", cuda_graphs="off", **sizes))
    workload = make_workload("c", vocab_size=core.executor.vocab_size, scale=8)
    rec, num = record_workload(core, workload, Window(steps=12, skip=6), level="nsight", graphs_inside="step")
    trace = rec.trace()
    captures, gaps = trace.captures(), trace.stage_gaps("forward", "logits")
    core.shutdown()
    print("FOUND " + json.dumps({
        "about": [str(trace.coverage["ops.captured"]), trace.diagnostics],
        "paths": [] if captures is None else captures.captured_under,
        "gaps": 0 if gaps is None else len(gaps),
    }))
""")


def run_launched(code: str, folder: Path) -> tuple[str, str]:
    """Run code under `nsys launch`, graphs node by node; return what it printed behind FOUND, and all else."""
    script = folder / "kernel.py"
    script.write_text(code)
    session = f"mrv2-test-{os.getpid()}"
    env = {**clean_env(), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = launch_command(session, [sys.executable, str(script)], granularity="node")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env, check=False)
    finally:
        subprocess.run([find_nsys(), "shutdown", f"--session={session}"], capture_output=True, env=env, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    return lines[0].removeprefix("FOUND "), done.stdout[-3000:]


def test_two_recordings_of_one_process(tmp_path: Path) -> None:
    found, about = run_launched(KERNEL, tmp_path)
    first, second = json.loads(found)
    assert first["scheduled"] == 6 and second["scheduled"] == 9, about
    assert first["windows"] == 6 and second["windows"] == 9, about
    assert first["kernels"] > 6 * 5 and second["kernels"] > 9 * 5
    assert set(first["syncs"]) <= {"output"} and set(second["syncs"]) <= {"output"}


@pytest.mark.xfail(reason="Nsight Systems 2025.3.1 brought back no creation of graph nodes from a started session")
def test_a_capture_inside_the_recording_names_the_parts_of_a_step(tmp_path: Path) -> None:
    found = json.loads(run_launched(CAPTURING, tmp_path)[0])
    stages = {name for path in found["paths"] for name in path.split(" > ")}
    assert stages >= {"staged_writes", "prepare_inputs", "forward", "logits", "sample", "post_update"}, found["about"]
    # the first step runs before there is a graph, the others in one
    assert found["gaps"] >= 11
