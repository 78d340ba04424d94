"""Bubbles: each cause alone, and the partition against a nanosecond-by-nanosecond reading of the rules."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv2.trace import OpKind, SyncType, Trace, WaitKind
from mrv2.trace.analysis import Analysis
from trace_cases import MAIN, PROCESS, SIDE, STREAM, WORKER, TraceCase, sync_steps


def causes(case: TraceCase, **settings) -> dict[str, int]:
    """Return the causes of all gaps, down to 1 ns."""
    return Analysis(case.build(), **{"min_bubble_ns": 1, "kernel_wait_ns": 50, **settings}).bubbles().by_cause()


def gap(*launch: int, end: int = 1000, **columns) -> TraceCase:
    """Return a case with a gap [100, end) that ends with an operation launched at ``launch``."""
    case = TraceCase()
    case.launch(0, 5, (10, 100))
    case.launch(*launch, (end, end + 50), **columns)
    return case


def test_work_submitted_in_time_is_kernel_wait_if_the_gap_is_short():
    assert causes(gap(20, 30, end=149)) == {"kernel_wait": 49}
    assert causes(gap(20, 30, end=150)) == {"unknown_device": 50}


def test_a_launch_around_the_start_of_the_gap_is_launch_api_until_it_returns():
    assert causes(gap(90, 120, end=130)) == {"launch_api": 20, "kernel_wait": 10}
    # an operation may start before its call returns
    assert causes(gap(90, 200, end=130)) == {"launch_api": 30}


def test_before_the_launch_the_innermost_stage_counts():
    case = gap(400, 420, end=430)
    case.range("schedule", 50, 200)
    case.range("execute_model", 220, 500)
    case.range("prepare_inputs", 250, 300)
    found = causes(case)
    assert found == {
        "host:execute_model": 30 + 100,
        "host:schedule": 100,
        "host:prepare_inputs": 50,
        "host:unattributed": 20,
        "launch_api": 20,
        "kernel_wait": 10,
    }


def test_waits_take_precedence_in_order():
    case = gap(600, 610, end=615)
    case.range("stage", 0, 1000)
    case.sync(100, 200)
    case.wait(150, 300, WaitKind.OS)
    case.wait(250, 400, WaitKind.GIL)
    case.call("cudaMalloc", 350, 450)
    case.launch(460, 480, (2000, 2001))
    found = causes(case, window=(0, 650))
    assert found == {
        "sync": 100,
        "starved": 100,
        "gil": 100,
        "alloc": 50,
        "launch_api": 20 + 10,
        "host:stage": 10 + 120,
        "kernel_wait": 5,
    }


def test_profiler_overhead_comes_first():
    case = gap(400, 420, end=430)
    case.add("overhead", "flush", 150, 425)
    assert causes(case) == {"profiler": 275, "host:unattributed": 50, "kernel_wait": 5}


def test_an_operation_without_a_call_is_unknown():
    case = TraceCase()
    case.op(0, 100)
    case.op(500, 600)
    assert causes(case) == {"unknown": 400}


def test_an_event_wait_on_the_stream_is_a_dependency_and_a_copy_is_a_copy():
    case = gap(30, 40, end=900, stream=SIDE)
    record = case.call("cudaEventRecord", 6, 8)
    case.sync(20, 22, SyncType.STREAM_WAIT, stream=SIDE, event_stream=STREAM, event_corr=record)
    assert causes(case) == {"dependency": 800}
    # the same, but the awaited operation is a copy
    case = TraceCase()
    case.copy(0, 5, (10, 100))
    record = case.call("cudaEventRecord", 6, 8)
    case.sync(20, 22, SyncType.STREAM_WAIT, stream=SIDE, event_stream=STREAM, event_corr=record)
    case.launch(30, 40, (900, 950), stream=SIDE)
    assert causes(case) == {"copy": 800}


def test_a_copy_before_it_on_the_stream_is_a_copy():
    case = TraceCase()
    case.copy(0, 5, (10, 100))
    case.launch(20, 30, (900, 950))
    assert causes(case) == {"copy": 800}


def test_a_wait_before_the_predecessor_does_not_count():
    case = TraceCase()
    record = case.call("cudaEventRecord", 0, 1)
    case.sync(2, 3, SyncType.STREAM_WAIT, stream=STREAM, event_stream=SIDE, event_corr=record)
    case.launch(5, 8, (10, 100))
    case.launch(20, 30, (900, 950))
    assert causes(case) == {"unknown_device": 800}


def test_where_the_launcher_starved_the_thread_of_the_same_step_counts():
    case = TraceCase()
    case.launch(0, 5, (10, 100), thread=WORKER)
    case.range("execute_model", 390, 450, 3, thread=WORKER)
    case.wait(90, 380, thread=WORKER)
    case.launch(400, 420, (430, 480), thread=WORKER)
    case.range("schedule", 150, 250, 3)
    case.range("update", 260, 300, 2)
    found = causes(case, window=(0, 500))
    assert found == {
        "host:schedule": 100,
        # the update belongs to another step: the worker had nothing to do
        "starved": 50 + 130,
        "host:unattributed": 10,
        "host:execute_model": 10,
        "launch_api": 20,
        "kernel_wait": 10,
    }


def test_device_stages_without_calls_are_divided_by_their_step():
    case = sync_steps(3)
    case.meta["source"] = "recorder"
    case.rows["api"].clear()
    case.rows["syncs"].clear()
    for i, row in enumerate(case.rows["ops"]):
        row |= {"corr": -1, "kind": OpKind.STAGE, "step": i}
    # from the end of a kernel: the named wait, the end of its stage, update, nothing, schedule, execute_model
    found = Analysis(case.build(), min_bubble_ns=1).bubbles().by_cause()
    assert found == {
        "host:schedule": 200,
        "host:update_from_output": 200,
        "host:execute_model": 240,
        "host:unattributed": 280,
        "sync": 60,
        "host:wait_output": 20,
    }


def test_short_gaps_are_no_bubbles():
    case = gap(20, 30, end=130)
    assert len(Analysis(case.build(), min_bubble_ns=31).bubbles()) == 0
    assert len(Analysis(case.build(), min_bubble_ns=31).bubbles(min_ns=30)) == 1
    assert Analysis(case.build(), min_bubble_ns=31).overview().devices[0].micro_gap_ns == 30


def test_rows_name_the_operation_that_ended_the_gap():
    case = gap(400, 420, end=430)
    case.range("stage", 0, 500, 9)
    bubbles = Analysis(case.build(), min_bubble_ns=1).bubbles()
    row = bubbles.rows()[0]
    assert (row["start"], row["end"], row["length_ns"]) == (100, 430, 330)
    assert (row["next_op"], row["thread"], row["process"], row["step"]) == (1, MAIN, PROCESS, 9)
    assert row["main_cause"] == "host:stage"


def test_rollup_speaks_as_hta_does():
    case = gap(400, 420, end=430)
    case.op(600, 650)
    assert Analysis(case.build(), min_bubble_ns=1).bubbles().rollup() == {
        "host wait": 320,
        "kernel wait": 10,
        "other": 120,
    }


def test_longest_keeps_its_pieces():
    case = gap(400, 420, end=430)
    case.op(600, 650)
    longest = Analysis(case.build(), min_bubble_ns=1).bubbles().longest(1)
    assert longest.length_ns.tolist() == [330]
    assert sum(longest.by_cause().values()) == 330
    assert longest.pieces["bubble"].tolist() == [0] * len(longest.pieces["start"])


def test_causes_by_step_sum_to_the_steps_bubbles():
    analysis = Analysis(sync_steps(5).build(), min_bubble_ns=1)
    bubbles, steps = analysis.bubbles(), analysis.steps()
    by_step, names = bubbles.by_step(analysis.windows)
    assert by_step.sum(axis=1).tolist() == steps.bubble_ns.tolist()
    assert dict(zip(names, by_step.sum(axis=0).tolist())).items() >= bubbles.by_cause().items()


def test_without_gpu_rows_there_is_no_answer():
    assert Analysis(TraceCase().build()).bubbles() is None


SIZE = 80
times = st.integers(0, SIZE)


@st.composite
def recordings(draw) -> TraceCase:
    """A random recording of two threads: nested ranges, calls one after another, operations after their calls."""
    case = TraceCase()
    for thread in (MAIN, WORKER):
        at = draw(st.integers(0, 10))
        while at < SIZE - 4 and draw(st.integers(0, 5)):
            end = at + draw(st.integers(1, 9))
            kind = draw(st.sampled_from(["launch", "launch", "copy", "sync", "alloc", "other"]))
            stream = draw(st.sampled_from([STREAM, SIDE]))
            if kind in ("launch", "copy"):
                corr = case.call("cudaLaunchKernel", at, end, thread)
                for _ in range(draw(st.integers(1, 2))):
                    begin = at + draw(st.integers(0, 25))
                    what = OpKind.MEMCPY if kind == "copy" else OpKind.KERNEL
                    case.op(begin, begin + draw(st.integers(0, 8)), corr, stream=stream, kind=what)
            elif kind == "sync":
                case.sync(at, end, thread=thread)
            elif kind == "alloc":
                case.call("cudaMalloc", at, end, thread)
            else:
                case.call("cudaEventRecord", at, end, thread)
            at = end + draw(st.integers(0, 9))
        _nested(draw, case, thread, 0, SIZE, 0)
        for start, end in draw(st.lists(st.tuples(times, times), max_size=3)):
            case.wait(start, end, draw(st.sampled_from([WaitKind.OS, WaitKind.GIL, WaitKind.NAMED])), thread)
    for start, end in draw(st.lists(st.tuples(times, times), max_size=1)):
        case.add("overhead", "profiler", start, end)
    for begin in draw(st.lists(times, max_size=2)):
        case.op(begin, begin + 3)
    return case


def _nested(draw, case: TraceCase, thread: int, low: int, high: int, depth: int) -> None:
    at = low
    while depth < 3 and high - at > 2 and draw(st.integers(0, 3 - depth)):
        start = draw(st.integers(at, min(at + 15, high - 1)))
        end = draw(st.integers(start + 1, min(start + 40, high)))
        case.range(f"stage {draw(st.integers(0, 3))}", start, end, draw(st.integers(-1, 1)), thread=thread)
        _nested(draw, case, thread, start, end, depth + 1)
        at = end


def brute_force(trace: Trace, min_ns: int, kernel_wait_ns: int, step_of) -> dict[str, int]:
    """Apply the rules to one nanosecond at a time."""
    ops, api, waits = trace.ops, trace.api, trace.waits
    busy = np.zeros(4 * SIZE, np.bool_)
    for start, end in zip(ops.start, ops.end):
        busy[start:end] = True
    if not busy.any():
        return {}
    first, last = int(np.flatnonzero(busy)[0]), int(np.flatnonzero(busy)[-1]) + 1
    call_of = [
        next((i for i in range(len(api)) if api.corr[i] == corr), None) if corr >= 0 else None for corr in ops.corr
    ]
    launches = {i for i in call_of if i is not None}

    def inside(table, t: int, thread: int, rows) -> bool:
        return any(table.thread[i] == thread and table.start[i] <= t < table.end[i] for i in rows)

    def named(text: str) -> list[int]:
        return [i for i in range(len(api)) if trace.name_of(int(api.name[i])) == text]

    def activity(t: int, thread: int) -> str:
        syncs, sync_rows = trace.syncs, range(len(trace.syncs))
        by_kind = {k: [i for i in range(len(waits)) if waits.kind[i] == k] for k in WaitKind}
        if inside(syncs, t, thread, sync_rows) or inside(waits, t, thread, by_kind[WaitKind.NAMED]):
            return "sync"
        if inside(waits, t, thread, by_kind[WaitKind.OS]):
            return "starved"
        if inside(waits, t, thread, by_kind[WaitKind.GIL]):
            return "gil"
        if inside(api, t, thread, named("cudaMalloc")):
            return "alloc"
        if inside(api, t, thread, launches):
            return "launch_api"
        r = trace.ranges
        holding = [i for i in range(len(r)) if r.thread[i] == thread and r.start[i] <= t < r.end[i]]
        return f"host:{trace.name_of(int(r.name[holding[-1]]))}" if holding else "host:unattributed"

    def in_step(t: int, thread: int, step: int) -> bool:
        r = trace.ranges
        carriers = [i for i in range(len(r)) if r.thread[i] == thread and r.start[i] <= t < r.end[i] and r.step[i] >= 0]
        return bool(carriers) and step >= 0 and r.step[carriers[0]] == step

    def cause(t: int, gap_start: int, n: int) -> str:
        if any(s <= t < e for s, e in zip(trace.overhead.start, trace.overhead.end)):
            return "profiler"
        call = call_of[n]
        if call is None:
            return "unknown"
        if t >= api.end[call]:
            before = [i for i in range(n) if ops.stream[i] == ops.stream[n]]
            if before and ops.kind[before[-1]] == OpKind.MEMCPY:
                return "copy"
            rest = ops.start[n] - max(api.end[call], gap_start)
            return "kernel_wait" if rest < kernel_wait_ns else "unknown_device"
        if t >= api.start[call]:
            return "launch_api"
        thread = int(api.thread[call])
        found = activity(t, thread)
        other = WORKER if thread == MAIN else MAIN
        if found in ("starved", "host:unattributed") and in_step(t, other, step_of(n)):
            return activity(t, other)
        return found

    out: dict[str, int] = {}
    t = first
    while t < last:
        if busy[t]:
            t += 1
            continue
        end = t + int(np.argmax(busy[t:]))
        if end - t >= min_ns:
            n = next(i for i in range(len(ops)) if ops.start[i] == end and ops.end[i] >= end)
            for now in range(t, end):
                name = cause(now, t, n)
                out[name] = out.get(name, 0) + 1
        t = end
    return out


@settings(max_examples=250, deadline=None)
@given(recordings(), st.integers(1, 5), st.integers(1, 12))
def test_partition_matches_the_rules_applied_to_single_nanoseconds(case, min_ns, kernel_wait_ns):
    trace = case.build()
    analysis = Analysis(trace, (0, 4 * SIZE), min_bubble_ns=min_ns, kernel_wait_ns=kernel_wait_ns)
    bubbles = analysis.bubbles()
    if bubbles is None:
        assert not len(trace.ops)
        return
    of_ops = analysis.step_ids.of_ops
    assert bubbles.by_cause() == pytest.approx(brute_force(trace, min_ns, kernel_wait_ns, lambda n: of_ops[n]))
    # the pieces of each bubble sum to it
    pieces = bubbles.pieces
    lengths = np.bincount(pieces["bubble"], weights=pieces["end"] - pieces["start"], minlength=len(bubbles))
    assert lengths.tolist() == bubbles.length_ns.tolist()
    assert bubbles.total_ns == analysis.overview().devices[0].bubble_ns
