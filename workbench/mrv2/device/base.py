"""The interface that the runner is written against: devices, in-order streams, events, graphs.

Device work is a function that writes into tensors it was handed and returns None.  It must depend on
nothing that the host may change before the work has run: pass per-step buffers, never a mutable `self`.
The host learns a result only through an event and a pinned buffer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter, perf_counter_ns
from typing import TYPE_CHECKING, Any, Literal, ParamSpec
from weakref import WeakValueDictionary

import torch

from mrv2.errors import MRV2Error
from mrv2.instrument import context
from mrv2.instrument.ranges import wait_range
from mrv2.instrument.stages import UPLOAD

if TYPE_CHECKING:
    from mrv2.instrument.recorder import Recorder

P = ParamSpec("P")
Shape = int | Sequence[int]
_INT_GARBAGE = 0x5A5A5A5A5A5A5A5A


class DeviceError(MRV2Error, RuntimeError):
    """Device work failed, or the device was used in a way that it does not support."""


class CaptureSliceOver(Exception):
    """The time of a `Device.capture_slice` is over; what was captured is captured."""


def fill_garbage(tensor: torch.Tensor) -> None:
    """Fill with NaN (floats), True (bool) or the byte 0x5A repeated (ints: out of range as an index)."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(_INT_GARBAGE >> (8 * (8 - tensor.element_size())))


class StorageSet:
    """Knows a tensor, and every view of it, by its storage; forgets a storage that is freed."""

    def __init__(self) -> None:
        self._by_address: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            self._by_address[storage.data_ptr()] = storage

    def __contains__(self, tensor: torch.Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            return tensor.untyped_storage().data_ptr() in self._by_address


class Event(ABC):
    """A point in a stream's work.  Never recorded = already done, as on CUDA; may be recorded again."""

    device: Device
    # False until the first `record`
    recorded: bool = False

    @abstractmethod
    def record(self, stream: Stream) -> None:
        """Mark the work submitted to `stream` so far."""

    @abstractmethod
    def query(self) -> bool:
        """Return whether the marked work is done; never waits."""

    @abstractmethod
    def _wait(self) -> None:
        """Block the calling thread until `query` would return True."""

    def synchronize(self, reason: str) -> None:
        """Block the calling thread until the marked work is done.

        The wait is counted in `Device.waits[reason]` and appears as the span ``wait: reason``.
        Raises `DeviceError` if device work has failed.
        """
        self.device._named_wait(reason, self._wait)


class Stream(ABC):
    """An in-order queue of device work."""

    name: str
    device: Device

    @abstractmethod
    def run(self, stage: str, fn: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Submit ``fn(*args, **kwargs)``; its result is dropped, it writes into tensors it was handed.

        `stage` names the work in errors, NVTX and recordings (`instrument.stages`).
        Raises `DeviceError` if earlier device work has failed.
        """

    @abstractmethod
    def wait_event(self, event: Event) -> None:
        """Make later work of this stream wait for the event's latest `record`; the host goes on."""

    def wait_stream(self, other: Stream) -> None:
        """Make later work of this stream wait for all work submitted to `other` so far."""
        self.wait_event(other.record_event())

    def record_event(self) -> Event:
        """Return a new event recorded now."""
        event = self.device.event()
        event.record(self)
        return event

    def copy(self, stage: str, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Submit ``dst.copy_(src)``; the host side, if any, must come from `Device.pinned`."""
        guard = context.local.guard
        if guard is not None and self.device.type == "host":
            # on CUDA the guard sees the copy itself; here it happens later, on another thread
            guard.check_copy(dst, src, non_blocking=True)
        self.run(stage, _copy, dst, src)


def _copy(dst: torch.Tensor, src: torch.Tensor) -> None:
    dst.copy_(src, non_blocking=True)


class Graph(ABC):
    """Captured device work."""

    @abstractmethod
    def replay(self) -> None:
        """Launch it on the current stream; use ``stream.run(stage, graph.replay)``."""


class Device(ABC):
    """Memory, streams and events of one accelerator, or of the host playing one."""

    type: Literal["cuda", "host"]
    torch_device: torch.device
    # True: fresh device memory holds garbage, and (host) memory turns to garbage when its owner drops it
    poison: bool

    def __init__(self, torch_device: torch.device, poison: bool) -> None:
        self.torch_device = torch_device
        self.poison = poison
        # host waits by reason: how many, and how long together
        self.waits: Counter[str] = Counter()
        self.wait_ns: Counter[str] = Counter()
        # on CUDA: whether a host that waits gives its core away, or asks again and again
        self.sleeps = False
        self.recorder: Recorder | None = None
        # graphs captured so far, and when the slice that runs is over (None = no slice runs)
        self.num_captured = 0
        self._slice_end: float | None = None
        self._slice_start = 0
        self._streams: dict[str, Stream] = {}
        self._device_memory = StorageSet()
        self._pinned_memory = StorageSet()
        context.devices.add(self)
        context.load_nvtx()

    @property
    def main(self) -> Stream:
        """The stream named "main", on which a step's work runs."""
        return self.stream("main")

    def stream(self, name: str) -> Stream:
        """Return the stream of that name, the same object every time."""
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = self._make_stream(name)
        return stream

    def empty(self, shape: Shape, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return an uninitialised device tensor (garbage in poison mode)."""
        tensor = self._adopt(self._allocate(shape, dtype))
        if self.poison:
            self._fill(tensor, fill_garbage)
        return tensor

    def full(self, shape: Shape, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a device tensor that holds `value` everywhere."""
        tensor = self._adopt(self._allocate(shape, dtype))
        self._fill(tensor, lambda t: t.fill_(value))
        return tensor

    def zeros(self, shape: Shape, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a device tensor that holds zeros."""
        return self.full(shape, 0, dtype)

    def pinned(self, shape: Shape, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return an uninitialised host tensor that streams can copy from and to without blocking."""
        guard = context.local.guard
        if guard is not None:
            guard.pinned_alloc(f"Device.pinned({shape}, {dtype})")
        tensor = self._allocate_pinned(shape, dtype)
        if self.poison:
            fill_garbage(tensor)
        self._pinned_memory.add(tensor)
        return tensor

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is memory of this device (views count)."""
        return tensor in self._device_memory

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` came from `pinned` (views count)."""
        return tensor in self._pinned_memory

    def upload(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream | None = None) -> None:
        """Copy pinned `src` into device tensor `dst` on `stream` (default: main), as stage "upload"."""
        (stream or self.main).copy(UPLOAD, dst, src)

    def synchronize(self, reason: str) -> None:
        """Block until all streams are empty; counted like `Event.synchronize`, and an error in a guard."""
        guard = context.local.guard
        if guard is not None:
            guard.device_synchronize(reason)
        self._named_wait(reason, self._wait_all)

    @abstractmethod
    def event(self) -> Event:
        """Return a new event."""

    def capture(self, fn: Callable[[], object], stream: Stream | None = None) -> Graph:
        """Run `fn` on `stream` (default: main) in capture mode and return the graph.

        `fn` must have run once before, so that everything it compiles or allocates lazily exists.
        The host backend runs nothing now and all of `fn` at each replay.
        """
        if self._slice_end is not None and self.num_captured > self._slice_start and perf_counter() >= self._slice_end:
            raise CaptureSliceOver
        graph = self._capture_graph(fn, stream)
        self.num_captured += 1
        return graph

    @contextmanager
    def capture_slice(self, seconds: float) -> Iterator[None]:
        """Within the block at least one graph may be captured, and others until `seconds` are over.

        The first capture after that ends the block; whoever loops over graphs goes on with it the next time.
        """
        self._slice_end, self._slice_start = perf_counter() + seconds, self.num_captured
        try:
            yield
        except CaptureSliceOver:
            pass
        finally:
            self._slice_end = None

    @abstractmethod
    def memory_info(self) -> tuple[int, int]:
        """Return (free, total) bytes."""

    @abstractmethod
    def close(self) -> None:
        """Finish queued work and release threads and streams; a second call does nothing."""

    def start_recording(self, rec: Recorder) -> None:
        """Send the stages submitted from now on to `rec`."""
        self.recorder = rec

    def stop_recording(self) -> None:
        """Stop; stages already submitted still reach the recorder."""
        self.recorder = None

    def retire_pinned(self, slot: torch.Tensor, event: Event) -> Event:
        """Return the event after which `slot` may be rewritten; poison mode spoils it first (host)."""
        return event

    @abstractmethod
    def _capture_graph(self, fn: Callable[[], object], stream: Stream | None) -> Graph: ...

    @abstractmethod
    def _make_stream(self, name: str) -> Stream: ...

    @abstractmethod
    def _allocate(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor: ...

    @abstractmethod
    def _allocate_pinned(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor: ...

    @abstractmethod
    def _fill(self, tensor: torch.Tensor, fill: Callable[[torch.Tensor], Any]) -> None:
        """Apply `fill` to fresh memory before any stage can see it."""

    @abstractmethod
    def _wait_all(self) -> None: ...

    def _adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Register fresh device memory."""
        self._device_memory.add(tensor)
        return tensor

    @abstractmethod
    def _check_failure(self) -> None:
        """Raise `DeviceError` if device work has failed or the device is closed."""

    def _named_wait(self, reason: str, wait: Callable[[], None]) -> None:
        local = context.local
        with wait_range(reason):
            start = perf_counter_ns()
            try:
                with context.Exempt():
                    wait()
            finally:
                elapsed = perf_counter_ns() - start
                self.waits[reason] += 1
                self.wait_ns[reason] += elapsed
                if local.guard is not None:
                    local.guard.waits[reason] += 1
        self._check_failure()
