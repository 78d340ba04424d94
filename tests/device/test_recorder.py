"""stage(), the recorder, interval arithmetic, NVTX."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv2.device import Device, make_device
from mrv2.errors import MRV2Error
from mrv2.instrument import (
    Recorder,
    captured_stage,
    context,
    device_time_per_step,
    host_time_per_step,
    overlap_fraction,
    recording,
    set_step,
    stage,
)
from mrv2.instrument.intervals import intersect, merge, subtract, total
from mrv2.instrument.nvtx_sink import NvtxSink, make_sink


@pytest.fixture
def device() -> Iterator[Device]:
    device = make_device("host")
    yield device
    device.close()


@pytest.fixture(autouse=True)
def _no_step() -> Iterator[None]:
    yield
    set_step(None)


def test_host_spans_carry_name_step_and_lane() -> None:
    with recording() as rec:
        set_step(3)
        with stage("outer"), stage("inner", step=9):
            pass
    spans = {span.name: span for span in rec.spans()}
    outer, inner = spans["outer"], spans["inner"]
    assert (outer.step, inner.step) == (3, 9)
    assert outer.kind == "host" and outer.lane == threading.current_thread().name
    assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns


def test_device_spans_carry_the_step_they_were_submitted_in(device: Device) -> None:
    with recording(device) as rec:
        for step in range(3):
            set_step(step)
            device.main.run("forward", time.sleep, 0.002)
        set_step(99)
        device.stream("copy").run("output_copy", time.sleep, 0.0)
        device.synchronize("drain")
    device_spans = [(s.lane, s.name, s.step) for s in rec.spans() if s.kind == "device"]
    assert [s for s in device_spans if s[0] == "main"] == [("main", "forward", step) for step in range(3)]
    assert ("copy", "output_copy", 99) in device_spans
    waits = [s for s in rec.spans() if s.kind == "wait"]
    assert [w.name for w in waits] == ["wait: drain"]


def test_work_submitted_while_recording_is_kept_after_the_stop(device: Device) -> None:
    gate = threading.Event()
    with recording(device) as rec:
        device.main.run("forward", gate.wait, 10.0)
    assert not rec.spans()
    device.main.run("later", time.sleep, 0.0)
    gate.set()
    device.synchronize("drain")
    assert [s.name for s in rec.spans()] == ["forward"]


def test_nothing_is_recorded_outside_a_recording(device: Device) -> None:
    with recording(device) as rec:
        pass
    with stage("schedule"):
        device.main.run("forward", time.sleep, 0.0)
    device.synchronize("drain")
    assert rec.spans() == []


def test_a_second_recording_is_refused() -> None:
    with recording(), pytest.raises(MRV2Error, match="already running"), recording():
        pass


def test_ring_keeps_the_newest_and_counts_the_dropped() -> None:
    rec = Recorder(capacity=10)
    for i in range(25):
        rec.add("host", "t", str(i), i, i + 1, None)
    assert [s.name for s in rec.spans()] == [str(i) for i in range(15, 25)]
    assert rec.dropped == 15
    with pytest.raises(ValueError, match="capacity=0"):
        Recorder(capacity=0)


def test_recorder_under_load_loses_nothing_below_capacity(device: Device) -> None:
    threads, each = 4, 2000

    def host_work(i: int) -> None:
        set_step(i)
        for _ in range(each):
            with stage(f"host {i}"):
                pass

    with recording(device, capacity=3 * threads * each) as rec:
        workers = [threading.Thread(target=host_work, args=(i,)) for i in range(threads)]
        for worker in workers:
            worker.start()
        for i in range(each):
            device.stream(f"s{i % 2}").run("device", time.sleep, 0.0)
        for worker in workers:
            worker.join()
        device.synchronize("drain")
    counts = {row.name: row.count for row in rec.summary()}
    assert counts == {**{f"host {i}": each for i in range(threads)}, "device": each, "wait: drain": 1}
    assert rec.dropped == 0
    assert all(s.step == int(s.name[-1]) for s in rec.spans() if s.kind == "host")


def _recorder(rows: list[tuple[Any, ...]]) -> Recorder:
    rec = Recorder(100)
    for row in rows:
        rec.add(*row)
    return rec


def test_summary_and_times_per_step() -> None:
    rec = _recorder(
        [
            ("host", "engine", "execute_model", 0, 40, 1),
            ("wait", "engine", "wait: output", 10, 20, 1),
            ("wait", "other", "wait: output", 20, 40, 1),
            ("host", "engine", "execute_model", 100, 110, 2),
            ("device", "main", "forward", 30, 60, 1),
            ("device", "copy", "output_copy", 50, 70, 1),
            ("host", "engine", "process_outputs", 200, 300, None),
        ]
    )
    assert host_time_per_step(rec) == {1: 30, 2: 10}
    assert device_time_per_step(rec) == {1: 40, 2: 0}
    # device busy [30, 70), host busy [0, 10) + [20, 40) + ...: they share [30, 40)
    assert overlap_fraction(rec) == pytest.approx(10 / 40)
    execute = next(row for row in rec.summary() if row.name == "execute_model")
    assert (execute.kind, execute.count, execute.total_ns, execute.mean_ns) == ("host", 2, 50, 25.0)


def test_overlap_without_evidence_is_none() -> None:
    assert overlap_fraction(_recorder([("host", "engine", "schedule", 0, 5, 1)])) is None


def test_host_and_device_really_overlap(device: Device) -> None:
    a = torch.ones(384, 384)
    out = device.empty((384, 384))

    def forward(result: torch.Tensor) -> None:
        for _ in range(20):
            torch.mm(a, a, out=result)

    with recording(device) as rec:
        for step in range(6):
            set_step(step)
            device.main.run("forward", forward, out)
            with stage("schedule"):
                sum(i * i for i in range(20_000))
        device.synchronize("drain")
    fraction = overlap_fraction(rec)
    assert fraction is not None and fraction > 0.0, "no host stage ran while a device stage did"


_interval = st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda p: (p[0], p[0] + p[1]))
_interval_lists = st.lists(_interval, max_size=8)


def _points(intervals: list[tuple[int, int]]) -> set[int]:
    return {t for start, end in intervals for t in range(start, end)}


@given(_interval_lists, _interval_lists)
def test_interval_arithmetic_agrees_with_sets_of_points(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    merged_a, merged_b = merge(a), merge(b)
    both, rest = intersect(merged_a, merged_b), subtract(merged_a, merged_b)
    assert _points(merged_a) == _points(a) and total(merged_a) == len(_points(a))
    assert _points(both) == _points(a) & _points(b)
    assert _points(rest) == _points(a) - _points(b)
    for intervals in (merged_a, both, rest):
        assert all(x[1] <= y[0] for x, y in pairwise(intervals))


class _FakeDomain:
    """Writes down what an NVTX tool would see."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def get_category_id(self, name: str) -> str:
        return name

    def get_event_attributes(self, *, message: str, color: int, category: str) -> SimpleNamespace:
        return SimpleNamespace(message=message, category=category, payload=None)

    def push_range(self, attributes: SimpleNamespace) -> None:
        self.log.append((attributes.message, attributes.category, attributes.payload))

    def pop_range(self) -> None:
        self.log.append("pop")


@pytest.fixture
def nvtx_log() -> Iterator[list[Any]]:
    domain = _FakeDomain()
    before = context.load_nvtx()
    context.set_nvtx(NvtxSink(domain))
    yield domain.log
    context.set_nvtx(before)


def test_nvtx_gets_name_category_and_step(device: Device, nvtx_log: list[Any]) -> None:
    set_step(4)
    with stage("schedule"):
        pass
    with stage("schedule", step=5):
        pass
    device.main.run("forward", time.sleep, 0.0)
    device.main.record_event().synchronize("output")
    assert nvtx_log[:4] == [("schedule", "host stage", 4), "pop", ("schedule", "host stage", 5), "pop"]
    assert ("forward", "device stage", 4) in nvtx_log and ("wait: output", "wait", 4) in nvtx_log
    assert nvtx_log.count("pop") == 4


def test_parts_of_a_captured_step_are_named_for_nvtx_alone(
    device: Device, nvtx_log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with recording(device) as rec:
        with captured_stage("forward"):
            assert nvtx_log == []
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with captured_stage("forward"), captured_stage("sample"):
            assert nvtx_log == [("forward", "device stage", -1), ("sample", "device stage", -1)]
    assert nvtx_log[2:] == ["pop", "pop"] and not rec.spans()
    context.set_nvtx(None)
    with captured_stage("forward"):
        pass
    assert len(nvtx_log) == 4


def test_nvtx_is_off_without_a_tool_or_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    class DummyDomain(_FakeDomain):
        pass

    listening = SimpleNamespace(get_domain=lambda name: _FakeDomain())
    assert make_sink(SimpleNamespace(get_domain=lambda name: DummyDomain())) is None
    assert make_sink(listening) is not None
    monkeypatch.setenv("MRV2_NVTX", "0")
    assert make_sink(listening) is None
