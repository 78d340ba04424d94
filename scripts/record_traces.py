"""Record the step loops of both runners under Nsight Systems, one capture each.

    nsys profile -t cuda,nvtx -s none --cpuctxsw=none --cuda-graph-trace=graph \\
        --capture-range=cudaProfilerApi --capture-range-end=repeat:5 -o OUT \\
        python scripts/record_traces.py

Captures, in this order: v1 sync, v1 async, v2 sync, v2 async (32 requests decoding), and v2 async
with prompts arriving between decodes.  Qwen3-0.6B with random weights, bfloat16.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

import numpy as np
import torch

from mrv2.config import EngineConfig, Knobs
from mrv2.engine.core import EngineCore
from mrv2.engine.messages import EngineRequest
from mrv2.sampling_params import SamplingParams

CAPTURES: dict[str, dict[str, object]] = {
    "v1_sync": {"runner": "v1", "async_scheduling": False},
    "v1_async": {"runner": "v1", "async_scheduling": True},
    "v2_sync": {"runner": "v2", "async_scheduling": False},
    "v2_async": {"runner": "v2", "async_scheduling": True},
    "v2_async_mixed": {"runner": "v2", "async_scheduling": True},
}


def requests(prefix: str, count: int, prompt_len: int, max_tokens: int) -> Iterator[EngineRequest]:
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for i in range(count):
        prompt = rng.integers(0, 10_000, size=prompt_len).tolist()
        yield EngineRequest(req_id=f"{prefix}-{i}", prompt_token_ids=prompt, params=params)


def capture(core: EngineCore, name: str, num_steps: int) -> None:
    """Warm up, then record `num_steps` turns of the loop."""
    mixed = name.endswith("mixed")
    for message in requests(name, 32, 128, num_steps + 60):
        core.add_request(message)
    for _ in range(30):
        core.step()
    arrivals = requests(f"{name}-new", num_steps, 200, 4)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for turn in range(num_steps):
        if mixed and turn % 5 == 2:
            core.add_request(next(arrivals))
        core.step()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    core.abort(list(core.scheduler.requests))
    while core.has_unfinished:
        core.step()
    core.kv.pool.forget_all()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--model", default="qwen3-0.6b")
    args = parser.parse_args()
    core = EngineCore(
        EngineConfig(model=args.model, dtype="bfloat16", device="cuda", max_model_len=4096, knobs=Knobs())
    )
    for name, knobs in CAPTURES.items():
        core.set_knobs(**knobs)
        for message in requests("warm", 33, 100, 20):
            core.add_request(message)
        while core.has_unfinished:
            core.step()
        capture(core, name, args.steps)
    print(json.dumps({"captures": list(CAPTURES), "steps": args.steps, "model": args.model}))
    core.shutdown()


if __name__ == "__main__":
    main()
