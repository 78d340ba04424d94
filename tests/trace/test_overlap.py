"""Busy, overlap, exposed and idle time: the identity, the ratios, several devices, copies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv2.trace import CopyKind, OpKind, WaitKind
from mrv2.trace.analysis import Analysis
from trace_cases import MAIN, SIDE, WORKER, TraceCase, sync_steps

SIZE = 60
pairs = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted), max_size=8)


def cells(intervals) -> np.ndarray:
    out = np.zeros(SIZE, np.bool_)
    for start, end in intervals:
        out[start:end] = True
    return out


@settings(max_examples=80, deadline=None)
@given(pairs, pairs, pairs, st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted), st.integers(1, 9))
def test_figures_match_a_raster_and_add_up(ops, ranges, waits, window, min_ns):
    case = TraceCase()
    for start, end in ops:
        case.op(start, end)
    for start, end in ranges:
        case.span("work", start, end)
    for start, end in waits:
        case.wait(start, end)
    analysis = Analysis(case.build(), tuple(window), min_bubble_ns=min_ns)
    inside = np.zeros(SIZE, np.bool_)
    inside[window[0] : window[1]] = True
    busy, work = cells(ops) & inside, cells(ranges) & ~cells(waits) & inside
    overview = analysis.overview()
    if not ops:
        assert overview.devices == []
        assert overview.overlap_cpu is None
        return
    d = overview.devices[0]
    assert d.busy_ns == busy.sum()
    assert d.idle_ns == d.head_idle_ns + d.tail_idle_ns + d.micro_gap_ns + d.bubble_ns
    if not ranges:
        assert d.overlap_ns is d.exposed_ns is d.overlap_cpu is None
        return
    assert d.overlap_ns == (work & busy).sum()
    assert d.exposed_ns == (work & ~busy).sum()
    assert d.gpu_only_ns == (busy & ~work).sum()
    assert d.overlap_ns + d.exposed_ns + d.gpu_only_ns + d.idle_both_ns == d.window_ns
    assert d.overlap_cpu == ((work & busy).sum() / work.sum() if work.any() else None)
    assert d.overlap_gpu == ((work & busy).sum() / busy.sum() if busy.any() else None)


def test_head_and_tail_are_kept_apart_from_bubbles_and_micro_gaps():
    case = TraceCase()
    for start, end in ((100, 200), (203, 300), (400, 450)):
        case.op(start, end)
    d = Analysis(case.build(), (0, 1000), min_bubble_ns=10).overview().devices[0]
    assert (d.head_idle_ns, d.micro_gap_ns, d.bubble_ns, d.num_bubbles, d.tail_idle_ns) == (100, 3, 100, 1, 550)


def test_sum_of_durations_exceeds_busy_when_streams_overlap():
    case = TraceCase()
    case.op(0, 100)
    case.op(50, 150, stream=SIDE)
    d = Analysis(case.build()).overview().devices[0]
    assert (d.busy_ns, d.gpu_time_sum_ns) == (150, 200)
    assert d.concurrency == pytest.approx(4 / 3)


def test_compute_leaves_copies_out():
    case = TraceCase()
    case.op(0, 100)
    case.op(90, 150, kind=OpKind.MEMCPY, copy_kind=CopyKind.D2H)
    d = Analysis(case.build()).overview().devices[0]
    assert (d.busy_compute_ns, d.busy_ns) == (100, 150)


def test_operations_across_the_window_are_clipped():
    case = TraceCase()
    case.op(0, 100)
    case.op(150, 250)
    d = Analysis(case.build(), (50, 200)).overview().devices[0]
    assert (d.busy_ns, d.gpu_time_sum_ns, d.num_ops) == (100, 100, 2)


def test_devices_are_never_united():
    case = TraceCase()
    case.range("work", 0, 100)
    case.op(0, 100, device=0)
    case.op(0, 50, device=1)
    overview = Analysis(case.build(), (0, 100)).overview()
    assert [d.utilization for d in overview.devices] == [1, 0.5]
    assert overview.utilization == 0.75
    assert overview.overlap_cpu == 0.75


def test_a_device_is_compared_with_the_threads_of_its_own_process():
    case = TraceCase()
    for device, process in ((0, 10), (1, 11)):
        case.range("work", 100 * device, 100 * device + 50, process=process)
        case.op(100 * device, 100 * device + 50, device=device, process=process)
    overview = Analysis(case.build(), (0, 200)).overview()
    assert [d.overlap_cpu for d in overview.devices] == [1, 1]


def test_every_kind_of_wait_is_no_work():
    case = TraceCase()
    case.range("work", 0, 1000)
    case.sync(0, 10)
    case.wait(20, 30, WaitKind.OS)
    case.wait(40, 50, WaitKind.GIL)
    case.wait(60, 70, WaitKind.NAMED)
    for i in range(3):
        case.call("cudaEventQuery", 80 + 10 * i, 85 + 10 * i)
    assert Analysis(case.build()).cpu_work().measure == 1000 - 40 - 25


def test_two_queries_in_a_row_are_no_polling():
    case = TraceCase()
    case.range("work", 0, 1000)
    for i in range(2):
        case.call("cudaEventQuery", 10 * i, 10 * i + 5)
        case.call("cudaEventQuery", 500 + 10 * i, 505 + 10 * i)
        case.call("cudaEventRecord", 200 + 10 * i, 205 + 10 * i)
    assert Analysis(case.build()).cpu_work().measure == 1000


def test_a_blocking_copy_holds_its_caller_until_the_copy_is_done():
    case = TraceCase()
    case.range("work", 0, 1000)
    case.op(150, 300, case.call("cudaMemcpy", 100, 320), kind=OpKind.MEMCPY)
    # returns before the copy runs: staged, not held
    case.op(600, 700, case.call("cudaMemcpyAsync", 400, 420), kind=OpKind.MEMCPY, src_kind=0)
    assert Analysis(case.build()).cpu_work().measure == 1000 - 200


def test_waits_of_other_threads_do_not_count():
    case = TraceCase()
    case.range("work", 0, 100)
    case.wait(0, 100, thread=WORKER)
    assert Analysis(case.build()).cpu_work().measure == 100


def test_zero_denominators_give_none():
    case = TraceCase()
    case.range("work", 0, 100)
    case.wait(0, 100)
    case.op(200, 300)
    d = Analysis(case.build(), (0, 100)).overview().devices[0]
    assert d.overlap_cpu is d.overlap_gpu is d.concurrency is None
    assert Analysis(case.build(), (50, 50)).overview().devices[0].utilization is None


def test_without_gpu_rows_gpu_figures_are_none_and_cpu_figures_stand():
    case = TraceCase()
    case.range("work", 0, 100)
    case.not_collected["ops"] = "CUDA was not traced"
    overview = Analysis(case.build()).overview()
    assert overview.cpu_work_ns == 100
    assert overview.utilization is overview.overlap_cpu is overview.causes is overview.launch_bound is None
    assert "GPU: not collected" in str(overview)
    assert any("no GPU rows" in line for line in Analysis(case.build()).banners())


def test_copies_are_hidden_behind_kernels_by_kind_and_stream():
    case = TraceCase()
    case.op(0, 100)
    case.op(50, 150, kind=OpKind.MEMCPY, copy_kind=CopyKind.D2H, stream=SIDE, bytes=8)
    case.op(200, 210, kind=OpKind.MEMCPY, copy_kind=CopyKind.H2D, bytes=4)
    case.op(220, 230, kind=OpKind.MEMCPY, copy_kind=CopyKind.H2D, bytes=4)
    rows = {row["kind"]: row for row in Analysis(case.build()).copies().rows()}
    assert (rows["D2H"]["time_ns"], rows["D2H"]["hidden_ns"], rows["D2H"]["hidden_share"]) == (100, 50, 0.5)
    assert (rows["H2D"]["copies"], rows["H2D"]["bytes"], rows["H2D"]["hidden_share"]) == (2, 8, 0)


def test_copies_that_were_not_collected_are_none():
    case = TraceCase()
    case.op(0, 100)
    assert len(Analysis(case.build()).copies()) == 0
    case.not_collected["ops.memcpy"] = "stages only"
    assert Analysis(case.build()).copies() is None


def test_launch_bound_needs_both_conditions():
    case = TraceCase()
    for i in range(5):
        case.launch(1000 * i, 1000 * i + 900, (1000 * i + 950, 1000 * i + 960))
    assert Analysis(case.build(), min_bubble_ns=10).overview().launch_bound is True
    assert Analysis(sync_steps(5).build(), min_bubble_ns=10).overview().launch_bound is False


def test_thread_choice_is_explicit():
    case = TraceCase()
    case.range("work", 0, 100, thread=MAIN)
    case.range("helper", 0, 500, thread=WORKER)
    case.launch(10, 20, (30, 40))
    trace = case.build()
    # only the thread that submits work is an engine thread
    assert Analysis(trace).cpu_work().measure == 100
    assert Analysis(trace, engine_threads=[(10, MAIN), (10, WORKER)]).cpu_work().measure == 500
