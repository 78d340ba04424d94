"""Level `step` of the knob `cuda_graphs`: the same tokens, one submission a step, and nothing touched but the batch.

The host backend runs what a graph would hold as one item of the stream's queue, on the same fixed buffers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from guarded import guarded_steps
from mrv2.config import Knobs
from mrv2.device.host import HostDevice
from mrv2.instrument import recording, stages
from mrv2.runner.protocol import NewRequest, RowSampling, SchedulerOutput
from mrv2.runner.v2.model_runner import ModelRunnerV2
from mrv2.runner.v2.variants import DrawPlan, graph_plans
from mrv2.sampling_params import SamplingParams
from mrv2_kernels.state.mailbox import Mailbox, fetch_step
from serving import BLOCK_SIZE, Collector, alone, make_core, random_prompt

STEP = Knobs(cuda_graphs="step")
MIX = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 1.3, "min_p": 0.1},
)


def mix(index: int, **changes: Any) -> SamplingParams:
    chosen: dict[str, Any] = {"temperature": 0.0} | MIX[index % len(MIX)] | changes
    return SamplingParams(seed=index, ignore_eos=True, **chosen)


def serve_mix(knobs: Knobs, device: HostDevice | None = None, **options: Any) -> tuple[list[list[int]], ModelRunnerV2]:
    """Serve one request of each kind of sampling, of different lengths, so that the batch shrinks as it goes."""
    core = make_core(device, max_num_seqs=6, knobs=knobs, **options)
    collector = Collector(core)
    for i in range(6):
        collector.submit(f"r{i}", random_prompt(i, 9 + 7 * i), mix(i, max_tokens=20 + 5 * i))
    served = collector.run()
    core.shutdown()
    return [served[f"r{i}"].token_ids for i in range(6)], core.executor.runner  # type: ignore[return-value]


@pytest.mark.parametrize("sampler", ["gumbel_two_pass", "gumbel_fused", "softmax_race", "gumbel_blocked", "torch_sort"])
def test_every_sampler_draws_the_same_tokens(sampler: str) -> None:
    knobs = Knobs(sampler=sampler)  # type: ignore[arg-type]
    want, _ = serve_mix(knobs)
    got, runner = serve_mix(knobs.with_changes(cuda_graphs="step"))
    assert got == want
    assert runner.stats.num_step_replays > 30


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("late", ["copy", "main"])
def test_late_streams_and_poisoned_memory_change_nothing(depth: int, late: str) -> None:
    want, _ = serve_mix(Knobs())
    device = HostDevice(poison=True, random_delay_s=0.002, delay_streams=[late], seed=depth)
    got, runner = serve_mix(STEP.with_changes(queue_depth=depth), device)
    assert got == want and runner.stats.num_step_replays > 30


def serve_and_count(
    monkeypatch: pytest.MonkeyPatch, knobs: Knobs, device: HostDevice
) -> tuple[list[list[int]], int, int]:
    """Return the tokens, the steps whose words had been brought by the step before, and all steps of graphs."""
    was_peeked = []

    def spy(words: torch.Tensor, mailbox: Mailbox, peeked: torch.Tensor, *rest: torch.Tensor) -> None:
        was_peeked.append(int(peeked[-1]) == int(mailbox.turn[1]))
        fetch_step(words, mailbox, peeked, *rest)

    monkeypatch.setattr("mrv2.runner.v2.step_work.fetch_step", spy)
    tokens, runner = serve_mix(knobs, device)
    assert len(was_peeked) == runner.stats.num_step_replays > 30
    return tokens, sum(was_peeked), len(was_peeked)


def test_a_host_that_is_ahead_tells_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that waits for each step, nor without the knob; the tokens are the same."""
    want, _ = serve_mix(Knobs())
    late = dict(random_delay_s=0.004, delay_streams=["main"], poison=True)
    got, num_peeked, num_steps = serve_and_count(monkeypatch, STEP, HostDevice(**late, seed=1))  # type: ignore[arg-type]
    assert got == want and num_peeked > num_steps / 4
    for knobs in (STEP.with_changes(fetch_ahead=False), STEP.with_changes(queue_depth=1)):
        got, num_peeked, _ = serve_and_count(monkeypatch, knobs, HostDevice(**late, seed=2))  # type: ignore[arg-type]
        assert got == want and not num_peeked


def test_every_batch_has_a_graph_of_its_kind() -> None:
    for variant in ("gumbel_two_pass", "gumbel_fused", "softmax_race", "gumbel_blocked", "torch_sort"):
        kinds = graph_plans(variant)
        for bits in range(16):
            has_greedy, is_scaled, is_truncated, all_truncated = (bool(bits >> i & 1) for i in range(4))
            plan = DrawPlan(variant, has_greedy, is_scaled, is_truncated, all_truncated)
            graph = plan.for_graph()
            assert graph in kinds
            # what the batch needs is launched
            assert graph.has_greedy and not graph.all_truncated and graph.is_truncated == is_truncated
            assert graph.is_scaled or not is_scaled or variant != "gumbel_two_pass"
            # and what it does not need is not
            assert graph.is_scaled == is_truncated or is_scaled


@pytest.mark.parametrize(
    "extra",
    [
        {"logprobs": 1},
        {"frequency_penalty": 0.5},
        {"logit_bias": {3: 1.0}},
        {"bad_words": [[1, 2]]},
        {"prompt_logprobs": 1},
    ],
)
def test_one_request_that_needs_more_takes_the_other_path_and_leaves_the_same_state(extra: dict[str, Any]) -> None:
    """The batch enters the graph, leaves it when the request comes, and enters it again after it."""
    outputs = []
    for knobs in (Knobs(), STEP):
        core = make_core(knobs=knobs)
        collector = Collector(core)
        collector.submit("long", random_prompt(1, 20), mix(2, max_tokens=60))
        for _ in range(8):
            collector.step()
        collector.submit("other", random_prompt(2, 12), mix(1, max_tokens=15, **extra))
        served = collector.run()
        stats = core.executor.runner.stats
        core.shutdown()
        outputs.append([served[name].token_ids for name in ("long", "other")])
        if knobs is STEP:
            # "other" is there for some 17 of about 62 steps
            assert 30 < stats.num_step_replays < stats.num_steps - (1 if "prompt_logprobs" in extra else 13)
    assert outputs[0] == outputs[1]


def test_v1_serves_under_it() -> None:
    got, _ = serve_mix(STEP.with_changes(runner="v1"))
    assert got == serve_mix(Knobs())[0]


def test_a_decode_step_is_one_submission() -> None:
    core = make_core(knobs=STEP)
    collector = Collector(core)
    collector.submit("r", random_prompt(1, 5), mix(2, max_tokens=40))
    for _ in range(3):
        collector.step()
    with recording(core.device) as recorder:
        first = core.scheduler.step
        for _ in range(20):
            collector.step()
        core.drain()
        core.device.synchronize("test")
        spans = recorder.spans()
    last = core.scheduler.step
    for step in range(first, last):
        mine = [span.name for span in spans if span.kind == "device" and span.step == step]
        assert sorted(mine) == sorted([stages.STEP_GRAPH, stages.OUTPUT_COPY]), (step, mine)
    collector.run()
    core.shutdown()


def test_three_hundred_steps_wait_for_outputs_only() -> None:
    core = make_core(max_num_seqs=6, knobs=STEP.with_changes(queue_depth=3))
    collector = Collector(core)

    def feed(index: int) -> None:
        collector.submit(f"r{index}", random_prompt(index % 7, 5 + index % 30), mix(index, max_tokens=33))

    for i in range(4):
        collector.submit(f"warm{i}", random_prompt(i, 10), mix(i, max_tokens=9))
    collector.run()
    replays = core.executor.runner.stats.num_step_replays
    guard = guarded_steps(collector, feed, 300)
    assert set(guard.waits) == {"output"} and not guard.violations
    assert core.executor.runner.stats.num_step_replays - replays > 200
    core.abort(list(core.scheduler.requests))
    collector.run()
    core.shutdown()


def decode(step: int, names: list[str], computed: int, **changes: Any) -> SchedulerOutput:
    ones = np.ones(len(names), dtype=np.int32)
    return SchedulerOutput(
        step=step,
        freed_req_ids=[],
        new_requests=[],
        req_ids=names,
        num_scheduled_tokens=ones,
        num_computed_tokens=computed * ones,
        yields_token=ones.astype(np.bool_),
        num_draft_tokens=0 * ones,
        new_block_ids={},
        total_tokens=len(names),
        **changes,
    )


def test_no_replay_overwrites_what_a_late_copy_still_reads() -> None:
    """One step more than the queue holds is launched before any output is fetched: fails with a ring of queue depth."""
    prompt, names = tuple(random_prompt(5, 6)), ["a", "b", "c"]
    device = HostDevice(poison=True, random_delay_s=0.01, delay_streams=["copy"], seed=1)
    core = make_core(device, knobs=STEP.with_changes(queue_depth=4))
    runner = core.executor.runner
    prefill = decode(0, names, 0)
    prefill.num_scheduled_tokens = np.full(3, len(prompt), dtype=np.int32)
    prefill.total_tokens = 3 * len(prompt)
    prefill.new_requests = [
        NewRequest(
            req_id=name,
            token_ids=np.array(prompt, dtype=np.int32),
            prompt_len=len(prompt),
            num_computed_tokens=0,
            block_ids=([1 + i],),
            sampling=RowSampling(temperature=1.0, seed=i),
        )
        for i, name in enumerate(names)
    ]
    runner.execute_model(prefill)
    tokens = [runner.sample_tokens().get().sampled_token_ids]
    flying = []
    for step in range(runner.max_queue_depth + 1):
        runner.execute_model(decode(1 + step, names, len(prompt) + step))
        flying.append(runner.sample_tokens())
    assert runner.stats.num_step_replays == len(flying) == 5
    tokens += [output.get().sampled_token_ids for output in flying]
    core.shutdown()
    for i in range(3):
        assert [int(step[i, 0]) for step in tokens] == alone(prompt, 1.0, i, 6)


def test_padding_and_a_step_of_nobody_touch_nothing() -> None:
    """Padding maps to row 0: its state, and the null block that padding rows name, stay as they are."""
    core = make_core(HostDevice(poison=True), max_num_seqs=6, knobs=STEP, enable_prefix_caching=False)
    runner, device = core.executor.runner, core.device
    assert isinstance(runner, ModelRunnerV2)
    collector = Collector(core)
    for i in range(6):
        collector.submit(f"r{i}", random_prompt(i, BLOCK_SIZE + 3), mix(i, max_tokens=40))
    for _ in range(4):
        collector.step()
    row = runner.state.row_of["r0"]
    assert row == 0
    core.abort(["r0"])
    collector.step()
    core.drain()
    device.synchronize("test")

    def picture() -> list[torch.Tensor]:
        arena = runner.state.arena
        names = ("token_ids", "total_len", "num_computed_tokens", "num_blocks", "block_table_0")
        null_blocks = [cache[0] for caches in core.executor.kv_caches for cache in caches]
        return [t.clone() for t in (*(arena[name][0] for name in names), runner.state.last_sampled_tokens[0])] + [
            block.clone() for block in null_blocks
        ]

    before, replays = picture(), runner.stats.num_step_replays
    for _ in range(9):
        # five requests in a bucket of six
        collector.step()
    core.drain()
    device.synchronize("test")
    assert runner.stats.num_step_replays - replays >= 8
    assert all(
        torch.equal(
            a,
            b,
        )
        or torch.equal(a.isnan(), b.isnan())
        for a, b in zip(before, picture(), strict=True)
    )

    # what a capture runs: a step without requests
    words, history = runner.state.arena.words.clone(), runner.state.last_sampled_tokens.clone()
    core.executor._make_inert()
    for graph in runner.step_graphs.graphs.values():
        sent = runner.upload.post_nothing()
        device.main.run(stages.STEP_GRAPH, graph.replay)
        runner.upload.release(sent, device.main.record_event())
    device.synchronize("test")
    assert torch.equal(words, runner.state.arena.words) and torch.equal(history, runner.state.last_sampled_tokens)
    served = collector.run()
    for i in range(1, 6):
        if not set(MIX[i]) - {"temperature"}:
            want = alone(tuple(random_prompt(i, BLOCK_SIZE + 3)), MIX[i].get("temperature", 0.0), i, 40)
            assert served[f"r{i}"].token_ids == want
    core.shutdown()


def test_a_step_that_is_too_large_for_the_mailbox_is_copied() -> None:
    want, _ = serve_mix(Knobs())
    core = make_core(HostDevice(poison=True), max_num_seqs=6, knobs=STEP)
    runner = core.executor.runner
    assert isinstance(runner, ModelRunnerV2)
    # room for a step that stages nothing
    runner.upload.mail_words = runner.upload.header + 1
    collector = Collector(core)
    for i in range(6):
        collector.submit(f"r{i}", random_prompt(i, 9 + 7 * i), mix(i, max_tokens=20 + 5 * i))
    with recording(core.device) as recorder:
        served = collector.run()
        core.device.synchronize("test")
        names = [span.name for span in recorder.spans() if span.kind == "device"]
    core.shutdown()
    assert [served[f"r{i}"].token_ids for i in range(6)] == want
    assert runner.stats.num_step_replays > 30
    # more copies than steps with prompts, fewer than steps
    assert runner.stats.num_steps - runner.stats.num_step_replays < names.count(stages.UPLOAD) < runner.stats.num_steps


def test_the_knob_may_change_while_requests_run() -> None:
    prompts = [random_prompt(40 + i, 20 + i) for i in range(4)]
    core = make_core(knobs=Knobs())
    collector = Collector(core)
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
        collector.submit(f"r{i}", prompt, params)
    replays = []
    for level in ("step", "off", "step", "model", "step"):
        for _ in range(5):
            collector.step()
        replays.append(core.executor.runner.stats.num_step_replays)
        core.set_knobs(cuda_graphs=level)
    served = collector.run()
    core.shutdown()
    assert replays[0] == 0 < replays[1] == replays[2] < replays[3] == replays[4]
    for i, prompt in enumerate(prompts):
        assert served[f"r{i}"].token_ids == alone(tuple(prompt), 1.0, 5, 40)
