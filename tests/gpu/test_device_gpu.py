"""The CUDA backend: streams, events, graphs, device spans, and the guard's CUDA half."""

from __future__ import annotations

import gc
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise

import pytest
import torch

from guarded import violations
from mrv2.device import Device, DeviceError, PinnedRing, make_device
from mrv2.device.cuda import CudaDevice, CudaStream
from mrv2.errors import SyncError
from mrv2.instrument import recording, set_step, stage, sync_allowed, sync_guard
from mrv2_kernels._triton import tl, triton

pytestmark = pytest.mark.gpu

# GPU clock cycles that take some 50 ms: long against any launch, short for a test
LONG = 100_000_000


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    device = make_device("cuda")
    assert isinstance(device, CudaDevice)
    yield device
    device.close()
    set_step(None)


def _hold(device: Device, cycles: int = LONG) -> None:
    device.main.run("gate", torch.cuda._sleep, cycles)


def test_main_is_a_side_stream_and_current(device: CudaDevice) -> None:
    main = device.main
    assert isinstance(main, CudaStream) and main is device.stream("main")
    assert main.raw != torch.cuda.default_stream() and torch.cuda.current_stream() == main.raw


def test_close_gives_the_thread_its_stream_back() -> None:
    before = torch.cuda.current_stream()
    device = make_device("cuda")
    device.close()
    device.close()
    assert torch.cuda.current_stream() == before
    with pytest.raises(DeviceError, match="closed"):
        device.main.run("forward", int)


def test_stages_run_in_their_stream_without_grad(device: CudaDevice) -> None:
    seen: list[tuple[int, bool]] = []
    for name in ("main", "copy", "main"):
        device.stream(name).run(
            "forward", lambda: seen.append((torch.cuda.current_stream().cuda_stream, torch.is_grad_enabled()))
        )
    main, copy = device.main, device.stream("copy")
    assert isinstance(main, CudaStream) and isinstance(copy, CudaStream)
    assert seen == [(main.handle, False), (copy.handle, False), (main.handle, False)]
    assert torch.cuda.current_stream() == main.raw and torch.is_grad_enabled()


def test_a_raising_stage_restores_stream_and_grad_mode(device: CudaDevice) -> None:
    with pytest.raises(ZeroDivisionError):
        device.stream("copy").run("forward", lambda: 1 // 0)
    assert torch.cuda.current_stream() == device._main.raw and torch.is_grad_enabled()


def test_events_order_streams_and_waits_are_counted(device: CudaDevice) -> None:
    x, out, copy = device.zeros(1), device.pinned(1), device.stream("copy")
    assert out.is_pinned()
    _hold(device)
    device.main.run("forward", x.fill_, 3.0)
    copy.wait_stream(device.main)
    copy.copy("output_copy", out, x)
    done = copy.record_event()
    assert not done.query(), "the host waited for the device at a launch"
    done.synchronize("output")
    assert out.item() == 3.0
    device.synchronize("drain")
    assert device.waits == {"output": 1, "drain": 1} and device.wait_ns["output"] > 0


def test_upload_and_ring(device: CudaDevice) -> None:
    ring = PinnedRing(device, 2, 4, torch.int32, name="ids")
    x = device.empty((5, 4), torch.int32)
    for step in range(5):
        slot = ring.acquire(step)
        slot.fill_(step)
        device.upload(x[step], slot)
        ring.release(slot, device.main.record_event())
    device.synchronize("drain")
    assert x[:, 0].tolist() == list(range(5))
    ring = PinnedRing(device, 1, 4, torch.int32, name="ids", debug=True)
    slot = ring.acquire(0)
    _hold(device)
    ring.release(slot, device.main.record_event())
    with pytest.raises(DeviceError, match="too shallow"):
        ring.acquire(1)


def test_poison_fills_fresh_memory() -> None:
    device = make_device("cuda", poison=True)
    assert device.empty(8, torch.bfloat16).isnan().all()
    assert (device.empty(8, torch.int32) == 0x5A5A5A5A).all()
    assert device.pinned(8).isnan().all()
    assert not device.zeros(8).any()
    device.close()


def test_owns_is_about_the_device(device: CudaDevice) -> None:
    assert device.owns(device.empty(4)[1:]) and device.owns(torch.zeros(1, device="cuda"))
    assert not device.owns(device.pinned(4)) and device.is_pinned(device.pinned(4))


def test_graphs_replay_and_share_a_pool(device: CudaDevice) -> None:
    x, out = device.zeros(8), device.zeros(8)
    graphs = []
    for factor in (2.0, 3.0):

        def work(factor: float = factor) -> None:
            out.copy_(x * factor + 1.0)

        device.main.run("warm-up", work)
        graphs.append(device.capture(work))
    device.main.run("prepare", x.fill_, 5.0)
    for graph, expected in zip(graphs, (11.0, 16.0)):
        device.main.run("forward", graph.replay)
        device.synchronize("drain")
        assert out.tolist() == [expected] * 8


def test_a_failed_capture_leaves_the_device_usable(device: CudaDevice) -> None:
    x = device.zeros(1)
    with pytest.raises(ZeroDivisionError):
        device.capture(lambda: (x.add_(1), 1 // 0))
    assert not device.capturing
    device.main.run("forward", x.add_, 1.0)
    device.synchronize("drain")
    assert x.item() == 1.0


def test_memory_info(device: CudaDevice) -> None:
    free, total = device.memory_info()
    assert 0 < free < total


def _set_debug_mode(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)


def test_graphs_may_come_and_go(device: CudaDevice) -> None:
    x = device.zeros(8)
    for turn in range(3):
        graph = device.capture(lambda: x.add_(torch.ones_like(x)))
        device.main.run("forward", graph.replay)
        device.synchronize("test")
        assert x.tolist() == [turn + 1.0] * 8
        # the last user of the pool's memory goes
        del graph


def test_graphs_that_nobody_holds_any_more_stay_until_a_capture_is_over(device: CudaDevice) -> None:
    x = device.zeros(8)

    class Engine:
        """Refers to itself, so that only the collector frees it."""

        def __init__(self) -> None:
            self.graph, self.me = device.capture(lambda: x.fill_(1.0)), self

    was_there = []

    def work() -> None:
        # enough new containers for many collections
        gc.set_threshold(10, 1, 1)
        junk = [[i] for i in range(20_000)]
        was_there.append(dead() is not None and len(junk) > 0)
        x.fill_(2.0)

    thresholds = gc.get_threshold()
    # the collector is on, and has nothing to do before the capture has begun
    gc.set_threshold(1_000_000, 1, 1)
    try:
        dead = weakref.ref(Engine())
        graph = device.capture(work)
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    device.main.run("forward", graph.replay)
    device.synchronize("test")
    assert was_there == [True] and dead() is None
    assert x.tolist() == [2.0] * 8


def test_a_capture_that_fails_leaves_the_device_usable(device: CudaDevice) -> None:
    x = device.zeros(8)

    def synchronise() -> None:
        x.add_(1.0)
        x.sum().item()

    with pytest.raises(RuntimeError):
        device.capture(synchronise)
    drawn = device.empty((8,))
    device.main.run("sample", drawn.uniform_)
    graph = device.capture(lambda: x.fill_(2.0))
    device.main.run("forward", graph.replay)
    device.synchronize("test")
    assert x.tolist() == [2.0] * 8 and bool((drawn < 1).all())


@pytest.mark.parametrize("anchor_life_ms", [1000.0, 0.0])
def test_device_spans_lie_on_the_host_clock_in_order_and_cost_no_sync(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch, anchor_life_ms: float
) -> None:
    monkeypatch.setattr("mrv2.device.cuda_clock._ANCHOR_LIFE_MS", anchor_life_ms)
    copy = device.stream("copy")
    with recording(device) as rec:
        before = time.perf_counter_ns()
        _set_debug_mode("error")
        try:
            for step in range(3):
                set_step(step)
                with stage("execute_model"):
                    _hold(device, LONG // 10)
                copy.wait_stream(device.main)
                copy.run("output_copy", torch.cuda._sleep, LONG // 100)
            early = rec.spans()
        finally:
            _set_debug_mode("default")
        device.synchronize("drain")
        after = time.perf_counter_ns()
    spans = [s for s in rec.spans() if s.kind == "device"]
    assert len([s for s in early if s.kind == "device"]) < len(spans)
    main, side = ([s for s in spans if s.lane == lane] for lane in ("main", "copy"))
    assert [(s.name, s.step) for s in main] == [("gate", step) for step in range(3)]
    assert [(s.name, s.step) for s in side] == [("output_copy", step) for step in range(3)]
    slack = 50_000  # resolution of the two clocks' alignment
    for lane in (main, side):
        assert lane[0].start_ns > before - slack and lane[-1].end_ns < after + slack
        assert all(s.start_ns < s.end_ns for s in lane)
        assert all(a.end_ns <= b.start_ns + slack for a, b in pairwise(lane))
    for m, c in zip(main, side):
        assert c.start_ns > m.start_ns + (m.end_ns - m.start_ns) // 2, "the copy began before its input was ready"


def test_many_spans_reuse_their_events(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrv2.device.cuda_clock.NUM_EVENTS", 100)
    x = device.zeros(1)
    with recording(device) as rec:
        for _ in range(3000):
            device.main.run("forward", x.add_, 1.0)
        assert device.clock is not None
        clock = device.clock
        device.synchronize("drain")
    assert sum(s.kind == "device" for s in rec.spans()) == 3000
    assert not clock._pending
    assert len(clock._pool) < 3000, "every span made events of its own"


def test_a_wait_reads_the_times_that_are_due(device: CudaDevice) -> None:
    x = device.zeros(1)
    with recording(device):
        assert device.clock is not None
        for _ in range(100):
            device.main.run("forward", x.add_, 1.0)
        _hold(device, LONG)
        device.main.record_event().synchronize("output")
        assert len(device.clock._pending) <= 1, "the host had time to read them while it waited"


Case = Callable[[dict[str, torch.Tensor]], object]
WAITING: dict[str, Case] = {
    "item": lambda t: t["s"].item(),
    "tolist": lambda t: t["f"].tolist(),
    "cpu": lambda t: t["f"].cpu(),
    "to": lambda t: t["f"].to("cpu"),
    "bool": lambda t: bool(t["s"]),
    "index": lambda t: range(t["s"]),
    "nonzero": lambda t: t["f"].nonzero(),
    "masked_select": lambda t: torch.masked_select(t["f"], t["m"]),
    "unique": lambda t: torch.unique(t["f"]),
    "mask index": lambda t: t["f"][t["m"]],
    "equal": lambda t: torch.equal(t["f"], t["f"]),
    "repr": lambda t: repr(t["f"]),
    "host index": lambda t: t["f"][torch.tensor([0, 1])],
    "blocking upload": lambda t: t["f"].copy_(torch.zeros(4)),
    "blocking upload by to": lambda t: torch.zeros(4).to("cuda"),
    "pageable upload": lambda t: t["f"].copy_(torch.zeros(4), non_blocking=True),
    "pageable upload by to": lambda t: torch.zeros(4).to("cuda", non_blocking=True),
    "pageable download": lambda t: torch.zeros(4).copy_(t["f"], non_blocking=True),
    "strided upload": lambda t: t["f"].copy_(t["pinned"][::2], non_blocking=True),
    # only torch's own debug mode knows this one
    "tensor from a list": lambda t: torch.tensor([1.0, 2.0], device="cuda"),
    "torch.cuda.synchronize": lambda t: torch.cuda.synchronize(),
    "stream.synchronize": lambda t: torch.cuda.current_stream().synchronize(),
    "event.synchronize": lambda t: torch.cuda.current_stream().record_event().synchronize(),
}


@pytest.fixture
def tensors(device: CudaDevice) -> dict[str, torch.Tensor]:
    tensors = {
        "f": device.full(4, 1.0),
        "m": device.full(4, True, torch.bool),
        "s": device.full((), 2, torch.int64),
        "pinned": device.pinned(8),
    }
    # lazy set-up of the operators used below would count as allocation
    for case in WAITING.values():
        case(tensors)
    device.synchronize("warm-up")
    return tensors


@pytest.mark.parametrize("name", WAITING)
def test_guard_raises(device: CudaDevice, tensors: dict[str, torch.Tensor], name: str) -> None:
    with sync_guard(device) as guard, pytest.raises(SyncError, match="would make the host wait") as caught:
        device.main.run("forward", WAITING[name], tensors)
    assert f"{__file__}:" in str(caught.value)
    assert len(guard.records) == 1


@pytest.mark.parametrize("name", WAITING)
def test_guard_records_once(device: CudaDevice, tensors: dict[str, torch.Tensor], name: str) -> None:
    with sync_guard(device, "record") as guard:
        WAITING[name](tensors)
    assert len([r for r in guard.violations if r.kind != "launch_backpressure"]) == 1, guard.records


def test_guard_passes_a_clean_step(device: CudaDevice, tensors: dict[str, torch.Tensor]) -> None:
    copy, out, x = device.stream("copy"), device.pinned(4), tensors["f"]
    with sync_guard(device) as guard:
        for step in range(4):
            set_step(step)
            device.upload(x, tensors["pinned"][:4])
            device.main.run("forward", lambda: x.mul_(2.0).add_(1.0))
            copy.wait_stream(device.main)
            copy.copy("output_copy", out, x)
            copy.record_event().synchronize("output")
        with sync_allowed("the test reads a value"):
            x.sum().item()
            torch.cuda.synchronize()
    # a busy machine can hold up a launch
    assert [r.kind for r in guard.records if r.kind != "launch_backpressure"] == ["allowed"]
    assert guard.waits == {"output": 4}


def test_guard_leaves_no_trace(device: CudaDevice) -> None:
    before = (torch.cuda.synchronize, torch.cuda.Stream.synchronize, torch.cuda.Event.synchronize)
    show, filters = warnings.showwarning, list(warnings.filters)
    with sync_guard(device), sync_guard(device, "record"):
        assert torch.cuda.get_sync_debug_mode() == 1
    assert torch.cuda.get_sync_debug_mode() == 0
    assert (torch.cuda.synchronize, torch.cuda.Stream.synchronize, torch.cuda.Event.synchronize) == before
    assert warnings.showwarning is show and warnings.filters == filters


def test_guard_leaves_other_threads_alone(device: CudaDevice, tensors: dict[str, torch.Tensor]) -> None:
    seen: list[float] = []

    def other() -> None:
        torch.cuda.synchronize()
        seen.append(torch.ones(2).to("cuda").sum().item())

    # the allocator's counters are the process's, so "record"
    with sync_guard(device, "record") as guard:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen == [2.0]
    assert [r.kind for r in guard.violations if r.kind != "allocator_growth"] == []


def test_guard_sees_allocator_growth(device: CudaDevice) -> None:
    torch.cuda.empty_cache()
    with pytest.raises(SyncError, match="allocator"), sync_guard(device):
        device.empty(64 << 20)


def test_guard_sees_new_pinned_memory(device: CudaDevice) -> None:
    with sync_guard(device), pytest.raises(SyncError, match="PinnedRing"):
        device.pinned(1 << 20)


def test_devices_made_one_after_the_other_keep_no_more_memory() -> None:
    """A stream that ran a product of matrices has a workspace of cuBLAS as long as the process lives."""
    kept, handles = [], []
    for _ in range(4):
        with closing(make_device("cuda")) as device:
            x = device.zeros((256, 256), torch.bfloat16)
            device.main.run("forward", torch.mm, x, x)
            device.synchronize("a product")
            handles.append(device.main.handle)
        del x, device
        gc.collect()
        torch.cuda.empty_cache()
        kept.append(torch.cuda.memory_reserved())
    assert len(set(handles)) == 1 and len(set(kept)) == 1


def test_a_host_that_waits_spins_or_sleeps(device: CudaDevice) -> None:
    """An event that is there already waits as its latest `record` says."""
    event, shares = device.event(), {}
    for device.sleeps in (False, True, False):
        _hold(device, 2 * LONG)
        event.record(device.main)
        wall, cpu = time.perf_counter(), time.thread_time()
        event.synchronize("output")
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        shares.setdefault(device.sleeps, []).append(cpu / wall)
    # other tests may use the same cores
    assert max(shares[True]) < 0.2 < 0.4 < min(shares[False])


@triton.jit
def _add_one_kernel(x_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # a kernel has no types
    offsets = tl.arange(0, BLOCK)
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets) + 1)


def test_guard_sees_a_late_compilation(device: CudaDevice) -> None:
    x = device.zeros(64)
    with sync_guard(device, "record") as guard:
        device.main.run("forward", lambda: _add_one_kernel[(1,)](x, BLOCK=64))
    kinds = {r.kind for r in guard.violations}
    assert kinds & {"jit_compile", "module_load"}
    with sync_guard(device, "record") as guard:
        device.main.run("forward", lambda: _add_one_kernel[(1,)](x, BLOCK=64))
    assert not violations(guard)


def test_guard_records_backpressure_and_does_not_raise(device: CudaDevice) -> None:
    x = device.zeros(1)
    with sync_guard(device) as guard:
        _hold(device, 10 * LONG)
        device.main.run("forward", lambda: [x.add_(1.0) for _ in range(5000)])
    assert "launch_backpressure" in {r.kind for r in guard.records}
