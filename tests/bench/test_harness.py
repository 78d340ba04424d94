"""Variants, interleaved measurement, comparisons, and the record that comes out."""

from __future__ import annotations

import json
import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.small_engine import small_core
from mrv2.bench import harness
from mrv2.bench.bandwidth import DeviceLimits, Limit, measure_limits, measure_matmul, measure_read_bandwidth
from mrv2.bench.environment import source_root
from mrv2.bench.harness import VariantResult, compare, disagreements, make_variants, measure, overlap_gain, same_tokens
from mrv2.bench.record import WorkloadResult, cost_card, headline, make_record, read_record, write_record
from mrv2.bench.serving import ServedRun, StepProfile, serve
from mrv2.bench.workloads import BenchRequest, Workload, make_workload
from mrv2.config import Knobs
from mrv2.device import make_device
from mrv2.errors import ConfigError

AXES = {"runner": ("v1", "v2"), "async_scheduling": (False, True)}
SMALL = make_workload("c", vocab_size=512, scale=16)


def served(rate: float, tokens: dict[str, list[int]] | None = None) -> ServedRun:
    found = tokens or {"0": [1, 2]}
    return ServedRun(found, sum(map(len, found.values())) / rate, 2, 0, 0, {"output": 2})


def test_variants_are_every_legal_combination() -> None:
    variants, refused = make_variants(Knobs(), {**AXES, "queue_depth": (2, 3)})
    assert len(variants) + len(refused) == 8
    # a depth of three is illegal for v1 once async
    assert [text.split(":")[0] for text in refused] == ["v1 async queue_depth=3"]
    assert len({variant.label for variant in variants}) == 7
    assert make_variants(Knobs(), {"cuda_graphs": ("off",)})[0][0].label == "v2 async graphs=off"


def test_no_legal_combination_is_an_error() -> None:
    with pytest.raises(ConfigError, match="queue_depth <= 2"):
        make_variants(Knobs(queue_depth=4), {"runner": ("v1",)})


def test_overlap_gain() -> None:
    assert overlap_gain(1.0, 1.0) == 2.0
    assert overlap_gain(1.0, 3.0) == pytest.approx(4 / 3)
    assert overlap_gain(0.0, 0.0) is None
    # a launch that goes on while the device works
    assert overlap_gain(1.0, 3.0, 0.4) == pytest.approx(1.2)


def test_comparisons_hold_all_other_knobs_equal() -> None:
    variants, _ = make_variants(Knobs(), AXES)
    rates = {"v1 sync": 10.0, "v1 async": 15.0, "v2 sync": 20.0, "v2 async": 40.0}
    results = [VariantResult(variant, [served(rates[variant.label])]) for variant in variants]
    found = {(each.knob, each.changed): each for each in compare(results, AXES)}
    assert len(found) == 4
    assert found["runner", "v2 async"].baseline == "v1 async"
    assert found["runner", "v2 async"].reached == pytest.approx(40 / 15)
    assert found["async_scheduling", "v2 async"].reached == pytest.approx(2.0)
    # without a recorded pass nothing is known of h and d
    assert found["async_scheduling", "v2 async"].expected is None


@pytest.mark.parametrize("overlap, attainable", [(None, None), (0.0, 1.3), (0.1, 1.2)])
def test_overlap_is_judged_by_passes_that_were_recorded_alike(overlap: float | None, attainable: float | None) -> None:
    """A recorder makes the host slower, so its h promises more than runs without it can show."""
    variants, _ = make_variants(Knobs(), {"async_scheduling": (False, True)})
    rates, steps = {"v2 sync": 10.0, "v2 async": 12.0}, {"v2 sync": 1.4, "v2 async": 1.0}
    results = [
        VariantResult(
            variant,
            [served(rates[variant.label])],
            StepProfile(64, steps[variant.label], 0.3, 1.0, overlap, None, {}, {}, {}, 0),
        )
        for variant in variants
    ]
    (found,) = compare(results, {"async_scheduling": (False, True)})
    assert (found.reached, found.expected, found.recorded) == pytest.approx((1.2, 1.3, 1.4))
    # without a device stage nothing is known of what overlaps already
    assert found.attainable == (attainable and pytest.approx(attainable))


def test_median_and_digest() -> None:
    variant = make_variants(Knobs(), {})[0][0]
    result = VariantResult(variant, [served(10.0), served(30.0), served(11.0)])
    assert result.rate == pytest.approx(11.0)
    assert same_tokens([result])
    other = VariantResult(variant, [served(10.0, {"0": [1, 3]})])
    assert not same_tokens([result, other])


def test_disagreements_name_the_setting_and_judge_each_request() -> None:
    small = Workload("two", "", (BenchRequest((1, 2, 3), 3), BenchRequest((4, 5), 3)), 0.0)
    with small_core(small) as core:
        run = serve(core, small.engine_requests())
        other = replace(run, tokens={**run.tokens, "1": [*run.tokens["1"][:2], (run.tokens["1"][2] + 1) % 512]})
        variants, _ = make_variants(core.knobs, {"runner": ("v1", "v2")})
        results = [VariantResult(variants[0], [run, run]), VariantResult(variants[1], [run, other, other])]
        ((label, difference),) = disagreements(core, small, results)
        record = WorkloadResult(small, cost_card(core, small), results, {}, [(label, difference)])
        found = record.as_dict(DeviceLimits(Limit(1.0, ""), Limit(1.0, "")))["differences"]
    assert label == "v2 async"
    assert (difference.req_id, difference.index) == ("1", 2)
    assert (found["num_requests"], found["num_ties"]) == (1, 0)
    assert found["worst"].startswith("v2 async, request 1, generated token 2")


def test_repetitions_are_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def fake_serve(core: object, requests: list[object]) -> ServedRun:
        order.append(knobs["now"])
        return served(1.0)

    class FakeCore:
        device = type("D", (), {"type": "host"})

        def set_knobs(self, **changes: object) -> None:
            knobs["now"] = "A" if changes["runner"] == "v1" else "B"

    knobs = {"now": ""}
    monkeypatch.setattr(harness, "serve", fake_serve)
    variants, _ = make_variants(Knobs(), {"runner": ("v1", "v2")})
    measure(FakeCore(), SMALL, variants, repetitions=3, record_stages=False)  # type: ignore[arg-type]  # only what it calls
    assert "".join(order) == "AB" + "AB" + "BA" + "AB"


def test_measure_and_record(tmp_path: Path) -> None:
    with small_core(SMALL) as core:
        variants, _ = make_variants(core.knobs, AXES)
        results = measure(core, SMALL, variants, repetitions=2)
        limits = DeviceLimits(Limit(1e10, "stated"), Limit(1e11, "stated"))
        record = make_record(core, limits, [WorkloadResult(SMALL, cost_card(core, SMALL), results, AXES, [])])
    assert same_tokens(results)
    for result in results:
        run, stages = result.last, result.profile
        assert run.num_output_tokens == SMALL.num_output_tokens
        assert run.num_steps == 32
        assert run.num_graph_replays == 0
        assert sum(run.waits.values()) >= run.num_steps, f"{result.variant.label}: {run.waits}"
        assert stages is not None and stages.num_dropped_spans == 0
        assert 0.0 < stages.host_ms < stages.step_ms and 0.0 < stages.device_ms < stages.step_ms
        assert stages.overlap is not None and 0.0 <= stages.overlap <= 1.0
        assert stages.device_idle is not None and 0.0 <= stages.device_idle <= 1.0
        assert "forward" in stages.device_stages_ms
    v1 = next(r.profile for r in results if r.variant.label == "v1 sync")
    assert v1 is not None
    assert {"v1: preprocess", "v1: forward", "v1: postprocess", "v1: sample", "v1: bookkeep"} <= set(v1.host_stages_ms)

    path = tmp_path / "folder" / "record.json"
    write_record(record, path)
    assert read_record(path) == json.loads(path.read_text(encoding="utf-8"))
    (workload,) = record["workloads"]
    assert workload["name"] == "c/16"
    assert len(workload["variants"]) == 4
    assert {c["knob"] for c in workload["comparisons"]} == set(AXES)
    assert all(c["expected"] >= 1.0 for c in workload["comparisons"] if c["knob"] == "async_scheduling")
    line = headline(record)
    assert set(line["workloads"]["c/16"]["variants"]) == {"v1 sync", "v1 async", "v2 sync", "v2 async"}
    assert "\n" not in json.dumps(line)


def test_a_record_names_no_machine() -> None:
    with small_core(SMALL) as core:
        limits = DeviceLimits(Limit(1.0, ""), Limit(1.0, ""))
        text = json.dumps(make_record(core, limits, []))
    private = [str(Path.home()), str(source_root()), str(Path.cwd())]
    # a host may be called like a word that stands in every record
    if len(platform.node()) > 5:
        private.append(platform.node())
    for name in private:
        assert name not in text


def test_every_run_does_the_same_work() -> None:
    """The prefix cache is emptied between runs."""
    small = Workload("long prompt", "", (BenchRequest(tuple(range(40)), 3),), 0.0)
    with small_core(small, max_num_batched_tokens=16) as core:
        steps = [serve(core, small.engine_requests()).num_steps for _ in range(2)]
        assert core.kv.pool.cached, "nothing was published, so nothing could have been hit"
    # three chunks of the prompt, then two decode steps
    assert steps == [5, 5]


def test_reading_something_else_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("[1]", encoding="utf-8")
    with pytest.raises(ConfigError, match="not a benchmark record"):
        read_record(path)
    path.write_text('{"kind": "mrv2-bench", "schema": 99}', encoding="utf-8")
    with pytest.raises(ConfigError, match="schema 99"):
        read_record(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_record(tmp_path / "none.json")


def test_limits_are_measured_on_the_device() -> None:
    device = make_device("host")
    try:
        read = measure_read_bandwidth(device, num_bytes=8 << 20, repetitions=3)
        matmul = measure_matmul(device, torch.float32, side=128, repetitions=3)
        assert read.value > 1e8 and "float32" in read.method
        assert matmul.value > 1e7 and "128" in matmul.method
    finally:
        device.close()


@pytest.mark.gpu
def test_limits_on_cuda_are_of_the_right_order() -> None:
    device = make_device("cuda")
    try:
        limits = measure_limits(device, torch.bfloat16)
        assert 5e10 < limits.bandwidth < 5e13
        assert 1e12 < limits.peak_flops < 1e16
    finally:
        device.close()
