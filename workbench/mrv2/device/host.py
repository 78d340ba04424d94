"""The host backend: every stream is a worker thread with an in-order queue, so "later" is real.

`Stream.run` only enqueues.  A buffer rewritten before its reader has run corrupts the result, as on a
GPU; so tests without a GPU find such errors, most surely with random delays and poisoned memory.
"""

from __future__ import annotations

import os
import random
import time
import weakref
import zlib
from collections.abc import Callable, Collection
from queue import SimpleQueue
from typing import Any, NoReturn, cast

import torch

from mrv2.device.base import Device, DeviceError, Event, Graph, P, Shape, Stream, fill_garbage
from mrv2.device.host_worker import NO_KWARGS, Item, Mark, Shared, start_worker, switch_interval
from mrv2.instrument import context


class HostEvent(Event):
    """An event of the host backend."""

    def __init__(self, device: HostDevice) -> None:
        self.device = device
        self.mark: Mark | None = None

    def record(self, stream: Stream) -> None:
        mark = Mark(cast("HostStream", stream))
        self.mark, self.recorded = mark, True
        mark.stream.put_internal(mark.fire)

    def query(self) -> bool:
        return self.mark is None or self.mark.done

    def _wait(self) -> None:
        if self.mark is not None:
            self.mark.wait()


class HostStream(Stream):
    """A worker thread and its queue."""

    def __init__(self, device: HostDevice, name: str, queue: SimpleQueue[Item | None]) -> None:
        self.device: HostDevice = device
        self.name = name
        self._shared = device.shared
        self._put = queue.put

    def run(self, stage: str, fn: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        shared, device = self._shared, self.device
        if shared.failure is not None or shared.closed:
            device._check_failure()
        if device.poison:
            # the queue must not keep the owner's objects alive, or a missing reference would go unseen
            handed = tuple(_alias(arg) for arg in args), {name: _alias(arg) for name, arg in kwargs.items()}
            self._put((stage, fn, *handed, context.local.step, device.recorder))
        else:
            self._put((stage, fn, args, kwargs, context.local.step, device.recorder))

    def wait_event(self, event: Event) -> None:
        mark = cast(HostEvent, event).mark
        if mark is not None and mark.stream is not self:
            self.put_internal(mark.wait)

    def put_internal(self, fn: Callable[..., object], *args: Any) -> None:
        """Enqueue bookkeeping that runs even after a failure and appears in no recording."""
        if self._shared.closed:
            self.device._check_failure()
        self._put((None, fn, args, NO_KWARGS, None, None))


class HostGraph(Graph):
    """Stands in for a graph: the function itself, run anew as one item of a stream's queue."""

    def __init__(self, fn: Callable[[], object]) -> None:
        self._fn = fn

    def replay(self) -> None:
        self._fn()


def _alias(arg: object) -> object:
    """Return a tensor that shares memory with `arg` but does not keep the owner's object alive."""
    if not isinstance(arg, torch.Tensor):
        return arg
    with torch._C.DisableTorchFunction():
        return arg.detach()


def _spoil(shared: Shared, queue: SimpleQueue[Item | None], alias: torch.Tensor) -> None:
    """Play the caching allocator: the owner dropped this memory, so the main stream writes over it."""
    if not shared.closed:
        queue.put((None, fill_garbage, (alias,), NO_KWARGS, None, None))


class HostDevice(Device):
    """The CPU playing a device; see the module."""

    type = "host"

    def __init__(
        self,
        *,
        poison: bool = False,
        random_delay_s: float = 0.0,
        delay_streams: Collection[str] | None = None,
        seed: int = 0,
        threads_per_stream: int = 1,
    ) -> None:
        """Start the main stream.

        With `random_delay_s` > 0 a worker sleeps before about every second item, up to that long; only
        the streams named in `delay_streams` if that is given.  The delays follow from `seed`.
        """
        if random_delay_s < 0.0 or threads_per_stream < 1:
            raise ValueError(
                f"random_delay_s={random_delay_s} must be at least 0 and "
                f"threads_per_stream={threads_per_stream} at least 1"
            )
        super().__init__(torch.device("cpu"), poison)
        self.shared = Shared()
        self._random_delay_s = random_delay_s
        self._delay_streams = delay_streams
        self._seed = seed
        self._threads_per_stream = threads_per_stream
        switch_interval.lower()
        self._closer = weakref.finalize(self, self.shared.close)
        self.stream("main")

    def event(self) -> HostEvent:
        return HostEvent(self)

    def _capture_graph(self, fn: Callable[[], object], stream: Stream | None) -> Graph:
        return HostGraph(fn)

    def memory_info(self) -> tuple[int, int]:
        page = os.sysconf("SC_PAGE_SIZE")
        total = page * os.sysconf("SC_PHYS_PAGES")
        try:
            with open("/proc/meminfo", encoding="ascii") as lines:
                fields = dict(line.split(":", 1) for line in lines)
            return int(fields["MemAvailable"].split()[0]) * 1024, total
        except (OSError, KeyError):
            # not Linux: no portable figure, so assume that half is free
            return total // 2, total

    def close(self) -> None:
        self._closer()

    def retire_pinned(self, slot: torch.Tensor, event: Event) -> Event:
        mark = cast(HostEvent, event).mark
        if not self.poison or mark is None:
            return event
        # right after the event, so that a reader that comes too late reads garbage
        mark.stream.put_internal(fill_garbage, slot)
        return mark.stream.record_event()

    def _make_stream(self, name: str) -> HostStream:
        delayed = self._random_delay_s > 0.0 and (self._delay_streams is None or name in self._delay_streams)
        queue = start_worker(name, self._threads_per_stream, self._random_delay(name) if delayed else None, self.shared)
        return HostStream(self, name, queue)

    def _random_delay(self, name: str) -> Callable[[], None]:
        rng, longest = random.Random(self._seed ^ zlib.crc32(name.encode())), self._random_delay_s

        def delay() -> None:
            if rng.random() < 0.5:
                time.sleep(rng.uniform(0.0, longest))

        return delay

    def _allocate(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def _allocate_pinned(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def _fill(self, tensor: torch.Tensor, fill: Callable[[torch.Tensor], Any]) -> None:
        # fresh memory that no stage knows yet: the calling thread may write it
        with context.Exempt():
            fill(tensor)

    def _adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        super()._adopt(tensor)
        if self.poison:
            alias = cast(torch.Tensor, _alias(tensor))
            weakref.finalize(tensor, _spoil, self.shared, self.shared.queues[0], alias).atexit = False
        return tensor

    def _wait_all(self) -> None:
        for event in [stream.record_event() for stream in self._streams.values()]:
            event._wait()

    def _check_failure(self) -> None:
        if self.shared.failure is not None:
            stage, stream, step, error = self.shared.failure
            _raise_failure(stage, stream, step, error)
        if self.shared.closed:
            raise DeviceError("the device is closed; make a new one with make_device()")


def _raise_failure(stage: str, stream: str, step: int | None, error: BaseException) -> NoReturn:
    where = f"stage {stage!r} on stream {stream!r}" + (f" in step {step}" if step is not None else "")
    raise DeviceError(
        f"{where} failed: {type(error).__name__}: {error}. Later stages were skipped; close this device"
    ) from error
