"""The V1-style runner gives the tokens of V2, waits where V1 waits, and survives what a batch can go through."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from mrv2.config import Knobs
from mrv2.device import DeviceError, make_device
from mrv2.engine.core import EngineCore
from mrv2.errors import ConfigError
from mrv2.instrument import recording, stages
from mrv2.instrument.sync_guard import no_sync
from mrv2.runner.async_output import OUTPUT_WAIT
from mrv2.runner.v1.bookkeeping import TO_LIST_WAIT
from mrv2.runner.v1.cached_request import PLACEHOLDER
from mrv2.runner.v1.model_runner import BARRIER_WAIT, ModelRunnerV1
from mrv2.sampling_params import SamplingParams
from mrv2_models.model_state import DefaultModelState
from serving import Collector, Served, alone, make_core, random_prompt, serve

SYNC = Knobs(runner="v1", async_scheduling=False)
ASYNC = Knobs(runner="v1", async_scheduling=True)
MODES = {"sync": SYNC, "async": ASYNC}
# one token to several chunks of the budget of 64
LENGTHS = (1, 90, 17, 3, 64, 33, 16)


def requests(num: int = 7) -> dict[str, tuple[list[int], SamplingParams]]:
    """Return requests of mixed lengths and features."""
    params: list[dict[str, Any]] = [
        dict(temperature=0.0),
        dict(temperature=1.0, logprobs=3),
        dict(temperature=0.7, top_k=20, top_p=0.9),
        dict(temperature=1.3, min_p=0.02),
        dict(temperature=0.0, logprobs=0),
        dict(temperature=0.9, top_p=0.8),
        dict(temperature=2.0, top_k=5),
    ]
    return {
        f"r{i}": (
            random_prompt(i, LENGTHS[i]),
            SamplingParams(seed=i, max_tokens=4 + 3 * i, ignore_eos=True, **params[i]),
        )
        for i in range(num)
    }


def runner_of(core: EngineCore) -> ModelRunnerV1:
    runner = core.executor.runner
    assert isinstance(runner, ModelRunnerV1)
    return runner


def steady(core: EngineCore, num: int, max_tokens: int = 12) -> Collector:
    """Submit `num` one-chunk requests."""
    collector = Collector(core)
    for i in range(num):
        params = SamplingParams(temperature=float(i % 2), seed=i, max_tokens=max_tokens, ignore_eos=True)
        collector.submit(f"r{i}", random_prompt(i, 5 + i), params)
    return collector


def expected(num: int, max_tokens: int = 12) -> list[list[int]]:
    return [alone(tuple(random_prompt(i, 5 + i)), float(i % 2), i, max_tokens) for i in range(num)]


@pytest.fixture(scope="module")
def from_v2() -> dict[str, Served]:
    return serve(make_core(knobs=Knobs(async_scheduling=False)), requests())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("output_copy", ["side_stream", "main_stream"])
def test_tokens_and_logprobs_are_those_of_v2(mode: str, output_copy: str, from_v2: dict[str, Served]) -> None:
    device = make_device("host", poison=True, random_delay_s=0.001)
    served = serve(make_core(device, knobs=MODES[mode].with_changes(output_copy=output_copy)), requests())
    for req_id, want in from_v2.items():
        assert served[req_id].token_ids == want.token_ids
        for mine, theirs in zip(served[req_id].outputs, want.outputs, strict=True):
            assert (mine.logprobs is None) == (theirs.logprobs is None)
            for a, b in zip(mine.logprobs or [], theirs.logprobs or [], strict=True):
                assert (a.token_ids, a.sampled_rank) == (b.token_ids, b.sampled_rank)
                assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_sync_waits_for_the_list_once_a_step_and_for_nothing_else() -> None:
    core = make_core(knobs=SYNC)
    steady(core, 4).run()
    assert core.device.waits == {TO_LIST_WAIT: runner_of(core).stats.num_steps}
    core.shutdown()


def test_async_waits_at_the_barrier_and_late_for_the_output() -> None:
    core = make_core(knobs=ASYNC)
    steady(core, 4).run()
    num_steps = runner_of(core).stats.num_steps
    assert core.device.waits == {BARRIER_WAIT: num_steps, OUTPUT_WAIT: num_steps}
    core.shutdown()


@pytest.mark.parametrize("mode", MODES)
def test_no_wait_goes_unnamed(mode: str) -> None:
    core = make_core(knobs=MODES[mode])
    collector = steady(core, 3)
    wants_logprobs = SamplingParams(
        temperature=0.8, seed=1, logprobs=2, top_k=9, min_p=0.01, max_tokens=9, ignore_eos=True
    )
    collector.submit("logprobs", random_prompt(8, 70), wants_logprobs)
    for _ in range(3):
        collector.step()
    with no_sync():
        collector.run()
    assert [collector.served[f"r{i}"].token_ids for i in range(3)] == expected(3)
    core.shutdown()


@pytest.mark.parametrize("with_barrier", [True, False])
def test_the_barrier_is_what_protects_the_shared_buffers(with_barrier: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(knobs=ASYNC)
    if not with_barrier:
        monkeypatch.setattr(runner_of(core).prepare_inputs_event, "synchronize", lambda reason: None)
    collector = steady(core, 2, max_tokens=6)
    try:
        while core.has_unfinished:
            # the copies of the step to come run late
            core.device.main.run("late", time.sleep, 0.02)
            collector.step()
    except DeviceError:
        # a token that is no token, read by the embedding
        assert not with_barrier
        return
    finally:
        core.shutdown()
    tokens = [collector.served[f"r{i}"].token_ids for i in range(2)]
    assert (tokens == expected(2, 6)) == with_barrier


def test_unchanged_decodes_hand_their_tokens_over_as_one_slice_and_upload_no_ids() -> None:
    core = make_core(knobs=ASYNC)
    collector = steady(core, 3)
    collector.step()
    collector.step()
    with recording(core.device) as rec:
        collector.step()
        core.device.synchronize("test")
    names = [span.name for span in rec.spans() if span.kind == "device"]
    # block table, query_start_loc, discard, req_indices, query_pos, computed, scheduled; no input_ids
    assert names.count(stages.UPLOAD) == 7
    # slice, gather
    assert names.count(stages.PREPARE_INPUTS) == 2
    collector.run()
    stats = runner_of(core).stats.extra
    assert stats["token_slices"] > 5 and stats["token_scatters"] == 0
    core.shutdown()


def test_a_changed_batch_scatters_tokens_to_their_new_places() -> None:
    core = make_core(knobs=ASYNC)
    collector = steady(core, 4)
    for _ in range(3):
        collector.step()
    core.abort(["r0"])
    # r3 moves into row 0; behind the decodes comes a prompt
    collector.submit("late", random_prompt(9, 30), SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    collector.run()
    assert [collector.served[f"r{i}"].token_ids for i in (1, 2, 3)] == expected(4)[1:]
    assert collector.served["late"].token_ids == alone(tuple(random_prompt(9, 30)), 0.0, 0, 4)
    stats = runner_of(core).stats.extra
    assert stats["token_scatters"] > 0 and stats["row_moves"] > 0
    core.shutdown()


@pytest.mark.parametrize("mode", MODES)
def test_a_request_that_sits_out_loses_its_row_and_comes_back_whole(mode: str) -> None:
    core = make_core(
        knobs=MODES[mode], max_num_batched_tokens=16, scheduling_policy="priority", enable_prefix_caching=False
    )
    collector = Collector(core)
    prompt, long_prompt = random_prompt(1, 7), random_prompt(2, 80)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    collector.submit("patient", prompt, params, priority=1)
    for _ in range(4):
        collector.step()
    collector.submit("urgent", long_prompt, params, priority=0)
    sat_out = 0
    runner = runner_of(core)
    while core.has_unfinished:
        collector.step()
        sat_out += "patient" in runner.requests and "patient" not in runner.batch.req_id_to_index
    assert sat_out > 0, "the long prompt must have taken the whole budget of some step"
    assert collector.served["patient"].token_ids == alone(tuple(prompt), 1.0, 3, 12)
    assert collector.served["urgent"].token_ids == alone(tuple(long_prompt), 1.0, 3, 12)
    core.shutdown()


def test_arrived_tokens_replace_their_placeholders() -> None:
    core = make_core(knobs=ASYNC)
    collector = steady(core, 3)
    runner = runner_of(core)
    for _ in range(5):
        collector.step()
    assert all(state.output_token_ids[-1] == PLACEHOLDER for state in runner.requests.values())
    core.drain()
    for index, tokens in enumerate(expected(3)):
        state = runner.requests[f"r{index}"]
        row = runner.batch.req_id_to_index[state.req_id]
        assert state.output_token_ids == tokens[: len(state.output_token_ids)]
        on_host = runner.batch.token_ids_cpu[row, : runner.batch.num_tokens[row]].tolist()
        assert on_host == state.prompt_token_ids + state.output_token_ids
    collector.run()
    core.shutdown()


def test_a_reused_id_does_not_inherit_the_token_in_flight_of_its_last_owner() -> None:
    core = make_core(knobs=ASYNC)
    collector = Collector(core)
    first, second = random_prompt(1, 7), random_prompt(2, 9)
    stop = alone(tuple(first), 0.0, 0, 5)[2]
    collector.submit("r", first, SamplingParams(temperature=0.0, stop_token_ids=[stop], max_tokens=5, ignore_eos=True))
    while collector.served["r"].finish_reason is None:
        collector.step()
    assert core.steps_in_flight == 1, "the step that the stop token made vain is still to arrive"
    collector.submit("r", second, SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    assert collector.run()["r"].token_ids == alone(tuple(second), 0.0, 0, 5)
    core.shutdown()


@pytest.mark.parametrize("mode", MODES)
def test_nan_logits_end_their_request_alone(mode: str) -> None:
    core = make_core(knobs=MODES[mode])
    collector = steady(core, 3)
    model, calls = core.executor.model, 0
    compute_logits = model.compute_logits

    def spoil_row_1_once(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        logits = compute_logits(hidden)
        if calls == 4:
            logits[1] = float("nan")
        return logits

    model.compute_logits = spoil_row_1_once  # type: ignore[method-assign]  # the test's fault injection
    collector.run()
    served, want = collector.served, expected(3)
    assert (served["r1"].finish_reason, served["r1"].token_ids) == ("error", want[1][:3])
    assert [served["r0"].token_ids, served["r2"].token_ids] == [want[0], want[2]]
    core.shutdown()


@pytest.mark.parametrize("mode", MODES)
def test_a_request_is_handed_over_between_the_runners_in_mid_run(mode: str) -> None:
    core = make_core(knobs=Knobs(runner="v2"))
    collector = steady(core, 4, max_tokens=18)
    for turn in range(9):
        if turn % 3 == 2:
            runner = "v1" if core.knobs.runner == "v2" else "v2"
            core.set_knobs(runner=runner, async_scheduling=mode == "async")
        collector.step()
    collector.run()
    assert [collector.served[f"r{i}"].token_ids for i in range(4)] == expected(4, 18)
    core.shutdown()


def test_sync_and_async_alternate_in_mid_run() -> None:
    core = make_core(knobs=ASYNC)
    collector = steady(core, 4, max_tokens=18)
    for turn in range(12):
        if turn % 2:
            core.set_knobs(async_scheduling=not core.knobs.async_scheduling)
        collector.step()
    collector.run()
    assert [collector.served[f"r{i}"].token_ids for i in range(4)] == expected(4, 18)
    core.shutdown()


def test_nothing_is_left_behind() -> None:
    core = make_core(knobs=ASYNC)
    collector = steady(core, 4)
    for _ in range(4):
        collector.step()
    core.abort(["r1"])
    collector.run()
    collector.submit("last", [1, 2, 3], SamplingParams(max_tokens=1))
    collector.run()
    runner = runner_of(core)
    # the scheduler tells of a finished request with the next step
    assert list(runner.requests) == ["last"] and runner.batch.ids == ["last"]
    runner.reset()
    assert not runner.requests and runner.batch.num_reqs == 0
    core.shutdown()


def test_a_model_that_keeps_state_by_row_is_refused() -> None:
    class Recurrent(DefaultModelState):
        def add_request(self, row: int, token_ids: Any, num_computed_tokens: int) -> None:
            pass

    core = make_core(knobs=Knobs(runner="v2"))
    resources = core.executor.resources
    resources.forward.model_state = Recurrent(core.executor.model)
    with pytest.raises(ConfigError, match="Recurrent keeps state by row: use runner='v2'"):
        ModelRunnerV1(resources)
    core.shutdown()
