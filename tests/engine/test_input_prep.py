"""The knob `input_prep`: NumPy on the host builds what kernels on the device build, and waits only to count drafts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from mrv2.config import Knobs
from mrv2.device import make_device
from mrv2.engine.core import EngineCore
from mrv2.instrument import Recorder, recording, sync_guard
from mrv2.runner.forward import Buckets, ForwardBatch
from mrv2.runner.v2.input_preparation import InputPreparation
from mrv2.sampling_params import SamplingParams
from schedule_cases import KnowingSpeculator, use_speculator
from serving import Collector, alone, make_core, random_prompt

METHODS = ("ngram", "suffix", "draft_model", "eagle3", "mtp")
DRAFTS = 3


def params(index: int, max_tokens: int = 24, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=(0.0, 0.9)[index % 2], seed=index, max_tokens=max_tokens, ignore_eos=True, **more)


def core_with(method: str, **knobs: Any) -> EngineCore:
    """An engine whose memory is poisoned and whose streams are late, with one drafter of random weights."""
    speculators = {
        "suffix": ("suffix",),
        "draft_model": ("draft_model=tiny-llama",),
        "eagle3": ("eagle3",),
        "mtp": ("mtp",),
    }
    return make_core(
        make_device("host", poison=True, random_delay_s=0.0005, seed=1),
        max_num_spec_tokens=DRAFTS,
        speculators=speculators.get(method, ()),
        suffix_documents=2,
        ngram_min=1,
        num_gpu_blocks=20,
        knobs=Knobs(spec_method=method, num_spec_tokens=DRAFTS, **knobs),  # type: ignore[arg-type]
    )


def some_requests(count: int = 5) -> Iterator[tuple[str, list[int], SamplingParams]]:
    """Prompts of one token to six chunks, of which some begin alike."""
    for index in range(count):
        yield f"r{index}", random_prompt(index % 4, 90)[: 1 + (37 * index) % 90], params(index)


def say(core: EngineCore, *, each: int = 2) -> dict[str, Any]:
    """Serve requests that arrive one after the other; return tokens, steps and reasons of everything said."""
    collector = Collector(core)
    for req_id, prompt, sampling in some_requests():
        collector.submit(req_id, prompt, sampling)
        for _ in range(each):
            collector.step()
    collector.run()
    return {
        name: [(o.new_token_ids, o.step, o.num_drafted, o.finish_reason) for o in served.outputs]
        for name, served in collector.served.items()
    }


class Both:
    """Lets the host prepare a step, then the device, and compares the buffers; what the device made is computed."""

    def __init__(self, core: EngineCore) -> None:
        inputs = core.executor.runner.inputs  # type: ignore[union-attr]
        self.main = core.device.main
        self.host: InputPreparation = inputs.ways["host"]
        self.device: InputPreparation = inputs.ways["device"]
        inputs.ways["host"] = self
        self.differences: list[str] = []
        # how many steps were compared; had prompts; had drafts; were padded
        self.steps = self.prompts = self.drafts = self.padded = 0

    def __getattr__(self, verb: str) -> Any:
        return getattr(self.host, verb)

    def submit(self, scheduled: Any, rows: Any, batch: Any, forward_batch: ForwardBatch, logits_indices: Any, *prefill):
        """Device work in order: garbage, host's inputs, a copy, garbage, the device's inputs, the comparison."""
        b, copies = forward_batch, {}
        named = {
            "positions": b.positions,
            "seq_lens": b.seq_lens,
            "table": b.block_tables[0],
            "slot": b.slot_mappings[0],
        }
        named["ids"] = b.input_ids[: scheduled.total_tokens]
        if not b.uniform_decode:
            named["logits"] = logits_indices
        for way in (self.host, self.device):
            self.main.run("garbage", fill, [*named.values()], -77)
            way.submit(scheduled, rows, batch, forward_batch, logits_indices, *prefill)
            if way is self.host:
                self.main.run("copy", lambda: copies.update({name: t.clone() for name, t in named.items()}))
        self.main.run("compare", compare, copies, named, scheduled.step, self.differences)
        self.steps += 1
        self.prompts += bool(prefill[0])
        self.drafts += bool(scheduled.num_draft_tokens.any())
        self.padded += b.seq_lens.shape[0] > scheduled.num_reqs


def fill(tensors: list[torch.Tensor], value: int) -> None:
    for tensor in tensors:
        tensor.fill_(value)


def compare(host: dict[str, torch.Tensor], device: dict[str, torch.Tensor], step: int, differences: list[str]) -> None:
    for name, tensor in device.items():
        if not torch.equal(host[name], tensor):
            differences.append(f"step {step}: {name} of the host {host[name]}, of the device {tensor}")


@pytest.mark.parametrize("seed", range(12))
def test_the_host_builds_what_the_device_builds(seed: int) -> None:
    """Bit for bit, over batches of prompts, chunks, decodes and verifications, padded as on CUDA."""
    rng = np.random.default_rng(seed)
    drafting = seed % 3 > 0
    knobs = Knobs(
        input_prep="host",
        spec_method="ngram" if drafting else "off",
        async_scheduling=seed % 4 > 0,
        queue_depth=1 + seed % 4,
        num_spec_tokens=1 + seed % DRAFTS,
    )
    device = make_device("host", poison=True, random_delay_s=0.0005, seed=seed)
    core = make_core(device, max_num_seqs=5, num_gpu_blocks=14, max_num_spec_tokens=DRAFTS, ngram_min=1, knobs=knobs)
    core.executor.forward.buckets = Buckets(5, max_mixed=64, padded=True, max_uniform=1 + DRAFTS)
    knowing = KnowingSpeculator(seed)
    if drafting:
        use_speculator(core, "ngram", knowing)
    both = Both(core)
    collector = Collector(core)
    for index in range(9):
        prompt = random_prompt(int(rng.integers(3)), 90)[: int(rng.integers(1, 90))]
        sampling = params(index, int(rng.integers(1, 20)))
        if drafting:
            knowing.sequences.append([*prompt, *alone(tuple(prompt), sampling.temperature, index, 20)])
        collector.submit(f"r{index}", prompt, sampling)
        for _ in range(int(rng.integers(4))):
            collector.step()
        if rng.random() < 0.2:
            core.abort([f"r{int(rng.integers(index + 1))}"])
    collector.run()
    core.shutdown()
    assert not both.differences, both.differences[:3]
    assert both.steps == core.scheduler.step and both.prompts and both.padded
    assert bool(both.drafts) == bool(core.scheduler.stats.drafts.num_drafted) == drafting
    if drafting:
        assert 0 < core.scheduler.stats.drafts.num_wasted < sum(core.scheduler.stats.drafts.num_drafted)


@pytest.mark.parametrize("verification", ["token_exact", "standard", "block"])
@pytest.mark.parametrize("method", METHODS)
def test_every_drafter_and_verification_says_the_same(method: str, verification: str) -> None:
    """Also with a temperature, where drafts are drawn: the steps are the same, whoever prepares them."""
    said = []
    for prep in ("device", "host"):
        core = core_with(method, verification=verification, draft_sampling="sampled", input_prep=prep)
        said.append(say(core))
        assert sum(core.scheduler.stats.drafts.num_drafted) > 0
        assert core.device.waits["accepted tokens"] == 0 or prep == "host"
        core.shutdown()
    assert said[0] == said[1]


def test_accepted_drafts_of_a_synthetic_rate_are_counted_the_same() -> None:
    """Rates that accept much move a request by another number of tokens in every step."""
    said = []
    for prep in ("device", "host"):
        core = make_core(
            max_num_spec_tokens=DRAFTS,
            benchmark=True,
            synthetic_acceptance=(0.9, 0.8, 0.6),
            ngram_min=1,
            knobs=Knobs(spec_method="ngram", verification="synthetic", queue_depth=3, input_prep=prep),  # type: ignore[arg-type]
        )
        said.append(say(core))
        core.shutdown()
    assert said[0] == said[1]


def waits_of(knobs: Knobs, *, num_steps: int = 120) -> tuple[dict[str, int], int]:
    """Return what steps of a mix under the guard waited for, and how many of them came after a step with drafts."""
    core = make_core(max_num_seqs=6, num_gpu_blocks=16, max_num_spec_tokens=DRAFTS, ngram_min=1, knobs=knobs)
    if knobs.drafting:
        # something to verify in every step: what is proposed is wrong, and that is known a step later
        use_speculator(core, "ngram", Always())
    collector, index, drafted = Collector(core), 0, [False]
    execute = core.executor.execute_model

    def counted(scheduled: Any) -> None:
        execute(scheduled)
        drafted.append(bool(scheduled.num_draft_tokens.any()))

    core.executor.execute_model = counted  # type: ignore[method-assign]
    for index in range(6):
        collector.submit(f"r{index}", random_prompt(index, 3 + (13 * index) % 80), params(index))
    collector.run()
    device, before, first = core.device, dict(core.device.waits), len(drafted)
    with sync_guard(device, mode="error") as guard:
        while len(drafted) - first < num_steps:
            if len(core.scheduler.waiting) < 3:
                index += 1
                collector.submit(f"r{index}", random_prompt(index % 7, 3 + (13 * index) % 80), params(index))
            collector.step()
        core.drain()
    assert not guard.violations
    assert core.scheduler.stats.num_preemptions > 0, "no step preempted: the mix is too tame"
    waits = {reason: count - before.get(reason, 0) for reason, count in device.waits.items()}
    assert waits == {reason: guard.waits[reason] for reason in waits}
    core.abort(list(core.scheduler.requests))
    collector.run()
    core.shutdown()
    return {reason: count for reason, count in waits.items() if count}, sum(drafted[first - 1 : first - 1 + num_steps])


class Always:
    """Proposes token 7 everywhere; device code."""

    def propose(self, state: Any, idx_mapping: torch.Tensor, _sampled: Any, num_draft_tokens: int, _max: int) -> None:
        rows = idx_mapping[idx_mapping >= 0].long()
        state.draft_tokens[rows] = -1
        state.draft_tokens[rows, :num_draft_tokens] = 7


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_without_drafts_the_host_waits_for_outputs_only(depth: int) -> None:
    waits, _ = waits_of(Knobs(input_prep="host", queue_depth=depth))
    assert set(waits) == {"output"}


@pytest.mark.parametrize("depth", [2, 4])
def test_with_drafts_it_waits_once_for_what_each_step_of_them_accepted(depth: int) -> None:
    waits, num_after_drafts = waits_of(Knobs(input_prep="host", queue_depth=depth, spec_method="ngram"))
    assert set(waits) == {"output", "accepted tokens"}
    assert waits["accepted tokens"] == num_after_drafts > 60
    # the device needs no such number
    waits, _ = waits_of(Knobs(queue_depth=depth, spec_method="ngram"))
    assert set(waits) == {"output"}


def test_a_synchronous_host_has_the_number_already() -> None:
    waits, num_after_drafts = waits_of(Knobs(input_prep="host", async_scheduling=False, spec_method="ngram"))
    assert set(waits) == {"output"} and num_after_drafts > 60


def recorded(core: EngineCore) -> Recorder:
    with recording(core.device) as recorder:
        say(core)
        core.device.synchronize("end of the recording")
    core.shutdown()
    return recorder


def test_the_host_builds_inside_execute_model_once_a_step() -> None:
    core = core_with("ngram", input_prep="host")
    spans = recorded(core).spans()
    outer, built, waits = (
        sorted((s.start_ns, s.end_ns, s.step) for s in spans if s.kind != "device" and s.name == name)
        for name in ("execute_model", "build_inputs", "wait: accepted tokens")
    )
    assert len(built) == len(outer) == core.scheduler.step and waits
    for (begin, end, step), inner in zip(outer, built, strict=True):
        assert begin <= inner[0] <= inner[1] <= end and inner[2] == step
    # it waits before it builds
    starts = {step: begin for begin, _, step in built}
    assert all(end <= starts[step] for _, end, step in waits)
    assert not [s for s in spans if s.name == "gather_block_tables"]


def test_the_device_builds_without_the_host() -> None:
    assert not [s for s in recorded(core_with("off", input_prep="device")).spans() if s.name == "build_inputs"]


def test_whole_steps_are_replayed_only_where_the_device_prepares() -> None:
    core = make_core(knobs=Knobs(cuda_graphs="step", input_prep="host"))
    assert core.snapshot().capture is None and not core.executor.graphs.num_missing(core.knobs)
    collector, stats = Collector(core), core.executor.runner.stats
    collector.submit("r", random_prompt(0, 10), params(0, 60))
    for _ in range(20):
        collector.step()
    assert stats.num_step_replays == 0
    core.set_knobs(input_prep="device")
    for _ in range(20):
        collector.step()
    replayed = stats.num_step_replays
    assert replayed > 10
    core.set_knobs(input_prep="host")
    collector.run()
    assert stats.num_step_replays == replayed
    assert collector.served["r"].token_ids == alone(tuple(random_prompt(0, 10)), 0.0, 0, 60)
    core.shutdown()


@pytest.mark.parametrize("method", ["off", "ngram", "mtp", "draft_model"])
def test_a_switch_drains_and_throws_nothing_away(method: str) -> None:
    core = core_with(method)
    collector, turn = Collector(core), 0
    for req_id, prompt, sampling in some_requests():
        collector.submit(req_id, prompt, sampling)
    while core.has_unfinished:
        collector.step()
        turn += 1
        if turn % 3 == 0:
            rows = {r.req_id: r.num_confirmed for r in core.scheduler.running}
            core.set_knobs(input_prep=("host", "device")[turn // 3 % 2])
            change = core.snapshot().change
            assert change.num_recomputed == change.num_caught_up == 0
            assert all(r.num_confirmed >= rows.get(r.req_id, 0) for r in core.scheduler.running)
    core.shutdown()
    for req_id, prompt, sampling in some_requests():
        want = alone(tuple(prompt), sampling.temperature, sampling.seed or 0, sampling.max_tokens or 0)
        assert collector.served[req_id].token_ids == want, req_id


def test_runner_v1_keeps_its_rows_whatever_the_knob_says() -> None:
    core = make_core(knobs=Knobs(runner="v1"))
    collector = Collector(core)
    collector.submit("r", random_prompt(0, 10), params(0))
    for _ in range(4):
        collector.step()
    core.set_knobs(input_prep="host")
    assert all(r.has_row for r in core.scheduler.running)
    with recording(core.device) as recorder:
        collector.run()
    assert not [s for s in recorder.spans() if s.name == "build_inputs"]
    core.shutdown()
