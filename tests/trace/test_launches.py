"""Launch figures, and the rules by which operations find their calls."""

from __future__ import annotations

import math

from mrv2.trace import SyncType
from mrv2.trace.analysis import Analysis
from trace_cases import PROCESS, SIDE, STREAM, TraceCase, sync_steps


def rows(case: TraceCase) -> list[dict]:
    return Analysis(case.build()).launches().rows()


def test_delays_of_a_launch_on_an_empty_stream():
    case = TraceCase()
    case.launch(100, 130, (150, 200))
    row = rows(case)[0]
    assert (row["api_ns"], row["start_delay_ns"], row["queue_delay_ns"]) == (30, 50, 20)
    assert (row["queue_wait_ns"], row["launch_latency_ns"], row["queued"]) == (0, 50, 0)


def test_an_operation_may_start_before_its_call_returns():
    case = TraceCase()
    case.launch(200, 230, (215, 225))
    row = rows(case)[0]
    assert (row["start_delay_ns"], row["queue_delay_ns"], row["launch_latency_ns"]) == (15, 0, 15)


def test_waiting_behind_earlier_work_is_told_from_latency():
    case = TraceCase()
    case.launch(0, 10, (20, 500))
    case.launch(100, 110, (505, 600))
    row = rows(case)[1]
    # 390 behind the first kernel, 5 after it
    assert (row["queue_delay_ns"], row["queue_wait_ns"]) == (395, 390)
    # the stream was not empty when the call returned
    assert row["launch_latency_ns"] is None
    assert row["queued"] == 1


def test_work_on_another_stream_is_not_ahead():
    case = TraceCase()
    case.launch(0, 10, (20, 500), stream=SIDE)
    case.launch(100, 110, (120, 600))
    assert (rows(case)[1]["launch_latency_ns"], rows(case)[1]["queued"]) == (20, 0)


def test_an_awaited_event_is_ahead():
    case = TraceCase()
    case.launch(0, 10, (20, 500), stream=SIDE)
    record = case.call("cudaEventRecord", 12, 14)
    case.sync(50, 55, SyncType.STREAM_WAIT, stream=STREAM, event_stream=SIDE, event_corr=record)
    case.launch(100, 110, (510, 600))
    row = rows(case)[1]
    assert (row["queue_wait_ns"], row["launch_latency_ns"]) == (390, None)


def test_a_graph_is_one_launch():
    case = TraceCase()
    case.launch(0, 50, (60, 70), (75, 85), (80, 95), graph_id=1)
    found = rows(case)
    assert len(found) == 1
    assert (found[0]["num_ops"], found[0]["api_ns"], found[0]["queue_delay_ns"]) == (3, 50, 10)
    assert found[0]["intra_gap_ns"] == 5


def test_run_ahead_in_steps():
    assert {row["run_ahead"] for row in rows(sync_steps(6))} == {0}
    assert [row["run_ahead"] for row in rows(sync_steps(6, overlap=True))] == [0, 1, 1, 1, 1, 1]
    case = TraceCase()
    case.launch(0, 1, (2, 3))
    assert math.isnan(Analysis(case.build()).launches().run_ahead[0])


def test_a_repeated_correlation_id_means_the_nearest_earlier_call():
    case = TraceCase()
    for start in (0, 1000, 2000):
        case.call("cudaLaunchKernel", start, start + 10, corr=5)
    case.op(1100, 1200, 5)
    case.op(2100, 2200, 5)
    analysis = Analysis(case.build())
    assert analysis.join.call.tolist() == [1, 2]
    assert analysis.join.num_ambiguous == 2
    assert any("correlation id" in line for line in analysis.banners())


def test_operations_join_calls_of_their_own_process_only():
    case = TraceCase()
    case.call("cudaLaunchKernel", 0, 10, corr=5, process=PROCESS + 1)
    case.op(20, 30, 5)
    case.op(40, 50, 5, process=PROCESS + 1)
    assert Analysis(case.build()).join.call.tolist() == [-1, 0]


def test_correlation_ids_may_be_as_large_as_addresses():
    case = TraceCase()
    for process in (PROCESS, PROCESS + 1):
        case.call("cudaLaunchKernel", 0, 10, corr=2**62, process=process)
        case.op(20, 30, 2**62, process=process)
    analysis = Analysis(case.build())
    calls = analysis.join.call
    assert analysis.trace.api.process[calls].tolist() == analysis.trace.ops.process.tolist()


def test_without_calls_or_operations_there_are_no_launches():
    case = TraceCase()
    case.op(0, 10)
    assert Analysis(case.build()).launches() is None
    assert Analysis(TraceCase().build()).launches() is None
