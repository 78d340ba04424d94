"""Clocks that contradict each other, and the banners that a reader must see."""

from __future__ import annotations

from mrv2.trace.analysis import Analysis, shift_device
from trace_cases import TraceCase, sync_steps


def skewed(by: int) -> TraceCase:
    """Return twenty launches 1000 ns apart whose kernels start `by` ns before their calls."""
    case = TraceCase()
    for i in range(20):
        case.launch(1000 * i, 1000 * i + 10, (1000 * i - by, 1000 * i - by + 100))
    return case


def test_no_contradiction_no_skew():
    skew = Analysis(skewed(-5).build()).skew()[0]
    assert (skew.launch_ns, skew.skew_ns) == (-5, 0)
    assert not any("skew" in line for line in Analysis(skewed(-5).build()).banners())


def test_a_kernel_before_its_launch_proves_skew():
    analysis = Analysis(skewed(300).build())
    assert analysis.skew()[0].skew_ns == 300
    assert any("clock skew" in line and "300 ns" in line for line in analysis.banners())
    assert analysis.launches().unreliable.all()


def test_a_wait_that_returns_before_its_work_ends_proves_skew():
    case = TraceCase()
    case.launch(0, 10, (20, 500))
    case.sync(30, 460)
    skew = Analysis(case.build()).skew()[0]
    assert (skew.launch_ns, skew.sync_ns, skew.skew_ns) == (-20, 40, 40)


def test_drift_shows_by_decile():
    case = TraceCase()
    for i in range(100):
        case.launch(1000 * i, 1000 * i + 10, (1000 * i + 100 - 2 * i, 1000 * i + 300))
    by_decile = Analysis(case.build()).skew()[0].by_decile
    assert by_decile == [-100 + 2 * i for i in range(9, 100, 10)]


def test_shifting_is_explicit_and_noted():
    trace = skewed(300).build()
    moved = shift_device(trace, {0: 305})
    assert Analysis(moved).skew()[0].launch_ns == -5
    assert moved.meta["shifted_ns"] == {0: 305}
    assert any("shifted on request" in line for line in moved.diagnostics)
    assert Analysis(trace).skew()[0].skew_ns == 300


def test_devices_have_their_own_clocks():
    case = skewed(300)
    case.launch(50_000, 50_010, (50_020, 50_030), device=1)
    assert [skew.skew_ns for skew in Analysis(case.build()).skew()] == [300, 0]


def test_banners_tell_of_orphans_and_a_silent_first_step():
    case = sync_steps(5)
    del case.rows["ops"][0]
    case.op(4500, 4600)
    case.diagnostics.append("3 records were dropped")
    banners = Analysis(case.build()).banners()
    assert "3 records were dropped" in banners
    assert any("1 of 5 operations have no call" in line for line in banners)
    assert any("silent in the first step" in line for line in banners)


def test_node_granularity_is_called_a_distortion():
    case = TraceCase()
    case.meta["granularity"] = "node"
    case.launch(0, 10, (20, 30), graph_node=5)
    assert any("node by node" in line for line in Analysis(case.build()).banners())


def test_without_launches_there_is_no_estimate():
    case = TraceCase()
    case.op(0, 10)
    skew = Analysis(case.build()).skew()[0]
    assert (skew.launch_ns, skew.sync_ns, skew.skew_ns) == (None, None, 0)
    assert Analysis(TraceCase().build()).skew() == []
