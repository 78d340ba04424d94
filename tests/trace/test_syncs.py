"""The sync table: what a wait costs, which waits there are, and which row stands for several events."""

from __future__ import annotations

import math

import pytest

from mrv2.trace import CopyKind, MemoryKind, OpKind, SyncType, WaitKind
from mrv2.trace.analysis import Analysis, stream_edges
from trace_cases import MAIN, PROCESS, SIDE, STREAM, WORKER, TraceCase, sync_steps


def rows(case: TraceCase, **settings) -> list[dict]:
    return Analysis(case.build(), **settings).syncs().rows()


def waiting(start: int, end: int, kind: SyncType = SyncType.STREAM, **columns) -> TraceCase:
    """Return a kernel [20, 100), a wait [start, end) for it, and a launch at 300 that runs from 320."""
    case = TraceCase()
    case.launch(0, 10, (20, 100))
    case.sync(start, end, kind, **columns)
    case.launch(300, 310, (320, 400))
    return case


def test_stall_latency_and_induced_bubble():
    row = rows(waiting(50, 130))[0]
    assert (row["stall_ns"], row["return_latency_ns"], row["induced_bubble_ns"]) == (50, 30, 220)
    assert (row["duration_ns"], row["ready"], row["scope"]) == (80, 100, "stream")
    assert (row["queued_before"], row["queued_after"]) == (1, 0)


def test_a_wait_for_finished_work_costs_no_more_than_itself():
    row = rows(waiting(150, 180))[0]
    assert (row["stall_ns"], row["return_latency_ns"], row["induced_bubble_ns"]) == (0, 30, 30)


def test_the_first_operation_of_anyone_cuts_the_bubble():
    case = waiting(50, 130)
    case.launch(140, 145, (150, 160), thread=WORKER, stream=SIDE)
    assert rows(case)[0]["induced_bubble_ns"] == 50
    # a device that still works has no bubble
    case = waiting(50, 130)
    case.launch(5, 8, (90, 250), thread=WORKER, stream=SIDE)
    assert rows(case)[0]["induced_bubble_ns"] == 0


def test_a_thread_that_submits_no_more_induces_nothing():
    case = TraceCase()
    case.launch(0, 10, (20, 100))
    case.sync(50, 130)
    assert rows(case)[0]["induced_bubble_ns"] is None


def test_the_scope_decides_what_is_awaited():
    def ready(kind: SyncType, **columns) -> int:
        case = TraceCase()
        case.launch(0, 10, (20, 100))
        case.launch(12, 14, (30, 150), stream=SIDE)
        # submitted after the event was recorded
        case.launch(18, 19, (100, 120))
        case.sync(40, 200, kind, **columns)
        case.call("cudaEventRecord", 15, 17, corr=77)
        return int(rows(case)[0]["ready"])

    assert ready(SyncType.STREAM, stream=STREAM) == 120
    assert ready(SyncType.STREAM, stream=SIDE) == 150
    assert ready(SyncType.CONTEXT) == 150
    assert ready(SyncType.EVENT, event_stream=STREAM, event_corr=77) == 100
    # nothing tells which event: the last operation that ended before the wait returned
    assert ready(SyncType.EVENT) == 150


def test_work_submitted_later_is_not_awaited():
    case = waiting(50, 400)
    case.launch(60, 70, (100, 390), thread=WORKER)
    assert rows(case)[0]["ready"] == 100


def test_dearest_first():
    case = sync_steps(4)
    case.launch(5000, 5010, (5020, 5030))
    bubbles = [row["induced_bubble_ns"] for row in rows(case)]
    assert bubbles == sorted(bubbles, reverse=True)


def test_stream_waits_are_edges_and_no_host_waits():
    case = waiting(50, 130)
    case.sync(150, 155, SyncType.STREAM_WAIT, stream=SIDE, event_stream=STREAM)
    assert len(rows(case)) == 1
    edges = stream_edges(Analysis(case.build()))
    assert [(edge["stream"], edge["event_stream"]) for edge in edges] == [(SIDE, STREAM)]


def test_reading_a_value_is_one_row():
    case = TraceCase()
    case.launch(0, 10, (20, 100))
    case.copy(30, 40, (101, 103))
    case.sync(42, 120)
    case.launch(200, 210, (220, 230))
    row = rows(case)[0]
    assert (row["name"], row["kind"], row["via"]) == ("cudaStreamSynchronize", "framework", "Memcpy DtoH")
    assert (row["start"], row["ready"], row["stall_ns"]) == (42, 103, 61)
    # with pageable memory the copy itself waits
    case.rows["ops"][1]["dst_kind"] = MemoryKind.PAGEABLE
    found = rows(case)
    assert [(row["start"], row["end"], row["stall_ns"]) for row in found] == [(30, 120, 73)]


def test_a_copy_and_a_later_wait_are_not_one_row():
    case = TraceCase()
    case.copy(30, 40, (50, 60))
    case.launch(41, 42, (70, 100))
    case.sync(43, 120)
    case.copy(130, 135, (140, 150), stream=SIDE)
    case.sync(151, 160)
    assert [row["kind"] for row in rows(case)] == ["explicit", "explicit"]


def test_a_torch_operator_that_reads_is_one_row():
    case = TraceCase()
    domain = case.pool.id("cpu_op")
    case.range("aten::item", 10, 200, domain=domain)
    case.range("aten::_local_scalar_dense", 20, 190, domain=domain)
    case.op(100, 102, case.call("cudaMemcpyAsync", 30, 40), kind=OpKind.MEMCPY, dst_kind=MemoryKind.PAGEABLE)
    case.call("cudaHostAlloc", 50, 60)
    case.sync(110, 150)
    found = rows(case)
    assert len(found) == 1
    assert (found[0]["start"], found[0]["end"]) == (30, 150)
    assert (found[0]["kind"], found[0]["via"], found[0]["name"]) == ("framework", "aten::item", "cudaStreamSynchronize")


@pytest.mark.parametrize(
    "name", ["cudaMemcpy", "cudaMalloc", "cudaFree", "cudaHostRegister", "cuModuleLoadData", "cudaFreeHost"]
)
def test_calls_that_may_wait_are_implicit(name):
    case = TraceCase()
    case.launch(0, 10, (20, 100))
    case.call(name, 30, 50)
    row = rows(case)[0]
    assert (row["name"], row["kind"], row["scope"]) == (name, "implicit", "unknown")
    # nothing tells what it waited for
    assert row["stall_ns"] is row["induced_bubble_ns"] is None


@pytest.mark.parametrize("name", ["cudaMallocAsync", "cudaLaunchKernel", "cudaEventRecord", "cudaEventQuery"])
def test_calls_that_never_wait_are_absent(name):
    case = TraceCase()
    case.call(name, 30, 50)
    assert rows(case) == []


def test_asynchronous_copies_with_pageable_memory_are_implicit():
    case = TraceCase()
    corr = case.call("cudaMemcpyAsync", 30, 100)
    case.op(40, 90, corr, kind=OpKind.MEMCPY, copy_kind=CopyKind.H2D, src_kind=MemoryKind.PAGEABLE)
    case.launch(150, 160, (170, 180))
    row = rows(case)[0]
    assert (row["kind"], row["scope"], row["stall_ns"], row["return_latency_ns"]) == ("implicit", "own_copy", 60, 10)
    # a copy that outlives its call was only staged
    case.rows["ops"][0]["end"] = 140
    assert rows(case)[0]["stall_ns"] == 0


def test_queries_in_a_row_are_one_polling_wait():
    case = waiting(500, 510)
    for i in range(5):
        case.call("cudaEventQuery", 30 + 20 * i, 35 + 20 * i)
    row = next(row for row in rows(case) if row["kind"] == "polling")
    assert (row["start"], row["end"], row["stall_ns"], row["return_latency_ns"]) == (30, 115, 70, 15)


def test_rows_know_their_step_path_and_reason():
    row = rows(sync_steps(3))[0]
    assert row["path"] == "wait_output > wait: output"
    assert row["reason"] == "output"
    assert row["counted"]
    assert {row["step"] for row in rows(sync_steps(3))} == {0, 1, 2}


def test_waits_outside_steps_or_on_other_threads_are_shown_and_not_counted():
    case = sync_steps(3)
    case.sync(9000, 9100)
    case.sync(500, 600, thread=WORKER)
    table = Analysis(case.build()).syncs()
    assert (len(table), int(table.counted.sum())) == (5, 3)
    assert Analysis(case.build()).steps().syncs.tolist() == [1, 1, 1]


def test_sums_by_call():
    summed = Analysis(sync_steps(4).build()).syncs().per_call()
    assert [(row["name"], row["reason"], row["count"]) for row in summed] == [("cudaEventSynchronize", "output", 4)]
    assert summed[0]["stall_ns"] == 4 * 410


def test_named_waits_of_the_recorder_are_rows():
    case = TraceCase()
    case.range("wait_output", 0, 100)
    case.wait(10, 90, WaitKind.NAMED)
    case.add("syncs", "wait: output", 10, 90, thread=MAIN, sync_type=SyncType.NAMED)
    case.op(0, 60, kind=OpKind.STAGE)
    case.op(200, 260, kind=OpKind.STAGE)
    case.not_collected["api"] = "stages only"
    row = rows(case)[0]
    assert (row["reason"], row["scope"], row["stall_ns"], row["induced_bubble_ns"]) == ("output", "estimated", 50, 140)


def test_the_best_stack_wins_and_says_where_it_comes_from():
    case = waiting(50, 130)
    assert Analysis(case.build()).syncs().stack(0) == ([], "unknown")
    case.range("forward", 40, 200)
    case.range("inner", 45, 150)
    assert Analysis(case.build()).syncs().stack(0) == (["inner", "forward"], "ranges")
    case.rows["syncs"][0]["stack"] = case.pool.id("libcuda.so\nmain")
    assert Analysis(case.build()).syncs().stack(0) == (["libcuda.so", "main"], "call chain")
    case.add("python", "run(engine.py:5)", 0, 300, thread=MAIN)
    case.add("python", "item(<built-in>)", 45, 140, thread=MAIN)
    case.add("python", "elsewhere", 45, 140, thread=WORKER)
    assert Analysis(case.build()).syncs().stack(0) == (["item(<built-in>)", "run(engine.py:5)"], "python frames")
    case.meta["source"] = "recorder"
    assert Analysis(case.build()).syncs().stack(0) == (["libcuda.so", "main"], "recorder")


def test_a_record_without_a_thread_belongs_to_the_only_one():
    case = TraceCase()
    case.range("work", 0, 100)
    case.launch(0, 5, (10, 60))
    case.add("syncs", "stream synchronisation", 20, 70, sync_type=SyncType.STREAM, stream=STREAM, thread=-1)
    assert rows(case)[0]["thread"] == MAIN
    assert Analysis(case.build(), (0, 100)).cpu_work().measure == 50


def test_without_gpu_rows_costs_are_undefined():
    case = TraceCase()
    case.sync(0, 10)
    case.not_collected["ops"] = "none"
    row = rows(case)[0]
    assert row["stall_ns"] is row["return_latency_ns"] is row["queued_before"] is None
    assert math.isnan(Analysis(case.build()).syncs().stall_ns[0])


def test_no_table_where_nothing_could_be_recorded():
    case = TraceCase()
    case.range("work", 0, 100)
    case.not_collected |= {"api": "no CUDA", "syncs": "no CUDA"}
    assert Analysis(case.build()).syncs() is None


def test_ranges_of_other_processes_do_not_enclose():
    case = waiting(50, 130)
    case.range("foreign", 0, 500, process=PROCESS + 1)
    assert rows(case)[0]["path"] == ""
