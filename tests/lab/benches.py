"""Small workbenches for tests: random weights on the host backend."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mrv2.lab import Load, Workbench

OPTIONS: dict[str, Any] = dict(
    device="host", dtype="float64", max_model_len=160, max_num_seqs=6, num_gpu_blocks=96, max_num_spec_tokens=3
)


def make_bench(**changes: Any) -> Workbench:
    """Return a workbench on a tiny model, quiet until it is started."""
    given = {"load": Load(users=3, max_tokens=24, ignore_eos=True), "start": False, "engine": "thread"} | changes
    return Workbench("tiny-llama", **{**OPTIONS, **given})


def until(done: Callable[[], Any], timeout: float = 60.0) -> Any:
    """Wait for something that another thread does; return its first true value."""
    deadline = time.monotonic() + timeout
    while not (found := done()):
        assert time.monotonic() < deadline, f"not within {timeout} s"
        time.sleep(0.01)
    return found
