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
from mrv2.engine.core import EngineCore
from mrv2.engine.messages import EngineRequest
from mrv2.options import build_config
from mrv2.sampling_params import SamplingParams
options = json.loads(sys.argv[1])
core = EngineCore(build_config(options.pop("model"), **options))
loaded = perf_counter()
params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
core.add_request(EngineRequest(req_id="0", prompt_token_ids=[1, 2, 3, 4], params=params))
while not any(output.new_token_ids for output in core.step()):
    pass
first = perf_counter()
print("STARTUP " + json.dumps({
    "import_torch_s": imported - start, "load_s": loaded - imported, "first_token_s": first - loaded,
}))
core.shutdown()
"""


@dataclass(frozen=True)
class Startup:
    """One start; seconds.  The parts are the child's own clock, `total_s` its parent's."""

    cache: str
    total_s: float
    import_torch_s: float
    # weights, memory, warm-up and captures
    load_s: float
    first_token_s: float


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
    """Return the starts as a table."""
    lines = [
        f"{model}: from the start of a process to its first token, in seconds",
        f"{'cache':>6}{'total':>8}{'import torch':>14}{'load':>8}{'first token':>13}",
    ]
    lines += [
        f"{s.cache:>6}{s.total_s:>8.1f}{s.import_torch_s:>14.1f}{s.load_s:>8.1f}{s.first_token_s:>13.2f}"
        for s in starts
    ]
    return "\n".join(lines)
