"""The figures add up to what the analysis says, and say what they do not know."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mrv2.trace.analysis.model import Analysis
from mrv2.trace.compare import compare
from mrv2.trace.table import Trace, TraceError
from mrv2.viz import compare as compared
from mrv2.viz import figures
from mrv2.viz.kernels import kernel_table
from viz.traces import NUM_STEPS, STEP_NS, big_trace, host_only_trace, small_trace

pytest.importorskip("plotly")


def _said(figure: Any) -> str:
    return " ".join([figure.layout.title.text, *(note.text for note in figure.layout.annotations)])


def test_overlap_parts_sum_to_each_step() -> None:
    analysis = Analysis(small_trace())
    figure = figures.overlap_bars(analysis)
    total = sum(np.array(bar.y) for bar in figure.data)
    assert total == pytest.approx(analysis.steps().wall_ns / 1e3)
    both = next(bar for bar in figure.data if bar.name == "CPU and GPU work")
    # execute_model runs from 1 to 5 us, wait_output is a wait only while it is inside the call that waits
    overlap = analysis.overview().devices[0].overlap_ns
    assert sum(both.y) * 1e3 == pytest.approx(overlap)
    assert "of the CPU work is hidden behind the GPU" in figure.layout.title.text


def test_bubbles_by_cause_sum_to_the_gaps() -> None:
    analysis = Analysis(small_trace())
    bubbles = analysis.bubbles()
    assert bubbles is not None
    figure = figures.bubble_stack(analysis)
    drawn = sum(float(np.sum(bar.y)) for bar in figure.data) * 1e3
    assert drawn == pytest.approx(bubbles.by_step(analysis.windows)[0].sum())
    assert f"{len(bubbles)} gaps" in figure.layout.title.text


def test_causes_of_one_hue_differ_in_pattern() -> None:
    causes = ["host:prepare_inputs", "host:upload", "host:forward", "sync", "gil", "starved", "launch_api", "copy"]
    looks = figures.cause_looks(causes)
    assert len(set(looks)) == len(causes)
    assert looks[0][0] == looks[1][0]


def test_many_steps_are_averaged_and_the_axis_says_so() -> None:
    analysis = Analysis(big_trace(100_000))
    figure = figures.overlap_bars(analysis)
    assert len(figure.data[0].y) == 125
    assert "mean of 4" in figure.layout.xaxis.title.text
    total = sum(np.array(bar.y) for bar in figure.data)
    wall = analysis.steps().wall_ns.reshape(125, 4).mean(axis=1)
    assert total == pytest.approx(wall / 1e3)


def test_stage_boxes_show_the_quantiles() -> None:
    analysis = Analysis(big_trace(20_000))
    figure = figures.stage_box(analysis)
    host = next(box for box in figure.data if box.name == "host")
    at = list(host.y).index("schedule")
    samples = analysis.stages().get("schedule").samples
    expected = np.quantile(samples, [0.05, 0.25, 0.5, 0.75, 0.95]) / 1e3
    assert [getattr(host, key)[at] for key in ("lowerfence", "q1", "median", "q3", "upperfence")] == pytest.approx(
        expected
    )


def test_few_samples_have_no_quartiles() -> None:
    host = next(box for box in figures.stage_box(Analysis(small_trace())).data if box.name == "host")
    assert list(host.q1) == list(host.median) == list(host.q3)


def test_stages_without_device_time_are_named() -> None:
    text = figures.stage_box(Analysis(small_trace())).layout.title.text
    assert "GPU time not collected: upload" in text
    assert max(map(len, text.split("<br>"))) <= 72


@pytest.mark.parametrize("draw", [figures.overlap_bars, figures.bubble_stack, figures.kernel_bars])
def test_without_a_gpu_the_figures_say_so(draw: Any) -> None:
    figure = draw(Analysis(host_only_trace()))
    assert not figure.data
    assert "not collected: GPU operations" in _said(figure)


@pytest.mark.parametrize("draw", [figures.overlap_bars, figures.bubble_stack])
def test_without_steps_the_figures_say_so(draw: Any) -> None:
    full = small_trace()
    figure = draw(Analysis(Trace(ops=full.ops, strings=full.strings)))
    assert not figure.data
    assert "steps not collected" in _said(figure)


def test_kernel_shares_sum_to_one_and_copies_have_a_bandwidth() -> None:
    kernels = kernel_table(Analysis(small_trace()), {"_decode_kernel": 4000})
    assert kernels is not None
    assert kernels.share.sum() == pytest.approx(1)
    assert kernels.name == ["nvjet_gemm", "_decode_kernel", "Memcpy DtoH"]
    assert kernels.count.tolist() == [NUM_STEPS] * 3
    assert kernels.total_ns.tolist() == [3 * 2000 + 3000, 4 * 2000, 4 * 1400]
    # bytes of a kernel are known only when the caller says so
    assert np.isnan(kernels.gb_per_s[0])
    assert kernels.gb_per_s[1:].tolist() == [2, 1]
    assert kernels.longest[0] == (1_000_000 + 3 * STEP_NS + 4500, 1_000_000 + 3 * STEP_NS + 7500)


def test_kernel_bars_carry_share_count_and_bandwidth() -> None:
    figure = figures.kernel_bars(Analysis(small_trace()), top=2)
    bar = figure.data[0]
    assert list(bar.x) == [9, 8]
    assert bar.text[1] == "35.4 %, 4 x 2 us"
    assert "2 of 3" in figure.layout.title.text


def test_differences_are_drawn_with_their_intervals() -> None:
    a, b = small_trace(), big_trace(4_000)
    comparison = compare(a, b, names=("small", "big"))
    figure = compared.delta_plot(comparison)
    points = figure.data[0]
    known = [
        d for d in comparison.deltas if d.delta is not None and (d.what.endswith("_ns") or d.what in ("host", "gpu"))
    ]
    assert np.array(points.x) == pytest.approx([d.delta / 1e3 for d in known])
    low = np.array(points.x) - np.array(points.error_x.arrayminus)
    assert low == pytest.approx([d.low / 1e3 for d in known])
    symbols = {True: {"triangle-left", "triangle-right"}, False: {"circle-open"}}
    assert all(symbol in symbols[d.is_clear] for symbol, d in zip(points.marker.symbol, known))
    assert figure.layout.title.text.replace("<br>", " ").startswith(comparison.verdict)


def test_the_same_steps_of_two_traces_start_at_zero() -> None:
    trace = small_trace()
    figure = compared.side_by_side(trace, trace, 1, num_steps=1, names=("left", "right"))
    forward = [t for t in figure.data if t.name == "forward, GEMM"]
    assert len(forward) == 2
    upper, lower = (np.array(t.x, np.float64) for t in forward)
    assert upper == pytest.approx(lower, nan_ok=True)
    starts = set(np.rint(upper.reshape(-1, 6)[:, 0] * 1e9).astype(int).tolist())
    # execute_model, forward, the launch and the second kernel of the step
    assert {1000, 1500, 2000, 5500} <= starts
    assert np.nanmin(np.array(forward[1].y, np.float64)) > np.nanmax(np.array(forward[0].y, np.float64))
    assert [note.text[:11] for note in figure.layout.annotations] == ["<b>left</b>", "<b>right</b"]
    assert sum(bool(t.showlegend) for t in forward) == 1


def test_a_step_that_is_not_there_is_refused() -> None:
    with pytest.raises(TraceError, match="left has 4 steps: position 9"):
        compared.side_by_side(small_trace(), small_trace(), 9, names=("left", "right"))


def test_step_times_show_both_medians() -> None:
    figure = compared.step_times(small_trace(), small_trace(), names=("x", "y"))
    assert [line.name for line in figure.data] == ["x: median 10 us", "y: median 10 us"]
    assert list(figure.data[0].y) == pytest.approx([10, 10, 10, 9.8])
