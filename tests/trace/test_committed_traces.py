"""What the recordings in ``traces/`` show: our own runners on an H200, and other people's engines."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from mrv2.trace import OpKind, Trace, load
from mrv2.trace.analysis import Analysis
from mrv2.trace.assertions import TraceAssertionError, assert_max_bubble, assert_no_sync, assert_overlap
from mrv2.trace.compare import compare

ROOT = Path(__file__).parents[2] / "traces"
GRANULARITIES = ("graph", "node")
RUNS = ("v1_sync", "v1_async", "v2_sync", "v2_async", "v2_async_mixed")


@cache
def recording(folder: str, name: str) -> Trace:
    path = ROOT / folder / f"{name}.sqlite.gz"
    if not path.exists():
        pytest.skip(f"traces/{folder}/{path.name} is absent")
    return load(path, cache=False)


def own(name: str, granularity: str = "graph") -> Trace:
    return recording("h200", f"{name}.{granularity}")


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", ["v2_sync", "v2_async", "v2_async_mixed"])
def test_v2_waits_for_nothing_but_the_output(name, granularity):
    trace = own(name, granularity)
    assert_no_sync(trace, within="step", allow=["output"])
    for stage in ("schedule", "execute_model", "sample_tokens", "update_from_output"):
        assert_no_sync(trace, within=stage)
    # the one that is left is found, so the evidence is there
    with pytest.raises(TraceAssertionError, match="cudaEventSynchronize in wait_output > wait: output"):
        assert_no_sync(trace, within="step")
    assert Analysis(trace).steps().syncs.tolist() == [1] * 30


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_v1_waits_in_its_bookkeeping(granularity):
    trace = own("v1_sync", granularity)
    with pytest.raises(
        TraceAssertionError, match="30 host waits .*in sample_tokens > v1: bookkeep > wait: v1: to_list"
    ):
        assert_no_sync(trace, within="step", allow=["output"])
    assert_no_sync(trace, within="step", allow=["v1: bookkeep"])
    assert_no_sync(trace, within="execute_model")


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_v1_async_waits_before_it_reuses_its_buffers(granularity):
    trace = own("v1_async", granularity)
    with pytest.raises(
        TraceAssertionError, match="in execute_model > v1: preprocess > wait: v1: prepare_inputs barrier"
    ):
        assert_no_sync(trace, within="step", allow=["output"])
    assert_no_sync(trace, within="step", allow=["output", "v1: prepare_inputs barrier"])


def test_overlap_separates_the_runners():
    assert_overlap(own("v2_async"), at_least=0.85)
    assert_overlap(own("v2_async_mixed"), at_least=0.85)
    for name in ("v1_sync", "v1_async", "v2_sync"):
        with pytest.raises(TraceAssertionError, match="overlap of the CPU work"):
            assert_overlap(own(name), at_least=0.6)


def test_bubbles_separate_the_runners():
    settled = Analysis(own("v2_async"), warmup=5)
    assert_max_bubble(settled, step_p95_ns=500_000)
    with pytest.raises(TraceAssertionError, match="most of it: host:v1: preprocess"):
        assert_max_bubble(Analysis(own("v1_sync"), warmup=5), step_p95_ns=500_000)


def test_async_runs_ahead_and_sync_does_not():
    run_ahead = Analysis(own("v2_async")).steps().run_ahead
    assert np.median(run_ahead) == 1
    assert Analysis(own("v2_sync")).steps().run_ahead.max() == 0
    assert Analysis(own("v1_sync")).steps().run_ahead.max() == 0


def test_the_comparison_names_the_faster_runner():
    found = compare(own("v1_sync"), own("v2_async"), names=("V1 sync", "V2 async"))
    assert found.get("step", "wall_ns").high < 0
    assert "A step of V2 async is" in found.verdict and "faster" in found.verdict
    assert "GPU bubbles" in found.verdict or "exposed CPU time" in found.verdict


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_figures_are_consistent(name, granularity):
    trace = own(name, granularity)
    analysis = Analysis(trace)
    figures, bubbles, steps = analysis.overview().devices[0], analysis.bubbles(), analysis.steps()
    assert len(steps) == 30
    assert (np.diff(steps.step) == 1).all()
    parts = figures.overlap_ns + figures.exposed_ns + figures.gpu_only_ns + figures.idle_both_ns
    assert parts == figures.window_ns == steps.wall_ns.sum()
    idle = figures.head_idle_ns + figures.tail_idle_ns + figures.micro_gap_ns + figures.bubble_ns
    assert idle == figures.idle_ns
    assert sum(bubbles.by_cause().values()) == figures.bubble_ns == steps.bubble_ns.sum()
    assert "unknown" not in bubbles.by_cause()
    # every operation has its call, inside a range
    assert analysis.projection().coverage == (1.0, 1.0)
    assert all(skew.skew_ns == 0 for skew in analysis.skew())
    assert analysis.busy_is_upper_bound == (granularity == "graph")


def test_graph_and_node_recordings_agree_on_what_was_launched():
    for name in RUNS:
        graph, node = (Analysis(own(name, granularity)) for granularity in GRANULARITIES)
        assert abs(len(graph.launches()) - len(node.launches())) <= 5
        assert (graph.trace.ops.kind == OpKind.GRAPH).sum() == 30
        assert (node.trace.ops.graph_node >= 0).sum() > 30 * 100


def test_vllm_v2_figures():
    trace = recording("foreign", "vllm_v2_async1")
    kinds = [int((trace.ops.kind == kind).sum()) for kind in (OpKind.KERNEL, OpKind.MEMCPY, OpKind.MEMSET)]
    assert kinds == [9195, 149, 52]
    assert int((trace.name_of(trace.api.name) == "cudaGraphLaunch").sum()) == 23
    figures = Analysis(trace, window=trace.span()).overview().devices[0]
    assert figures.busy_ns == 41_521_045
    assert figures.gpu_time_sum_ns == 41_538_645
    steps = Analysis(trace).steps()
    assert len(steps) == 25
    # one wait a step, for the output of the step before
    assert steps.syncs[1:24].tolist() == [1] * 23


def test_vllm_v1_waits_twice_a_step_and_names_the_stage():
    trace = recording("foreign", "vllm_v1_async1")
    steps = Analysis(trace).steps()
    assert steps.syncs[1:24].tolist() == [2] * 23
    with pytest.raises(TraceAssertionError, match="gpu_model_runner: preprocess"):
        assert_no_sync(trace, within="step")


def test_the_toy_reads_one_value_a_step():
    table = Analysis(recording("foreign", "h200_toy")).syncs()
    found = [row for row in table.rows() if row["name"] == "cudaStreamSynchronize"]
    assert sorted(row["step"] for row in found) == list(range(20))
    assert {(row["path"], row["kind"], row["counted"]) for row in found} == {("step", "framework", True)}
    bubbles = [-1.0 if row["induced_bubble_ns"] is None else row["induced_bubble_ns"] for row in found]
    assert bubbles == sorted(bubbles, reverse=True)
