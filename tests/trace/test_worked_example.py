"""One step known by hand: a graph of 40 nodes, a second stream, an orphan, a straddling launch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mrv2.trace import Trace, load
from mrv2.trace.analysis import Analysis, Attribution
from nsight_files import worked_example

US = 1000


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Trace:
    return load(worked_example().write(tmp_path_factory.mktemp("example") / "example.sqlite"))


@pytest.fixture(scope="module")
def analysis(trace) -> Analysis:
    return Analysis(trace)


def row_of(analysis: Analysis, name: str, policy="contained") -> dict:
    projection = analysis.projection(policy)
    assert projection is not None
    return projection.rows()[projection.name.index(name)] | {
        "span_ns": int(projection.span_ns[projection.name.index(name)])
    }


def test_forward_has_330_us_of_work_in_322_us_over_a_span_of_398_us(analysis):
    row = row_of(analysis, "forward")
    assert row["gpu_sum_ns"] == 330 * US
    assert row["gpu_busy_ns"] == 322 * US
    assert row["span_ns"] == 398 * US
    assert (row["ops"], row["launches"]) == (41, 2)


def test_launch_time_counts_once_for_a_graph(analysis):
    assert row_of(analysis, "forward")["api_ns"] == (50 + 30) * US
    launches = analysis.launches()
    assert launches.api_ns.tolist() == [50 * US, 30 * US, 15 * US]
    assert launches.num_ops.tolist() == [40, 1, 1]


def test_launch_delays_use_the_first_operation(analysis):
    launches = analysis.launches()
    graph, side, _ = range(3)
    assert launches.queue_delay_ns[graph] == 10 * US
    assert launches.start_delay_ns[side] == 15 * US
    assert launches.queue_delay_ns[side] == 0
    # 40 nodes of 8 us every 10: the last hole is before the last node
    assert launches.intra_gap_ns[graph] == 39 * 2 * US


def test_straddling_launch_is_in_step_unless_its_start_decides(analysis):
    assert row_of(analysis, "forward")["ops"] == 41
    assert row_of(analysis, "step")["ops"] == 42
    assert row_of(analysis, "step")["self_ops"] == 1
    by_start = row_of(analysis, "forward", "start")
    assert (by_start["ops"], by_start["gpu_sum_ns"]) == (42, 350 * US)
    assert row_of(analysis, "step", "start")["self_ops"] == 0


def test_orphan_is_busy_but_in_no_range(analysis):
    overview = analysis.overview()
    # 322 of the graph and the side launch, the orphan, the straddling launch
    assert overview.devices[0].busy_ns == (322 + 50 + 20) * US
    assert overview.devices[0].gpu_time_sum_ns == (320 + 10 + 50 + 20) * US
    by_number, by_time = analysis.projection().coverage
    assert by_number == 42 / 43
    assert by_time == pytest.approx(350 / 400)


def test_range_across_threads_is_attributed_by_step_number(analysis):
    row = row_of(analysis, "request")
    assert row["how"] == Attribution.STEP
    assert (row["ops"], row["gpu_sum_ns"]) == (42, 350 * US)
    # it is not nested: no self figure
    assert row["self_ops"] == -1


def test_range_across_threads_without_a_step_number_abstains_aloud(trace):
    ranges = trace.ranges
    bare = replace(ranges, step=np.where(trace.name_of(ranges.name) == "request", -1, ranges.step))
    projection = Analysis(replace(trace, ranges=bare)).projection()
    assert "request" in projection.warnings[0]
    row = projection.rows()[projection.name.index("request")]
    assert row["how"] == Attribution.NONE
    assert row["ops"] == -1


def test_the_step_is_one_step(analysis):
    steps = analysis.steps()
    assert steps.step.tolist() == [7]
    assert steps.wall_ns.tolist() == [1000 * US]
    assert steps.gpu_busy_ns.tolist() == [392 * US]
    assert steps.launches.tolist() == [3]


def test_whole_graph_is_busy_without_its_holes_and_says_so(tmp_path):
    trace = load(worked_example(graph_rows=True).write(tmp_path / "graph.sqlite"))
    analysis = Analysis(trace)
    row = row_of(analysis, "forward")
    assert (row["ops"], row["launches"]) == (2, 2)
    # 170 to 568: the holes inside are invisible, and the side launch runs within
    assert row["gpu_busy_ns"] == 398 * US
    assert analysis.busy_is_upper_bound
    assert "upper bound" in analysis.stages().get("forward", "gpu").note
    assert "upper bound" in str(analysis.overview())
    assert analysis.overview().utilization == pytest.approx(0.468)
