"""The guard's CUDA half: torch's sync debug mode, explicit synchronise calls, and growth after warm-up.

The debug mode, the patched methods and Triton's hooks are process-wide; each looks up the calling
thread's guard and leaves other threads alone.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch

from mrv2.instrument import context

if TYPE_CHECKING:
    from mrv2.instrument.sync_guard import SyncGuard

_MESSAGE = "called a synchronizing CUDA operation"
_NAMED = "wait with mrv2's Event.synchronize(reason), which is counted and named"
_WARM_UP = "warm up with every shape first, so that nothing is allocated or compiled inside the step"


def _guard() -> SyncGuard | None:
    return None if context.local.exempt else context.local.guard


class _Hooks:
    """Installs the process-wide hooks for the first guard and removes them after the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            self._undo = [
                _hook_warnings(),
                _wrap(torch.cuda, "synchronize", "torch.cuda.synchronize()"),
                _wrap(torch.cuda.Stream, "synchronize", "torch.cuda.Stream.synchronize()"),
                _wrap(torch.cuda.Event, "synchronize", "torch.cuda.Event.synchronize()"),
                _hook_triton(),
            ]

    def remove(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                for undo in reversed(self._undo):
                    undo()
                self._undo = []


_hooks = _Hooks()


@contextmanager
def watch_cuda() -> Iterator[None]:
    """Arm the process-wide hooks inside the block; does nothing without CUDA."""
    if not torch.cuda.is_available():
        yield
        return
    _hooks.install()
    try:
        yield
    finally:
        _hooks.remove()


def _hook_warnings() -> Callable[[], None]:
    """Turn on torch's sync debug mode and route its warning to the guard of the thread it comes from."""
    before = torch.cuda.get_sync_debug_mode()
    catcher = warnings.catch_warnings()
    catcher.__enter__()
    warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
    warnings.filterwarnings("always", message=f".*{_MESSAGE}")
    show = warnings.showwarning

    def showwarning(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if _MESSAGE not in str(message):
            show(message, *args, **kwargs)
            return
        guard = _guard()
        if guard is not None:
            guard.flag("sync", "a CUDA operation that waits for the device", _NAMED)
        elif before:
            show(message, *args, **kwargs)

    warnings.showwarning = showwarning
    torch.cuda.set_sync_debug_mode("warn")

    def undo() -> None:
        torch.cuda.set_sync_debug_mode(before)
        catcher.__exit__(None, None, None)

    return undo


def _wrap(owner: Any, name: str, call: str) -> Callable[[], None]:
    original = getattr(owner, name)
    was_own = name in vars(owner)

    def synchronize(*args: Any, **kwargs: Any) -> Any:
        guard = _guard()
        if guard is None:
            return original(*args, **kwargs)
        if guard.mode == "error":
            guard.flag("cuda_sync", call, _NAMED)
        start = perf_counter_ns()
        with context.Exempt():
            result = original(*args, **kwargs)
        guard.flag("cuda_sync", call, _NAMED, duration_ns=perf_counter_ns() - start)
        return result

    setattr(owner, name, synchronize)

    def undo() -> None:
        if was_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)

    return undo


def _hook_triton() -> Callable[[], None]:
    """Report compilations and module loads of Triton kernels, where this Triton offers the hooks."""
    knobs = getattr(sys.modules.get("triton"), "knobs", None)
    runtime = getattr(knobs, "runtime", None)
    if runtime is None:
        return lambda: None
    undo: list[Callable[[], None]] = []

    def report(kind: str, what: Any) -> None:
        guard = _guard()
        if guard is not None:
            guard.flag(kind, f"Triton kernel {getattr(what, 'name', what)}", _WARM_UP)

    if hasattr(runtime, "jit_post_compile_hook"):
        before = runtime.jit_post_compile_hook

        def compiled(*args: Any, **kwargs: Any) -> Any:
            result = before(*args, **kwargs) if before is not None else None
            report("jit_compile", kwargs.get("fn"))
            return result

        runtime.jit_post_compile_hook = compiled
        undo.append(lambda: setattr(runtime, "jit_post_compile_hook", before))
    chain: Any = getattr(runtime, "kernel_load_end_hook", None)
    if hasattr(chain, "add") and hasattr(chain, "remove"):

        def loaded(_module: Any, _function: Any, name: str, *_rest: Any) -> None:
            report("module_load", name)

        chain.add(loaded)
        undo.append(lambda: chain.remove(loaded))

    def restore() -> None:
        for step in undo:
            step()

    return restore


class GrowthWatch:
    """Compares the allocators' counters with those at arming time."""

    def __init__(self) -> None:
        self._before = _counters()

    def check(self, guard: SyncGuard) -> None:
        """Report what grew since the last check."""
        now, before = _counters(), self._before
        self._before = now
        if now["device"] > before["device"]:
            guard.flag(
                "allocator_growth", f"the CUDA allocator took {now['device'] - before['device']:,} bytes", _WARM_UP
            )
        if now["pinned"] > before["pinned"]:
            guard.flag("pinned_alloc", f"{now['pinned'] - before['pinned']} new pinned host blocks", _WARM_UP)


def _counters() -> dict[str, int]:
    if not torch.cuda.is_available():
        return {"device": 0, "pinned": 0}
    host_stats = getattr(torch.cuda, "host_memory_stats", dict)()
    return {
        # bytes ever taken from the driver, so that growth followed by a release shows too
        "device": torch.cuda.memory_stats().get("reserved_bytes.all.allocated", 0),
        "pinned": host_stats.get("num_host_alloc", 0),
    }
