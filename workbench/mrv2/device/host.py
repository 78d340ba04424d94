"""The host backend: every stream is a worker thread with an in-order queue, so "later" is real.

`Stream.run` only enqueues.  A buffer rewritten before its reader has run corrupts the result, as on a
GPU; so tests without a GPU find such errors, most surely with random delays and poisoned memory.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import perf_counter_ns
from typing import Any, NoReturn, cast

import torch

from mrv2.device.base import Device, DeviceError, Event, Graph, P, Shape, Stream, fill_garbage
from mrv2.instrument import context
from mrv2.instrument.recorder import Recorder

# A busy Python thread may keep the GIL for one switch interval (5 ms by default) while a worker waits.
SWITCH_INTERVAL_S = 0.0005

# stage (None = bookkeeping of the backend), function, args, kwargs, step, recorder
_Item = tuple["str | None", Callable[..., object], tuple[Any, ...], dict[str, Any], "int | None", "Recorder | None"]
_NO_KWARGS: dict[str, Any] = {}


class _SwitchInterval:
    """Lowers the interpreter's switch interval while at least one host device lives."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = 0.0

    def lower(self) -> None:
        with self._lock:
            if self._users == 0:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(SWITCH_INTERVAL_S, self._before))
            self._users += 1

    def restore(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                sys.setswitchinterval(self._before)


_switch_interval = _SwitchInterval()


@dataclass
class _Shared:
    """What the workers and finalizers know of their device; they must not keep the device alive."""

    closed: bool = False
    # first failed stage: (stage, stream, step, error)
    failure: tuple[str, str, int | None, BaseException] | None = None
    queues: list[SimpleQueue[_Item | None]] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)

    def close(self) -> None:
        """Let the workers finish what is queued, then stop them."""
        if self.closed:
            return
        self.closed = True
        for queue in self.queues:
            queue.put(None)
        # a worker that drops the last reference to the device must not wait for its siblings
        if threading.current_thread() not in self.threads:
            for thread in self.threads:
                thread.join()
        _switch_interval.restore()


class _Mark:
    """A point in a queue: a held lock that the worker releases when it gets there."""

    __slots__ = ("_lock", "done", "stream")

    def __init__(self, stream: HostStream) -> None:
        self.stream = stream
        self.done = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def fire(self) -> None:
        self.done = True
        self._lock.release()

    def wait(self) -> None:
        if not self.done:
            # each waiter passes the lock on, so any number may wait
            with self._lock:
                pass


def _work(name: str, queue: SimpleQueue[_Item | None], shared: _Shared, delay: Callable[[], None] | None) -> None:
    """Run a stream's items in order until None arrives."""
    get, local = queue.get, context.local
    while True:
        item = get()
        if item is None:
            return
        stage, fn, args, kwargs, step, recorder = item
        if delay is not None:
            delay()
        try:
            if stage is None:
                fn(*args)
            elif shared.failure is None:
                local.step = step
                nvtx = context.nvtx
                if nvtx is not None:
                    nvtx.push(stage, "device", step)
                start = perf_counter_ns()
                fn(*args, **kwargs)
                end = perf_counter_ns()
                if nvtx is not None:
                    nvtx.pop()
                if recorder is not None:
                    recorder.add("device", name, stage, start, end, step)
        except BaseException as error:  # whatever it is, the engine thread must hear of it
            shared.failure = shared.failure or (stage or "poison", name, step, error)
        # an idle worker must not keep a step's tensors alive
        del item, fn, args, kwargs


def _start_worker(
    name: str, num_threads: int, delay: Callable[[], None] | None, shared: _Shared
) -> SimpleQueue[_Item | None]:
    queue: SimpleQueue[_Item | None] = SimpleQueue()
    ready = threading.Lock()
    ready.acquire()

    def main() -> None:
        torch.set_num_threads(num_threads)
        torch.set_grad_enabled(False)
        ready.release()
        _work(name, queue, shared, delay)

    thread = threading.Thread(target=main, name=f"mrv2-stream-{name}", daemon=True)
    num_threads_here = torch.get_num_threads()
    thread.start()
    ready.acquire()
    # torch keeps the count per thread but hands the latest one to threads that start later
    torch.set_num_threads(num_threads_here)
    shared.queues.append(queue)
    shared.threads.append(thread)
    return queue


class HostEvent(Event):
    """An event of the host backend."""

    def __init__(self, device: HostDevice) -> None:
        self.device = device
        self.mark: _Mark | None = None

    def record(self, stream: Stream) -> None:
        mark = _Mark(cast("HostStream", stream))
        self.mark, self.recorded = mark, True
        mark.stream.put_internal(mark.fire)

    def query(self) -> bool:
        return self.mark is None or self.mark.done

    def _wait(self) -> None:
        if self.mark is not None:
            self.mark.wait()


class HostStream(Stream):
    """A worker thread and its queue."""

    def __init__(self, device: HostDevice, name: str, queue: SimpleQueue[_Item | None]) -> None:
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
        self._put((None, fn, args, _NO_KWARGS, None, None))


def _alias(arg: object) -> object:
    """Return a tensor that shares memory with `arg` but does not keep the owner's object alive."""
    if not isinstance(arg, torch.Tensor):
        return arg
    with torch._C.DisableTorchFunction():
        return arg.detach()


def _spoil(shared: _Shared, queue: SimpleQueue[_Item | None], alias: torch.Tensor) -> None:
    """Play the caching allocator: the owner dropped this memory, so the main stream writes over it."""
    if not shared.closed:
        queue.put((None, fill_garbage, (alias,), _NO_KWARGS, None, None))


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
        self.shared = _Shared()
        self._random_delay_s = random_delay_s
        self._delay_streams = delay_streams
        self._seed = seed
        self._threads_per_stream = threads_per_stream
        _switch_interval.lower()
        self._closer = weakref.finalize(self, self.shared.close)
        self.stream("main")

    def event(self) -> HostEvent:
        return HostEvent(self)

    def capture(self, fn: Callable[[], object], stream: Stream | None = None) -> Graph:
        raise DeviceError("graphs need a CUDA device; set cuda_graphs='off' on the host backend")

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
        queue = _start_worker(
            name, self._threads_per_stream, self._random_delay(name) if delayed else None, self.shared
        )
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
