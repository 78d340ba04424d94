"""Whatever a recording lacks, every question has an answer: a figure, None, or a failing assertion; never a crash."""

from __future__ import annotations

from contextlib import suppress
from itertools import combinations
from pathlib import Path

import pytest

from mrv2.trace import CopyKind, OpKind, SyncType, Trace, WaitKind, load
from mrv2.trace.analysis import Analysis, stream_edges
from mrv2.trace.assertions import TraceAssertionError, assert_max_bubble, assert_no_sync, assert_overlap
from mrv2.trace.compare import compare
from trace_cases import MAIN, SIDE, STREAM, WORKER, TraceCase, sync_steps

TABLES = ("ops", "api", "ranges", "syncs", "waits", "overhead", "python")
TRACES = sorted((Path(__file__).parents[2] / "traces").rglob("*.sqlite.gz"))


def full() -> TraceCase:
    case = sync_steps(5)
    case.copy(1110, 1120, (1130, 1140), stream=SIDE, copy_kind=CopyKind.H2D)
    case.sync(1150, 1155, SyncType.STREAM_WAIT, stream=SIDE, event_stream=STREAM)
    case.launch(2110, 2150, (2160, 2170), (2175, 2180), graph_node=1, thread=WORKER)
    case.launch(3110, 3150, (3160, 3170), kind=OpKind.GRAPH)
    case.span("request", 100, 4000, step=2, end_thread=WORKER)
    case.span("loose", 100, 2000)
    case.wait(50, 80, WaitKind.GIL)
    case.wait(10, 20, thread=WORKER)
    case.call("cudaMalloc", 4100, 4110)
    case.add("overhead", "flush", 900, 950)
    case.add("python", "run", 0, 5000, thread=MAIN)
    return case


def ask_everything(trace: Trace) -> None:
    analysis = Analysis(trace)
    for answer in (analysis.overview(), analysis.steps(), analysis.stages(), analysis.copies(), analysis.launches()):
        assert str(answer)
    analysis.skew(), analysis.banners(), stream_edges(analysis)
    for policy in ("contained", "start"):
        projection = analysis.projection(policy)
        if projection is not None:
            projection.by_name(), projection.rows()
    bubbles, syncs = analysis.bubbles(), analysis.syncs()
    if bubbles is not None:
        assert sum(bubbles.by_cause().values()) == bubbles.total_ns == sum(bubbles.rollup().values())
        bubbles.by_step(analysis.windows), bubbles.longest(3).rows()
    if syncs is not None:
        syncs.rows(), syncs.per_call(), syncs.in_steps
        assert all(syncs.stack(row) for row in range(min(len(syncs), 3)))
    assert compare(trace, trace).verdict
    for check in (
        lambda: assert_no_sync(analysis),
        lambda: assert_overlap(analysis, at_least=0.5),
        lambda: assert_overlap(analysis, "schedule", at_least=0.5),
        lambda: assert_max_bubble(analysis, max_ns=0, p95_ns=0, step_p95_ns=0),
    ):
        # true or false, but no other error
        with suppress(TraceAssertionError):
            check()


@pytest.mark.parametrize("missing", [m for n in (0, 1, 2) for m in combinations(TABLES, n)], ids="-".join)
def test_without_some_tables(missing):
    case = full()
    for name in missing:
        case.rows[name].clear()
        case.not_collected |= {name: "left out", f"{name}.kernel": "left out", f"{name}.memcpy": "left out"}
    ask_everything(case.build())


@pytest.mark.parametrize("kept", TABLES)
def test_with_one_table_only(kept):
    case = full()
    for name in TABLES:
        if name != kept:
            case.rows[name].clear()
            case.not_collected[name] = "left out"
    ask_everything(case.build())


def test_without_anything():
    ask_everything(Trace())
    ask_everything(TraceCase().build())


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_recordings_in_the_repository(path):
    ask_everything(load(path, cache=False))


def test_data_frames():
    pandas = pytest.importorskip("pandas")
    analysis = Analysis(full().build())
    for table in (analysis.steps(), analysis.syncs(), analysis.launches(), analysis.bubbles(), analysis.projection()):
        frame = table.to_pandas()
        assert isinstance(frame, pandas.DataFrame)
        assert len(frame) == len(table)
