"""`stage(name)`: one call that feeds NVTX and the recorder, and costs next to nothing when nobody listens."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from time import perf_counter_ns
from typing import TYPE_CHECKING, Literal

import torch

from mrv2.instrument import context

if TYPE_CHECKING:
    from mrv2.instrument.nvtx_sink import NvtxSink
    from mrv2.instrument.recorder import Recorder

HostKind = Literal["host", "wait"]


class _Nothing:
    """The range that nobody hears."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_exc: object) -> None:
        return None


_NOTHING = _Nothing()


class _Range:
    """One open range on the calling thread."""

    __slots__ = ("kind", "name", "nvtx", "recorder", "start", "step")

    def __init__(self, name: str, step: int | None, kind: HostKind) -> None:
        self.name, self.step = name, step
        self.kind: HostKind = kind

    def __enter__(self) -> None:
        if self.step is None:
            self.step = context.local.step
        self.nvtx: NvtxSink | None = context.nvtx if context.nvtx_loaded else context.load_nvtx()
        self.recorder: Recorder | None = context.recorder
        if self.nvtx is not None:
            self.nvtx.push(self.name, self.kind, self.step)
        self.start = perf_counter_ns()

    def __exit__(self, *_exc: object) -> None:
        end = perf_counter_ns()
        if self.nvtx is not None:
            self.nvtx.pop()
        if self.recorder is not None:
            self.recorder.add(self.kind, threading.current_thread().name, self.name, self.start, end, self.step)


def stage(name: str, step: int | None = None) -> AbstractContextManager[None]:
    """Mark a part of a step on the calling thread; `name` is one of `instrument.stages`.

    `step` defaults to the number given to `set_step` on this thread.
    """
    return _NOTHING if context.quiet else _Range(name, step, "host")


class _Captured:
    """A range for NVTX alone: the recorder's spans are of submissions, and these are not submitted one by one."""

    __slots__ = ("name", "nvtx")

    def __init__(self, name: str, nvtx: NvtxSink) -> None:
        self.name, self.nvtx = name, nvtx

    def __enter__(self) -> None:
        self.nvtx.push(self.name, "device", None)

    def __exit__(self, *_exc: object) -> None:
        self.nvtx.pop()


def captured_stage(name: str) -> AbstractContextManager[None]:
    """Mark device code while it is captured into a CUDA graph, so that its kernels can be told apart in every replay.

    A tool that records the capture keeps the range with each node (`Ops.captured` of a trace); else this is nothing.
    """
    if context.quiet or not torch.cuda.is_initialized() or not torch.cuda.is_current_stream_capturing():
        return _NOTHING
    sink = context.nvtx if context.nvtx_loaded else context.load_nvtx()
    return _NOTHING if sink is None else _Captured(name, sink)


def wait_range(reason: str) -> AbstractContextManager[None]:
    """Mark a wait of the calling thread; the span is named ``wait: reason``."""
    return _NOTHING if context.quiet else _Range(f"wait: {reason}", None, "wait")
