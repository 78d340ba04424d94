"""From the start of a process to its first token, with an empty and with a filled cache of compiled kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from mrv2.errors import EngineDeadError

KIND = "mrv2-startup"
_TIMEOUT_S = 600
# token ids only: works for models without a tokenizer
_CHILD = """
import json, sys
from time import perf_counter
start = perf_counter()
import torch
imported = perf_counter()
from mrv2.bench.startup import watch_compiler
from mrv2.engine.core import EngineCore
from mrv2.engine.messages import EngineRequest
from mrv2.options import build_config
from mrv2.sampling_params import SamplingParams
compiler = watch_compiler()
engine_imported = perf_counter()
options = json.loads(sys.argv[1])
core = EngineCore(build_config(options.pop("model"), **options))
loaded = perf_counter()
load_parts = dict(core.executor.clock.seconds)
params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
core.add_request(EngineRequest(req_id="0", prompt_token_ids=[1, 2, 3, 4], params=params))
while not any(output.new_token_ids for output in core.step()):
    pass
first = perf_counter()
print("STARTUP " + json.dumps({
    "import_torch_s": imported - start, "import_engine_s": engine_imported - imported,
    "load_s": loaded - engine_imported, "first_token_s": first - loaded, "load_parts": load_parts, **compiler,
}))
core.shutdown()
"""


@dataclass(frozen=True)
class Startup:
    """One start; seconds.  The parts are the child's own clock, `total_s` its parent's."""

    cache: str
    total_s: float
    import_torch_s: float
    import_engine_s: float
    # everything up to the engine that can take a request
    load_s: float
    first_token_s: float
    # of the load: device, weights, memory, runner, warm-up requests, graphs, as far as there are any
    load_parts: dict[str, float]
    # kernels that Triton compiled, and that it found in its cache, from the first import to the first token
    num_compiled: int
    num_cached: int
    # the time spent on those that were compiled, in whichever part
    compile_s: float


def watch_compiler() -> dict[str, float]:
    """Return what Triton compiles in this process from now on, counted in place: the last fields of `Startup`."""
    counts: dict[str, float] = {"num_compiled": 0, "num_cached": 0, "compile_s": 0.0}
    try:
        from triton import knobs
    except ImportError:
        return counts

    def listen(*, times: Any, cache_hit: bool, **_: Any) -> None:
        counts["num_cached" if cache_hit else "num_compiled"] += 1
        if not cache_hit:
            counts["compile_s"] += 1e-6 * times.total

    knobs.compilation.listener = listen
    return counts


def measure_startup(model: str, options: dict[str, Any], *, progress: Callable[[str], object] = print) -> list[Startup]:
    """Start an engine in a process of its own three times: nothing compiled, then all compiled, twice.

    Raises:
        EngineDeadError: the child failed; the message ends with what it said last.
    """
    found = []
    with tempfile.TemporaryDirectory(prefix="mrv2-startup-") as folder:
        for cache in ("cold", "warm", "warm"):
            progress(f"start-up: {cache} cache")
            found.append(_start(model, options, cache, folder))
    return found


def _start(model: str, options: dict[str, Any], cache: str, folder: str) -> Startup:
    env = {**os.environ, "TRITON_CACHE_DIR": folder, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    start = perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, json.dumps({"model": model, **options})],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    assert child.stdout is not None and child.stderr is not None, "both are piped"
    try:
        line = next((text for text in child.stdout if text.startswith("STARTUP ")), None)
        seconds = perf_counter() - start
        _, said = child.communicate(timeout=_TIMEOUT_S)
    finally:
        child.kill()
    if line is None:
        raise EngineDeadError(f"the engine did not start: {said.strip().splitlines()[-1] if said.strip() else ''}")
    return Startup(cache, seconds, **json.loads(line.removeprefix("STARTUP ")))


def report(starts: list[Startup], model: str) -> str:
    """Return the starts as a table; the parts of the load are indented."""
    parts = list(dict.fromkeys(name for start in starts for name in start.load_parts))
    rows: list[tuple[str, list[float]]] = [
        ("import torch", [s.import_torch_s for s in starts]),
        ("import engine", [s.import_engine_s for s in starts]),
        ("load", [s.load_s for s in starts]),
        *((f"  {name}", [s.load_parts.get(name, 0.0) for s in starts]) for name in parts),
        ("first token", [s.first_token_s for s in starts]),
        ("total", [s.total_s for s in starts]),
        ("compiling, in all", [s.compile_s for s in starts]),
    ]
    lines = [
        f"{model}: from the start of a process to its first token, in seconds",
        f"{'cache of kernels':<20}" + "".join(f"{s.cache:>9}" for s in starts),
    ]
    lines += [f"{name:<20}" + "".join(f"{value:>9.2f}" for value in values) for name, values in rows]
    lines.append(f"{'kernels compiled':<20}" + "".join(f"{s.num_compiled:>9}" for s in starts))
    lines.append(f"{'kernels from cache':<20}" + "".join(f"{s.num_cached:>9}" for s in starts))
    return "\n".join(lines)
