"""A small engine with requests that run for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mrv2.config import EngineConfig
from mrv2.engine.core import EngineCore
from mrv2.engine.messages import EngineRequest
from mrv2.sampling_params import SamplingParams

OPTIONS = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_gpu_blocks": 40}


def add_requests(core: EngineCore, num_tokens: int = 30) -> None:
    """Queue three greedy requests."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for i in range(3):
        core.add_request(EngineRequest(req_id=f"r{i}", prompt_token_ids=[1, 2, 3 + i], params=params))


@contextmanager
def running_core(num_tokens: int = 30) -> Iterator[EngineCore]:
    """Yield an engine in the middle of its decodes."""
    core = EngineCore(EngineConfig(model="tiny-llama", device="host", **OPTIONS))  # type: ignore[arg-type]
    try:
        add_requests(core, num_tokens)
        for _ in range(4):
            core.step()
        yield core
    finally:
        core.shutdown()


def drain(core: EngineCore) -> int:
    """Step until nothing is left; return the number of turns."""
    turns = 0
    while core.has_unfinished:
        core.step()
        turns += 1
    return turns
