"""The inspector copies what the forward pass was fed, for the steps that were asked for and no others."""

from __future__ import annotations

import numpy as np
import pytest

from mrv2.config import Knobs
from mrv2.engine.service import EngineService
from mrv2.errors import ConfigError
from mrv2.sampling_params import SamplingParams
from serving import BLOCK_SIZE, Collector, make_core

PROMPTS = {"a": [5, 6, 7, 8, 9], "b": [3] * 20, "c": [11, 12]}


@pytest.mark.parametrize("runner, graphs", [("v1", "model"), ("v2", "model"), ("v2", "step")])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_inputs_of_every_step_add_up_to_the_sequences(runner: str, graphs: str, async_scheduling: bool) -> None:
    knobs = Knobs(runner=runner, cuda_graphs=graphs, async_scheduling=async_scheduling)  # type: ignore[arg-type]
    core = make_core(knobs=knobs)
    service, collector = EngineService(core), Collector(core)
    for name, prompt in PROMPTS.items():
        collector.submit(name, prompt, SamplingParams(max_tokens=6 + len(name), ignore_eos=True, seed=1))
    service.inspect(40)
    served = collector.run()
    steps = service.inspect().steps
    assert [step.step for step in steps] == list(range(len(steps)))
    fed: dict[str, dict[int, int]] = {name: {} for name in PROMPTS}
    for step in steps:
        assert step.runner == runner
        assert step.query_start_loc.tolist() == [0, *np.cumsum(step.num_scheduled).tolist()]
        assert len(set(step.rows.tolist())) == len(step.req_ids)
        for i, name in enumerate(step.req_ids):
            part = slice(step.query_start_loc[i], step.query_start_loc[i + 1])
            positions = step.positions[part].tolist()
            assert positions == list(range(positions[0], positions[-1] + 1))
            assert step.seq_lens[i] == positions[-1] + 1
            assert (step.slots[0][part] % BLOCK_SIZE).tolist() == [p % BLOCK_SIZE for p in positions]
            fed[name] |= dict(zip(positions, step.input_ids[part].tolist(), strict=True))
    for name, prompt in PROMPTS.items():
        known = prompt + served[name].token_ids
        # the last token of a sequence is never fed
        assert [fed[name][i] for i in sorted(fed[name])] == known[:-1]
    service.shutdown()


def test_only_the_asked_steps_are_inspected_and_then_nothing_stands_in_the_way() -> None:
    core = make_core()
    service, collector = EngineService(core), Collector(core)
    collector.submit("a", [1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True))
    assert service.inspect().steps == []
    assert "execute_model" not in vars(core.executor)
    service.inspect(3)
    assert "execute_model" in vars(core.executor)
    for _ in range(8):
        collector.step()
    found = service.inspect()
    assert (len(found.steps), found.num_left) == (3, 0)
    assert "execute_model" not in vars(core.executor)
    waits = core.device.waits["inspection"]
    collector.step()
    assert core.device.waits["inspection"] == waits == 3
    (held,) = found.requests
    assert len(held.block_ids) == -(-held.num_computed // found.block_size)
    with pytest.raises(ConfigError, match=r"0\.\.64"):
        service.inspect(65)
    service.shutdown()


def test_inspection_does_not_change_the_tokens() -> None:
    tokens = []
    for steps in (0, 12):
        core = make_core()
        service, collector = EngineService(core), Collector(core)
        collector.submit("a", [1, 2, 3], SamplingParams(max_tokens=16, temperature=1.0, seed=4, ignore_eos=True))
        service.inspect(steps)
        tokens.append(collector.run()["a"].token_ids)
        service.shutdown()
    assert tokens[0] == tokens[1]


def test_outputs_name_their_step_and_drafts_and_a_snapshot_says_since_when_its_knobs_are_in_force() -> None:
    core = make_core(max_num_spec_tokens=3, knobs=Knobs(spec_method="ngram", num_spec_tokens=3))
    collector = Collector(core)
    collector.submit("a", [5, 6, 7, 5, 6, 7, 5, 6], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
    for _ in range(6):
        collector.step()
    assert core.snapshot().knobs_since == 0
    core.set_knobs(spec_method="off")
    since = core.snapshot().knobs_since
    assert since == core.scheduler.step > 0
    collector.run()
    outputs = collector.served["a"].outputs
    steps = [output.step for output in outputs]
    assert steps == sorted(set(steps))  # type: ignore[type-var]  # every output has a step
    assert any(output.num_drafted for output in outputs)
    for output in outputs:
        assert len(output.new_token_ids) <= 1 + output.num_drafted
        assert output.step < since or not output.num_drafted  # type: ignore[operator]
    core.shutdown()
