"""A small engine on the host for the tests of the harness."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mrv2.bench.workloads import Workload
from mrv2.config import EngineConfig
from mrv2.engine.core import EngineCore


@contextmanager
def small_core(workload: Workload, **options: Any) -> Iterator[EngineCore]:
    """Yield tiny-llama with just the room that `workload` needs."""
    longest, rows = workload.longest + 1, len(workload.requests)
    defaults = {
        "max_model_len": longest,
        "max_num_seqs": rows,
        "max_num_batched_tokens": 256,
        "num_gpu_blocks": 1 + rows * -(-longest // 16),
    }
    core = EngineCore(EngineConfig(model="tiny-llama", device="host", **{**defaults, **options}))
    try:
        yield core
    finally:
        core.shutdown()
