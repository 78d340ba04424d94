"""The Nsight Systems reader, on small files in both generations of the schema."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mrv2.trace import OpKind, RangeKind, SyncType, Trace, WaitKind, load, save
from nsight_files import NEW, OLD, PID, TID, NsightFile, global_tid, worked_example

both = pytest.mark.parametrize("schema", [OLD, NEW])
NO_ID = 2**32 - 1


def _load(file: NsightFile, folder: Path, name: str = "t.sqlite") -> Trace:
    return load(file.write(folder / name))


def _names(trace: Trace, table: str) -> list[str]:
    return trace.name_of(trace.table(table).columns()["name"]).tolist()


@both
def test_the_worked_example_reads_the_same_in_both_schemas(tmp_path: Path, schema: str) -> None:
    trace = _load(worked_example(schema), tmp_path)
    assert len(trace.ops) == 43 and set(trace.ops.kind) == {OpKind.KERNEL}
    assert trace.meta["granularity"] == "node"
    assert trace.ops.graph_node[trace.ops.corr == 1].tolist() == [(5 << 32) + i for i in range(40)]
    assert set(trace.ops.graph_id[trace.ops.corr == 1].tolist()) == {5}
    assert trace.ops.corr[trace.name_of(trace.ops.name) == "orphan"].tolist() == [-1]
    assert _names(trace, "api") == ["cudaGraphLaunch", "cudaLaunchKernel", "cudaLaunchKernel"]
    assert (trace.processes(), np.unique(trace.api.thread).tolist()) == ([PID], [TID])
    assert trace.diagnostics == []


@both
def test_the_name_cuda_graph_events_may_mean_nodes_or_graphs(tmp_path: Path, schema: str) -> None:
    """2023: creation of nodes; 2025 and later: creation of graphs. Neither is an execution on the GPU."""
    file = worked_example(schema)
    columns = {"graphNodeId": 9, "originalGraphNodeId": 1, "graphId": 5, "graphExecId": 6}
    file.add("CUDA_GRAPH_EVENTS", start=1, end=2, globalTid=global_tid(TID), nameId=file.text("g"), **columns)
    trace = _load(file, tmp_path)
    assert len(trace.ops) == 43 and len(trace.api) == 3


def test_whole_graphs_count_when_their_nodes_are_missing(tmp_path: Path) -> None:
    trace = _load(worked_example(graph_rows=True), tmp_path)
    graph = trace.ops.take(trace.ops.kind == OpKind.GRAPH)
    assert (graph.end - graph.start).tolist() == [398_000]
    assert trace.name_of(graph.name).tolist() == ["CUDA graph 3"]
    assert trace.meta["granularity"] == "graph"
    assert trace.coverage["ops.graph"].rows == 1
    assert any("upper bound" in line for line in trace.diagnostics)


def test_nodes_win_over_the_whole_graph_of_the_same_launch(tmp_path: Path) -> None:
    file = worked_example()
    file.graph(170_000, 568_000, 1)
    trace = _load(file, tmp_path, "both.sqlite")
    assert not (trace.ops.kind == OpKind.GRAPH).any()
    assert trace.meta["granularity"] == "node"
    file.graph(800_000, 900_000, 77)
    trace = _load(file, tmp_path, "mixed.sqlite")
    assert trace.ops.corr[trace.ops.kind == OpKind.GRAPH].tolist() == [77]
    assert trace.meta["granularity"] == "mixed"


def test_graphs_without_anything_inside_are_announced(tmp_path: Path) -> None:
    file = NsightFile()
    file.api("cudaGraphLaunch_v10000", 0, 5, 1)
    file.launch("k", 10, 5, 20, 30, 2)
    trace = _load(file, tmp_path)
    assert trace.meta["granularity"] == "none"
    assert any("nothing of what ran inside" in line for line in trace.diagnostics)


def test_rows_without_a_time_stamp_are_left_out_aloud(tmp_path: Path) -> None:
    file = NsightFile()
    file.kernel("good", 10, 20, 1)
    file.kernel("point", 30, 30, 2)
    file.kernel("stampless", 0, 0, 3)
    file.kernel("backwards", 50, 40, 4)
    trace = _load(file, tmp_path)
    assert _names(trace, "ops") == ["good", "point"]
    assert "2 device operations had no valid time stamp" in trace.diagnostics[0]


def test_a_graph_that_starts_on_the_host_belongs_to_the_only_device(tmp_path: Path) -> None:
    file = NsightFile()
    file.kernel("k", 10, 20, 1)
    file.graph(30, 40, 2, deviceId=2**31 - 1, contextId=2**31 - 1)
    trace = _load(file, tmp_path)
    assert trace.ops.device.tolist() == [0, 0] and trace.ops.context.tolist() == [1, -1]


@both
def test_copies_and_sets_carry_kind_memory_and_size(tmp_path: Path, schema: str) -> None:
    file = NsightFile(schema)
    file.memcpy(0, 10, 1, bytes=4096, copyKind=1, srcKind=0, dstKind=2)
    file.memset(20, 30, 2, bytes=128)
    trace = _load(file, tmp_path)
    assert _names(trace, "ops") == ["Memcpy HtoD (Pageable -> Device)", "Memset (Device)"]
    ops = trace.ops
    assert (ops.bytes.tolist(), ops.copy_kind.tolist(), ops.src_kind.tolist()) == ([4096, 128], [1, -1], [0, -1])


@both
def test_a_sync_is_one_row_with_the_calls_thread(tmp_path: Path, schema: str) -> None:
    file = NsightFile(schema)
    file.api("cudaStreamSynchronize_v3020", 100, 200, 5)
    file.sync(3, 110, 190, 5, streamId=7)
    # the same correlation id in another process is another call
    file.api("cudaEventSynchronize_v3020", 300, 400, 5, tid=9001, pid=9000)
    trace = _load(file, tmp_path)
    syncs = trace.syncs
    assert _names(trace, "syncs") == ["cudaStreamSynchronize", "cudaEventSynchronize"]
    assert (syncs.start.tolist(), syncs.end.tolist()) == ([100, 300], [200, 400])
    assert (syncs.process.tolist(), syncs.thread.tolist()) == ([PID, 9000], [TID, 9001])
    assert syncs.sync_type.tolist() == [SyncType.STREAM, SyncType.EVENT]
    assert syncs.stream.tolist() == [7, -1]


def test_the_calls_name_corrects_a_mislabelled_record(tmp_path: Path) -> None:
    """nsys 2025.3 labels stream synchronisation as a stream wait."""
    file = NsightFile()
    file.api("cudaStreamSynchronize_v3020", 100, 200, 5)
    file.sync(2, 110, 190, 5, streamId=7)
    file.api("cudaStreamWaitEvent_v3020", 300, 310, 6)
    file.sync(2, 301, 309, 6, streamId=13, eventId=4)
    file.sync(2, 400, 450, None, streamId=7)
    trace = _load(file, tmp_path)
    assert trace.syncs.sync_type.tolist() == [SyncType.STREAM, SyncType.STREAM_WAIT, SyncType.STREAM]
    assert trace.syncs.thread.tolist() == [TID, TID, -1]


def test_queries_are_calls_and_no_syncs(tmp_path: Path) -> None:
    file = NsightFile()
    file.api("cudaEventQuery_v3020", 100, 110, 5)
    file.sync(1, 101, 109, 5, eventId=4)
    trace = _load(file, tmp_path)
    assert len(trace.syncs) == 0 and _names(trace, "api") == ["cudaEventQuery"]
    assert trace.coverage["syncs"].status == "empty"


def test_an_event_leads_to_the_call_that_recorded_it(tmp_path: Path) -> None:
    new, old = NsightFile(NEW), NsightFile(OLD)
    for file in (new, old):
        # one event, recorded twice; the first wait is for the first recording
        file.event(4, stream=13, corr=10, sync_id=1)
        file.event(4, stream=7, corr=30, sync_id=2)
        for corr, sync_id in ((20, 1), (40, 2)):
            file.api("cudaEventSynchronize", corr * 10, corr * 10 + 5, corr)
            file.sync(1, corr * 10 + 1, corr * 10 + 4, corr, eventId=4, eventSyncId=sync_id)
    for file in (new, old):
        syncs = _load(file, tmp_path, f"{file.schema}.sqlite").syncs
        assert syncs.event_corr.tolist() == [10, 30]
        assert syncs.event_stream.tolist() == syncs.stream.tolist() == [13, 7]
    late = NsightFile(NEW)
    late.event(4, stream=7, corr=30, sync_id=2)
    late.sync(1, 401, 404, 40, eventId=4, eventSyncId=0)
    assert _load(late, tmp_path, "before.sqlite").syncs.event_corr.tolist() == [-1]


def test_stacks_come_from_the_call_chains(tmp_path: Path) -> None:
    file = NsightFile()
    file.api("cudaStreamSynchronize_v3020", 100, 200, 5, callchainId=3)
    for depth, symbol in enumerate(("sync", "item", "main")):
        file.add("CUDA_CALLCHAINS", id=3, symbol=file.text(symbol), module=file.text("lib.so"), stackDepth=depth)
    trace = _load(file, tmp_path)
    assert trace.name_of(trace.syncs.stack).tolist() == ["sync\nitem\nmain"]
    assert trace.coverage["syncs.stack"].rows == 1


@both
def test_ranges_have_domain_category_step_and_kind(tmp_path: Path, schema: str) -> None:
    file = NsightFile(schema)
    file.domain(1, "mrv2")
    file.category(1, 2, "host stage")
    file.nvtx("forward", 10, 20, domainId=1, category=2, int64Value=7)
    file.nvtx("plain", 30, 40)
    file.nvtx("own text", 50, 60, textId=None, text="spelled out")
    file.nvtx("step", 70, 90, eventType=60, domainId=1, endGlobalTid=global_tid(TID + 1), uint64Value=8)
    file.nvtx("mark", 95, None, eventType=34)
    trace = _load(file, tmp_path)
    ranges = trace.ranges
    assert _names(trace, "ranges") == ["forward", "plain", "spelled out", "step", "mark"]
    assert trace.name_of(ranges.domain).tolist() == ["mrv2", "default", "default", "mrv2", "default"]
    assert trace.name_of(ranges.category).tolist() == ["host stage", "", "", "", ""]
    assert ranges.step.tolist() == [7, -1, -1, 8, -1]
    assert ranges.kind.tolist() == [RangeKind.PUSH_POP] * 3 + [RangeKind.START_END, RangeKind.MARK]
    assert (ranges.end_thread - ranges.thread).tolist() == [0, 0, 0, 1, 0]
    assert ranges.end[-1] == ranges.start[-1] == 95


def test_open_ranges_end_with_the_recording(tmp_path: Path) -> None:
    file = NsightFile()
    file.nvtx("open", 10, None)
    file.nvtx("closed", 20, 30)
    file.kernel("k", 50, 120, 1)
    trace = _load(file, tmp_path)
    assert trace.ranges.end.tolist() == [120, 30] and trace.ranges.is_open.tolist() == [True, False]
    assert "1 ranges were still open" in trace.diagnostics[0]


def test_waits_of_the_system_the_gil_and_the_engine(tmp_path: Path) -> None:
    file = NsightFile()
    file.domain(1, "mrv2")
    file.domain(2, "GIL Trace")
    file.category(1, 3, "wait")
    file.osrt("sem_wait", 10, 20)
    file.osrt("read", 12, 18)
    file.nvtx("Waiting for GIL", 30, 40, domainId=2)
    file.nvtx("Holding GIL", 40, 50, domainId=2)
    file.nvtx("wait: output", 60, 70, domainId=1, category=3)
    trace = _load(file, tmp_path)
    assert _names(trace, "waits") == ["sem_wait", "Waiting for GIL", "wait: output"]
    assert trace.waits.kind.tolist() == [WaitKind.OS, WaitKind.GIL, WaitKind.NAMED]
    assert _names(trace, "ranges") == ["wait: output"]
    assert all(trace.coverage.has(f"waits.{kind}") for kind in ("os", "gil", "named"))


def test_overhead_messages_and_thread_names(tmp_path: Path) -> None:
    file = NsightFile()
    file.kernel("k", 0, 5, 1)
    file.add("PROFILER_OVERHEAD", start=10, end=20, globalTid=global_tid(TID), nameId=file.text("flush"))
    file.add("CUPTI_ACTIVITY_KIND_OVERHEAD", start=30, end=40, nameId=file.text("buffer"))
    for severity in (1, 2, 2, 3):
        file.add("DIAGNOSTIC_EVENT", timestamp=1, source=1, severity=severity, text=f"message {severity}")
    file.add("ThreadNames", nameId=file.text("worker"), priority=1, globalTid=global_tid(TID))
    trace = _load(file, tmp_path)
    assert _names(trace, "overhead") == ["flush", "buffer"]
    assert trace.diagnostics == ["profiler warning: message 2 (2 times)", "profiler error: message 3"]
    assert trace.thread_names == {(PID, TID): "worker"}


def test_a_full_export_with_empty_tables_says_the_same_as_a_lazy_one(tmp_path: Path) -> None:
    reports = []
    for lazy in (True, False):
        file = worked_example()
        file.lazy = lazy
        reports.append(_load(file, tmp_path, f"{lazy}.sqlite").coverage)
    for key, entry in reports[0].entries.items():
        assert reports[1][key].rows == entry.rows
        assert reports[1][key].status == entry.status, key


def test_a_recording_without_cuda_says_so(tmp_path: Path) -> None:
    file = NsightFile(OLD)
    file.nvtx("step", 0, 10)
    trace = _load(file, tmp_path)
    for key in ("ops", "ops.kernel", "api", "syncs", "waits"):
        assert trace.coverage[key].status == "not collected", key
    assert trace.coverage["ranges"].status == "collected"


def test_missing_columns_are_not_fatal(tmp_path: Path) -> None:
    file = worked_example(OLD)
    for row in file.rows["NVTX_EVENTS"]:
        row.pop("int64Value", None)
    trace = _load(file, tmp_path)
    assert set(trace.ranges.step.tolist()) == {-1}


def test_packed_files_read_alike(tmp_path: Path) -> None:
    plain, packed = _load(worked_example(), tmp_path), _load(worked_example(), tmp_path, "t.sqlite.gz")
    for name, column in plain.ops.columns().items():
        assert np.array_equal(column, packed.ops.columns()[name]), name
    assert packed.strings == plain.strings


def _captured_example(schema: str, clones: int) -> NsightFile:
    """Return the worked example with the capture of its 40 nodes: 10 in no range, 20 in "a", 10 in "a > b"."""
    file = worked_example(schema)
    table = "CUDA_GRAPH_EVENTS" if schema == OLD else "CUDA_GRAPH_NODE_EVENTS"
    file.nvtx("a", -900_000, -100_000)
    file.nvtx("b", -300_000, -200_000)
    # another thread's range at the same time
    file.nvtx("elsewhere", -900_000, -100_000, tid=TID + 1)
    for node in range(40):
        at = [-950_000, -800_000, -700_000, -250_000][node // 10] + node
        ids = [(10 + depth << 32) + node for depth in range(clones)] + [(5 << 32) + node]
        for depth, key in enumerate(ids):
            file.add(
                table,
                start=at if depth == 0 else -50_000 + depth,
                end=at,
                globalTid=global_tid(TID),
                nameId=file.text("create"),
                graphNodeId=key,
                originalGraphNodeId=ids[depth - 1] if depth else None,
            )
    return file


@both
@pytest.mark.parametrize("clones", [0, 1, 3])
def test_nodes_know_the_ranges_of_their_capture(tmp_path: Path, schema: str, clones: int) -> None:
    trace = _load(_captured_example(schema, clones), tmp_path)
    node = trace.ops.graph_node >= 0
    assert (trace.ops.captured[~node] == -1).all()
    captured = trace.ops.captured[node][np.argsort(trace.ops.graph_node[node])]
    names = ["" if i < 0 else trace.name_of(i) for i in captured.tolist()]
    assert names == [""] * 10 + ["a"] * 20 + ["a > b"] * 10
    table = trace.captures()
    assert table is not None
    assert table.captured_under == ["a", "a > b"] and table.num_ops.tolist() == [20, 10]
    assert table.total_ns.tolist() == [160_000, 80_000] and table.share.tolist() == [0.5, 0.25]
    assert trace.coverage["ops.captured"].rows == 30


@both
def test_a_capture_before_the_recording_is_not_collected(tmp_path: Path, schema: str) -> None:
    """A clone's own creation is the graph's instantiation, which says nothing about the capture."""
    file = worked_example(schema)
    table = "CUDA_GRAPH_EVENTS" if schema == OLD else "CUDA_GRAPH_NODE_EVENTS"
    for node in range(40):
        columns = {"graphNodeId": (5 << 32) + node, "originalGraphNodeId": (9 << 32) + node}
        file.add(table, start=300_500, end=300_500, globalTid=global_tid(TID), nameId=file.text("create"), **columns)
    trace = _load(file, tmp_path)
    assert trace.captures() is None and (trace.ops.captured == -1).all()
    assert trace.coverage["ops.captured"].status == "not collected"
    assert "before the recording" in trace.coverage["ops.captured"].reason


def test_capture_paths_survive_saving(tmp_path: Path) -> None:
    trace = _load(_captured_example(NEW, 1), tmp_path)
    again = load(save(trace, tmp_path / "t.npz"))
    assert str(again.captures()) == str(trace.captures())
