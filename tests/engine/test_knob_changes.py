"""A change of knobs: applied at the next step boundary, its cost reported, its graphs captured between steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest

from mrv2.config import Knobs
from mrv2.device import make_device
from mrv2.engine.core import EngineCore
from mrv2.engine.graph_capture import describe_graph
from mrv2.engine.messages import EngineRequest
from mrv2.engine.service import Command, EngineService, _serve
from mrv2.runner.forward import GraphKey
from mrv2.runner.v2.drafters.graphs import DraftKey
from mrv2.runner.v2.step_graph import StepKey
from mrv2.sampling_params import SamplingParams
from serving import Collector, alone, make_core, random_prompt
from spec.drafter_cores import drafting_core, greedy

# each value, on an engine that has whatever it needs
CHANGES = [
    {"runner": "v1"},
    {"runner": "v2"},
    {"async_scheduling": False},
    {"async_scheduling": True},
    {"queue_depth": 1},
    {"queue_depth": 2},
    {"input_prep": "host"},
    {"fetch_ahead": False},
    {"fetch_ahead": True},
    {"output_copy": "main_stream"},
    {"output_copy": "side_stream"},
    {"output_wait": "sleep"},
    {"output_wait": "spin"},
    {"sampler": "softmax_race"},
    {"sampler": "gumbel_fused"},
    {"cuda_graphs": "step"},
    {"cuda_graphs": "model"},
    {"cuda_graphs": "off"},
    {"spec_method": "ngram", "runner": "v2"},
    {"num_spec_tokens": 1},
    {"spec_method": "off"},
    {"prefill_chunk": 16},
    {"input_prep": "device"},
    {"prefill_chunk": 0},
]


def submit(collector: Collector, count: int, max_tokens: int = 40) -> list[list[int]]:
    prompts = [random_prompt(40 + i, 20 + i) for i in range(count)]
    for i, prompt in enumerate(prompts):
        collector.submit(
            f"r{i}", prompt, SamplingParams(temperature=1.0, seed=5, max_tokens=max_tokens, ignore_eos=True)
        )
    return prompts


def test_a_change_waits_for_what_is_in_flight_and_for_nothing_else() -> None:
    core = make_core(knobs=Knobs(queue_depth=2), max_num_spec_tokens=3)
    collector, rng = Collector(core), random.Random(0)
    submit(collector, 3, max_tokens=130)
    for change in CHANGES:
        for _ in range(rng.randrange(1, 6)):
            collector.step()
        step, in_flight = core.scheduler.step, core.steps_in_flight
        core.set_knobs(**change)
        snapshot = core.snapshot()
        # the step that would have come next is the first one with the new knobs
        assert snapshot.step == step == snapshot.knobs_since, change
        assert snapshot.change.num_drained == in_flight and core.steps_in_flight == 0, change
        # nothing is thrown away for it
        assert snapshot.change.num_recomputed == 0 and snapshot.capture is None, change
    assert core.snapshot().num_running == 3
    core.shutdown()


def test_a_command_waits_for_one_turn_of_the_loop_at_most() -> None:
    core = make_core()
    turns: list[str] = []
    step, asked = core.step, iter([False, False, True, False, True])

    def counted() -> list:
        turns.append("step")
        return step()

    def receive(wait: bool) -> Command | None:
        if len(turns) >= 12:
            return Command(9, "close")
        if not next(asked, False):
            return None
        turns.append("asked")
        return Command(1, "set", kwargs={"queue_depth": 2})

    def send(message: object) -> None:
        turns.append(type(message).__name__)

    params = SamplingParams(max_tokens=60, ignore_eos=True)
    core.step = counted  # type: ignore[method-assign]
    core.add_request(EngineRequest(req_id="r", prompt_token_ids=[1, 2, 3], params=params))
    _serve(EngineService(core), receive, send)
    places = [i for i, turn in enumerate(turns) if turn == "asked"]
    assert len(places) == 2 and all(turns[i + 1] == "Reply" for i in places), turns
    core.shutdown()


@pytest.mark.parametrize("method", ["eagle3", "mtp", "draft_model"])
def test_a_change_says_how_many_requests_it_recomputed_or_read_again(method: str) -> None:
    core = drafting_core(method, knobs={"spec_method": "off"})
    collector = Collector(core)
    for i in range(3):
        collector.submit(f"r{i}", random_prompt(i, 20 + i), greedy(30))
    for _ in range(6):
        collector.step()
    core.set_knobs(spec_method=method)
    change = core.snapshot().change
    assert (change.num_recomputed, change.num_caught_up) == ((0, 3) if method == "draft_model" else (3, 0))
    collector.run()
    core.set_knobs(spec_method="off")
    change = core.snapshot().change
    assert (change.num_recomputed, change.num_caught_up) == (0, 0)
    core.shutdown()


class TestCaptureBetweenSteps:
    """On this backend a graph is the work itself, called again: what it replays and when is the same."""

    @pytest.fixture
    def core(self) -> Iterator[EngineCore]:
        made = make_core(make_device("host", poison=True), max_num_seqs=12, knobs=Knobs(cuda_graphs="model"))
        # one graph a pause
        made.executor.graphs.pause_s = 0.0
        yield made
        made.shutdown()

    def test_requests_go_on_without_graphs_and_the_progress_is_seen(self, core: EngineCore) -> None:
        collector = Collector(core)
        prompts = submit(collector, 4)
        for _ in range(4):
            collector.step()
        step = core.scheduler.step
        core.set_knobs(capture="between_steps", cuda_graphs="step")
        first = core.snapshot()
        assert first.capture is not None and first.change.step == step
        assert (first.capture.num_captured, first.capture.num_graphs) == (0, first.change.num_graphs)
        assert first.change.num_graphs >= 3 and first.capture.upcoming.startswith("whole step, 12 requests")
        seen, tokens, replays = [0], 0, core.executor.runner.stats
        while (now := core.snapshot()).capture is not None:
            before = sum(len(served.token_ids) for served in collector.served.values())
            collector.step()
            tokens += sum(len(served.token_ids) for served in collector.served.values()) - before
            seen.append(now.capture.num_captured)
            assert now.capture.num_graphs == first.change.num_graphs
        assert seen == sorted(seen) and max(b - a for a, b in pairwise(seen)) == 1
        assert tokens > 0, "requests stood still meanwhile"
        collector.run()
        assert replays.num_step_replays > 0
        for i, prompt in enumerate(prompts):
            assert collector.served[f"r{i}"].token_ids == alone(tuple(prompt), 1.0, 5, 40)

    def test_an_idle_engine_has_work_until_the_last_graph_is_there(self, core: EngineCore) -> None:
        core.set_knobs(capture="between_steps", cuda_graphs="step")
        turns, num_graphs = 0, core.snapshot().change.num_graphs
        while core.has_unfinished:
            assert core.step() == []
            turns += 1
        assert turns == num_graphs and core.snapshot().capture is None
        core.set_knobs(capture="between_steps", cuda_graphs="off")
        core.set_knobs(capture="between_steps", cuda_graphs="step")
        assert not core.has_unfinished and core.snapshot().change.num_graphs == 0, "graphs are kept"

    def test_another_change_takes_the_place_of_what_was_asked_before(self, core: EngineCore) -> None:
        core.set_knobs(capture="between_steps", cuda_graphs="step")
        core.step()
        core.set_knobs(capture="between_steps", cuda_graphs="off")
        assert core.snapshot().capture is None and not core.has_unfinished
        core.set_knobs(capture="between_steps", cuda_graphs="step")
        core.step()
        core.set_knobs(queue_depth=1)
        assert core.snapshot().capture is None and not core.executor.graphs.num_missing(core.knobs)

    def test_steps_get_as_long_as_the_pause_took(self, core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = [0.0]
        monkeypatch.setattr("mrv2.engine.graph_capture.perf_counter", lambda: clock[0])
        monkeypatch.setattr(core.device, "_capture_graph", _slow_capture(core, clock, 3.0))
        collector = Collector(core)
        submit(collector, 2)
        collector.step()
        core.set_knobs(capture="between_steps", cuda_graphs="step")
        pauses = []
        while core.snapshot().capture is not None:
            before = clock[0]
            clock[0] += 1.0
            collector.step()
            if clock[0] > before + 1:
                pauses.append(before + 1)
        # three seconds of capture, three of steps
        assert {b - a for a, b in pairwise(pauses)} == {6.0}


def test_the_device_waits_as_the_knob_says() -> None:
    core = make_core(knobs=Knobs(output_wait="sleep"))
    assert core.device.sleeps
    core.set_knobs(output_wait="spin")
    assert not core.device.sleeps
    core.shutdown()


def _slow_capture(core: EngineCore, clock: list[float], seconds: float):
    capture = core.device._capture_graph

    def slow(*args: object) -> object:
        clock[0] += seconds
        return capture(*args)  # type: ignore[arg-type]

    return slow


def test_a_slice_captures_one_graph_at_least_and_ends_by_itself() -> None:
    device = make_device("host")
    made = []

    def capture_all() -> None:
        for number in range(5):
            made.append((number, device.capture(lambda: None)))

    with device.capture_slice(0.0):
        capture_all()
    assert [number for number, _ in made] == [0]
    with device.capture_slice(60.0):
        capture_all()
    assert len(made) == 6
    capture_all()
    assert device.num_captured == len(made) == 11
    with pytest.raises(ZeroDivisionError), device.capture_slice(60.0):
        raise ZeroDivisionError
    device.capture(lambda: None)
    device.close()


def test_a_graph_is_described_in_words() -> None:
    assert describe_graph(GraphKey(16, 16, 1)) == "forward, 16 requests"
    assert describe_graph(GraphKey(64, 8, 0)) == "forward, 64 tokens"
    assert describe_graph(GraphKey(4, 1, 4)) == "forward, 1 request of 4 tokens"
    assert describe_graph(StepKey(GraphKey(2, 2, 1), None)) == "whole step, 2 requests"  # type: ignore[arg-type]
    draft = DraftKey("mtp", GraphKey(2, 2, 1), 3, "greedy")
    assert describe_graph(draft) == "mtp chain of 3 drafts, 2 requests"
