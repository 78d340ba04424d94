"""Interval sets against a raster of single nanoseconds."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mrv2.trace.intervals import Intervals, overlap_join, union, union_measure

SIZE = 40
pairs = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), max_size=12)


def columns(intervals: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    array = np.array(intervals, np.int64).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def raster(intervals: list[tuple[int, int]]) -> np.ndarray:
    out = np.zeros(SIZE + 1, np.bool_)
    for start, end in intervals:
        out[start:end] = True
    return out


def painted(found: Intervals) -> np.ndarray:
    assert np.all(found.end > found.start), "an interval is empty"
    assert np.all(found.start[1:] > found.end[:-1]), "intervals touch or are out of order"
    return raster(list(zip(found.start.tolist(), found.end.tolist())))


@given(pairs)
def test_union_paints_the_same_instants(a):
    found = union(*columns(a))
    assert np.array_equal(painted(found), raster(a))
    assert found.measure == raster(a).sum()


@given(pairs, st.randoms())
def test_union_does_not_depend_on_order_or_on_cuts(a, random):
    whole = union(*columns(a))
    cut = []
    for start, end in a:
        middle = random.randint(min(start, end), max(start, end))
        cut += [(start, middle), (middle, end)] if end > start else [(start, end)]
    random.shuffle(cut)
    assert union(*columns(cut)) == whole


@given(pairs, pairs)
def test_set_operations_match_the_raster(a, b):
    x, y = union(*columns(a)), union(*columns(b))
    assert np.array_equal(painted(x & y), raster(a) & raster(b))
    assert np.array_equal(painted(x | y), raster(a) | raster(b))
    assert np.array_equal(painted(x - y), raster(a) & ~raster(b))


@given(pairs, st.integers(0, SIZE), st.integers(0, SIZE))
def test_clip_complement_and_measures_match_the_raster(a, low, high):
    x, cells = union(*columns(a)), raster(a)
    window = np.zeros(SIZE + 1, np.bool_)
    window[low:high] = True
    assert np.array_equal(painted(x.clip(low, high)), cells & window)
    assert np.array_equal(painted(x.complement(low, high)), ~cells & window)
    times = np.arange(SIZE + 1)
    assert x.before(times).tolist() == [cells[:t].sum() for t in times]
    assert x.contains(times).tolist() == cells.tolist()
    if low <= high:
        assert x.within(np.array([low]), np.array([high]))[0] == (cells & window).sum()


@given(st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE), st.integers(0, 3)), max_size=15))
def test_union_by_group_is_the_union_of_each_group(rows):
    rows.sort()
    start, end, group = (np.array([row[i] for row in rows], np.int64) for i in range(3))
    found = union_measure(start, end, group, 4)
    assert found.tolist() == [union(start[group == g], end[group == g]).measure for g in range(4)]


def test_union_by_group_splits_a_time_axis_too_long_for_all_groups():
    start = np.array([0, 5, 2**61], np.int64)
    found = union_measure(start, start + 10, np.array([0, 1, 2]), 3)
    assert found.tolist() == [10, 10, 10]


@given(pairs, pairs)
def test_join_finds_each_pair_that_shares_an_instant(a, b):
    start, end = columns(a)
    other = union(*columns(b))
    left, right = overlap_join(start, end, other)
    expected = [
        (i, j)
        for i in range(len(a))
        for j in range(len(other))
        if min(end[i], other.end[j]) > max(start[i], other.start[j])
    ]
    assert list(zip(left.tolist(), right.tolist())) == expected


def test_empty_sets_are_neutral():
    nothing, something = Intervals.empty(), union(np.array([1]), np.array([3]))
    assert nothing | something == something
    assert nothing & something == nothing == something - something
    assert something - nothing == something
    assert nothing.measure == 0
    assert nothing.before(np.array([5])).tolist() == [0]
