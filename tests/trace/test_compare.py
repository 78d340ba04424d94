"""Two traces side by side."""

from __future__ import annotations

import numpy as np
import pytest

from mrv2.trace import TraceError
from mrv2.trace.analysis import Analysis
from mrv2.trace.compare import compare, config_diff
from trace_cases import TraceCase, sync_steps


def noisy(num_steps: int, mean: int, seed: int, first: int = 0) -> TraceCase:
    rng = np.random.default_rng(seed)
    case, at = TraceCase(), 0
    for step in range(first, first + num_steps):
        length = mean + int(rng.integers(-50, 50))
        case.range("schedule", at, at + length // 2, step)
        at += length
    return case


def test_the_same_trace_differs_in_nothing():
    trace = sync_steps(30).build()
    found = compare(trace, trace)
    assert {delta.delta for delta in found.deltas if delta.delta is not None} == {0}
    assert found.verdict.startswith("No clear difference")
    assert found.config == {} and found.notes == []


def test_a_clear_difference_is_named_in_one_sentence():
    found = compare(sync_steps(30).build(), sync_steps(30, overlap=True).build(), names=("sync", "async"))
    # both loops take 1000 ns a turn; only the last ones differ
    assert found.get("step", "exposed_ns").delta == -330
    assert found.get("step", "bubble_ns").what == "bubble_ns"
    slower = compare(noisy(40, 1000, 1).build(), noisy(40, 1500, 2).build(), names=("old", "new"))
    assert slower.verdict.startswith("A step of new is 0 us (50 %) slower than one of old (95 % interval")
    assert slower.verdict.count(".") == 1


def test_the_interval_covers_the_truth_and_is_repeatable():
    a, b = noisy(200, 1000, 1).build(), noisy(200, 1100, 2).build()
    first, second = (compare(a, b, seed=7).get("step", "wall_ns") for _ in range(2))
    assert first == second
    assert first.low <= 100 <= first.high
    assert first.is_clear
    assert first.relative == pytest.approx(0.1, abs=0.03)
    assert compare(a, b, seed=8).get("step", "wall_ns") != first


def test_steps_pair_by_number_where_both_have_it_else_by_position():
    base, shifted = sync_steps(30).build(), sync_steps(30, first=500).build()
    assert compare(base, base).align == "step_id"
    assert compare(base, shifted).align == "position"
    assert compare(base, shifted).get("step", "wall_ns").count == 29
    assert compare(base, shifted, align="step_id").get("step", "wall_ns").delta is None
    assert "cannot be compared" in compare(base, shifted, align="step_id").verdict
    with pytest.raises(TraceError, match="legal are"):
        compare(base, shifted, align="id")  # type: ignore[arg-type]


def test_pairing_removes_what_both_share():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1000, 9000, 60)

    def loop(extra: int) -> TraceCase:
        case, at = TraceCase(), 0
        for step, length in enumerate(lengths.tolist()):
            case.range("schedule", at, at + length + extra, step)
            at += length + extra
        return case

    paired = compare(loop(0).build(), loop(20).build()).get("step", "wall_ns")
    assert (paired.low, paired.delta, paired.high) == (20, 20, 20)
    loose = compare(loop(0).build(), loop(20).build(), align="none").get("step", "wall_ns")
    assert loose.high - loose.low > 500


def test_figures_without_evidence_are_none():
    bare = sync_steps(30)
    bare.rows["ops"].clear()
    bare.not_collected["ops"] = "no CUDA"
    found = compare(sync_steps(30).build(), bare.build())
    delta = found.get("step", "gpu_busy_ns")
    assert (delta.a, delta.b, delta.delta, delta.low, delta.count) == (500, None, None, None, 0)
    assert found.get("execute_model", "gpu").b is None
    assert "n/a" in str(found)


def test_stages_of_one_side_only_are_listed():
    case = sync_steps(30)
    for i in range(30):
        case.range("v1: preprocess", 1000 * i + 110, 1000 * i + 150, i)
    delta = compare(sync_steps(30).build(), case.build()).get("v1: preprocess", "host")
    assert (delta.a, delta.b, delta.delta) == (None, 40, None)
    with pytest.raises(TraceError, match="no 'host' of 'nix'"):
        compare(case.build(), case.build()).get("nix", "host")


def test_settings_that_differ_are_shown():
    a, b = sync_steps(3), sync_steps(3)
    a.meta |= {"knobs": {"runner": "v1", "depth": 2}, "granularity": "graph", "gpu_name": "A"}
    b.meta |= {"knobs": {"runner": "v2", "depth": 2}, "granularity": "node", "gpu_name": "A"}
    diff = config_diff(a.build(), b.build())
    assert diff == {"granularity": ("graph", "node"), "knobs.runner": ("v1", "v2")}
    found = compare(a.build(), b.build())
    assert found.config == diff
    assert any("granularity" in note for note in found.notes)
    assert "knobs.runner: v1 -> v2" in str(found)


def test_traces_without_steps_cannot_be_compared():
    case = TraceCase()
    case.op(0, 10)
    found = compare(case.build(), Analysis(case.build()))
    assert "cannot be compared" in found.verdict
