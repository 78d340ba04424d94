"""Where steps begin and end, and what each row says."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv2.trace import OpKind
from mrv2.trace.analysis import Analysis
from trace_cases import MAIN, PROCESS, WORKER, TraceCase, sync_steps


def test_a_turn_reaches_from_schedule_to_the_next_schedule():
    steps = Analysis(sync_steps(3, first=5).build()).steps()
    assert steps.step.tolist() == [5, 6, 7]
    assert steps.start.tolist() == [0, 1000, 2000]
    # the last turn ends with its last range
    assert steps.end.tolist() == [1000, 2000, 2860]


def test_ranges_of_an_earlier_step_do_not_open_a_turn():
    steps = Analysis(sync_steps(3, overlap=True).build()).steps()
    assert steps.start.tolist() == [0, 1000, 2000]
    assert steps.end.tolist() == [1000, 2000, 2440]


def test_without_schedule_the_first_range_of_a_higher_step_opens_a_turn():
    case = TraceCase()
    for i, step in enumerate((4, 5, 4, 6, 5)):
        case.range("work", 100 * i, 100 * i + 50, step)
    steps = Analysis(case.build()).steps()
    assert steps.step.tolist() == [4, 5, 6]
    assert steps.start.tolist() == [0, 100, 300]


def test_repeated_schedule_of_one_step_is_one_turn():
    case = TraceCase()
    for i, step in enumerate((1, 1, 2)):
        case.range("schedule", 100 * i, 100 * i + 50, step)
    assert Analysis(case.build()).steps().start.tolist() == [0, 200]


def test_an_idle_server_is_in_no_step():
    case = sync_steps(2)
    later = 1_000_000_000
    case.range("schedule", later, later + 100, 2)
    steps = Analysis(case.build()).steps()
    assert steps.end.tolist() == [1000, 1860, later + 100]


def test_a_range_can_be_a_step_or_open_one():
    case = TraceCase()
    for i in range(3):
        case.range("decode", 100 * i, 100 * i + 60, domain=case.pool.id("other"))
    trace = case.build()
    assert Analysis(trace, step_name="decode").steps().end.tolist() == [60, 160, 260]
    assert Analysis(trace, step_name="decode", step_span="turn").steps().end.tolist() == [100, 200, 260]
    assert Analysis(trace, step_name="decode").steps().step.tolist() == [0, 1, 2]


def test_steps_of_other_tools_and_engines_are_known():
    for name, ends in (("ProfilerStep#3", [60]), ("step", [60]), ("llm_engine step: get_output", [90])):
        case = TraceCase()
        case.range(name, 0, 60, domain=case.pool.id("default"))
        case.range("other", 70, 90, domain=case.pool.id("default"))
        steps = Analysis(case.build()).steps()
        assert steps.end.tolist() == ends, name
    assert Analysis(_named("ProfilerStep#3")).steps().step.tolist() == [3]


def _named(name: str):
    case = TraceCase()
    case.range(name, 0, 60, domain=case.pool.id("default"))
    return case.build()


def test_unmarked_steps_say_why():
    steps = Analysis(_named("work")).steps()
    assert len(steps) == 0
    assert "pass step_name=" in steps.source
    assert "no range is named 'nix'" in Analysis(_named("work"), step_name="nix").steps().source
    bare = TraceCase()
    bare.not_collected["ranges"] = "no NVTX"
    assert "no NVTX" in Analysis(bare.build()).steps().source


def test_synchronous_steps_expose_their_cpu_work():
    steps = Analysis(sync_steps(30).build()).steps()
    row = steps.rows()[3]
    # stages: 300 up to the wait, 10 after it, 100 of update; 5 before the named wait begins
    assert row["cpu_ns"] == 300 + 5 + 10 + 100
    assert row["gpu_busy_ns"] == 500
    # 80 of execute_model, 5 around the wait
    assert row["overlap_cpu"] == 85 / 415
    assert row["exposed_ns"] == 330
    assert row["syncs"] == 1
    assert row["sync_stall_ns"] == 410
    assert row["run_ahead"] == 0
    assert row["own_gpu_ns"] == 500


def test_overlapped_steps_run_ahead():
    steps = Analysis(sync_steps(30, overlap=True).build()).steps()
    row = steps.rows()[5]
    assert row["overlap_cpu"] == 1
    assert row["exposed_ns"] == row["bubble_ns"] == row["sync_stall_ns"] == 0
    assert row["run_ahead"] == 1
    # what runs inside the window, and what the step submitted
    assert row["gpu_busy_ns"] == row["own_gpu_ns"] == 1000


def test_run_ahead_of_recordings_without_calls_is_read_where_the_turn_begins():
    for overlap, expected in ((False, [0] * 6), (True, [0, 1, 1, 1, 1, 1])):
        case = sync_steps(6, overlap=overlap)
        case.rows["api"].clear()
        for i, row in enumerate(case.rows["ops"]):
            row |= {"corr": -1, "kind": OpKind.STAGE, "step": i}
        steps = Analysis(case.build()).steps()
        assert steps.run_ahead.tolist() == expected
        assert steps.launches is None


def test_figures_without_evidence_are_none():
    case = TraceCase()
    case.range("schedule", 0, 100, 1)
    case.not_collected |= {"ops": "no CUDA", "api": "no CUDA", "syncs": "no CUDA"}
    row = Analysis(case.build()).steps().rows()[0]
    assert row["cpu_ns"] == 100
    missing = ("gpu_busy_ns", "overlap_cpu", "exposed_ns", "bubble_ns", "syncs", "run_ahead", "launches", "own_gpu_ns")
    assert {name: row[name] for name in missing} == dict.fromkeys(missing)


def test_work_of_all_engine_threads_is_united():
    case = TraceCase()
    case.range("schedule", 0, 100, 1)
    case.range("forward", 50, 150, 1, thread=WORKER)
    case.launch(60, 70, (200, 300), thread=WORKER)
    case.launch(20, 30, (180, 190))
    steps = Analysis(case.build(), window=(0, 300)).steps()
    # the worker's range lies outside the turn of the main thread from 100 on
    assert steps.cpu_ns.tolist() == [100]
    only_main = Analysis(case.build(), engine_threads=[(PROCESS, MAIN)])
    assert only_main.cpu_work().measure == 100
    assert Analysis(case.build(), window=(0, 300)).cpu_work().measure == 150


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 8), st.booleans(), st.integers(0, 400))
def test_turns_partition_the_window(num_steps, overlap, shift):
    analysis = Analysis(sync_steps(num_steps, overlap=overlap).build(), min_bubble_ns=1 + shift)
    steps, figures = analysis.steps(), analysis.overview().devices[0]
    for column, whole in (
        ("wall_ns", figures.window_ns),
        ("cpu_ns", figures.cpu_work_ns),
        ("gpu_busy_ns", figures.busy_ns),
        ("exposed_ns", figures.exposed_ns),
        ("idle_both_ns", figures.idle_both_ns),
        ("bubble_ns", figures.bubble_ns),
        ("micro_gap_ns", figures.micro_gap_ns),
    ):
        assert int(np.sum(getattr(steps, column))) == whole, column


def test_rows_print_and_select():
    steps = Analysis(sync_steps(4).build()).steps()
    assert steps.window(slice(1, 3)) == (1000, 3000)
    assert len(steps.take(slice(1, 3))) == 2
    assert "wall us" in str(steps)
