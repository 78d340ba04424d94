"""The torch profiler reader: exact times, joins, syncs with Python stacks."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kineto_files import PID, TID, KinetoFile
from mrv2.trace import MemoryKind, OpKind, SyncType, Trace, load
from mrv2.trace.readers.kineto_json import to_ns


def _load(file: KinetoFile, folder: Path, name: str = "t.json") -> Trace:
    return load(file.write(folder / name))


def _names(trace: Trace, table: str) -> list[str]:
    return trace.name_of(trace.table(table).columns()["name"]).tolist()


@given(st.integers(-(10**18), 10**18))
def test_microseconds_lose_nothing(ns: int) -> None:
    text = f"{'-' if ns < 0 else ''}{abs(ns) // 1000}.{abs(ns) % 1000:03d}"
    assert to_ns(text) == ns
    assert to_ns(text.rstrip("0") or "0") == ns if not text.endswith("000") else True
    assert to_ns(ns) == 1000 * ns


@pytest.mark.parametrize("text", ["1.23456", "1e3", "1.5E-2", "123456789012345.6789"])
def test_other_spellings_round_to_the_nearest(text: str) -> None:
    assert abs(Decimal(to_ns(text)) - Decimal(text) * 1000) <= Decimal("0.5")


def _gpu_file() -> KinetoFile:
    file = KinetoFile(deviceProperties=[{"id": 0, "name": "NVIDIA H200"}], cuda_runtime_version=13000)
    file.add("python_function", "engine.py(10): step", 0, 10_000)
    file.add("python_function", "runner.py(20): sample", 4_000, 9_000)
    file.add("user_annotation", "ProfilerStep#12", 0, 10_000)
    file.op("aten::add", 100, 900)
    file.api("cudaLaunchKernel", 200, 400, 1)
    file.on_device("kernel", "add_kernel", 600, 1_601, 1)
    file.op("aten::_local_scalar_dense", 5_000, 8_000)
    file.api("cudaMemcpyAsync", 5_100, 5_300, 2)
    file.on_device("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 5_500, 6_000, 2, bytes=4)
    file.api("cudaStreamSynchronize", 5_400, 7_000, 3)
    file.on_device("gpu_memset", "Memset (Device)", 7_500, 7_600, 4, bytes=32)
    return file


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_every_category_finds_its_table(tmp_path: Path, name: str) -> None:
    trace = _load(_gpu_file(), tmp_path, name)
    assert _names(trace, "ops") == ["add_kernel", "Memcpy DtoH (Device -> Pageable)", "Memset (Device)"]
    ops = trace.ops
    assert ops.kind.tolist() == [OpKind.KERNEL, OpKind.MEMCPY, OpKind.MEMSET]
    assert (ops.start[0], ops.end[0]) == (600, 1601)
    assert (set(ops.process.tolist()), set(ops.stream.tolist()), set(ops.device.tolist())) == ({PID}, {7}, {0})
    assert ops.dst_kind.tolist() == [-1, MemoryKind.PAGEABLE, MemoryKind.DEVICE] and ops.bytes.tolist() == [-1, 4, 32]
    assert _names(trace, "api") == ["cudaLaunchKernel", "cudaMemcpyAsync", "cudaStreamSynchronize"]
    assert trace.api.corr.tolist() == [1, 2, 3]
    assert trace.name_of(trace.ranges.domain).tolist() == ["user_annotation", "cpu_op", "cpu_op"]
    assert trace.ranges.step.tolist() == [12, -1, -1]
    assert len(trace.python) == 2
    assert trace.thread_names == {(PID, TID): "python 4001"}
    assert trace.meta["gpu_name"] == "NVIDIA H200" and trace.meta["utc_epoch_ns"] == 1_700_000_000_000_000_000


def test_a_sync_call_carries_its_python_stack(tmp_path: Path) -> None:
    trace = _load(_gpu_file(), tmp_path)
    assert _names(trace, "syncs") == ["cudaStreamSynchronize"]
    assert trace.syncs.sync_type.tolist() == [SyncType.STREAM]
    assert trace.name_of(trace.syncs.stack).tolist() == ["runner.py(20): sample\nengine.py(10): step"]
    assert trace.coverage["syncs.stack"].status == "collected"


def test_without_python_frames_the_operators_around_are_the_stack(tmp_path: Path) -> None:
    file = _gpu_file()
    file.events = [event for event in file.events if event.get("cat") != "python_function"]
    trace = _load(file, tmp_path)
    assert trace.name_of(trace.syncs.stack).tolist() == ["aten::_local_scalar_dense\nProfilerStep#12"]


def test_sync_records_and_calls_are_one_row(tmp_path: Path) -> None:
    file = _gpu_file()
    file.on_device("cuda_sync", "Stream Synchronize", 5_450, 6_950, 3, stream=7)
    file.api("cudaStreamWaitEvent", 8_100, 8_200, 5)
    waits = {"wait_on_stream": 7, "wait_on_cuda_event_record_corr_id": 2, "wait_on_cuda_event_id": 9}
    file.on_device("cuda_sync", "Stream Wait Event", 8_110, 8_190, 5, stream=13, **waits)
    file.on_device("cuda_sync", "Context Sync", 9_100, 9_200, 6, stream=2**32 - 1)
    syncs = _load(file, tmp_path).syncs
    assert syncs.sync_type.tolist() == [SyncType.STREAM, SyncType.STREAM_WAIT, SyncType.CONTEXT]
    assert (syncs.start[0], syncs.end[0]) == (5_400, 7_000)
    assert (syncs.event_stream.tolist(), syncs.event_corr.tolist()) == ([-1, 7, -1], [-1, 2, -1])
    assert syncs.stream.tolist() == [7, 13, -1]
    assert syncs.thread.tolist() == [TID, TID, -1]


def test_a_cpu_recording_hints_at_what_would_wait(tmp_path: Path) -> None:
    file = KinetoFile()
    file.op("aten::item", 0, 100)
    file.op("aten::_local_scalar_dense", 10, 90)
    trace = _load(file, tmp_path)
    assert _names(trace, "syncs") == ["aten::_local_scalar_dense"]
    assert trace.syncs.sync_type.tolist() == [SyncType.UNKNOWN]
    assert "hints from operators" in trace.coverage["syncs"].reason
    assert not trace.coverage.has("ops") and not trace.coverage.has("api")


def test_hints_are_no_syncs_where_cuda_was_recorded(tmp_path: Path) -> None:
    file = KinetoFile()
    file.op("aten::_local_scalar_dense", 10, 90)
    file.api("cudaLaunchKernel", 100, 110, 1)
    trace = _load(file, tmp_path)
    assert len(trace.syncs) == 0 and trace.coverage["syncs"].status == "empty"


def test_children_do_not_outlive_their_parents_by_rounding(tmp_path: Path) -> None:
    file = KinetoFile()
    file.op("parent", 0, 5_000)
    file.op("child", 1_000, 5_400)
    file.api("cudaLaunchKernel", 4_000, 5_100, 1)
    file.op("overlaps", 4_900, 9_000)
    trace = _load(file, tmp_path)
    ends = dict(zip(_names(trace, "ranges"), trace.ranges.end.tolist()))
    assert ends == {"parent": 5_000, "child": 5_000, "overlaps": 9_000}
    assert trace.api.end.tolist() == [5_000]


def test_graph_nodes_are_known_by_their_launch(tmp_path: Path) -> None:
    file = KinetoFile()
    file.api("cudaGraphLaunch", 0, 100, 5)
    trace = _load(file, tmp_path, "empty.json")
    assert "nothing of what ran inside" in trace.diagnostics[0]
    file.on_device("kernel", "node", 200, 300, 5, **{"graph node id": 12, "graph id": 3})
    trace = _load(file, tmp_path)
    assert trace.meta["granularity"] == "node"
    assert (trace.ops.graph_node.tolist(), trace.ops.graph_id.tolist()) == ([12], [3])


def test_a_real_recording_of_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        torch.profiler.profile(activities=activities, with_stack=True) as profiler,
        torch.profiler.record_function("sample"),
    ):
        torch.ones(3).sum().item()
    path = tmp_path / "torch.json"
    profiler.export_chrome_trace(str(path))
    trace = load(path)
    assert "sample" in _names(trace, "ranges")
    assert _names(trace, "syncs") == ["aten::_local_scalar_dense"]
    span = trace.span()
    assert span is not None and 0 < span[1] - span[0] < 60 * 10**9
