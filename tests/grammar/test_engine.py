"""Structured output through the engine: every constrained text validates, nobody else notices."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from grammar.serving import Constraint, mixed_params, mixed_prompt, submit, text_of, toy_core
from mrv2.config import Knobs
from mrv2.device import make_device
from mrv2.instrument import recording, sync_guard
from mrv2.sampling_params import SamplingParams
from serving import Collector, Served

MODES = {
    "sync": Knobs(async_scheduling=False),
    "sync blocking": Knobs(async_scheduling=False, grammar_overlap="blocking"),
    "depth 1": Knobs(queue_depth=1),
    "depth 2": Knobs(),
    "depth 2 blocking": Knobs(grammar_overlap="blocking"),
    "depth 4": Knobs(queue_depth=4),
    "main stream copies": Knobs(output_copy="main_stream"),
    "host inputs": Knobs(input_prep="host"),
    "v1 sync": Knobs(runner="v1", async_scheduling=False),
    "v1 depth 2": Knobs(runner="v1"),
    "v1 blocking": Knobs(runner="v1", grammar_overlap="blocking"),
}


def run_mixed(folder: Path, num_requests: int, **options: object) -> tuple[dict[str, Served], dict[str, int]]:
    """Serve the first mixed requests, arriving over time; return what came and the named waits."""
    core = toy_core(folder, **options)
    collector = Collector(core)
    index = 0
    while index < num_requests or core.has_unfinished:
        while index < num_requests and len(core.scheduler.waiting) < 3:
            submit(collector, f"r{index}", mixed_prompt(index), mixed_params(index)[0])
            index += 1
        collector.step()
    waits = dict(core.device.waits)
    assert core.snapshot().kv_blocks_used == 0, "blocks are held after the last request"
    core.shutdown()
    return collector.served, waits


@cache
def alone(folder: Path, index: int) -> list[int]:
    """Return what request `index` yields with the engine to itself, waited for step by step."""
    core = toy_core(folder, max_num_seqs=1, enable_prefix_caching=False, knobs=Knobs(async_scheduling=False))
    collector = Collector(core)
    submit(collector, "alone", mixed_prompt(index), mixed_params(index)[0])
    served = collector.run()["alone"]
    core.shutdown()
    return served.token_ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("toy")


def check_constrained(served: Served, constraint: Constraint) -> None:
    assert served.finish_reason == "stop", served
    text = text_of(served.token_ids)
    assert constraint.accepts(text), text


@pytest.mark.parametrize("mode", MODES)
def test_constrained_outputs_validate_and_tokens_are_those_of_each_request_alone(mode: str, folder: Path) -> None:
    served, waits = run_mixed(folder, 16, knobs=MODES[mode])
    for index in range(16):
        constraint = mixed_params(index)[1]
        if constraint is not None:
            check_constrained(served[f"r{index}"], constraint)
        assert served[f"r{index}"].token_ids == alone(folder, index), f"request {index}"
    own = {wait for wait in waits if wait.startswith("v1: ")} if mode.startswith("v1") else set()
    assert set(waits) - own <= {"output"}, waits


def test_two_hundred_mixed_requests_at_depth_2_validate(folder: Path) -> None:
    served, waits = run_mixed(folder, 200, max_num_seqs=16, num_gpu_blocks=256, dtype="float32", debug_checks=False)
    for index in range(1, 200, 2):
        constraint = mixed_params(index)[1]
        assert constraint is not None
        check_constrained(served[f"r{index}"], constraint)
    assert set(waits) == {"output"}


@pytest.mark.parametrize("runner", ["v2", "v1"])
def test_late_streams_and_spoilt_memory_change_nothing(runner: str, folder: Path) -> None:
    """A mask slot or the device's mask rewritten too early would show here."""
    device = make_device("host", poison=True, random_delay_s=0.002, delay_streams=("grammar", "copy", "main"), seed=5)
    served, _ = run_mixed(folder, 10, ready=device, knobs=Knobs(runner=runner))
    for index in range(10):
        assert served[f"r{index}"].token_ids == alone(folder, index), f"request {index}"


@pytest.mark.parametrize("depth", [2, 4])
def test_steps_with_masks_wait_for_outputs_only_and_pin_nothing(depth: int, folder: Path) -> None:
    """Inside the guard any other wait, and any pinned allocation, is an error."""
    core = toy_core(folder, max_num_seqs=6, num_gpu_blocks=18, knobs=Knobs(queue_depth=depth))
    collector, index = Collector(core), 0
    for _ in range(8):
        submit(collector, f"r{index}", mixed_prompt(index), mixed_params(index)[0])
        index += 1
    collector.run()
    first = core.scheduler.step
    with sync_guard(core.device, mode="error") as guard:
        while core.scheduler.step - first < 150:
            if len(core.scheduler.waiting) < 3:
                submit(collector, f"r{index}", mixed_prompt(index), mixed_params(index)[0])
                index += 1
            collector.step()
        core.drain()
    assert not guard.violations
    assert set(guard.waits) == {"output"}
    core.abort(list(core.scheduler.requests))
    collector.run()
    core.shutdown()


def test_the_forward_is_launched_before_the_output_it_depends_on_is_waited_for(folder: Path) -> None:
    events: list[str] = []
    for overlap in ("deferred", "blocking"):
        core = toy_core(folder, knobs=Knobs(grammar_overlap=overlap))
        collector = Collector(core)
        submit(collector, "r", [5, 6, 7], mixed_params(1)[0])
        while core.scheduler.step == 0:
            collector.step()
        assert core.steps_in_flight == 1
        events.clear()
        execute, settle = core.executor.execute_model, core._settle_oldest
        core.executor.execute_model = lambda s, f=execute: (events.append("forward"), f(s))[1]
        core._settle_oldest = lambda f=settle: (events.append("wait"), f())[1]
        collector.step()
        assert events == (["forward", "wait"] if overlap == "deferred" else ["wait", "forward"])
        assert core.steps_in_flight == 1, "more than one step is launched and not waited for"
        core.shutdown()


def test_depth_falls_back_to_2_only_while_a_grammar_row_runs(folder: Path) -> None:
    core = toy_core(folder, knobs=Knobs(queue_depth=4))
    collector = Collector(core)
    submit(collector, "free", [3, 4], SamplingParams(max_tokens=80, seed=1, ignore_eos=True))
    for _ in range(4):
        collector.step()
    assert core.steps_in_flight == 3 and core.snapshot().effective_depth == 4
    submit(collector, "bound", [3, 4], mixed_params(1)[0])
    while core.snapshot().num_grammar_running == 0:
        collector.step()
    collector.step()
    while core.snapshot().num_grammar_running:
        assert core.snapshot().effective_depth == 2
        assert core.steps_in_flight <= 1, "a step may be launched only onto one that is in flight"
        collector.step()
    for _ in range(4):
        collector.step()
    assert core.snapshot().effective_depth == 4 and core.steps_in_flight == 3
    collector.run()
    core.shutdown()


def test_batches_without_grammar_rows_take_no_mask(folder: Path) -> None:
    core = toy_core(folder)
    core.executor.take_grammar_bits = None  # type: ignore[assignment,method-assign]
    collector = Collector(core)
    submit(collector, "free", [3, 4], SamplingParams(max_tokens=9, seed=1, ignore_eos=True))
    assert collector.run()["free"].finish_reason == "length"
    assert not core.grammars.compiler._kept and core.grammars.compiler._backend is None
    core.shutdown()


def test_the_mask_is_made_under_the_forward_of_its_step(folder: Path) -> None:
    """With a forward of 5 ms: launched first and still at work when the mask is done, unless blocking is asked for."""
    hidden, launched_first = {}, {}
    for overlap in ("deferred", "blocking"):
        core = toy_core(folder, knobs=Knobs(grammar_overlap=overlap))  # type: ignore[arg-type]
        forward = core.executor.model.forward

        def slow(*args: object, forward: Callable[..., object] = forward, **kwargs: object) -> object:
            time.sleep(0.005)
            return forward(*args, **kwargs)

        core.executor.model.forward = slow  # type: ignore[method-assign]
        collector = Collector(core)
        params = SamplingParams(seed=1, max_tokens=20, structured_outputs={"regex": "[a-f]{25}"})
        submit(collector, "r", [5, 6, 7], params)
        while core.scheduler.step < 2:
            collector.step()
        with recording(core.device) as rec:
            collector.run()
        spans = rec.spans()
        core.shutdown()
        assert {"grammar_upload", "apply_grammar"} <= {span.name for span in spans if span.kind == "device"}
        ends = {span.step: span.end_ns for span in spans if span.name == "forward" and span.kind == "device"}
        launches = {span.step: span.end_ns for span in spans if span.name == "execute_model"}
        fills = [
            span for span in spans if span.name == "fill_grammar_mask" and span.step in ends.keys() & launches.keys()
        ]
        assert len(fills) > 5
        hidden[overlap] = sum(fill.end_ns < ends[fill.step] for fill in fills) / len(fills)
        launched_first[overlap] = sum(launches[fill.step] < fill.start_ns for fill in fills) / len(fills)
    assert launched_first == {"deferred": 1.0, "blocking": 0.0}
    assert hidden["deferred"] > 0.8, hidden
