"""Level "kernels": the torch profiler, with this package's stages as annotations."""

from __future__ import annotations

import gzip
import json
import re
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrv2.engine.recording import END_OF_RECORDING, StepLimit
from mrv2.instrument import context
from mrv2.instrument.nvtx_sink import CATEGORIES, DOMAIN, NvtxSink
from mrv2.record.backend import Backend, RecordError, stamp
from mrv2.record.target import Target

if TYPE_CHECKING:
    from mrv2.trace import Trace

# a stage travels through the profiler as the name of an annotation: mrv2:<kind>:<step>:<name>
_MARK = f"{DOMAIN}:"
# from the name of such an event to the first of its arguments; the text is edited because parsing it costs digits
_STAGE_EVENT = re.compile(rf'"name": ?"{_MARK}(\w+):(-?\d+):([^"\\]*)"([^{{}}]*)"args": ?\{{\s*(\}}?)')


class AnnotationSink(NvtxSink):
    """Turns stages into annotations of the torch profiler, beside the NVTX ranges if a tool listens to those."""

    def __init__(self, inner: NvtxSink | None) -> None:
        self.inner = inner
        self._local = threading.local()

    def push(self, name: str, kind: str, step: int | None) -> None:
        from torch.autograd.profiler import record_function

        if self.inner is not None:
            self.inner.push(name, kind, step)
        annotation = record_function(f"{_MARK}{kind}:{-1 if step is None else step}:{name}")
        annotation.__enter__()
        self._stack().append(annotation)

    def pop(self) -> None:
        stack = self._stack()
        # a range that was open when the recording began has no annotation
        if stack:
            stack.pop().__exit__(None, None, None)
        if self.inner is not None:
            self.inner.pop()

    def _stack(self) -> list[Any]:
        stack = getattr(self._local, "stack", None)
        if stack is None:
            stack = self._local.stack = []
        return stack


class KernelBackend(Backend):
    """Operators of all threads; with CUDA also calls, kernels, copies and synchronisation."""

    def __init__(self, target: Target, steps: int | None, *, with_stack: bool = False) -> None:
        self._target = target
        self._steps = steps
        self._with_stack = with_stack
        self._limit: StepLimit | None = None
        self._profiler: Any = None
        self._sink: AnnotationSink | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="mrv2-record-")
        self._file = Path(self._folder.name) / "trace.json.gz"
        self._is_running = False
        self._lock = threading.Lock()

    def start(self) -> None:
        import torch
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import ProfilerActivity, profile

        if torch.autograd.profiler._is_profiler_enabled:
            raise RecordError("a torch profiler is running already; stop it first")
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # the engine's own threads count too, and waits are what this is about
        config = _ExperimentalConfig(profile_all_threads=True, enable_cuda_sync_events=True)
        if len(activities) > 1:
            # the first session of a process loads CUPTI, and misses what happens meanwhile
            with profile(activities=activities):
                pass
        self._target.settle("start of recording")
        self._profiler = profile(activities=activities, with_stack=self._with_stack, experimental_config=config)
        self._profiler.start()
        self._sink = AnnotationSink(context.load_nvtx())
        context.set_nvtx(self._sink)
        self._is_running = True
        if self._steps is not None:
            self._limit = StepLimit(self._target.core, self._steps, self.stop)

    def stop(self) -> None:
        with self._lock:
            if not self._is_running:
                return
            self._is_running = False
            if self._limit is not None:
                self._limit.remove()
            if context.nvtx is self._sink and self._sink is not None:
                context.set_nvtx(self._sink.inner)
            self._target.settle(END_OF_RECORDING)
            self._profiler.stop()

    def trace(self) -> Trace:
        from mrv2.trace.readers import kineto

        trace = kineto.read(self._export())
        if self._target.device is not None and self._target.device.type != "cuda":
            trace.diagnostics.append("recorded on the host: operators and stages only, there is no GPU to see")
        return trace

    def save_native(self, path: Path, meta: dict[str, Any]) -> bool:
        if (path.with_suffix("") if path.suffix == ".gz" else path).suffix != ".json":
            return False
        from mrv2.trace.scrub import scrub

        # the file is a JSON object: one more key
        text = gzip.decompress(self._export().read_bytes()).decode()
        stamped = Path(self._folder.name) / "stamped.json"
        stamped.write_text(f'{{"{DOMAIN}": {json.dumps(stamp(meta))}, {text.lstrip()[1:]}', encoding="utf-8")
        scrub(stamped, path)
        stamped.unlink()
        return True

    def _export(self) -> Path:
        """Write the profiler's file once, its stages unpacked."""
        if not self._file.exists():
            raw = Path(self._folder.name) / "raw.json"
            self._profiler.export_chrome_trace(str(raw))
            text = unpack_stages(raw.read_text(encoding="utf-8"))
            raw.unlink()
            self._file.write_bytes(gzip.compress(text.encode(), 1, mtime=0))
            self._profiler = None
        return self._file


def unpack_stages(text: str) -> str:
    """Return the profiler's JSON with each stage under its own name, and its domain, category and step as arguments."""

    def unpack(found: re.Match[str]) -> str:
        kind, step, name, between, end = found.groups()
        about = f'"domain": "{DOMAIN}", "category": "{CATEGORIES[kind]}", "step": {step}'
        return f'"name": "{name}"{between}"args": {{{about}{end or ", "}'

    return _STAGE_EVENT.sub(unpack, text)
