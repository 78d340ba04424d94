"""Real recordings of other programs, as `traces/foreign` holds them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mrv2.trace import OpKind, SyncType, Trace, find_leaks, load

FOREIGN = Path(__file__).parents[2] / "traces" / "foreign"


def _busy(trace: Trace) -> int:
    """Return the union of all operations, by a sweep."""
    start, end = trace.ops.start, np.maximum.accumulate(trace.ops.end)
    holes = np.maximum(0, start[1:] - end[:-1]).sum()
    return int(end[-1] - start[0] - holes)


def test_vllm_v2() -> None:
    trace = load(FOREIGN / "vllm_v2_async1.sqlite.gz")
    counts = [int((trace.ops.kind == kind).sum()) for kind in (OpKind.KERNEL, OpKind.MEMCPY, OpKind.MEMSET)]
    assert counts == [9195, 149, 52]
    assert (trace.api.name == trace.string_id("cudaGraphLaunch")).sum() == 23
    assert _busy(trace) == 41_521_045
    assert (trace.ops.end - trace.ops.start).sum() == 41_538_645
    assert trace.meta["granularity"] == "node"
    assert trace.meta["gpu_name"] == "NVIDIA H200"
    assert trace.meta["versions"]["schema"] == "3.20.3"


def test_vllm_v2_waits_only_for_its_output_copies() -> None:
    trace = load(FOREIGN / "vllm_v2_async1.sqlite.gz")
    waits = trace.syncs.take(trace.syncs.sync_type == SyncType.EVENT)
    assert len(waits) == 24 and set(waits.stream.tolist()) == {13}
    # each awaited event was recorded before the wait, by a call of its own
    assert len(set(waits.event_corr.tolist())) == 24 and (waits.event_corr < waits.corr).all()


def test_vllm_v1() -> None:
    trace = load(FOREIGN / "vllm_v1_async1.sqlite.gz")
    counts = [int((trace.ops.kind == kind).sum()) for kind in (OpKind.KERNEL, OpKind.MEMCPY, OpKind.MEMSET)]
    assert counts == [9212, 289, 76]
    assert (trace.syncs.sync_type == SyncType.EVENT).sum() == 49
    assert _busy(trace) == 42_387_695
    assert (trace.ops.end - trace.ops.start).sum() == 42_423_951


def test_the_toy_synchronises_its_stream_once_a_step() -> None:
    trace = load(FOREIGN / "h200_toy.sqlite.gz")
    syncs = trace.syncs.take(trace.syncs.name == trace.string_id("cudaStreamSynchronize"))
    steps = trace.ranges.take(trace.ranges.name == trace.string_id("step"))
    assert len(syncs) == len(steps) == 20
    assert set(syncs.sync_type.tolist()) == {SyncType.STREAM}
    assert ((steps.start <= syncs.start) & (syncs.end <= steps.end) & (steps.thread == syncs.thread)).all()


@pytest.mark.parametrize("path", sorted(FOREIGN.glob("*.gz")), ids=lambda path: path.name)
def test_nothing_private_is_in_them(path: Path) -> None:
    assert find_leaks(path) == []
    assert path.stat().st_size <= 1.5e6
