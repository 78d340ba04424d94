"""The CUDA backend: stages run at once inside a torch stream, their launches are asynchronous.

This file imports without CUDA; only `CudaDevice()` needs it.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, cast

import torch

from mrv2.device.base import Device, DeviceError, Event, Graph, P, Shape, Stream
from mrv2.device.cuda_clock import SpanClock
from mrv2.instrument import context
from mrv2.instrument.recorder import Recorder


class _Collector:
    """Python's cyclic garbage collector, off while anybody wants it off."""

    def __init__(self) -> None:
        self._lock, self._num_holders, self._was_enabled = threading.Lock(), 0, False

    @contextmanager
    def off(self) -> Iterator[None]:
        with self._lock:
            if self._num_holders == 0:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._num_holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_holders -= 1
                if self._num_holders == 0 and self._was_enabled:
                    gc.enable()


_collector = _Collector()


def no_collection() -> AbstractContextManager[None]:
    """Return a block within which Python looks for no reference cycles, in any thread.

    A capture needs that: a cycle may hold the graphs of an engine that is gone, and to destroy a graph is an error
    that ends a capture of the same thread.
    """
    return _collector.off()


class CudaEvent(Event):
    """A CUDA event; whether waiting for it sleeps or spins is what `Device.sleeps` said at its latest `record`."""

    def __init__(self, device: CudaDevice) -> None:
        self.device: CudaDevice = device
        self._make()

    def _make(self) -> None:
        self._sleeps = self.device.sleeps
        self.raw = torch.cuda.Event(blocking=self._sleeps)

    def record(self, stream: Stream) -> None:
        if self._sleeps is not self.device.sleeps:
            self._make()
        self.raw.record(cast("CudaStream", stream).raw)
        self.recorded = True

    def query(self) -> bool:
        return self.raw.query()

    def _wait(self) -> None:
        clock = self.device.clock
        if clock is not None:
            # books of a recording are kept while there is nothing else to do
            clock.poll(until=self.raw)
        self.raw.synchronize()


class _IdleStreams:
    """Streams of closed devices, for the next ones.

    A stream once used keeps memory as long as the process lives: cuBLAS a workspace (32 MiB on Hopper), and torch's
    allocator blocks that no other stream may have.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # by the device's index
        self._idle: dict[int, list[torch.cuda.Stream]] = {}

    def take(self, index: int) -> torch.cuda.Stream:
        with self._lock:
            idle = self._idle.get(index)
            return idle.pop() if idle else torch.cuda.Stream(index)

    def give(self, index: int, streams: list[torch.cuda.Stream]) -> None:
        """Take back streams on which nothing runs any more; the first will be handed out first."""
        with self._lock:
            self._idle.setdefault(index, []).extend(reversed(streams))


_idle_streams = _IdleStreams()


class CudaStream(Stream):
    """A torch stream."""

    def __init__(self, device: CudaDevice, name: str) -> None:
        self.device: CudaDevice = device
        self.name = name
        self.raw = _idle_streams.take(device.index)
        self.handle: int = self.raw.cuda_stream

    def run(self, stage: str, fn: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        device = self.device
        if device.closed:
            device._check_failure()
        other = torch._C._cuda_getCurrentRawStream(device.index) != self.handle
        if (
            other
            or context.nvtx is not None
            or context.local.guard is not None
            or device.clock is not None
            or torch.is_grad_enabled()
        ):
            self._run_watched(other, stage, fn, *args, **kwargs)
        else:
            fn(*args, **kwargs)

    def wait_event(self, event: Event) -> None:
        self.raw.wait_event(cast(CudaEvent, event).raw)

    def _run_watched(self, other: bool, stage: str, fn: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        nvtx, guard, clock = context.nvtx, context.local.guard, self.device.clock
        if self.device.capturing:
            clock = None
        before = torch.cuda.current_stream(self.device.torch_device) if other else None
        grad = torch.is_grad_enabled()
        if before is not None:
            torch.cuda.set_stream(self.raw)
        if grad:
            torch.set_grad_enabled(False)
        if nvtx is not None:
            nvtx.push(stage, "device", context.local.step)
        start = clock.start(self.raw) if clock is not None else None
        try:
            if guard is None:
                fn(*args, **kwargs)
            else:
                guard.watch_launch(stage, lambda: fn(*args, **kwargs))
        finally:
            if clock is not None and start is not None:
                clock.end(self.raw, self.name, stage, start)
            if nvtx is not None:
                nvtx.pop()
            if grad:
                torch.set_grad_enabled(True)
            if before is not None:
                torch.cuda.set_stream(before)


class CudaGraph(Graph):
    """A captured CUDA graph."""

    def __init__(self, raw: torch.cuda.CUDAGraph) -> None:
        self._raw = raw

    def replay(self) -> None:
        self._raw.replay()


class CudaDevice(Device):
    """One CUDA device; all graphs share one memory pool."""

    type = "cuda"

    def __init__(self, *, poison: bool = False, index: int | None = None) -> None:
        """Make "main", a non-default stream, the current stream of the calling (engine) thread."""
        self.index = torch.cuda.current_device() if index is None else index
        super().__init__(torch.device("cuda", self.index), poison)
        torch.cuda.set_device(self.index)
        self.clock: SpanClock | None = None
        self._timing_events: list[torch.cuda.Event] = []
        self.capturing = False
        self.closed = False
        # the pool that all graphs share, and a graph that keeps it: it goes with the last graph that uses it
        self._graph_pool: Any = None
        self._pool_keeper: CudaGraph | None = None
        # captures that failed: torch's allocators may look at them as long as the process lives
        self._failed_captures: list[torch.cuda.CUDAGraph] = []
        self._main = cast(CudaStream, self.stream("main"))
        # work done on the stream that was current before, loading say, comes first
        self._main.raw.wait_stream(torch.cuda.current_stream(self.torch_device))
        self._thread_stream = torch.cuda.current_stream(self.torch_device)
        self.use_main()

    def use_main(self) -> None:
        """Make "main" the current stream of the calling thread; stages on it then need no switch."""
        torch.cuda.set_stream(self._main.raw)

    def event(self) -> CudaEvent:
        return CudaEvent(self)

    def owns(self, tensor: torch.Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            return tensor.is_cuda and tensor.device.index == self.index

    def _capture_graph(self, fn: Callable[[], object], stream: Stream | None) -> CudaGraph:
        on = cast(CudaStream, stream or self.main)
        if self._graph_pool is None:
            self._graph_pool = torch.cuda.graph_pool_handle()
            self._pool_keeper = self._capture(self._touch, on)
        return self._capture(fn, on)

    def _touch(self) -> None:
        torch.zeros(1, device=self.torch_device)

    def _capture(self, fn: Callable[[], object], on: CudaStream) -> CudaGraph:
        graph = torch.cuda.CUDAGraph()
        self._wait_all()
        self.capturing = True
        try:
            with torch.cuda.stream(on.raw), torch.no_grad(), no_collection():
                # "thread_local": other threads of the process may allocate meanwhile
                graph.capture_begin(self._graph_pool, capture_error_mode="thread_local")
                try:
                    fn()
                except BaseException:
                    self._abandon(graph)
                    raise
                graph.capture_end()
        finally:
            self.capturing = False
        return CudaGraph(graph)

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed, so that the device is usable again; the first error is the one to see."""
        try:
            graph.capture_end()
            return
        except RuntimeError:
            pass
        # torch's generator would wait for the end of that capture for ever; a copy of it knows of none
        generator = torch.cuda.default_generators[self.index]
        generator.graphsafe_set_state(generator.clone_state())
        # and its allocator would still send allocations to the pool; later graphs get a pool of their own
        for give_up in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
            with suppress(RuntimeError):
                give_up(self.index, self._graph_pool)
        self._failed_captures.append(graph)
        self._graph_pool, self._pool_keeper = None, None

    def memory_info(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self.index)

    def close(self) -> None:
        if self.closed:
            return
        self._wait_all()
        self.closed = True
        self.stop_recording()
        if torch.cuda.current_stream(self.torch_device) == self._main.raw:
            torch.cuda.set_stream(self._thread_stream)
        _idle_streams.give(self.index, [cast(CudaStream, stream).raw for stream in self._streams.values()])

    def start_recording(self, rec: Recorder) -> None:
        super().start_recording(rec)
        self.clock = SpanClock(self.torch_device, rec, self._timing_events)

    def stop_recording(self) -> None:
        super().stop_recording()
        self.clock = None

    def _make_stream(self, name: str) -> CudaStream:
        return CudaStream(self, name)

    def _allocate(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        with torch.cuda.stream(self._main.raw):
            return torch.empty(shape, dtype=dtype, device=self.torch_device)

    def _allocate_pinned(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def _fill(self, tensor: torch.Tensor, fill: Callable[[torch.Tensor], Any]) -> None:
        with torch.cuda.stream(self._main.raw):
            fill(tensor)

    def _wait_all(self) -> None:
        for stream in self._streams.values():
            cast(CudaStream, stream).raw.synchronize()

    def _check_failure(self) -> None:
        if self.closed:
            raise DeviceError("the device is closed; make a new one with make_device()")
