"""Which events stand in which row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrv2.trace.analysis.model import Analysis
from mrv2.trace.table import OpKind, Ops, Overhead, RangeKind, Ranges, Syncs, SyncType, Trace
from mrv2.viz.lanes import MAX_DEPTH, build_index, pack
from viz.traces import NUM_STEPS, STEP_NS, host_only_trace, small_trace


def _sorted(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    start, length = np.array(pairs, np.int64).reshape(-1, 2).T
    order = np.lexsort((-(start + length), start))
    return start[order], (start + length)[order]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=30))
def test_equal_depths_never_overlap(pairs: list[tuple[int, int]]) -> None:
    start, end = _sorted(pairs)
    depth = pack(start, end)
    for level in np.unique(depth):
        mine = depth == level
        assert (start[mine][1:] >= end[mine][:-1]).all()
    # no more rows than are needed at any instant; a point takes the place of an interval
    most = max((int(((start <= t) & ((end > t) | (start == t))).sum()) for t in start.tolist()), default=0)
    assert depth.max(initial=-1) + 1 <= max(most, 1)


def test_nested_intervals_get_their_depth() -> None:
    start = np.array([0, 0, 10, 20, 100])
    end = np.array([50, 50, 40, 30, 120])
    assert pack(start, end).tolist() == [0, 1, 2, 3, 0]


def test_the_small_trace_has_the_rows_that_it_should() -> None:
    index = build_index(Analysis(small_trace()))
    keys = {row.key: row for row in index.rows}
    assert list(keys) == [
        "steps:0", "ranges:1:5:0", "ranges:1:5:1", "api:1:5:0", "syncs:0",
        "stream:0:7:0", "stream:0:7:1", "copies:0:17:0",
    ]  # fmt: skip
    assert keys["ranges:1:5:0"].label == "engine (5)"
    # the overlapping kernel of the last step stands in a row of its own
    assert keys["stream:0:7:1"].start.tolist() == [1_000_000 + 3 * STEP_NS + 4500]
    assert len(keys["ranges:1:5:1"]) == NUM_STEPS
    assert index.ticks.time.tolist() == [1_000_000 + step * STEP_NS + 8000 for step in range(NUM_STEPS)]
    assert index.bands.step.tolist() == list(range(NUM_STEPS))
    assert (index.origin, index.end) == (1_000_000, 1_000_000 + NUM_STEPS * STEP_NS - 200)


def test_every_event_is_drawn_once() -> None:
    trace = small_trace()
    index = build_index(Analysis(trace))
    for table in ("ops", "api", "ranges"):
        drawn = np.sort(np.concatenate([row.event for row in index.rows if row.table == table]))
        assert drawn.tolist() == list(range(len(trace.table(table))))
    for row in index.rows:
        assert (row.start[1:] >= row.end[:-1]).all(), row.key


def test_operations_and_calls_know_their_step() -> None:
    index = build_index(Analysis(small_trace()))
    for row in index.rows:
        if row.table in ("ops", "ranges", "host_syncs"):
            assert row.step.tolist() == ((row.start - 1_000_000) // STEP_NS).tolist(), row.key


def test_a_trace_without_a_gpu_is_drawn_too() -> None:
    index = build_index(Analysis(host_only_trace()))
    assert [row.key for row in index.rows] == ["steps:0", "ranges:1:5:0", "ranges:1:5:1"]


def test_stream_waits_are_no_host_syncs() -> None:
    trace = small_trace()
    trace.syncs = Syncs.make(start=[1_000_100, 1_000_200], end=[1_000_150, 1_000_250], name=0, process=1, thread=5,
                             sync_type=[SyncType.STREAM_WAIT, SyncType.STREAM])  # fmt: skip
    index = build_index(Analysis(trace))
    assert 1_000_200 in index.ticks.time
    assert 1_000_100 not in index.ticks.time
    waits = next(row for row in index.rows if row.key == "stream_waits:0")
    assert waits.start.tolist() == [1_000_100]


def test_streams_of_two_processes_stand_apart() -> None:
    ops = Ops.make(start=[0, 5], end=[10, 15], kind=OpKind.KERNEL, name=0, process=[1, 2], stream=7)
    index = build_index(Analysis(Trace(ops=ops, strings=["k"])))
    assert [row.label for row in index.rows] == ["GPU 0 stream 7 (process 1)", "GPU 0 stream 7 (process 2)"]


def test_named_streams_and_device_stages_keep_their_names() -> None:
    ops = Ops.make(start=[0, 2], end=[10, 8], kind=[OpKind.STAGE, OpKind.KERNEL], name=[0, 1], stream=3)
    trace = Trace(
        ops=ops, strings=["forward", "k"], meta={"source": "recorder", "granularity": "none", "streams": {3: "main"}}
    )
    assert [row.label for row in build_index(Analysis(trace)).rows] == ["GPU 0 main: stages", "GPU 0 main"]


def test_ranges_that_may_cross_stand_apart_from_those_that_nest() -> None:
    ranges = Ranges.make(
        start=[0, 5, 1], end=[10, 20, 4], name=0, domain=1, process=1, thread=5,
        kind=[RangeKind.PUSH_POP, RangeKind.START_END, RangeKind.PUSH_POP],
    )  # fmt: skip
    index = build_index(Analysis(Trace(ranges=ranges, strings=["r", "d"])))
    assert [row.key for row in index.rows] == ["ranges:1:5:0", "ranges:1:5:1", "ranges:1:5 (start/end):0"]


def test_deep_nesting_ends_in_a_row_of_outlines() -> None:
    depth = MAX_DEPTH + 8
    ranges = Ranges.make(start=np.arange(depth), end=1000 - np.arange(depth), name=0, domain=1, process=1, thread=5)
    index = build_index(Analysis(Trace(ranges=ranges, strings=["r", "d"])))
    assert len(index.rows) == MAX_DEPTH
    assert (index.rows[-1].start.tolist(), index.rows[-1].end.tolist()) == ([MAX_DEPTH - 1], [1000 - MAX_DEPTH + 1])


def test_the_profilers_own_time_does_not_stretch_the_axis() -> None:
    trace = small_trace()
    trace.overhead = Overhead.make(start=[0, 9_000_000], end=[500, 99_000_000], name=0)
    index = build_index(Analysis(trace))
    assert index.origin == 1_000_000
    assert index.end < 2_000_000
    assert any(row.key == "overhead:0" for row in index.rows)


@pytest.mark.parametrize("name", ["waits", "python"])
def test_waits_and_python_frames_have_rows(name: str) -> None:
    trace = small_trace()
    table = type(trace.table(name))
    extra = {"kind": 0} if name == "waits" else {}
    setattr(trace, name, table.make(start=[1_000_000], end=[1_000_500], name=0, process=1, thread=5, **extra))
    assert any(row.key == f"{name}:1:5:0" for row in build_index(Analysis(trace)).rows)
