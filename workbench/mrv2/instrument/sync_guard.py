"""The sync guard: inside it, every unnamed wait of the host for the device is an error or a record.

Named waits (`Event.synchronize(reason)`) are allowed and counted apart.  A guard belongs to the thread
that armed it.  What it cannot see: waits inside C++ extensions that bypass torch.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch

from mrv2.errors import SyncError
from mrv2.instrument import context
from mrv2.instrument.sync_calls import CallMode, Held, OffStreamMode, copy_problem
from mrv2.instrument.sync_cuda import GrowthWatch, watch_cuda

if TYPE_CHECKING:
    from mrv2.device.base import Device

_OWN_DIRS = (
    os.path.dirname(os.path.abspath(__file__)),
    os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "device"),
    os.path.dirname(os.path.abspath(torch.__file__)),
    "<frozen",
)
_STDLIB = sysconfig.get_paths()["stdlib"]
_STACK_DEPTH = 6
# a launch that holds its thread for longer found the launch queue full
_BACKPRESSURE_NS = 1_000_000
# a busy machine, or a GPU that others use too, can cause these by itself, so they never raise
_NEVER_RAISED = frozenset({"launch_backpressure"})


@dataclass(frozen=True, slots=True)
class SyncRecord:
    """One thing the guard saw.

    `kind`: "sync", "blocking_copy", "pageable_copy", "strided_copy", "cuda_sync", "device_synchronize",
    "off_stream", "allocator_growth", "pinned_alloc", "jit_compile", "module_load",
    "launch_backpressure", or "allowed" (a `sync_allowed` block; `call` is its reason).
    """

    kind: str
    call: str
    # innermost frame outside torch and this package's device layer: "file:line"
    where: str
    # innermost first: "file:line function"
    stack: tuple[str, ...]
    step: int | None
    # how long the host was held, where that is known
    duration_ns: int | None = None


class SyncGuard:
    """What an armed guard has seen; made by `sync_guard` and `no_sync`."""

    def __init__(self, devices: list[Device], mode: Literal["error", "record"]) -> None:
        self.devices = devices
        self.mode = mode
        self.records: list[SyncRecord] = []
        # named waits inside the guard, by reason
        self.waits: Counter[str] = Counter()
        self._growth = GrowthWatch()
        self._num_calls = 0
        self._calls_ns = 0

    @property
    def violations(self) -> list[SyncRecord]:
        """Return the records that are not explicitly allowed."""
        return [record for record in self.records if record.kind != "allowed"]

    def owns(self, value: Any) -> bool:
        """Return whether `value` is a tensor in device memory."""
        return isinstance(value, torch.Tensor) and any(device.owns(value) for device in self.devices)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is pinned host memory."""
        if any(device.is_pinned(tensor) for device in self.devices):
            return True
        with torch._C.DisableTorchFunction():
            return any(device.type == "cuda" for device in self.devices) and tensor.is_pinned()

    def check(self) -> None:
        """Look for allocator growth since the last check; call it between steps (it costs ~0.1 ms)."""
        if not context.local.exempt:
            self._growth.check(self)

    def flag(self, kind: str, call: str, remedy: str, duration_ns: int | None = None) -> None:
        """Record a violation; in mode "error" raise `SyncError`."""
        stack = _user_stack()
        where = stack[0].rsplit(" ", 1)[0] if stack else "unknown"
        self.records.append(SyncRecord(kind, call, where, stack, context.local.step, duration_ns))
        if self.mode == "error" and kind not in _NEVER_RAISED:
            _raise(kind, call, where, remedy)

    def check_copy(self, dst: torch.Tensor, src: torch.Tensor, *, non_blocking: bool) -> None:
        """Flag a copy between host and device that would make the host wait."""
        if not context.local.exempt:
            problem = copy_problem(self, dst, src, non_blocking)
            if problem is not None:
                self.flag(*problem)

    def pinned_alloc(self, call: str) -> None:
        """Flag an allocation of pinned memory, which makes CUDA wait for the whole device."""
        if not context.local.exempt:
            self.flag("pinned_alloc", call, "allocate it at load, as a PinnedRing or a Device.pinned buffer")

    def device_synchronize(self, reason: str) -> None:
        """Flag a wait for all streams."""
        if not context.local.exempt:
            self.flag(
                "device_synchronize", f"Device.synchronize({reason!r})", "wait for one event: Event.synchronize(reason)"
            )

    def count_call(self, func: Callable[..., Any], held: Held) -> None:
        """Note how long a torch call held the host; on CUDA a long one is backpressure."""
        self._num_calls += 1
        self._calls_ns += held.counted_ns
        if held.counted_ns > _BACKPRESSURE_NS:
            self._backpressure(getattr(func, "__name__", str(func)), held.counted_ns)

    def watch_launch(self, stage: str, launch: Callable[[], object]) -> None:
        """Run a stage's launches; flag it when they held the host longer than their number explains."""
        calls, calls_ns, held = self._num_calls, self._calls_ns, Held()
        launch()
        held.stop()
        # torch calls are judged one by one; the rest are graph and kernel launches and Python itself
        rest_ns = held.counted_ns - (self._calls_ns - calls_ns)
        if rest_ns > _BACKPRESSURE_NS * (1 + self._num_calls - calls):
            self._backpressure(f"stage {stage!r}", rest_ns)

    def _backpressure(self, call: str, duration_ns: int) -> None:
        if any(device.type == "cuda" for device in self.devices):
            remedy = "let fewer steps be in flight; the launch queue is full"
            self.flag("launch_backpressure", call, remedy, duration_ns)


def _user_stack() -> tuple[str, ...]:
    """Return the frames outside the standard library, torch, this package and the device layer, innermost first."""
    frames: list[str] = []
    frame = sys._getframe(2)
    while frame is not None and len(frames) < _STACK_DEPTH:
        path = frame.f_code.co_filename
        is_stdlib = path.startswith(_STDLIB) and "-packages" not in path
        if not is_stdlib and not path.startswith(_OWN_DIRS):
            frames.append(f"{path}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(frames)


def _raise(kind: str, call: str, where: str, remedy: str) -> NoReturn:
    raise SyncError(
        f"{call} at {where} would make the host wait for the device ({kind}); {remedy}. "
        "If the wait is meant, put it in `with sync_allowed(reason):`"
    )


@contextmanager
def sync_guard(device: Device | None = None, mode: Literal["error", "record"] = "error") -> Iterator[SyncGuard]:
    """Guard the calling thread inside the block; `device` None means every live device.

    Mode "error" raises `SyncError` at the first unnamed wait, "record" collects `SyncGuard.records`.
    Arm it after warm-up: allocations and compilations inside the block count as violations too.
    """
    if mode not in ("error", "record"):
        raise ValueError(f"sync_guard(mode={mode!r}): legal values are 'error' and 'record'")
    devices = list(context.devices) if device is None else [device]
    guard, outer = SyncGuard(devices, mode), context.local.guard
    with ExitStack() as stack:
        if any(d.type == "cuda" for d in devices):
            stack.enter_context(watch_cuda())
        if any(d.type == "host" for d in devices):
            stack.enter_context(OffStreamMode(guard))
        stack.enter_context(CallMode(guard))
        context.local.guard = guard
        try:
            yield guard
            guard.check()
        finally:
            context.local.guard = outer


@contextmanager
def no_sync() -> Iterator[SyncGuard]:
    """Raise `SyncError` if the block makes the host wait for any device without a name."""
    with sync_guard(mode="error") as guard:
        yield guard


@contextmanager
def sync_allowed(reason: str) -> Iterator[None]:
    """Let the block wait; an armed guard records it once, as kind "allowed" with `reason`."""
    guard = context.local.guard
    start = perf_counter_ns()
    stack = _user_stack() if guard is not None else ()
    try:
        with context.Exempt():
            yield
    finally:
        if guard is not None:
            where = stack[0].rsplit(" ", 1)[0] if stack else "unknown"
            elapsed = perf_counter_ns() - start
            guard.records.append(SyncRecord("allowed", reason, where, stack, context.local.step, elapsed))
