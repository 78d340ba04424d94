"""Assertions on traces: they hold where the statement is true, and fail where it is false or unknown."""

from __future__ import annotations

import pytest

from mrv2.trace import OpKind, SyncType, Trace, WaitKind
from mrv2.trace.analysis import Analysis
from mrv2.trace.assertions import TraceAssertionError, assert_max_bubble, assert_no_sync, assert_overlap
from mrv2.trace.methods import TraceMethods
from trace_cases import MAIN, PROCESS, WORKER, TraceCase, sync_steps


def fails(match: str):
    return pytest.raises(TraceAssertionError, match=match)


def test_a_loop_without_other_waits_passes_and_one_with_fails():
    case = sync_steps(5, overlap=True)
    assert_no_sync(case.build(), allow=["output"])
    case.range("prepare_inputs", 2110, 2150, 2)
    case.sync(2120, 2130)
    with fails("1 host waits .allowed: output.: step 2: cudaStreamSynchronize in execute_model > prepare_inputs"):
        assert_no_sync(case.build(), allow=["output"])


def test_the_message_lists_the_first_and_counts_the_rest():
    with fails("30 host waits .allowed: none.: step 0: .*; step 4: .*; and 25 more$"):
        assert_no_sync(sync_steps(30).build())


@pytest.mark.parametrize(
    "pattern", ["output", "out*", "cudaEventSynchronize", "wait_output", "wait: output", "thread:engine"]
)
def test_waits_are_allowed_by_reason_call_range_or_thread(pattern):
    case = sync_steps(5)
    case.thread_names[PROCESS, MAIN] = "engine"
    assert_no_sync(case.build(), allow=[pattern])
    with fails("5 host waits"):
        assert_no_sync(case.build(), allow=["something else"])


def test_short_stalls_can_be_tolerated_but_not_unknown_ones():
    case = sync_steps(5)
    assert_no_sync(case.build(), min_stall_ns=411)
    with fails("5 host waits"):
        assert_no_sync(case.build(), min_stall_ns=410)
    case.call("cudaMalloc", 110, 120)
    with fails("cudaMalloc in execute_model, stall unknown"):
        assert_no_sync(case.build(), min_stall_ns=411)


def test_a_range_narrows_the_question():
    case = sync_steps(5)
    assert_no_sync(case.build(), within="execute_model")
    with fails("5 host waits"):
        assert_no_sync(case.build(), within="wait_output")
    with fails("no range named 'nix' was collected"):
        assert_no_sync(case.build(), within="nix")


def test_other_threads_count_only_when_asked():
    case = sync_steps(5, overlap=True)
    case.sync(2120, 2130, thread=WORKER)
    assert_no_sync(case.build(), allow=["output"])
    with fails("1 host waits"):
        assert_no_sync(case.build(), allow=["output"], all_threads=True)


def test_unrecorded_calls_are_no_proof():
    case = TraceCase()
    case.range("schedule", 0, 100, 1)
    case.not_collected |= {"api": "stages only", "syncs": "stages only"}
    with fails("CUDA calls were not collected .stages only."):
        assert_no_sync(case.build())


def test_named_waits_are_proof_enough_only_if_the_caller_says_so():
    case = TraceCase()
    case.range("schedule", 0, 100, 1)
    case.not_collected["api"] = "stages only"
    with fails("stages only"):
        assert_no_sync(case.build())
    assert_no_sync(case.build(), named_waits_suffice=True)
    case.wait(10, 20, WaitKind.NAMED)
    case.add("syncs", "wait: v1: to_list", 10, 20, thread=MAIN, sync_type=SyncType.NAMED)
    with fails("wait: v1: to_list"):
        assert_no_sync(case.build(), named_waits_suffice=True)


def test_lost_records_and_missing_steps_are_no_proof():
    case = sync_steps(5, overlap=True)
    case.diagnostics.append("profiler error: 12 CUPTI records were dropped")
    for check in (
        lambda trace: assert_no_sync(trace, allow=["output"]),
        lambda trace: assert_overlap(trace, at_least=0),
        lambda trace: assert_max_bubble(trace, max_ns=10**9),
    ):
        with fails("the recording is incomplete"):
            check(case.build())
    case = TraceCase()
    case.launch(0, 10, (20, 30))
    with fails("steps not collected"):
        assert_no_sync(case.build())


def test_lost_calls_are_no_proof():
    case = sync_steps(5, overlap=True)
    for i in range(5):
        case.op(10_000 + 100 * i, 10_050 + 100 * i)
    with fails("only 50.0 % of the GPU operations have their call"):
        assert_no_sync(case.build(), allow=["output"])
    assert_no_sync(case.build(), allow=["output"], min_coverage=0.5)


def test_overlap_of_all_work_and_of_one_stage():
    # the first turn has nothing to overlap with
    analysis = Analysis(sync_steps(30, overlap=True).build(), window=(1000, 29000))
    assert_overlap(analysis, at_least=1.0)
    assert_overlap(analysis, "schedule", at_least=1.0)
    with fails("overlap of the CPU work at least 90.0 %: it is 2"):
        assert_overlap(sync_steps(30).build(), at_least=0.9)
    with fails("overlap of schedule at least 10.0 %: it is 0.0 %"):
        assert_overlap(sync_steps(30).build(), "schedule", at_least=0.1)


def test_overlap_without_evidence_fails():
    case = TraceCase()
    case.range("schedule", 0, 100, 1)
    case.not_collected["ops"] = "no CUDA"
    with fails("GPU activity was not collected .no CUDA."):
        assert_overlap(case.build(), at_least=0)
    case = TraceCase()
    case.op(0, 100)
    with fails("no host work was recorded"):
        assert_overlap(case.build(), at_least=0)


def test_limits_on_bubbles():
    trace = sync_steps(30).build()
    analysis = Analysis(trace, min_bubble_ns=100)
    assert_max_bubble(analysis, max_ns=500, p95_ns=500, step_p95_ns=500)
    with fails("longest bubble at most 499 ns: one at 720 lasts 500 ns, mostly host:"):
        assert_max_bubble(analysis, max_ns=499)
    with fails("95th percentile of 29 bubbles at most 499 ns: it is 500 ns; most of it: "):
        assert_max_bubble(analysis, p95_ns=499)
    with fails("95th percentile of the bubbles in 29 steps"):
        assert_max_bubble(analysis, step_p95_ns=499)
    with pytest.raises(ValueError, match="at least one"):
        assert_max_bubble(analysis)
    with fails("GPU activity was not collected"):
        assert_max_bubble(TraceCase().build(), max_ns=1)


def test_no_bubbles_satisfy_any_limit():
    case = TraceCase()
    case.op(0, 100)
    assert_max_bubble(case.build(), max_ns=0, p95_ns=0)
    with fails("steps not collected"):
        assert_max_bubble(case.build(), step_p95_ns=10)


def test_device_stages_are_evidence_of_overlap():
    case = sync_steps(5, overlap=True)
    for row in case.rows["ops"]:
        row |= {"kind": OpKind.STAGE, "corr": -1}
    assert_overlap(Analysis(case.build(), window=(1000, 4000)), at_least=1.0)


class Asking(Trace, TraceMethods):
    """A trace with the methods, whether or not `Trace` brings them itself."""


def test_traces_answer_the_same_questions_as_methods():
    trace = Asking(**vars(sync_steps(30, overlap=True).build()))
    trace.assert_no_sync(allow=["output"])
    trace.assert_max_bubble(max_ns=0)
    with fails("it is 9"):
        trace.assert_overlap(at_least=1.0)
    assert len(trace.stages()) > 0
    assert len(trace.sync_points()) == 29
    assert trace.bubbles().total_ns == 0
    assert trace.overview().overlap_cpu > 0.9
    assert trace.analyze() is trace.analyze()
    assert len(trace.steps(step_name="schedule")) == 30
    assert "No clear difference" in trace.compare(trace).verdict
