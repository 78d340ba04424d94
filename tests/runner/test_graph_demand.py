"""warm_up="first_use": few graphs at load, the others when a step asks for them, and the same tokens."""

from __future__ import annotations

from typing import Literal

import pytest

from mrv2.config import EngineConfig, Knobs
from mrv2.engine.startup_clock import StartupClock
from mrv2.errors import ConfigError
from mrv2.runner.graph_demand import GraphDemand
from mrv2.runner.v2.model_runner import ModelRunnerV2
from mrv2.sampling_params import SamplingParams
from serving import Collector, make_core, random_prompt

STEP = Knobs(cuda_graphs="step")


def serve(warm_up: Literal["first_use", "all"], num_reqs: int = 11) -> tuple[list[list[int]], ModelRunnerV2, int]:
    """Serve requests that end one by one, so that every bucket is met; return tokens, runner, graphs at load."""
    core = make_core(max_num_seqs=12, knobs=STEP, warm_up=warm_up, num_gpu_blocks=128)
    runner = core.executor.runner
    assert isinstance(runner, ModelRunnerV2)
    at_load, collector = len(runner.step_graphs.graphs), Collector(core)
    for i in range(num_reqs):
        params = SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=8 + 4 * i, ignore_eos=True)
        collector.submit(f"r{i}", random_prompt(i, 9 + i), params)
    served = collector.run()
    core.shutdown()
    return [served[f"r{i}"].token_ids for i in range(num_reqs)], runner, at_load


def test_late_captures_change_no_token_and_are_replayed() -> None:
    want, eager, all_graphs = serve("all")
    got, lazy, first_graphs = serve("first_use")
    assert got == want
    assert first_graphs < all_graphs == len(eager.step_graphs.graphs)
    late = len(lazy.step_graphs.graphs) - first_graphs
    assert 0 < late < all_graphs - first_graphs, "what no step asked for is not captured"
    # every key costs the steps up to the next boundary, the rest is replayed
    assert lazy.stats.num_step_replays >= eager.stats.num_step_replays - late


def test_the_largest_and_the_smallest_shape_come_first() -> None:
    core = make_core(max_num_seqs=12, knobs=STEP, warm_up="first_use")
    graphs = core.executor.runner.step_graphs  # type: ignore[attr-defined]
    shapes = {key.shape.num_reqs for key in graphs.graphs}
    assert shapes == {1, 12}
    core.shutdown()


def test_nothing_stays_asked_for() -> None:
    """A key that cannot be captured must not make every later step try again."""
    core = make_core(knobs=STEP, warm_up="first_use")
    core.executor.graph_demand.ask("no such key")
    Collector(core).submit("r", random_prompt(0, 9), SamplingParams(max_tokens=3, ignore_eos=True))
    core.step()
    assert not core.executor.graph_demand.asked
    core.shutdown()


def test_demand_selects_first_and_asked_in_order() -> None:
    lazy, eager = GraphDemand(lazy=True), GraphDemand(lazy=False)
    lazy.ask(3)
    eager.ask(3)
    keys = [9, 5, 3, 2, 1]
    assert lazy.missing(keys, first=(9, 1), captured=(9,)) == [3, 1]
    assert eager.missing(keys, first=(9, 1), captured=(9,)) == [5, 3, 2, 1] and not eager.asked


def test_an_unknown_warm_up_names_the_legal_ones() -> None:
    with pytest.raises(ConfigError, match="'first_use' or 'all'"):
        EngineConfig(model="tiny-llama", warm_up="some")  # type: ignore[arg-type]


def test_parts_of_a_start_exclude_the_parts_inside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("mrv2.engine.startup_clock.perf_counter", lambda: now[0])
    clock = StartupClock()
    with clock.part("outer"):
        now[0] += 2
        with clock.part("inner"):
            now[0] += 5
        now[0] += 1
    with clock.part("inner"):
        now[0] += 7
    assert clock.seconds == {"outer": 3, "inner": 12}
