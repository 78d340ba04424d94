"""The `Trace` itself: columns, windows, names, coverage."""

from __future__ import annotations

import numpy as np
import pytest

from mrv2.trace import Coverage, OpKind, Ops, Ranges, Trace, TraceError, Waits
from mrv2.trace.nesting import clamp_children, crossing, enclosing, sub_lanes
from mrv2.trace.strings import StringPool


def _trace() -> Trace:
    return Trace(
        ops=Ops.make(start=[50, 10], end=[60, 30], kind=OpKind.KERNEL, name=[0, 1], process=[1, 2]),
        ranges=Ranges.make(start=[0, 0], end=[10, 90], name=[2, 3], domain=4, process=1, thread=9),
        strings=["late", "early", "inner", "outer", "mrv2"],
    )


def test_rows_are_sorted_by_start_and_outer_ranges_come_first() -> None:
    trace = _trace()
    assert trace.ops.start.tolist() == [10, 50]
    assert trace.name_of(trace.ops.name).tolist() == ["early", "late"]
    assert trace.name_of(trace.ranges.name).tolist() == ["outer", "inner"]


def test_missing_columns_get_their_defaults_and_types() -> None:
    ops = _trace().ops
    assert ops.corr.tolist() == [-1, -1]
    assert {name: array.dtype for name, array in ops.columns().items()} == Ops.column_types()


@pytest.mark.parametrize(
    "columns, message",
    [
        (dict(start=[1], end=[2], kind=0), "'name' is missing"),
        (dict(start=[1], end=[2], kind=0, name=0, colour=1), "no column 'colour'"),
        (dict(start=[1], end=[2, 3], kind=0, name=0), "end has 2 rows"),
    ],
)
def test_a_table_says_what_is_wrong(columns: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ops.make(**columns)


def test_empty_tables_have_no_rows_and_all_columns() -> None:
    assert len(Ops.make()) == 0
    assert set(Ops.make().columns()) == set(Ops.column_types())


def test_a_window_keeps_what_touches_it_whole() -> None:
    waits = Waits.make(start=[0, 5, 10, 20], end=[5, 10, 10, 30], name=0, kind=0)
    assert waits.window(5, 20).start.tolist() == [5, 10]
    part = _trace().window(20, 55)
    assert part.ops.start.tolist() == [10, 50]
    assert part.meta["window"] == (20, 55)
    with pytest.raises(TraceError, match="before the start"):
        _trace().window(5, 1)


def test_processes_can_be_told_apart() -> None:
    trace = _trace()
    assert trace.processes() == [1, 2]
    assert len(trace.select_process(2).ops) == 1 and not len(trace.select_process(2).ranges)
    with pytest.raises(TraceError, match="processes: 1, 2"):
        trace.select_process(3)


def test_span_names_and_lookup() -> None:
    trace = _trace()
    assert trace.span() == (0, 90)
    assert Trace().span() is None and Trace().processes() == []
    assert trace.string_id("outer") == 3 and trace.string_id("absent") == -1
    assert trace.name_of(-1) == "" and trace.name_of(0) == "late"
    assert trace.name_of(np.array([-1, 4])).tolist() == ["", "mrv2"]


def test_an_unknown_table_names_the_legal_ones() -> None:
    with pytest.raises(TraceError, match="did you mean 'ranges'"):
        _trace().table("range")


def test_a_data_frame_spells_text_out() -> None:
    pytest.importorskip("pandas")
    frame = _trace().to_pandas("ranges")
    assert frame["name"].tolist() == ["outer", "inner"]
    assert frame["domain"].tolist() == ["mrv2", "mrv2"]
    assert frame["duration"].tolist() == [90, 10]


def test_coverage_tells_nothing_happened_from_nothing_recorded() -> None:
    coverage = Coverage()
    coverage.set("ops", 3)
    coverage.set("syncs", 0)
    coverage.set("waits", 0, recorded=False, reason="not traced")
    assert [coverage[key].status for key in ("ops", "syncs", "waits", "other")] == [
        "collected",
        "empty",
        "not collected",
        "not collected",
    ]
    assert coverage.has("syncs") and not coverage.has("waits")
    assert "waits  not collected: not traced" in coverage.report()


def test_string_pool_maps_a_files_own_keys() -> None:
    pool = StringPool(["a"])
    ids = pool.map_keys(np.array([7, 8, 7, 9]), {7: "x", 8: "a"}, "?")
    assert [pool.values[i] for i in ids] == ["x", "a", "x", "?"]
    assert pool.map_keys(np.array([5]), {}, None).tolist() == [-1]


def test_clamp_pulls_in_what_rounding_let_out_and_leaves_overlaps() -> None:
    start, end, lane = np.array([0, 10, 20, 0]), np.array([100, 101, 500, 50]), np.array([1, 1, 1, 2])
    assert clamp_children(start, end, lane, 5).tolist() == [100, 100, 500, 50]
    assert crossing(start, clamp_children(start, end, lane, 5), lane).tolist() == [False, False, True, False]


def test_sub_lanes_never_overlap() -> None:
    rng = np.random.default_rng(0)
    start = rng.integers(0, 200, 100)
    end, lane = start + rng.integers(1, 30, 100), rng.integers(0, 3, 100)
    number = sub_lanes(start, end, lane)
    for key in {(a, b) for a, b in zip(lane, number)}:
        rows = np.flatnonzero((lane == key[0]) & (number == key[1]))
        rows = rows[np.argsort(start[rows])]
        assert (end[rows][:-1] <= start[rows][1:]).all()
    # greedy by start uses as many as run at once, and no more
    most = max(int(((start <= t) & (end > t) & (lane == k)).sum()) for t in start for k in range(3))
    assert number.max() + 1 == most


def test_enclosing_equals_a_search_of_all_rows() -> None:
    rng = np.random.default_rng(1)
    # a call tree: every interval halves its parent
    rows = [(0, 1 << 10)]
    for start, end in rows:
        if end - start > 8:
            rows += [(start, (start + end) // 2), ((start + end) // 2, end)]
    start, end = np.array(rows).T
    lane = np.zeros(len(rows), np.int64)
    at, at_lane = rng.integers(-5, 1100, 50), rng.integers(0, 2, 50)
    for now, key, found in zip(at, at_lane, enclosing(start, end, lane, at, at_lane)):
        inside = [i for i in range(len(rows)) if start[i] <= now < end[i] and key == 0]
        assert found == sorted(inside, key=lambda i: end[i] - start[i])
