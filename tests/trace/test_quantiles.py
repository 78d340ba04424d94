"""Stage durations: per step, after warm-up, with honest tails and honest blanks."""

from __future__ import annotations

import numpy as np
import pytest

from mrv2.trace import OpKind, TraceError
from mrv2.trace.analysis import Analysis
from mrv2.trace.analysis.quantiles import MIN_SAMPLES, quantile_row
from trace_cases import TraceCase, sync_steps


def test_tails_need_samples():
    few = quantile_row(np.arange(MIN_SAMPLES - 1))
    assert few == {"count": 19, "min_ns": 0, "p50_ns": 9, "p95_ns": None, "p99_ns": None, "max_ns": 18}
    enough = quantile_row(np.arange(101))
    assert (enough["p50_ns"], enough["p95_ns"], enough["p99_ns"]) == (50, 95, 99)
    assert set(quantile_row(np.empty(0)).values()) == {0, None}


def test_samples_are_sums_over_a_step_after_warm_up():
    case = sync_steps(30)
    for i in range(30):
        case.range("upload", 1000 * i + 110, 1000 * i + 120, i)
        case.range("upload", 1000 * i + 130, 1000 * i + 140 + i, i)
    stage = Analysis(case.build(), warmup=2).stages().get("upload")
    assert stage.num_calls == 2 * 28
    assert stage.steps.tolist() == list(range(2, 30))
    assert stage.samples.tolist() == [20 + i for i in range(2, 30)]


def test_a_stage_belongs_to_the_step_it_names_not_to_the_turn_it_is_in():
    stages = Analysis(sync_steps(30, overlap=True).build(), warmup=0).stages()
    # the last step's output is never waited for
    assert stages.get("wait_output").steps.tolist() == list(range(29))


def test_device_time_of_a_stage_is_what_it_submitted():
    stages = Analysis(sync_steps(30, overlap=True).build()).stages()
    assert set(stages.get("execute_model", "gpu").samples.tolist()) == {1000}
    assert len(stages.get("schedule", "gpu").samples) == 0


def test_without_steps_every_call_is_a_sample():
    case = TraceCase()
    for i in range(4):
        case.range("work", 100 * i, 100 * i + 10 + i, domain=case.pool.id("other"))
    stages = Analysis(case.build()).stages()
    assert stages.per == "call"
    assert stages.get("work").samples.tolist() == [10, 11, 12, 13]


def test_quantile_rows_name_their_columns():
    row = next(iter(Analysis(sync_steps(30).build()).stages().quantiles([0.5, 0.9])))
    assert list(row) == ["name", "where", "calls", "count", "min_ns", "p50_ns", "p90_ns", "max_ns", "note"]
    with pytest.raises(TraceError, match="between 0 and 1"):
        Analysis(sync_steps(3).build()).stages().quantiles([95])


def test_unknown_stages_read_not_collected():
    stages = Analysis(sync_steps(30).build()).stages()
    stage = stages.get("nix")
    assert len(stage.samples) == 0
    assert stage.note.startswith("not collected")


def test_stages_inside_a_graph_that_was_recorded_whole_read_not_collected():
    case = sync_steps(30)
    for row in case.rows["ops"]:
        row["kind"] = OpKind.GRAPH
    stages = Analysis(case.build()).stages()
    inside = stages.get("sample", "gpu")
    assert len(inside.samples) == 0
    assert "inside a CUDA graph that is recorded as a whole" in inside.note
    assert "upper bound" in stages.get("execute_model", "gpu").note
    assert "upper bound" not in stages.get("schedule", "gpu").note
    assert "not collected" in str(stages)


def test_stages_without_gpu_rows_read_not_collected():
    case = TraceCase()
    case.range("schedule", 0, 10, 1)
    case.not_collected["ops"] = "no CUDA"
    assert Analysis(case.build()).stages().get("forward", "gpu").note == "not collected: no GPU rows (no CUDA)"


def test_spans_of_the_recorder_are_device_stages():
    case = TraceCase()
    for i in range(25):
        case.range("schedule", 100 * i, 100 * i + 50, i)
        case.op(100 * i + 60, 100 * i + 90 + i, name="forward", kind=OpKind.STAGE, step=i)
    case.not_collected["api"] = "stages only"
    stage = Analysis(case.build()).stages().get("forward", "gpu")
    assert stage.samples.tolist() == [30 + i for i in range(1, 25)]
