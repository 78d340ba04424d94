"""Whole decode steps as CUDA graphs: the tokens of the other levels, no waits, late captures, memory as sized."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from guarded import guarded_steps, violations
from mrv2.config import EngineConfig, Knobs
from mrv2.engine.core import EngineCore
from mrv2.engine.messages import CaptureTime
from mrv2.sampling_params import SamplingParams
from schedule_cases import MAX_TOKENS, draw_case, on_device, run_case
from serving import Collector, alone, make_core, random_prompt

pytestmark = pytest.mark.gpu

GPU: dict[str, Any] = {"device": "cuda", "dtype": "float32"}
SAMPLERS = ("gumbel_two_pass", "gumbel_fused", "softmax_race", "gumbel_blocked", "torch_sort")
MIX: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8, "min_p": 0.05},
)


def serve_mix(knobs: Knobs) -> tuple[list[list[int]], int]:
    core = make_core(max_num_seqs=6, knobs=knobs, **GPU)
    collector = Collector(core)
    for i in range(5):
        params = SamplingParams(seed=i, max_tokens=20 + 5 * i, ignore_eos=True, **MIX[i])
        collector.submit(f"r{i}", random_prompt(i, 9 + 7 * i), params)
    served = collector.run()
    replays = core.executor.runner.stats.num_step_replays
    core.shutdown()
    return [served[f"r{i}"].token_ids for i in range(5)], replays


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_level_yields_the_same_tokens(sampler: str) -> None:
    off = Knobs(cuda_graphs="off", sampler=sampler)  # type: ignore[arg-type]
    want, _ = serve_mix(off)
    for level, depth in (("model", 2), ("step", 1), ("step", 2), ("step", 4)):
        got, replays = serve_mix(off.with_changes(cuda_graphs=level, queue_depth=depth))
        assert got == want, (level, depth)
        assert (replays > 30) == (level == "step")


@pytest.mark.parametrize("seed", range(16))
def test_tokens_do_not_depend_on_the_schedule(seed: int) -> None:
    """Among the seeds is every drafter; switches, which capture much, are a test of their own."""
    case = draw_case(seed)
    axes = {"delays": False, "switches": False, "cuda_graphs": "step", "drafter": on_device(case.axes["drafter"])}
    run_case(replace(case, axes=case.axes | axes), options=GPU)


@pytest.mark.parametrize("depth", [2, 4])
def test_three_hundred_steps_wait_for_outputs_only(depth: int) -> None:
    core = make_core(max_num_seqs=6, knobs=Knobs(queue_depth=depth, cuda_graphs="step"), **GPU)
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
    assert not violations(guard)
    assert set(guard.waits) == {"output"}
    assert core.executor.runner.stats.num_step_replays - replays > 200
    core.abort(list(core.scheduler.requests))
    collector.run()
    core.shutdown()


@pytest.mark.parametrize("capture", ["now", "between_steps"])
def test_late_captures_leave_running_requests_alone(capture: CaptureTime) -> None:
    prompts = [random_prompt(200 + i, 20 + i) for i in range(4)]
    want = [alone(tuple(p), 1.0, 5, MAX_TOKENS, options=tuple(GPU.items())) for p in prompts]
    core = make_core(knobs=Knobs(cuda_graphs="off"), **GPU)
    # one graph in each pause between two steps
    core.executor.graphs.pause_s = 0.0
    collector = Collector(core)
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=1.0, seed=5, max_tokens=MAX_TOKENS, ignore_eos=True)
        collector.submit(f"r{i}", prompt, params)
    for changes in (
        {"cuda_graphs": "step"},
        {"sampler": "gumbel_fused"},
        {"cuda_graphs": "model"},
        {"cuda_graphs": "step", "sampler": "softmax_race"},
        {"output_copy": "main_stream", "output_wait": "sleep"},
    ):
        collector.step()
        collector.step()
        core.set_knobs(capture=capture, **changes)
    served = collector.run()
    assert core.snapshot().capture is None and not core.executor.graphs.num_missing(core.knobs)
    if capture == "now":
        # between steps the graphs may come when most tokens are out
        assert core.executor.runner.stats.num_step_replays > 5
    core.shutdown()
    assert [served[f"r{i}"].token_ids for i in range(4)] == want


@pytest.mark.parametrize(("method", "num_reqs"), [("off", 256), ("eagle3", 64), ("draft_model", 64)])
def test_memory_stays_where_it_was_sized(method: str, num_reqs: int) -> None:
    """A full batch, with graphs of the most expensive draws, and of drafts: the pool was sized for it."""
    drafting: dict[str, Any] = {}
    if method != "off":
        entry = {"eagle3": "eagle3", "draft_model": "draft_model=tiny-qwen3"}[method]
        drafting = {"speculators": (entry,), "max_num_spec_tokens": 3}
    config = EngineConfig(
        model="tiny-qwen3",
        device="cuda",
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=num_reqs,
        gpu_memory_utilization=0.1,
        knobs=Knobs(
            cuda_graphs="step",
            sampler="gumbel_two_pass",
            spec_method=method,
            draft_sampling="sampled",  # type: ignore[arg-type]
        ),
        **drafting,
    )
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    core = EngineCore(config)
    collector = Collector(core)
    params = SamplingParams(temperature=0.9, top_k=30, top_p=0.8, min_p=0.01, max_tokens=40, ignore_eos=True)
    for i in range(num_reqs):
        collector.submit(f"r{i}", random_prompt(i, 100, core.executor.vocab_size), params)
    collector.run()
    # of 40 tokens a request, up to four a step with drafts
    assert core.executor.runner.stats.num_step_replays > (20 if method == "off" else 10)
    total = torch.cuda.get_device_properties(0).total_memory
    assert torch.cuda.max_memory_allocated() <= 0.1 * total
    core.shutdown()
