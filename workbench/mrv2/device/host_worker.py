"""The threads behind the host backend's streams: one worker and one in-order queue each."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch

from mrv2.instrument import context
from mrv2.instrument.recorder import Recorder

if TYPE_CHECKING:
    from mrv2.device.host import HostStream

# A busy Python thread may keep the GIL for one switch interval (5 ms by default) while a worker waits.
SWITCH_INTERVAL_S = 0.0005

# stage (None = bookkeeping of the backend), function, args, kwargs, step, recorder
Item = tuple["str | None", Callable[..., object], tuple[Any, ...], dict[str, Any], "int | None", "Recorder | None"]
NO_KWARGS: dict[str, Any] = {}


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


switch_interval = _SwitchInterval()


@dataclass
class Shared:
    """What the workers and finalizers know of their device; they must not keep the device alive."""

    closed: bool = False
    # first failed stage: (stage, stream, step, error)
    failure: tuple[str, str, int | None, BaseException] | None = None
    queues: list[SimpleQueue[Item | None]] = field(default_factory=list)
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
        switch_interval.restore()


class Mark:
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


def _work(name: str, queue: SimpleQueue[Item | None], shared: Shared, delay: Callable[[], None] | None) -> None:
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


def start_worker(
    name: str, num_threads: int, delay: Callable[[], None] | None, shared: Shared
) -> SimpleQueue[Item | None]:
    """Start the worker of stream `name` and return its queue; `delay` is called before each item."""
    queue: SimpleQueue[Item | None] = SimpleQueue()
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
