"""On a GPU too V1's drafts are those of V2, eagerly and through graphs, with its named waits only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from guarded import violations
from mrv2.config import Knobs
from mrv2.engine.core import EngineCore
from mrv2.engine.scheduler_stats import SchedulerStats
from mrv2.instrument import sync_guard
from mrv2.runner.v1.bookkeeping import ACCEPTED_WAIT, TO_LIST_WAIT
from mrv2.runner.v1.model_runner import BARRIER_WAIT
from mrv2.runner.v1.proposer import DRAFTS_WAIT
from mrv2.sampling_params import SamplingParams
from serving import Collector, alone, make_core, random_prompt, serve
from spec.drafter_cores import ENTRY, K, greedy, use_small_vocabulary

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GPU = {"device": "cuda", "dtype": "float32"}
HEADS = ("eagle3", "mtp")
WAITS = {
    False: {TO_LIST_WAIT, ACCEPTED_WAIT, DRAFTS_WAIT},
    True: {BARRIER_WAIT, ACCEPTED_WAIT, "output"},
}


def gpu_core(method: str, **options: Any) -> EngineCore:
    knobs = {"spec_method": method, "num_spec_tokens": K} | options.pop("knobs", {})
    options = {"max_num_seqs": 6, "max_num_spec_tokens": K, "speculators": (ENTRY[method],)} | options
    return make_core(knobs=Knobs(**knobs), **GPU, **options)


def requests(temperature: float = 0.0) -> dict[str, tuple[list[int], SamplingParams]]:
    return {
        f"r{i}": (
            random_prompt(i, 10 + 37 * i % 90),
            SamplingParams(temperature=temperature, seed=i, max_tokens=26, ignore_eos=True),
        )
        for i in range(5)
    }


@pytest.mark.parametrize("cuda_graphs", ["off", "model"])
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("method", HEADS)
def test_tokens_and_acceptance_are_those_of_v2(method: str, async_scheduling: bool, cuda_graphs: str) -> None:
    found = {}
    for runner in ("v1", "v2"):
        knobs = {"runner": runner, "async_scheduling": async_scheduling, "cuda_graphs": cuda_graphs}
        core = gpu_core(method, knobs=knobs, num_gpu_blocks=24, max_num_batched_tokens=24)
        if cuda_graphs == "off":
            use_small_vocabulary(core)
        served = serve(core, requests())
        found[runner] = [s.token_ids for s in served.values()]
        if runner == "v1" and cuda_graphs == "model":
            assert core.executor.runner.drafting.proposer.passes.num_replays > 0  # type: ignore[attr-defined]
        stats = core.scheduler.stats
        found[runner, "drafts"] = stats.num_drafted
    assert found["v1"] == found["v2"]
    assert found["v1", "drafts"] == found["v2", "drafts"]
    assert found["v1"] == [alone(tuple(p), 0.0, 0, 26, options=tuple(GPU.items())) for p, _ in requests().values()]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_nothing_is_counted_before_the_first_request(runner: str) -> None:
    core = gpu_core("mtp", warm_up="all", knobs={"runner": runner, "adaptive_drafts": True})
    assert core.scheduler.stats == SchedulerStats()
    assert core.scheduler.adaptive is not None and not core.scheduler.adaptive.shares
    core.shutdown()


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("method", HEADS)
def test_hot_drafts_share_the_noise_of_the_target(method: str, async_scheduling: bool) -> None:
    """So hot that the noise decides: drafts that share it are often accepted."""
    found = {}
    for runner in ("v1", "v2"):
        knobs = {"runner": runner, "async_scheduling": async_scheduling, "draft_sampling": "sampled"}
        core = gpu_core(method, knobs=knobs)
        found[runner] = [s.token_ids for s in serve(core, requests(temperature=6.0)).values()]
        found[runner, "accepted"] = core.scheduler.stats.num_accepted
    assert found["v1"] == found["v2"]
    assert found["v1", "accepted"] == found["v2", "accepted"] and sum(found["v1", "accepted"]) > 0


@pytest.mark.parametrize("verification", ["token_exact", "standard", "synthetic"])
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("method", HEADS)
def test_the_only_waits_are_the_named_ones(method: str, async_scheduling: bool, verification: str) -> None:
    knobs = {
        "runner": "v1",
        "async_scheduling": async_scheduling,
        "verification": verification,
        "draft_sampling": "sampled" if verification == "standard" else "greedy",
    }
    core = gpu_core(method, knobs=knobs, benchmark=True, synthetic_acceptance=(0.8, 0.6, 0.4))
    collector = Collector(core)
    params = (greedy(30), SamplingParams(temperature=1.0, seed=1, top_k=20, max_tokens=20, ignore_eos=True))

    def feed(index: int) -> None:
        collector.submit(f"r{index}", random_prompt(index % 5, 3 + 11 * index % 60), params[index % 2])

    for index in range(20):
        feed(index)
    # the first round allocates and compiles what start-up did not
    collector.run()
    with sync_guard(core.device, mode="error") as guard:
        for index in range(20, 40):
            feed(index)
        collector.run()
    assert not violations(guard) and set(guard.waits) <= WAITS[async_scheduling]
    assert ACCEPTED_WAIT in guard.waits
    core.shutdown()


def test_live_switches_keep_tokens() -> None:
    prompts = [random_prompt(200 + i, 20 + i) for i in range(4)]
    core = gpu_core("mtp", speculators=("eagle3", "mtp"), knobs={"runner": "v1"})
    collector = Collector(core)
    for i, prompt in enumerate(prompts):
        collector.submit(f"r{i}", prompt, greedy(60))
    for changes in (
        {"runner": "v2"},
        {"runner": "v1", "async_scheduling": False},
        {"spec_method": "eagle3", "num_spec_tokens": 2},
        {"cuda_graphs": "off", "draft_sampling": "sampled"},
        {"async_scheduling": True, "cuda_graphs": "model"},
        {"num_spec_tokens": K, "draft_sampling": "greedy"},
        {"spec_method": "ngram", "async_scheduling": False},
        {"spec_method": "off"},
    ):
        for _ in range(3):
            collector.step()
        core.set_knobs(**changes)
    served = collector.run()
    core.shutdown()
    want = [alone(tuple(p), 0.0, 0, 60, options=tuple(GPU.items())) for p in prompts]
    assert [served[f"r{i}"].token_ids for i in range(4)] == want
