"""Steps with drafts as one graph: which they are, the tokens of the other levels, padding, switches, no waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mrv2.config import Knobs
from mrv2.device.host import HostDevice
from mrv2.engine.core import EngineCore
from mrv2.engine.grammar.backend import AnyTokenMatcher
from mrv2.instrument import recording, stages, sync_guard
from mrv2.runner.forward import Buckets, GraphKey, padded_query_len
from mrv2.runner.v2.model_runner import ModelRunnerV2
from mrv2.runner.v2.step_keys import wanted_keys
from mrv2.sampling_params import SamplingParams
from runner.test_step_graphs import decode, mix
from serving import BLOCK_SIZE, Collector, alone, make_core, random_prompt, serve
from spec.drafter_cores import ENTRY, K, greedy, perturb

LOADED = ("draft_model", "eagle3", "mtp")
METHODS = ("ngram", "suffix", *LOADED)
RULES = ("token_exact", "standard", "block", "synthetic")
ENTRIES = {"ngram": (), "suffix": ("suffix",)} | {method: (ENTRY[method],) for method in LOADED}


def step_core(method: str, device: HostDevice | None = None, *, graphs: str = "step", **options: Any) -> EngineCore:
    knobs = dict(spec_method=method, num_spec_tokens=K, cuda_graphs=graphs) | options.pop("knobs", {})
    defaults: dict[str, Any] = dict(max_num_seqs=6, max_num_spec_tokens=K, ngram_min=1, speculators=ENTRIES[method])
    core = make_core(device, knobs=Knobs(**knobs), **(defaults | options))  # type: ignore[arg-type]
    if method == "draft_model":
        # right often and wrong often
        perturb(core, 0.03)
    return core


def stats_of(core: EngineCore) -> Any:
    return core.executor.runner.stats


def random_requests(num_tokens: int) -> dict[str, tuple[list[int], SamplingParams]]:
    """Greedy, random and truncated, of different lengths, one of them short enough to end early."""
    return {f"r{i}": (random_prompt(i, 9 + 7 * i), mix(i, max_tokens=num_tokens - 3 * (i % 3))) for i in range(5)}


@pytest.mark.parametrize(
    ("method", "choice"), [(m, "greedy") for m in METHODS] + [(m, "sampled") for m in ("draft_model", "eagle3")]
)
@pytest.mark.parametrize("rule", RULES)
def test_every_level_yields_the_same_tokens(method: str, rule: str, choice: str) -> None:
    """Under every rule, also those whose tokens depend on the drafts: they, too, are functions of seed and position."""
    outcomes = []
    for graphs in ("off", "step"):
        knobs = {"verification": rule, "draft_sampling": choice}
        options: dict[str, Any] = {"draft_probabilities": True} if method in LOADED else {}
        if rule == "synthetic":
            options |= {"benchmark": True, "synthetic_acceptance": (0.8, 0.6, 0.5)}
        core = step_core(method, graphs=graphs, knobs=knobs, **options)
        served = serve(core, random_requests(24))
        stats = core.scheduler.stats
        outcomes.append(([served[f"r{i}"].token_ids for i in range(5)], stats.num_drafted, stats.num_accepted))
        replays = stats_of(core).num_step_replays
        assert (replays > 0.5 * stats_of(core).num_steps) == (graphs == "step"), stats_of(core)
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("sampler", ["gumbel_two_pass", "gumbel_fused", "softmax_race", "gumbel_blocked", "torch_sort"])
def test_every_sampler_draws_the_same_tokens(sampler: str) -> None:
    got = [
        {name: served.token_ids for name, served in serve(core, random_requests(30)).items()}
        for core in (step_core("ngram", graphs=graphs, knobs={"sampler": sampler}) for graphs in ("off", "step"))
    ]
    assert got[0] == got[1]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("late", ["copy", "main"])
@pytest.mark.parametrize("depth", [1, 4])
def test_late_streams_and_poisoned_memory_change_nothing(method: str, late: str, depth: int) -> None:
    device = HostDevice(poison=True, random_delay_s=0.002, delay_streams=[late], seed=depth)
    core = step_core(method, device, knobs={"queue_depth": depth})
    prompts = [random_prompt(70 + i, 5 + 13 * i) for i in range(5)]
    served = serve(core, {f"r{i}": (p, greedy(20 + i)) for i, p in enumerate(prompts)})
    for i, prompt in enumerate(prompts):
        assert served[f"r{i}"].token_ids == alone(tuple(prompt), 0.0, 0, 20 + i)
    assert stats_of(core).num_step_replays > 10


@pytest.mark.parametrize("method", METHODS)
def test_a_step_with_drafts_is_one_submission(method: str) -> None:
    core = step_core(method)
    collector = Collector(core)
    for i in range(3):
        collector.submit(f"r{i}", random_prompt(1 + i, 5 + i), greedy(90))
    for _ in range(4):
        collector.step()
    with recording(core.device) as recorder:
        first = core.scheduler.step
        for _ in range(12):
            collector.step()
        core.drain()
        core.device.synchronize("test")
        spans = recorder.spans()
    assert core.scheduler.stats.num_drafted[K - 1] > 20
    for step in range(first, core.scheduler.step):
        mine = [span.name for span in spans if span.kind == "device" and span.step == step]
        # tokens, and how many of each request
        want = [stages.STEP_GRAPH, stages.OUTPUT_COPY, stages.OUTPUT_COPY]
        assert sorted(mine) == sorted(want), (step, mine)
    core.abort(list(core.scheduler.requests))
    collector.run()
    core.shutdown()


@pytest.mark.parametrize("method", METHODS)
def test_three_hundred_steps_wait_for_outputs_only(method: str) -> None:
    core = step_core(method, knobs={"queue_depth": 3})
    collector = Collector(core)
    for i in range(4):
        collector.submit(f"warm{i}", random_prompt(i, 10), mix(i, max_tokens=9))
    collector.run()
    first, index, replays = core.scheduler.step, 0, stats_of(core).num_step_replays
    with sync_guard(core.device, mode="error") as guard:
        while core.scheduler.step - first < 300:
            if len(core.scheduler.running) < 4 and core.scheduler.step % 9 == 0:
                collector.submit(f"r{index}", random_prompt(index % 7, 5 + index % 30), mix(index, max_tokens=33))
                index += 1
            collector.step()
        core.drain()
    assert set(guard.waits) == {"output"} and not guard.violations
    assert stats_of(core).num_step_replays - replays > 200
    core.abort(list(core.scheduler.requests))
    collector.run()
    core.shutdown()


@pytest.mark.parametrize("method", METHODS)
def test_the_number_of_drafts_may_change_while_requests_run(method: str) -> None:
    """Every K has a graph from the moment on that it is asked for; only the steps from one to another have none."""
    core = step_core(method)
    prompts = [random_prompt(40 + i, 20 + i) for i in range(4)]
    collector = Collector(core)
    for i, prompt in enumerate(prompts):
        collector.submit(f"r{i}", prompt, greedy(110))
    for _ in range(4):
        collector.step()
    stats = stats_of(core)
    for count in (1, 2, K, 0, 2, K):
        core.set_knobs(num_spec_tokens=count)
        before = stats.num_steps, stats.num_step_replays
        for _ in range(6):
            collector.step()
        steps, replays = stats.num_steps - before[0], stats.num_step_replays - before[1]
        assert steps - 1 <= replays, (count, steps, replays)
    served = collector.run()
    core.shutdown()
    for i, prompt in enumerate(prompts):
        assert served[f"r{i}"].token_ids == alone(tuple(prompt), 0.0, 0, 110)


def test_live_switches_of_everything_keep_tokens() -> None:
    entries = ("suffix", *(ENTRY[method] for method in LOADED))
    core = make_core(
        max_num_seqs=6,
        max_num_spec_tokens=K,
        ngram_min=1,
        speculators=entries,
        knobs=Knobs(spec_method="mtp", num_spec_tokens=K, cuda_graphs="step"),
    )
    prompts = [random_prompt(200 + i, 20 + i) for i in range(4)]
    collector = Collector(core)
    for i, prompt in enumerate(prompts):
        collector.submit(f"r{i}", prompt, greedy(110))
    for changes in (
        {"spec_method": "eagle3"},
        {"verification": "standard"},
        {"cuda_graphs": "model", "draft_sampling": "greedy"},
        {"spec_method": "draft_model", "num_spec_tokens": 2},
        {"cuda_graphs": "step", "num_spec_tokens": 0},
        {"num_spec_tokens": K, "verification": "block"},
        {"spec_method": "suffix"},
        {"adaptive_drafts": True, "verification": "token_exact"},
        {"spec_method": "ngram", "sampler": "softmax_race"},
        {"output_copy": "main_stream"},
        {"spec_method": "off"},
    ):
        for _ in range(4):
            collector.step()
        core.set_knobs(**changes)  # type: ignore[arg-type]
    served = collector.run()
    assert stats_of(core).num_step_replays > 20
    core.shutdown()
    for i, prompt in enumerate(prompts):
        assert served[f"r{i}"].token_ids == alone(tuple(prompt), 0.0, 0, 110)


@pytest.mark.parametrize("extra", [{"logprobs": 1}, {"frequency_penalty": 0.5}, {"bad_words": [[1, 2]]}])
@pytest.mark.parametrize("method", ["ngram", "eagle3"])
def test_one_request_that_needs_more_takes_the_other_path(method: str, extra: dict[str, Any]) -> None:
    """The batch enters the graph, leaves it when the request comes, and enters it again after it."""
    outputs = []
    for graphs in ("off", "step"):
        core = step_core(method, graphs=graphs)
        collector = Collector(core)
        collector.submit("long", random_prompt(1, 20), greedy(90))
        for _ in range(6):
            collector.step()
        collector.submit("other", random_prompt(2, 12), mix(1, max_tokens=12, **extra))
        served = collector.run()
        core.shutdown()
        outputs.append([served[name].token_ids for name in ("long", "other")])
        stats = stats_of(core)
        assert graphs == "off" or 5 < stats.num_step_replays < stats.num_steps - 3
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("method", METHODS)
def test_padding_and_a_step_of_nobody_touch_nothing(method: str) -> None:
    """Padding maps to row 0: its state and drafts, and the null block, stay as they are."""
    core = step_core(method, HostDevice(poison=True), enable_prefix_caching=False)
    runner, device = core.executor.runner, core.device
    assert isinstance(runner, ModelRunnerV2)
    collector = Collector(core)
    for i in range(6):
        collector.submit(f"r{i}", random_prompt(i, BLOCK_SIZE + 3), greedy(90))
    for _ in range(4):
        collector.step()
    assert runner.state.row_of["r0"] == 0
    core.abort(["r0"])
    collector.step()
    core.drain()
    device.synchronize("test")

    def picture() -> list[torch.Tensor]:
        arena, state = runner.state.arena, runner.state
        names = ("token_ids", "total_len", "num_computed_tokens", "num_blocks", "block_table_0")
        caches = [*core.executor.kv_caches, *(c for d in core.executor.drafters for c in d.kv_caches)]
        kept = [*(arena[name][0] for name in names), state.last_sampled_tokens[0], state.draft_tokens[0]]
        return [t.clone() for t in (*kept, *(cache[0] for layer in caches for cache in layer))]

    before, replays = picture(), runner.stats.num_step_replays
    for _ in range(6):
        # five requests in a bucket of six
        collector.step()
    core.drain()
    device.synchronize("test")
    assert runner.stats.num_step_replays - replays >= 5
    for a, b in zip(before, picture(), strict=True):
        assert torch.equal(a, b) or torch.equal(a.isnan(), b.isnan())

    # what a capture runs: the upload of a step without requests
    state = runner.state
    kept = [t.clone() for t in (state.arena.words, state.last_sampled_tokens, state.draft_tokens)]
    core.executor._make_inert()
    for graph in runner.step_graphs.graphs.values():
        sent = runner.upload.post_nothing()
        device.main.run(stages.STEP_GRAPH, graph.replay)
        runner.upload.release(sent, device.main.record_event())
    device.synchronize("test")
    now = (state.arena.words, state.last_sampled_tokens, state.draft_tokens)
    assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))
    served = collector.run()
    core.shutdown()
    for i in range(1, 6):
        assert served[f"r{i}"].token_ids == alone(tuple(random_prompt(i, BLOCK_SIZE + 3)), 0.0, 0, 90)


def test_a_grammar_takes_the_other_path_and_its_drafts_reach_the_host() -> None:
    """Drafts that a copy still reads are not overwritten by the graph that comes next."""
    outputs = []
    for graphs in ("off", "step"):
        device = HostDevice(poison=True, random_delay_s=0.003, delay_streams=["grammar"], seed=3)
        core = step_core("eagle3", device, graphs=graphs, knobs={"queue_depth": 2})
        collector = Collector(core)
        collector.submit("plain", random_prompt(3, 20), greedy(60))
        collector.submit("other", random_prompt(4, 12), greedy(8))
        core.scheduler.requests["other"].grammar = AnyTokenMatcher()
        served = collector.run()
        core.shutdown()
        outputs.append([served[name].token_ids for name in ("plain", "other")])
        assert graphs == "off" or 5 < stats_of(core).num_step_replays < stats_of(core).num_steps - 3
    assert outputs[0] == outputs[1]


def test_which_keys_are_captured() -> None:
    buckets = Buckets(4, max_mixed=0, padded=True, max_uniform=9)

    def counts(**knobs: Any) -> set[tuple[int, int]]:
        keys = wanted_keys(Knobs(cuda_graphs="step", **knobs), buckets, 8)
        assert len(keys) == len(set(keys)) and {key.shape.num_reqs for key in keys} == {1, 2, 4}
        assert [key.shape.num_tokens for key in keys] == sorted((k.shape.num_tokens for k in keys), reverse=True)
        return {(key.shape.query_len - 1, key.drafted.num_next if key.drafted else 0) for key in keys}

    assert counts() == counts(spec_method="ngram", num_spec_tokens=0) == {(0, 0)}
    assert counts(spec_method="eagle3", num_spec_tokens=3) == {(0, 0), (1, 1), (3, 3), (8, 8)}
    assert counts(spec_method="mtp", num_spec_tokens=3, adaptive_drafts=True) == {(k, k) for k in (0, 1, 2, 3, 8)}
    # with a drafter that must keep step even a step without drafts is another one
    drafted = [bool(key.drafted) for key in wanted_keys(Knobs(spec_method="mtp", num_spec_tokens=0), buckets, 8)]
    assert all(drafted)


def test_requests_with_fewer_drafts_have_the_shape_of_the_others() -> None:
    knobs = Knobs(spec_method="ngram", num_spec_tokens=3)
    scheduled = decode(0, ["a", "b"], 5)
    assert padded_query_len(scheduled, knobs) == 1
    scheduled.num_draft_tokens = scheduled.num_scheduled_tokens * 0 + [0, 2]
    scheduled.num_scheduled_tokens = scheduled.num_draft_tokens + 1
    scheduled.total_tokens = 4
    assert padded_query_len(scheduled, knobs) == 4
    assert padded_query_len(scheduled, knobs.with_changes(adaptive_drafts=True)) == 3
    assert Buckets(4, max_mixed=0, padded=True, max_uniform=4).key(4, 2, 4) == GraphKey(8, 2, 4)
    # a prompt among them
    scheduled.num_scheduled_tokens = scheduled.num_scheduled_tokens + [1, 0]
    scheduled.total_tokens = 5
    assert padded_query_len(scheduled, knobs) == 0


def test_graphs_that_wait_until_they_are_asked_for_change_no_token() -> None:
    found = {}
    for warm_up in ("all", "first_use"):
        core = step_core("eagle3", warm_up=warm_up)
        graphs: Any = core.executor.runner.step_graphs  # type: ignore[attr-defined]
        at_load = len(graphs.graphs)
        served = serve(core, random_requests(30))
        found[warm_up] = {name: each.token_ids for name, each in served.items()}, at_load, len(graphs.graphs)
        assert stats_of(core).num_step_replays > 8
    assert found["all"][0] == found["first_use"][0]
    assert found["all"][1] == found["all"][2] > found["first_use"][2] > found["first_use"][1]
