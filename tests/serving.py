"""Small engines for tests: build one, feed it, collect what it says; and what a request yields alone."""

from __future__ import annotations

from ast import literal_eval
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from mrv2.config import EngineConfig, Knobs
from mrv2.device import Device
from mrv2.engine.core import EngineCore
from mrv2.engine.messages import EngineOutput, EngineRequest
from mrv2.sampling_params import SamplingParams

MODEL = "tiny-llama"
MAX_MODEL_LEN = 160
BLOCK_SIZE = 16


def make_core(ready: Device | None = None, *, model: str = MODEL, **options: object) -> EngineCore:
    """Return a float64 engine on the host backend that checks its books after every step."""
    defaults: dict[str, object] = dict(
        device="host",
        dtype="float64",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        num_gpu_blocks=64,
        block_size=BLOCK_SIZE,
        debug_checks=True,
        warm_up="all",
        knobs=Knobs(),
    )
    return EngineCore(EngineConfig(model=model, **(defaults | options)), ready)  # type: ignore[arg-type]


@dataclass
class Served:
    """What an engine said about one sequence."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    outputs: list[EngineOutput] = field(default_factory=list)

    def add(self, output: EngineOutput) -> None:
        assert self.finish_reason is None, f"{output.req_id}: output after finish_reason={self.finish_reason}"
        self.token_ids += output.new_token_ids
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        self.outputs.append(output)


def logprobs_of(served: Served) -> list[tuple[list[int], int, list[float]]]:
    """Return ids, rank and log-probabilities of every generated position."""
    rows = [row for output in served.outputs for row in output.logprobs or []]
    return [(row.token_ids, row.sampled_rank, row.logprobs) for row in rows]


class Collector:
    """Steps an engine and sorts its outputs by request."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.served: dict[str, Served] = {}

    def submit(self, req_id: str, prompt: list[int], params: SamplingParams, **fields: object) -> None:
        message = EngineRequest(req_id=req_id, prompt_token_ids=prompt, params=params, **fields)  # type: ignore[arg-type]
        self.core.add_request(message)
        self.served[req_id] = Served()

    def step(self) -> None:
        for output in self.core.step():
            self.served[output.req_id].add(output)

    def run(self, limit: int = 5000) -> dict[str, Served]:
        """Step until nothing is left."""
        for _ in range(limit):
            if not self.core.has_unfinished:
                return self.served
            self.step()
        raise AssertionError(f"the engine is not done after {limit} turns: {self.core.snapshot()}")


def serve(core: EngineCore, requests: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, Served]:
    """Submit everything at once, run to the end, shut down."""
    collector = Collector(core)
    for req_id, (prompt, params) in requests.items():
        collector.submit(req_id, prompt, params)
    served = collector.run()
    core.shutdown()
    return served


def random_prompt(seed: int, length: int, vocab: int = 512) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, size=length).tolist()


@cache
def alone(
    prompt: tuple[int, ...],
    temperature: float,
    seed: int,
    num_tokens: int,
    options: tuple[tuple[str, object], ...] = (),
    sampling: str = "[]",
) -> list[int]:
    """Return what a request yields with the engine to itself: synchronous, one row, no cache, no chunks.

    `sampling` holds further parameters as the text of a list of pairs, which a cache can compare.
    """
    core = make_core(
        **dict(options),  # type: ignore[arg-type]
        max_num_seqs=1,
        max_num_batched_tokens=MAX_MODEL_LEN,
        enable_prefix_caching=False,
        knobs=Knobs(async_scheduling=False, cuda_graphs="off"),
    )
    fields = {"temperature": temperature, "seed": seed, "max_tokens": num_tokens, "ignore_eos": True}
    params = SamplingParams(**(fields | dict(literal_eval(sampling))))
    return serve(core, {"alone": (list(prompt), params)})["alone"].token_ids
