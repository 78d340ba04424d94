"""Stages for nsight-python: beside its NVTX range each chosen stage opens a start/end range in that tool's domain.

nsight-python profiles what runs inside ranges of the domain ``nsight-python``, one range at a time.  So only the
outermost stage opens one, and only while no other is open in the process.  Its own `annotate` is not used: it
refuses a name the second time, and a step has the same stages as the one before.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from mrv2.errors import MRV2Error
from mrv2.instrument import context
from mrv2.instrument.nvtx_sink import NvtxSink

NSIGHT_DOMAIN = "nsight-python"
_PREFIX = "mrv2/"


class RangeApi(Protocol):
    """The part of the package nvtx that is used here; its ranges may end on another thread."""

    def start_range(self, message: str, *, domain: str) -> Any: ...
    def end_range(self, range_id: Any) -> None: ...


class NsightPythonSink(NvtxSink):
    """Opens and closes the ranges of the sink below it as before, and those for nsight-python besides."""

    def __init__(self, inner: NvtxSink | None, api: RangeApi, names: Collection[str] | None) -> None:
        """`names`: the stages to mark; None = whichever is outermost. Waits are never marked."""
        self.inner = inner
        self._api = api
        self._names = None if names is None else frozenset(names)
        self._lock = threading.Lock()
        self._is_open = False
        self._local = threading.local()

    def push(self, name: str, kind: str, step: int | None) -> None:
        if self.inner is not None:
            self.inner.push(name, kind, step)
        handle = None
        if kind != "wait" and (self._names is None or name in self._names):
            with self._lock:
                if not self._is_open:
                    handle = self._api.start_range(f"{_PREFIX}{name}", domain=NSIGHT_DOMAIN)
                    self._is_open = True
        self._stack().append((handle is not None, handle))

    def pop(self) -> None:
        stack = self._stack()
        # a stage that was open when this sink came has nothing here
        is_mine, handle = stack.pop() if stack else (False, None)
        if is_mine:
            with self._lock:
                self._api.end_range(handle)
                self._is_open = False
        if self.inner is not None:
            self.inner.pop()

    def _stack(self) -> list[tuple[bool, Any]]:
        stack = getattr(self._local, "stack", None)
        if stack is None:
            stack = self._local.stack = []
        return stack


@contextmanager
def nsight_python_ranges(names: Collection[str] | None = None, *, api: RangeApi | None = None) -> Iterator[None]:
    """Mark stages for nsight-python inside the block.

    Args:
        names: stages to mark, such as ``("sample",)``; None = the outermost of each step part.
        api: stands in for the package nvtx.

    Raises `MRV2Error` if the package nvtx is missing.
    """
    if api is None:
        try:
            import nvtx as api  # type: ignore[no-redef]
        except ImportError:
            raise MRV2Error("ranges for nsight-python need the package nvtx: pip install nvtx") from None
    assert api is not None, "the package nvtx imported as None"
    sink = NsightPythonSink(context.load_nvtx(), api, names)
    context.set_nvtx(sink)
    try:
        yield
    finally:
        if context.nvtx is sink:
            context.set_nvtx(sink.inner)


def started_too_early() -> str | None:
    """Return what was initialised already that nsight-python must precede, or None.

    It hooks itself into CUDA and NVTX when it is imported; what was up before stays out of its sight.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA"
    if context.nvtx_loaded and "nvtx" in sys.modules:
        return "NVTX"
    return None
