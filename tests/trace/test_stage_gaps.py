"""The GPU between two stages of a step, and between executions of CUDA graphs."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrv2.trace import OpKind, Trace, load, save
from mrv2.trace.analysis import Analysis
from mrv2.trace.assertions import TraceAssertionError, assert_graph_idle, assert_no_sync, assert_stage_gap
from nsight_files import NEW, OLD, speculating_steps
from trace_cases import PROCESS, TraceCase

US = 1000
both = pytest.mark.parametrize("schema", [OLD, NEW])


def made(tmp_path: Path, schema: str = NEW, **how: object) -> Trace:
    return load(speculating_steps(schema, **how).write(tmp_path / "t.sqlite"))  # type: ignore[arg-type]


@both
@pytest.mark.parametrize("whole_step", [True, False])
def test_the_gap_is_told_apart_from_what_runs_inside_it(tmp_path: Path, schema: str, whole_step: bool) -> None:
    """6 + x us from verify to draft, of which post_update fills 4: by capture in one graph, by launch without."""
    trace = made(tmp_path, schema, whole_step=whole_step, idle_us=5)
    gaps = trace.stage_gaps("verify", "draft")
    assert gaps is not None and gaps.step.tolist() == list(range(24))
    assert gaps.start.tolist() == [100 * US * step + 60 * US for step in range(24)]
    assert set(gaps.gap_ns.tolist()) == {11 * US} and set(gaps.idle_ns.tolist()) == {7 * US}
    trace.assert_stage_gap("verify", "draft", p95_ns=7 * US)
    with pytest.raises(TraceAssertionError, match="95th percentile of 23 steps is 7000 ns; the longest, 7000 ns, in"):
        trace.assert_stage_gap("verify", "draft", p95_ns=7 * US - 1)


@both
def test_a_capture_that_was_not_recorded_is_no_evidence(tmp_path: Path, schema: str) -> None:
    trace = made(tmp_path, schema, captured=False)
    assert trace.stage_gaps("verify", "draft") is None
    with pytest.raises(TraceAssertionError, match="known to belong to both stages .*before the recording began"):
        trace.assert_stage_gap("verify", "draft", p95_ns=10**9)


def test_stages_survive_saving(tmp_path: Path) -> None:
    trace = made(tmp_path)
    again = load(save(trace, tmp_path / "t.npz"))
    assert str(again.stage_gaps("verify", "draft")) == str(trace.stage_gaps("verify", "draft"))


def test_a_stage_that_begins_early_leaves_no_gap() -> None:
    case = TraceCase()
    for step in range(3):
        at = 1000 * step
        case.range("schedule", at, at + 10, step)
        case.range("verify", at + 20, at + 40, step)
        case.launch(at + 25, at + 30, (at + 100, at + 200), (at + 300, at + 400))
        case.range("draft", at + 40, at + 60, step)
        # on another stream, before the verification ends, and another operation of the stage long after
        case.launch(at + 45, at + 50, (at + 350, at + 360), (at + 900, at + 910), stream=13)
    gaps = case.build().stage_gaps("verify", "draft")
    assert gaps is not None
    assert gaps.gap_ns.tolist() == gaps.idle_ns.tolist() == [0, 0, 0]
    assert gaps.start.tolist() == [400, 1400, 2400]


def test_only_steps_with_both_stages_count_and_only_inside_the_window() -> None:
    case = TraceCase()
    for step in range(6):
        at = 1000 * step
        case.range("schedule", at, at + 10, step)
        # inside another range of the stage, as graphs of a drafter are
        case.range("verify", at + 20, at + 40, step)
        case.launch(at + 25, at + 30, (at + 100, at + 200))
        if step % 2:
            case.range("draft", at + 40, at + 90, step)
            case.range("replay", at + 42, at + 80, step)
            case.launch(at + 45, at + 50, (at + 200 + step, at + 300))
    trace = case.build()
    gaps = trace.stage_gaps("verify", "draft")
    assert gaps is not None and gaps.step.tolist() == [1, 3, 5] and gaps.gap_ns.tolist() == [1, 3, 5]
    late = Analysis(trace, window=(1500, 6000)).stage_gaps("verify", "draft")
    assert late is not None and late.step.tolist() == [3, 5]
    with pytest.raises(TraceAssertionError, match="no step behind the warm-up"):
        assert_stage_gap(Analysis(trace, warmup=6), "verify", "draft", p95_ns=0)


def test_each_device_has_its_own_gap() -> None:
    case = TraceCase()
    case.range("schedule", 0, 10, 4)
    case.range("verify", 20, 40, 4)
    case.range("draft", 40, 60, 4)
    for device in (0, 1):
        case.launch(22 + 4 * device, 24 + 4 * device, (100, 200), device=device)
        case.launch(42 + 4 * device, 44 + 4 * device, (210 + 90 * device, 400), device=device)
    gaps = case.build().stage_gaps("verify", "draft")
    assert gaps is not None
    assert gaps.device.tolist() == [0, 1] and gaps.idle_ns.tolist() == [10, 100]


@both
@pytest.mark.parametrize("whole_step", [True, False])
def test_v2_waits_for_the_output_and_v1_names_what_else(tmp_path: Path, schema: str, whole_step: bool) -> None:
    assert_no_sync(made(tmp_path, schema, whole_step=whole_step), allow=["output"])
    with pytest.raises(TraceAssertionError, match="24 host waits .*in sample_tokens > wait: v1: accepted tokens"):
        assert_no_sync(made(tmp_path, schema, whole_step=whole_step, count_wait=True), allow=["output"])


@both
def test_idle_between_graphs_and_inside(tmp_path: Path, schema: str) -> None:
    """A graph of 52 us every 100, of which 6 + x are holes; the first step is warm-up."""
    found = made(tmp_path, schema, idle_us=4).graph_idle()
    assert found is not None and found.num_executions == 23
    assert found.span_ns == (22 * 100 + 52) * US
    assert found.between_ns == 22 * 48 * US and found.inside_ns == 23 * 6 * US
    assert found.between_share == pytest.approx(22 * 48 / 2252)


def graphs(case: TraceCase, *spans: tuple[int, int], step: int = 0) -> None:
    """Launch graphs that are recorded as a whole."""
    for start, end in spans:
        case.launch(start - 5, start - 4, (start, end), kind=OpKind.GRAPH)


def test_what_runs_beside_graphs_is_not_idle() -> None:
    case = TraceCase()
    for step in range(4):
        case.range("schedule", 1000 * step, 1000 * step + 10, step)
    # the first two are warm-up; two streams overlap; a copy fills a part of a hole
    graphs(case, (100, 200), (1100, 1200), (2000, 2500), (2400, 2700), (3000, 3500))
    case.copy(2600, 2605, (2750, 2850), stream=13)
    case.range("update_from_output", 3600, 4000, 3)
    found = Analysis(case.build(), warmup=2).graph_idle()
    assert found is not None
    assert (found.num_executions, found.span_ns, found.between_ns, found.inside_ns) == (3, 1500, 200, None)
    assert_graph_idle(Analysis(case.build(), warmup=2), at_most=200 / 1500)
    with pytest.raises(TraceAssertionError, match="at most 13.0 %: it is 13.3 % of 3 executions"):
        assert_graph_idle(Analysis(case.build(), warmup=2), at_most=0.13)


def test_without_graphs_nothing_is_said() -> None:
    case = TraceCase()
    case.range("schedule", 0, 10, 0)
    case.launch(20, 25, (30, 40), (50, 60))
    assert case.build().graph_idle() is None
    with pytest.raises(TraceAssertionError, match="fewer than two executions"):
        case.build().assert_graph_idle(at_most=1.0)
    assert case.build().processes() == [PROCESS]
