"""What the hot path looks up: the recorder in force, the NVTX sink, the thread's step and guard."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

if TYPE_CHECKING:
    from mrv2.instrument.nvtx_sink import NvtxSink
    from mrv2.instrument.recorder import Recorder
    from mrv2.instrument.sync_guard import SyncGuard


class _ThreadState(threading.local):
    """Per thread: the step being submitted, the sync guard, and whether it looks away."""

    step: int | None = None
    guard: SyncGuard | None = None
    exempt: bool = False


local = _ThreadState()


class Exempt:
    """Context manager: this thread's sync guard looks away inside the block."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = local.exempt
        local.exempt = True

    def __exit__(self, *_exc: object) -> None:
        local.exempt = self._before


# the recorder that host spans go to, or None
recorder: Recorder | None = None
# the NVTX sink, or None when no tool listens; looked up once, by `load_nvtx`
nvtx: NvtxSink | None = None
nvtx_loaded: bool = False
# True once it is known that nobody wants a host span
quiet: bool = False
# every live device, for guards that are not given one
devices: WeakSet[Any] = WeakSet()


def load_nvtx() -> NvtxSink | None:
    """Look for a listening NVTX tool, once; later calls return the same answer."""
    global nvtx, nvtx_loaded
    if not nvtx_loaded:
        from mrv2.instrument.nvtx_sink import make_sink

        nvtx, nvtx_loaded = make_sink(), True
        _refresh()
    return nvtx


def set_nvtx(sink: NvtxSink | None) -> None:
    """Replace the NVTX sink (None = emit nothing)."""
    global nvtx, nvtx_loaded
    nvtx, nvtx_loaded = sink, True
    _refresh()


def set_recorder(rec: Recorder | None) -> None:
    """Replace the recorder that host spans go to."""
    global recorder
    recorder = rec
    _refresh()


def _refresh() -> None:
    global quiet
    quiet = nvtx_loaded and nvtx is None and recorder is None


def set_step(step: int | None) -> None:
    """Set the step number that this thread's spans and submissions carry from now on."""
    local.step = step


def current_step() -> int | None:
    """Return the step number set on this thread, or None."""
    return local.step
