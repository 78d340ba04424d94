"""V2 waits for nothing but the output of an earlier step."""

from __future__ import annotations

import pytest

from mrv2.config import Knobs
from mrv2.instrument import sync_guard
from mrv2.sampling_params import SamplingParams
from serving import Collector, make_core, random_prompt

PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.05, seed=1, max_tokens=17, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=2, max_tokens=25, logprobs=3, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=11, ignore_eos=True),
)


def feed(collector: Collector, index: int) -> None:
    prompt = random_prompt(index % 7, 3 + (13 * index) % 80)
    collector.submit(f"r{index}", prompt, PARAMS[index % len(PARAMS)])


@pytest.mark.parametrize("depth", [2, 4])
def test_three_hundred_mixed_steps_wait_for_outputs_only(depth: int) -> None:
    core = make_core(max_num_seqs=6, num_gpu_blocks=16, knobs=Knobs(queue_depth=depth))
    collector = Collector(core)
    for index in range(8):
        feed(collector, index)
    collector.run()

    first, index = core.scheduler.step, 8
    with sync_guard(core.device, mode="error") as guard:
        while core.scheduler.step - first < 300:
            if len(core.scheduler.waiting) < 3:
                feed(collector, index)
                index += 1
            if index % 11 == 0:
                core.abort([f"r{index - 2}"])
            collector.step()
        core.drain()
    assert not guard.violations
    assert set(guard.waits) == {"output"}
    assert guard.waits["output"] <= 300
    assert core.scheduler.stats.num_preemptions > 0, "no step preempted: the mix is too tame"
    core.abort(list(core.scheduler.requests))
    collector.run()
    core.shutdown()


def test_an_output_is_waited_for_only_after_the_next_step_was_launched() -> None:
    core = make_core(knobs=Knobs(queue_depth=2))
    collector = Collector(core)
    collector.submit("r", random_prompt(0, 10), PARAMS[0])
    collector.step()
    assert core.steps_in_flight == 1 and core.device.waits["output"] == 0
    collector.step()
    assert core.scheduler.step == 2 and core.device.waits["output"] == 1
    collector.run()
    core.shutdown()


def test_v2_sync_waits_once_a_step() -> None:
    core = make_core(knobs=Knobs(async_scheduling=False))
    collector = Collector(core)
    collector.submit("r", random_prompt(0, 10), PARAMS[0])
    collector.run()
    assert dict(core.device.waits) == {"output": core.scheduler.step}
    core.shutdown()
