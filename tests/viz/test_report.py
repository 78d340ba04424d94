"""One page with everything: banners, key figures, timeline, figures, tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrv2.trace.analysis.model import Analysis
from mrv2.trace.table import OpKind, Trace, TraceError
from mrv2.viz import payload
from mrv2.viz.report import key_figures, report, save_report
from viz.test_timeline import parse
from viz.traces import host_only_trace, small_trace

pytest.importorskip("plotly")


def test_the_report_holds_everything_and_fetches_nothing(tmp_path: Path) -> None:
    trace = small_trace()
    trace.diagnostics.append("3 records were dropped")
    path = save_report(trace, tmp_path / "report.html")
    text = path.read_text(encoding="utf-8")
    page = parse(text)
    assert page.fetched == []
    assert "<p class='banner'>3 records were dropped</p>" in text
    assert "<title>small.sqlite</title>" in text
    assert "Test GPU" in text
    data = json.loads(payload.unpacked(page.scripts["mrv2-data"]))
    assert len(data["figures"]) == 4
    assert [table["title"].split(":")[0] for table in data["tables"]] == ["Host syncs", "Bubbles", "Kernels and copies"]
    # places are counted from the start of the timeline
    assert data["tables"][0]["rows"][0]["start"] < data["timeline"]["span"]


def test_graphs_that_were_recorded_as_a_whole_are_announced() -> None:
    trace = small_trace()
    trace.ops.kind[:] = OpKind.GRAPH
    trace.meta["granularity"] = "graph"
    trace.diagnostics.append("graph executions recorded as a whole: GPU busy time is an upper bound")
    text = report(trace)
    assert "upper bound" in text
    assert "GPU busy (upper bound)" in text


def test_a_trace_of_the_host_alone_has_a_report_without_zeros() -> None:
    values = dict(key_figures(Analysis(host_only_trace())))
    assert values["GPU busy"] == values["CPU work hidden behind the GPU"] == values["host syncs a step"] == "n/a"
    assert values["steps"] == "4"
    assert "no GPU rows" in report(host_only_trace())


def test_an_empty_trace_has_none() -> None:
    with pytest.raises(TraceError, match="no events"):
        report(Trace())
