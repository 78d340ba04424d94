"""How long a large Nsight recording takes: reading the file, reading its side-car, and the whole analysis.

    python scripts/bench_trace.py --kernels 1000000

The file is made first: as many API calls as kernels, steps and stages.  Each figure is from a process of its own,
whose peak of memory is the one that counts.  The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mrv2.trace import load

# the trace is the one that the tests draw, and the file the one that they read
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from nsight_files import NsightFile
from viz.traces import big_trace


def make(path: Path, num_kernels: int) -> None:
    """Write the recording, its side-car not yet there."""
    trace, file = big_trace(num_kernels), NsightFile()
    ops, api, ranges, text = trace.ops, trace.api, trace.ranges, trace.strings
    names, starts, ends = (column.tolist() for column in (ops.name, ops.start, ops.end))
    is_copy = (ops.bytes >= 0).tolist()
    for at, corr in enumerate(ops.corr.tolist()):
        if is_copy[at]:
            file.memcpy(starts[at], ends[at], corr + 1, streamId=17)
        else:
            file.kernel(text[names[at]], starts[at], ends[at], corr + 1)
    for name, start, end, corr in zip(*(c.tolist() for c in (api.name, api.start, api.end, api.corr)), strict=True):
        file.api(text[name], start, end, corr + 1)
    file.domain(1, "mrv2")
    file.category(1, 4, "host stage")
    columns = (ranges.name, ranges.start, ranges.end, ranges.step)
    for name, start, end, step in zip(*(column.tolist() for column in columns), strict=True):
        file.nvtx(text[name], start, end, domainId=1, category=4, int64Value=step)
    for at, (start, end) in enumerate(zip(trace.syncs.start.tolist(), trace.syncs.end.tolist(), strict=True)):
        corr = num_kernels + 1 + at
        file.api("cudaEventSynchronize_v3020", start - 100, end + 100, corr)
        file.sync(1, start, end, corr)
    file.write(path)


def peak_mb() -> int:
    """Return the most memory that this process held, in MiB."""
    status = Path("/proc/self/status")
    if status.is_file():
        # what `getrusage` says begins with the memory of the process that started this one
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) >> 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def measure(path: Path) -> dict[str, Any]:
    """Load a recording and analyse all of it."""
    start = time.perf_counter()
    trace = load(path)
    loaded = time.perf_counter()
    trace.overview(), trace.bubbles(), trace.sync_points(), trace.stages(), trace.graph_idle()
    return {
        "events": len(trace.ops.start) + len(trace.api.start),
        "syncs": len(trace.syncs.start),
        "load_s": round(loaded - start, 3),
        "analysis_s": round(time.perf_counter() - loaded, 3),
        "peak_mb": peak_mb(),
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, default=1_000_000, help="kernels, and as many API calls")
    parser.add_argument("--file", type=Path, help="only load and analyse this recording")
    args = parser.parse_args()
    if args.file is not None:
        print(json.dumps(measure(args.file)))
        return
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.sqlite"
        make(path, args.kernels)
        result["file_mb"] = path.stat().st_size >> 20
        for what in ("file", "side_car"):
            command = [sys.executable, __file__, "--file", str(path)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            result[what] = json.loads(done.stdout.splitlines()[-1])
            print(f"{what:10}", *(f"{key} {value}" for key, value in result[what].items()))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
