"""Drafters with weights on a GPU: graphs, padding, sampled drafts, switches, and nothing to wait for but outputs."""

from __future__ import annotations

from typing import Any

import pytest

from guarded import guarded_steps, violations
from mrv2.config import Knobs
from mrv2.engine.core import EngineCore
from mrv2.instrument import sync_guard
from mrv2.sampling_params import SamplingParams
from schedule_cases import SPECULATORS
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
@pytest.mark.parametrize("graphs", ["off", "model", "step"])
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
    runner: Any = core.executor.runner
    assert (runner.drafting.graphs.num_replays > 0) == (graphs != "off")
    assert (runner.stats.num_step_replays > 10) == (graphs == "step")
    core.shutdown()


EVERY_METHOD = ("ngram", *SPECULATORS)
RULES = ("token_exact", "standard", "block", "synthetic")
MIX: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.0},
)


def any_core(method: str, graphs: str, *, knobs: dict[str, Any] | None = None) -> EngineCore:
    """An engine of one method that may verify by every rule."""
    settings = {"spec_method": method, "num_spec_tokens": K, "cuda_graphs": graphs} | (knobs or {})
    return make_core(
        knobs=Knobs(**settings),
        max_num_seqs=6,
        max_num_spec_tokens=K,
        ngram_min=1,
        speculators=tuple(entry for name, entry in SPECULATORS.items() if name == method),
        enable_prefix_caching=False,
        benchmark=True,
        synthetic_acceptance=(0.8, 0.6, 0.5),
        **GPU,
    )


def serve_mix(core: EngineCore) -> tuple[list[list[int]], list[int], list[int], int]:
    """Serve one request of each kind; return tokens, drafts proposed and accepted by place, and whole steps."""
    runner: Any = core.executor.runner
    if runner.drafting.suffix is not None:
        # what earlier requests said would be drafted now; a request's row is left when the next one comes
        first = Collector(core)
        first.submit("first", [1, 2, 3], greedy(1))
        first.run()
        core.device.synchronize("test")
        runner.drafting.suffix.lengths.zero_()
    collector, stats, whole = Collector(core), core.scheduler.stats, runner.stats.num_step_replays
    before = list(stats.num_drafted), list(stats.num_accepted)
    for i, fields in enumerate(MIX):
        params = SamplingParams(seed=i, max_tokens=24 + i, ignore_eos=True, **fields)
        collector.submit(f"r{i}", random_prompt(i, 9 + 7 * i), params)
    served = collector.run()
    counts = [
        [now - (then[k] if k < len(then) else 0) for k, now in enumerate(counts)]
        for counts, then in zip((stats.num_drafted, stats.num_accepted), before, strict=True)
    ]
    whole = runner.stats.num_step_replays - whole
    return [served[f"r{i}"].token_ids for i in range(len(MIX))], counts[0], counts[1], whole


@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", EVERY_METHOD)
def test_whole_steps_yield_the_tokens_of_the_other_levels(method: str) -> None:
    """By every rule and choice of drafts; one engine, whose graphs are captured as its knobs turn."""
    core, differing = any_core(method, "off"), []
    choices = ("greedy", "sampled") if method in METHODS else ("greedy",)
    for rule in RULES:
        for choice in choices:
            found = {}
            for graphs in ("off", "model", "step"):
                core.set_knobs(verification=rule, draft_sampling=choice, cuda_graphs=graphs)
                *found[graphs], whole = serve_mix(core)
                if (whole > 4) != (graphs == "step"):
                    differing.append(f"{rule}, {choice}, {graphs}: {whole} whole steps")
            differing += [f"{rule}, {choice}, {graphs}" for graphs in found if found[graphs] != found["off"]]
    core.shutdown()
    assert not differing


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_three_hundred_whole_steps_wait_for_outputs_only(method: str) -> None:
    core = any_core(method, "step", knobs={"queue_depth": 3})
    collector = Collector(core)

    def feed(index: int) -> None:
        params = SamplingParams(seed=index, max_tokens=33, ignore_eos=True, **MIX[index % len(MIX)])
        collector.submit(f"r{index}", random_prompt(index % 7, 5 + index % 30), params)

    # every bucket and kind of draw replays once, and the eager steps find their memory
    for index in range(30):
        feed(index)
        if index % 3 == 0:
            collector.step()
    collector.run()
    replays = core.executor.runner.stats.num_step_replays
    guard = guarded_steps(collector, feed, 300, index=30)
    assert not violations(guard) and set(guard.waits) == {"output"}
    assert core.executor.runner.stats.num_step_replays - replays > 150
    core.abort(list(core.scheduler.requests))
    collector.run()
    core.shutdown()


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_the_number_of_drafts_may_change_while_requests_run(method: str) -> None:
    """A capture in the middle of running requests leaves them alone, and serves them from the next step but one."""
    core = any_core(method, "step")
    prompts = [random_prompt(40 + i, 20 + i) for i in range(4)]
    collector = Collector(core)
    for i, prompt in enumerate(prompts):
        collector.submit(f"r{i}", prompt, greedy(100))
    for _ in range(4):
        collector.step()
    stats, fallen = core.executor.runner.stats, []
    for count in (1, 2, 0, K):
        core.set_knobs(num_spec_tokens=count)
        before = stats.num_steps - stats.num_step_replays
        for _ in range(5):
            collector.step()
        fallen.append(stats.num_steps - stats.num_step_replays - before)
    served = collector.run()
    core.shutdown()
    assert max(fallen) <= 1
    assert [served[f"r{i}"].token_ids for i in range(4)] == want(prompts, 100)


@pytest.mark.parametrize("graphs", ["off", "model", "step"])
def test_a_drafter_that_is_the_target_is_always_right(graphs: str) -> None:
    core = gpu_core("draft_model", graphs, num_gpu_blocks=14, knobs={"queue_depth": 4})
    prompts = [random_prompt(70 + i, 5 + 17 * i) for i in range(5)]
    served = serve(core, {f"r{i}": (p, greedy(40)) for i, p in enumerate(prompts)})
    assert [served[f"r{i}"].token_ids for i in range(5)] == want(prompts, 40)
    stats = core.scheduler.stats
    assert stats.num_accepted == stats.num_drafted and sum(stats.num_drafted) > 60


@pytest.mark.parametrize("graphs", ["model", "step"])
@pytest.mark.parametrize("choice", ["greedy", "shared", "own"])
@pytest.mark.parametrize("method", METHODS)
def test_nothing_but_the_output_is_waited_for(method: str, choice: str, graphs: str) -> None:
    knobs = {
        "queue_depth": 3,
        "draft_sampling": "greedy" if choice == "greedy" else "sampled",
        "verification": "block" if choice == "own" else "token_exact",
    }
    core = gpu_core(method, graphs, num_gpu_blocks=24, knobs=knobs)
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
    assert not violations(guard) and set(guard.waits) == {"output"}
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
