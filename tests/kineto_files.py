"""Small recordings in the form of the torch profiler, for tests."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

PID, TID = 4000, 4001


class KinetoFile:
    """Collects events; times are given in nanoseconds and written as microseconds with three decimals."""

    def __init__(self, **header: Any) -> None:
        self.header = {"schemaVersion": 1, "baseTimeNanoseconds": 1_700_000_000_000_000_000, **header}
        self.events: list[dict[str, Any]] = []
        self.add_meta("thread_name", "python 4001")

    def add_meta(self, name: str, value: str, pid: Any = PID, tid: Any = TID) -> None:
        """Add a metadata event."""
        self.events.append({"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": {"name": value}})

    def add(self, cat: str, name: str, start: int, end: int, pid: Any = PID, tid: Any = TID, **args: Any) -> None:
        """Add a complete event."""
        times = {"ts": Raw(start), "dur": Raw(end - start)}
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, **times, "args": args})

    def op(self, name: str, start: int, end: int, **args: Any) -> None:
        """Add a torch operator."""
        self.add("cpu_op", name, start, end, **args)

    def api(self, name: str, start: int, end: int, corr: int) -> None:
        """Add a CUDA call."""
        self.add("cuda_runtime", name, start, end, correlation=corr, cbid=211)

    def on_device(self, cat: str, name: str, start: int, end: int, corr: int, stream: int = 7, **args: Any) -> None:
        """Add a device operation (``kernel``, ``gpu_memcpy``, ``gpu_memset``, ``cuda_sync``)."""
        more = {"device": 0, "context": 1, "stream": stream, "correlation": corr, **args}
        self.add(cat, name, start, end, 0, stream, **more)

    def text(self) -> str:
        """Return the file's text."""
        return (
            json.dumps({**self.header, "traceEvents": [_numbers(event) for event in self.events]})
            .replace(f'"{Raw.MARK}', "")
            .replace(f'{Raw.MARK}"', "")
        )

    def write(self, path: Path) -> Path:
        """Write the file, packed if the name ends in ``.gz``."""
        raw = self.text().encode()
        path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
        return path


class Raw:
    """A time that is written digit by digit."""

    MARK = "@raw@"

    def __init__(self, ns: int) -> None:
        self.ns = ns


def _numbers(event: dict[str, Any]) -> dict[str, Any]:
    def text(ns: int) -> str:
        sign, ns = ("-" if ns < 0 else ""), abs(ns)
        return f"{Raw.MARK}{sign}{ns // 1000}.{ns % 1000:03d}{Raw.MARK}"

    return {key: text(value.ns) if isinstance(value, Raw) else value for key, value in event.items()}
