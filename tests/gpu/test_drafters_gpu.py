"""Drafters with weights on a GPU: graphs, padding, sampled drafts, switches, and nothing to wait for but outputs."""

from __future__ import annotations

from typing import Any

import pytest

from mrv2.config import Knobs
from mrv2.engine.core import EngineCore
from mrv2.instrument import sync_guard
from mrv2.sampling_params import SamplingParams
from serving import Collector, alone, make_core, random_prompt, serve
from spec.drafter_cores import ENTRY, METHODS, K, check_drafts, greedy, plain_drafter, use_small_vocabulary

pytestmark = pytest.mark.gpu

GPU = {"device": "cuda", "dtype": "float32"}


def gpu_core(method: str, graphs: str, *, knobs: dict[str, Any] | None = None, **options: Any) -> EngineCore:
    settings = {"spec_method": method, "num_spec_tokens": K, "cuda_graphs": graphs} | (knobs or {})
    options = {"max_num_seqs": 6, "max_num_spec_tokens": K, "speculators": (ENTRY[method],)} | options
    return make_core(knobs=Knobs(**settings), **GPU, **options)


def want(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    return [alone(tuple(p), 0.0, 0, num_tokens, options=tuple(GPU.items())) for p in prompts]


# the plain model computes every draft's history anew
@pytest.mark.timeout(400)
@pytest.mark.parametrize("graphs", ["off", "model"])
@pytest.mark.parametrize("method", METHODS)
def test_drafts_are_those_of_the_head_on_the_whole_history(method: str, graphs: str) -> None:
    core = gpu_core(method, graphs, num_gpu_blocks=14, max_num_batched_tokens=24)
    if method != "draft_model" and graphs == "off":
        use_small_vocabulary(core)
    plain, collector, compared = plain_drafter(core), Collector(core), 0
    prompts = [random_prompt(i, 10 + 37 * i % 90) for i in range(5)]
    for i, prompt in enumerate(prompts):
        collector.submit(f"r{i}", prompt, greedy(26))
    while core.has_unfinished:
        collector.step()
        compared += check_drafts(core, plain, K)
    assert compared > 100
    assert [collector.served[f"r{i}"].token_ids for i in range(5)] == want(prompts, 26)
    replays = core.executor.runner.drafting.graphs.num_replays  # type: ignore[attr-defined]
    assert (replays > 0) == (graphs == "model")
    core.shutdown()


@pytest.mark.parametrize("graphs", ["off", "model", "step"])
def test_a_drafter_that_is_the_target_is_always_right(graphs: str) -> None:
    core = gpu_core("draft_model", graphs, num_gpu_blocks=14, knobs={"queue_depth": 4})
    prompts = [random_prompt(70 + i, 5 + 17 * i) for i in range(5)]
    served = serve(core, {f"r{i}": (p, greedy(40)) for i, p in enumerate(prompts)})
    assert [served[f"r{i}"].token_ids for i in range(5)] == want(prompts, 40)
    stats = core.scheduler.stats
    assert stats.num_accepted == stats.num_drafted and sum(stats.num_drafted) > 60


@pytest.mark.parametrize("choice", ["greedy", "shared", "own"])
@pytest.mark.parametrize("method", METHODS)
def test_nothing_but_the_output_is_waited_for(method: str, choice: str) -> None:
    knobs = {
        "queue_depth": 3,
        "draft_sampling": "greedy" if choice == "greedy" else "sampled",
        "verification": "block" if choice == "own" else "token_exact",
    }
    core = gpu_core(method, "model", num_gpu_blocks=24, knobs=knobs)
    collector = Collector(core)
    params = (greedy(30), SamplingParams(temperature=1.0, seed=1, top_k=20, max_tokens=20, ignore_eos=True))

    def feed(index: int) -> None:
        collector.submit(f"r{index}", random_prompt(index % 5, 3 + 11 * index % 60), params[index % 2])

    for index in range(20):
        feed(index)
    collector.run()
    first, index = core.scheduler.step, 20
    with sync_guard(core.device, mode="error") as guard:
        while core.scheduler.step - first < 150:
            if len(core.scheduler.waiting) < 3:
                feed(index)
                index += 1
            collector.step()
        core.drain()
    assert not guard.violations and set(guard.waits) == {"output"}
    core.abort(list(core.scheduler.requests))
    collector.run()
    core.shutdown()


def test_live_switches_keep_tokens() -> None:
    prompts = [random_prompt(200 + i, 20 + i) for i in range(4)]
    core = gpu_core("mtp", "model", speculators=tuple(ENTRY.values()))
    collector = Collector(core)
    for i, prompt in enumerate(prompts):
        collector.submit(f"r{i}", prompt, greedy(60))
    for changes in (
        {"spec_method": "eagle3"},
        {"cuda_graphs": "off", "draft_sampling": "sampled"},
        {"spec_method": "draft_model", "num_spec_tokens": 2},
        {"cuda_graphs": "step", "num_spec_tokens": 0},
        {"num_spec_tokens": K, "draft_sampling": "greedy"},
        {"spec_method": "ngram"},
        {"spec_method": "off"},
    ):
        for _ in range(3):
            collector.step()
        core.set_knobs(**changes)
    served = collector.run()
    core.shutdown()
    assert [served[f"r{i}"].token_ids for i in range(4)] == want(prompts, 60)
