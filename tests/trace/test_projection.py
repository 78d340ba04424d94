"""Device work by range: the tree of push/pop ranges, loose ranges, ranges across threads."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv2.trace import OpKind, RangeKind
from mrv2.trace.analysis import Analysis, Attribution
from mrv2.trace.analysis.nesting import Nests
from mrv2.trace.analysis.projection import project
from mrv2.trace.intervals import union
from trace_cases import MAIN, PROCESS, SIDE, WORKER, TraceCase


def by_name(case: TraceCase, policy="contained", **settings) -> dict[str, dict[str, Any]]:
    projection = project(Analysis(case.build()), policy, **settings)
    return {row["name"]: row for row in projection.rows()}


def nested() -> TraceCase:
    case = TraceCase()
    case.range("step", 0, 1000)
    case.range("forward", 100, 300)
    case.range("attention", 150, 200)
    case.launch(110, 120, (2000, 2100))
    case.launch(160, 170, (2050, 2200), (2300, 2400), stream=SIDE)
    case.launch(500, 510, (3000, 3050))
    return case


def test_inclusive_and_self_figures_of_a_tree():
    found = by_name(nested())
    names = ("launches", "ops", "gpu_sum_ns", "gpu_busy_ns", "api_ns")
    assert [found["attention"][n] for n in names] == [1, 2, 250, 250, 10]
    assert [found["forward"][n] for n in names] == [2, 3, 350, 300, 20]
    assert [found["step"][n] for n in names] == [3, 4, 400, 350, 30]
    own = ("self_launches", "self_ops", "self_sum_ns", "self_busy_ns")
    assert [found["forward"][n] for n in own] == [1, 1, 100, 100]
    assert [found["step"][n] for n in own] == [1, 1, 50, 50]
    assert (found["forward"]["first_start"], found["forward"]["last_end"]) == (2000, 2400)


def test_ranges_without_work_have_zeros_and_no_span():
    case = nested()
    case.range("idle", 600, 700)
    row = by_name(case)["idle"]
    assert (row["ops"], row["gpu_busy_ns"], row["first_start"], row["last_end"]) == (0, 0, -1, -1)


def test_when_an_operation_ran_does_not_matter():
    case = TraceCase()
    case.range("launcher", 0, 50)
    case.range("meanwhile", 60, 500)
    case.launch(10, 20, (100, 200))
    found = by_name(case)
    assert (found["launcher"]["ops"], found["meanwhile"]["ops"]) == (1, 0)


def test_all_domains_form_one_tree_unless_one_is_chosen():
    case = TraceCase()
    case.range("outer", 0, 100, domain=case.pool.id("a"))
    case.range("inner", 10, 90, domain=case.pool.id("b"))
    case.launch(20, 30, (40, 50))
    assert by_name(case)["outer"]["self_ops"] == 0
    alone = by_name(case, domain="a")
    assert alone["outer"]["self_ops"] == 1
    assert alone["inner"]["how"] == Attribution.NONE


def test_launches_of_other_threads_and_processes_are_not_inside():
    case = TraceCase()
    case.range("mine", 0, 100)
    case.launch(10, 20, (40, 50), thread=WORKER)
    corr = case.launch(30, 40, (60, 70))
    # the same correlation id in another process is another launch
    case.call("cudaLaunchKernel", 50, 60, corr=corr, process=PROCESS + 1)
    case.op(80, 90, corr, process=PROCESS + 1)
    row = by_name(case)["mine"]
    assert (row["ops"], row["gpu_sum_ns"]) == (1, 10)


def test_loose_ranges_may_share_operations():
    case = TraceCase()
    case.span("a", 0, 60)
    case.span("b", 40, 100)
    case.launch(45, 50, (100, 110))
    case.launch(55, 65, (120, 130))
    found = by_name(case)
    assert (found["a"]["ops"], found["b"]["ops"]) == (1, 2)
    assert by_name(case, "start")["a"]["ops"] == 2
    assert found["a"]["how"] == Attribution.CONTAINED
    # what overlaps cannot be divided
    assert found["a"]["self_ops"] == -1


def test_marks_claim_nothing():
    case = nested()
    case.range("mark", 115, 115, kind=RangeKind.MARK)
    assert by_name(case)["mark"]["how"] == Attribution.NONE


def test_a_range_across_threads_takes_the_launches_of_its_step():
    case = TraceCase()
    case.span("request", 0, 500, step=3, end_thread=WORKER)
    case.range("execute", 100, 200, 3, thread=WORKER)
    case.range("execute", 300, 400, 4, thread=WORKER)
    case.launch(110, 120, (130, 140), thread=WORKER)
    case.launch(310, 320, (330, 350), thread=WORKER)
    row = by_name(case)["request"]
    assert (row["how"], row["ops"], row["gpu_sum_ns"]) == (Attribution.STEP, 1, 10)


def test_several_devices_add_up_and_are_not_united():
    case = TraceCase()
    case.range("work", 0, 100)
    case.launch(10, 20, (200, 300))
    case.launch(30, 40, (200, 300), device=1)
    assert by_name(case)["work"]["gpu_busy_ns"] == 200


def test_sums_by_name_and_missing_evidence():
    case = nested()
    case.range("forward", 600, 700)
    case.launch(610, 620, (4000, 4010))
    rows = {row["name"]: row for row in Analysis(case.build()).projection().by_name()}
    assert (rows["forward"]["ranges"], rows["forward"]["ops"]) == (2, 4)
    assert Analysis(TraceCase().build()).projection() is None


def test_ranges_that_cross_are_cut_where_the_outer_one_ends():
    case = TraceCase()
    case.range("first", 0, 100)
    case.range("second", 50, 150)
    nest = Nests(case.build())[PROCESS, MAIN]
    assert nest.was_crossed
    assert nest.end.tolist() == [100, 100]
    assert nest.parent.tolist() == [-1, 0]


SIZE = 60
times = st.integers(0, SIZE)


@st.composite
def trees(draw) -> TraceCase:
    case = TraceCase()

    def grow(low: int, high: int, depth: int) -> None:
        at = low
        while depth < 4 and high - at > 1 and draw(st.integers(0, 2)):
            start = draw(st.integers(at, high - 1))
            end = draw(st.integers(start + 1, high))
            case.range(f"{start}-{end}", start, end)
            grow(start, end, depth + 1)
            at = end

    grow(0, SIZE, 0)
    at = 0
    while at < SIZE - 3 and draw(st.integers(0, 4)):
        end = at + draw(st.integers(1, 6))
        begins = [at + draw(st.integers(0, 30)) for _ in range(draw(st.integers(1, 3)))]
        ops = [(b, b + draw(st.integers(0, 9))) for b in begins]
        case.launch(at, end, *ops, stream=draw(st.sampled_from([7, 13])))
        at = end + draw(st.integers(0, 4))
    return case


@settings(max_examples=150, deadline=None)
@given(trees(), st.sampled_from(["contained", "start"]))
def test_random_trees_match_a_search_over_all_pairs(case, policy):
    trace = case.build()
    ops, api, ranges = trace.ops, trace.api, trace.ranges
    projection = project(Analysis(trace), policy)
    if projection is None:
        assert not (len(ops) and len(ranges))
        return
    call_of = {int(corr): i for i, corr in enumerate(api.corr)}
    inclusive = np.zeros((len(ranges), len(ops)), np.bool_)
    for r in range(len(ranges)):
        for g in range(len(ops)):
            a = call_of[int(ops.corr[g])]
            last = api.end[a] if policy == "contained" else api.start[a]
            inside = ranges.start[r] <= api.start[a] < ranges.end[r] and last <= ranges.end[r]
            inclusive[r, g] = inside
    length = ranges.end - ranges.start
    for r in range(len(ranges)):
        mine = np.flatnonzero(inclusive[r])
        assert projection.ops[r] == len(mine)
        assert projection.gpu_sum_ns[r] == (ops.end - ops.start)[mine].sum()
        assert projection.gpu_busy_ns[r] == union(ops.start[mine], ops.end[mine]).measure
        assert projection.launches[r] == len(set(ops.corr[mine].tolist()))
        assert projection.first_start[r] == (ops.start[mine].min() if len(mine) else -1)
        assert projection.last_end[r] == (ops.end[mine].max() if len(mine) else -1)
        # innermost: no shorter or later-listed range of the tree claims it too
        own = [g for g in mine.tolist() if not any(inclusive[q, g] for q in range(r + 1, len(ranges)))]
        assert projection.self_ops[r] == len(own)
        assert length[r] > 0
    claimed = inclusive.any(axis=0)
    assert projection.self_ops.sum() == claimed.sum()
    assert projection.self_sum_ns.sum() == (ops.end - ops.start)[claimed].sum()
    assert projection.coverage[0] == claimed.mean()


def test_self_figures_of_graph_rows_count_one_operation():
    case = TraceCase()
    case.range("forward", 0, 100)
    case.launch(10, 60, (100, 500), kind=OpKind.GRAPH, graph_id=3)
    assert by_name(case)["forward"]["self_ops"] == 1
