"""Streams, events and failures of the host backend."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from mrv2.device import Device, DeviceError, make_device
from mrv2.device.host import HostDevice
from mrv2.device.host_worker import SWITCH_INTERVAL_S
from mrv2.errors import ConfigError

STAGE = "forward"


@pytest.fixture
def device() -> Iterator[Device]:
    device = make_device("host")
    yield device
    device.close()


def _gate(device: Device, stream: str) -> Callable[[], None]:
    """Hold up a stream until the returned function is called."""
    lock = threading.Event()
    device.stream(stream).run("gate", lock.wait, 10.0)
    return lock.set


def test_a_stream_has_one_object_per_name(device: Device) -> None:
    assert device.stream("copy") is device.stream("copy")
    assert device.stream("main") is device.main


def test_run_only_enqueues(device: Device) -> None:
    x = device.zeros(1)
    open_gate = _gate(device, "main")
    device.main.run(STAGE, x.fill_, 1.0)
    done = device.main.record_event()
    assert not done.query()
    assert x[0] == 0
    open_gate()
    done.synchronize("test")
    assert done.query()
    assert x[0] == 1


def test_work_of_a_stream_runs_in_order(device: Device) -> None:
    seen: list[int] = []
    for i in range(200):
        device.main.run(STAGE, seen.append, i)
    device.synchronize("test")
    assert seen == list(range(200))


def test_keyword_arguments_reach_the_stage(device: Device) -> None:
    seen: list[tuple[int, int]] = []

    def stage(a: int, *, b: int) -> None:
        seen.append((a, b))

    device.main.run(STAGE, stage, 1, b=2)
    device.synchronize("test")
    assert seen == [(1, 2)]


def test_streams_are_independent_and_events_join_them(device: Device) -> None:
    seen: list[str] = []
    copy = device.stream("copy")
    open_gate = _gate(device, "main")
    device.main.run(STAGE, seen.append, "main")
    ready = device.main.record_event()
    copy.run("output_copy", seen.append, "copy, free")
    copy.record_event().synchronize("free")
    copy.wait_event(ready)
    copy.run("output_copy", seen.append, "copy, joined")
    last = copy.record_event()
    assert not last.query()
    open_gate()
    last.synchronize("joined")
    assert seen == ["copy, free", "main", "copy, joined"]


def test_wait_stream_covers_all_earlier_work(device: Device) -> None:
    seen: list[int] = []
    open_gate = _gate(device, "main")
    device.main.run(STAGE, seen.append, 1)
    side = device.stream("side")
    side.wait_stream(device.main)
    side.run(STAGE, seen.append, 2)
    open_gate()
    device.synchronize("test")
    assert seen == [1, 2]


def test_an_event_can_be_recorded_again(device: Device) -> None:
    event = device.event()
    assert event.query() and not event.recorded
    event.synchronize("never recorded")
    for _ in range(3):
        open_gate = _gate(device, "main")
        event.record(device.main)
        assert event.recorded and not event.query()
        open_gate()
        event.synchronize("again")
        assert event.query()
    assert device.waits == {"never recorded": 1, "again": 3}


def test_many_threads_may_wait_for_one_event(device: Device) -> None:
    open_gate = _gate(device, "main")
    event = device.main.record_event()
    threads = [threading.Thread(target=event.synchronize, args=("shared",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    open_gate()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive(), "a waiter was forgotten"


def test_waits_are_counted_and_timed_by_reason(device: Device) -> None:
    device.main.run(STAGE, time.sleep, 0.02)
    device.main.record_event().synchronize("output")
    device.synchronize("drain")
    assert device.waits == {"output": 1, "drain": 1}
    assert device.wait_ns["output"] > 0


def test_copy_and_upload(device: Device) -> None:
    src, dst, back = device.pinned(4), device.empty(4), device.pinned(4)
    src.copy_(torch.arange(4.0))
    device.upload(dst, src)
    copy = device.stream("copy")
    copy.wait_stream(device.main)
    copy.copy("output_copy", back, dst)
    copy.record_event().synchronize("output")
    assert back.tolist() == [0, 1, 2, 3]


def test_a_buffer_rewritten_too_early_corrupts_the_copy(device: Device) -> None:
    src, dst = device.pinned(1), device.empty(1)
    src.fill_(1)
    open_gate = _gate(device, "main")
    device.upload(dst, src)
    src.fill_(2)
    open_gate()
    device.synchronize("test")
    assert dst[0] == 2


def test_stages_run_without_grad_on_one_torch_thread(device: Device) -> None:
    seen: list[tuple[bool, int]] = []
    before = torch.get_num_threads()
    device.main.run(STAGE, lambda: seen.append((torch.is_grad_enabled(), torch.get_num_threads())))
    device.synchronize("test")
    assert seen == [(False, 1)]
    assert torch.get_num_threads() == before


def _fail() -> None:
    raise ZeroDivisionError("in a stage")


def test_a_failed_stage_is_reported_at_the_next_wait_and_names_itself(device: Device) -> None:
    after: list[int] = []
    device.main.run("logits", _fail)
    device.main.run("sample", after.append, 1)
    with pytest.raises(DeviceError, match=r"'logits' on stream 'main'.*ZeroDivisionError: in a stage") as caught:
        device.synchronize("test")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert not after, "a stage after the failure ran"


def test_a_failed_stage_is_reported_at_the_next_run_and_releases_every_waiter(device: Device) -> None:
    device.main.run("logits", _fail)
    copy = device.stream("copy")
    copy.wait_stream(device.main)
    event = copy.record_event()
    with pytest.raises(DeviceError, match="logits"):
        event.synchronize("output")
    with pytest.raises(DeviceError, match="logits"):
        device.main.run(STAGE, _fail)


def test_close_finishes_queued_work_and_refuses_more(device: Device) -> None:
    seen: list[int] = []
    device.main.run(STAGE, time.sleep, 0.01)
    device.main.run(STAGE, seen.append, 1)
    device.close()
    device.close()
    assert seen == [1]
    with pytest.raises(DeviceError, match="closed"):
        device.main.run(STAGE, seen.append, 2)


def test_close_after_a_failure_is_silent() -> None:
    device = make_device("host")
    device.main.run(STAGE, _fail)
    device.close()


def test_switch_interval_is_low_while_a_device_lives() -> None:
    before = sys.getswitchinterval()
    first, second = make_device("host"), make_device("host")
    assert sys.getswitchinterval() == pytest.approx(min(before, SWITCH_INTERVAL_S))
    first.close()
    assert sys.getswitchinterval() == pytest.approx(min(before, SWITCH_INTERVAL_S))
    second.close()
    assert sys.getswitchinterval() == pytest.approx(before)


def test_a_dropped_device_stops_its_threads() -> None:
    device = HostDevice()
    threads = device.shared.threads
    device.stream("copy")
    del device
    gc.collect()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive(), "a worker outlives its device"


def test_an_idle_worker_keeps_no_tensor_alive(device: Device) -> None:
    dropped = threading.Event()
    x = torch.zeros(1)
    weakref.finalize(x, dropped.set)
    device.main.run(STAGE, torch.Tensor.add_, x, 1)
    del x
    device.synchronize("test")
    assert dropped.wait(10), "the worker still holds its last argument"


@pytest.mark.parametrize("seed", range(4))
def test_delays_change_the_timing_and_not_the_result(seed: int) -> None:
    device = make_device("host", random_delay_s=0.002, seed=seed)
    copy, x, out = device.stream("copy"), device.zeros(1, torch.int64), device.pinned((20,), torch.int64)
    for i in range(20):
        device.main.run(STAGE, x.add_, 1)
        copy.wait_stream(device.main)
        copy.copy("output_copy", out[i : i + 1], x)
        device.main.wait_stream(copy)
    device.synchronize("test")
    assert out.tolist() == list(range(1, 21))
    device.close()


def test_a_missing_wait_between_streams_shows_under_delays() -> None:
    stale = 0
    device = make_device("host", random_delay_s=0.01, delay_streams=("main",), seed=1)
    copy, x, out = device.stream("copy"), device.zeros(1, torch.int64), device.pinned(1, torch.int64)
    for i in range(1, 9):
        device.main.run(STAGE, x.fill_, i)
        copy.copy("output_copy", out, x)
        copy.record_event().synchronize("output")
        stale += int(out[0]) != i
        device.synchronize("settle")
    device.close()
    assert stale > 0, "the copy stream always came after the main stream, although nothing orders them"


def test_owns_knows_views_and_forgets_freed_memory(device: Device) -> None:
    x = device.empty((4, 4))
    assert device.owns(x) and device.owns(x[1:, 2]) and device.owns(x.view(-1))
    assert not device.owns(torch.empty(4)) and not device.owns(device.empty(0))
    pinned = device.pinned(4)
    assert device.is_pinned(pinned[1:]) and not device.owns(pinned) and not device.is_pinned(x)
    known = len(device._device_memory._by_address)
    del x
    gc.collect()
    assert len(device._device_memory._by_address) == known - 1


def test_zeros_and_full(device: Device) -> None:
    assert device.zeros((2, 3), torch.int32).tolist() == [[0] * 3] * 2
    assert device.full(2, 7, torch.int64).tolist() == [7, 7]


def test_memory_info_is_plausible(device: Device) -> None:
    free, total = device.memory_info()
    assert 0 < free <= total


def test_a_graph_of_the_host_runs_when_it_is_replayed(device: Device) -> None:
    runs = device.zeros(1, torch.int64)
    graph = device.capture(lambda: runs.add_(1))
    device.synchronize("test")
    assert runs.tolist() == [0]
    for _ in range(3):
        device.main.run("step_graph", graph.replay)
    device.synchronize("test")
    assert runs.tolist() == [3]


def test_make_device_refuses_what_it_cannot_make() -> None:
    with pytest.raises(ConfigError, match="'auto', 'cuda', 'host'"):
        make_device("tpu")  # type: ignore[arg-type]  # the error under test
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            make_device("cuda")
        made = make_device("auto")
        assert made.type == "host"
        made.close()
