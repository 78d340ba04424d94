"""Inputs built on the host, on a GPU: the same tokens, and no wait but for outputs and the count of drafts."""

from __future__ import annotations

from typing import Any

import pytest

from guarded import guarded_steps, violations
from mrv2.config import Knobs
from mrv2.engine.core import EngineCore
from mrv2.sampling_params import SamplingParams
from serving import Collector, make_core, random_prompt

pytestmark = pytest.mark.gpu

GPU: dict[str, Any] = {"device": "cuda", "dtype": "float32"}
DRAFTS = 3


def gpu_core(knobs: Knobs) -> EngineCore:
    speculators = (knobs.spec_method,) if knobs.spec_method in ("eagle3", "mtp") else ()
    return make_core(
        max_num_seqs=6, max_num_spec_tokens=DRAFTS, ngram_min=1, speculators=speculators, knobs=knobs, **GPU
    )


def submit(collector: Collector, index: int, max_tokens: int = 40) -> None:
    params = SamplingParams(temperature=(0.0, 0.8)[index % 2], seed=index, max_tokens=max_tokens, ignore_eos=True)
    collector.submit(f"r{index}", random_prompt(index % 7, 5 + (29 * index) % 90), params)


@pytest.mark.parametrize("graphs", ["off", "model", "step"])
@pytest.mark.parametrize("method", ["off", "ngram", "eagle3", "mtp"])
def test_tokens_are_those_of_inputs_built_on_the_device(method: str, graphs: str) -> None:
    said = []
    for prep in ("device", "host"):
        knobs = Knobs(
            input_prep=prep,  # type: ignore[arg-type]
            spec_method=method,  # type: ignore[arg-type]
            num_spec_tokens=DRAFTS,
            # whole steps are replayed only where the device prepares; both compute the same padded shapes
            cuda_graphs=graphs,  # type: ignore[arg-type]
        )
        core = gpu_core(knobs)
        collector = Collector(core)
        for index in range(10):
            submit(collector, index)
            collector.step()
        said.append({name: served.token_ids for name, served in collector.run().items()})
        stats = core.executor.runner.stats
        assert (stats.num_step_replays > 0) == (graphs == "step" and prep == "device")
        assert (stats.num_graph_replays > 0) == (graphs != "off")
        core.shutdown()
    assert said[0] == said[1]


@pytest.mark.parametrize("method", ["off", "ngram", "mtp"])
def test_the_host_waits_for_outputs_and_for_the_count_of_drafts(method: str) -> None:
    core = gpu_core(Knobs(input_prep="host", spec_method=method, num_spec_tokens=DRAFTS))  # type: ignore[arg-type]
    collector = Collector(core)
    for index in range(14):
        submit(collector, index)
    collector.run()
    guard = guarded_steps(collector, lambda index: submit(collector, index), 200, index=14)
    assert not violations(guard)
    assert set(guard.waits) == ({"output"} if method == "off" else {"output", "accepted tokens"})
    core.abort(list(core.scheduler.requests))
    collector.run()
    core.shutdown()
