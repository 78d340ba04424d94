"""Level "nsight": Nsight Systems, driven from inside a process that it launched."""

from __future__ import annotations

import json
import sqlite3
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrv2.engine.recording import END_OF_RECORDING, StepLimit
from mrv2.instrument import nvtx_status
from mrv2.record.backend import Backend, RecordError, stamp
from mrv2.record.nsys import Session, current_session
from mrv2.record.target import Target

if TYPE_CHECKING:
    from mrv2.trace import Trace

# keys of `Trace.meta` travel inside an export as rows MRV2:<key> of META_DATA_CAPTURE
STAMP_PREFIX = "MRV2:"
_SETTLE_S = 1.0


def require_session() -> Session:
    """Return the session of this process; raises `RecordError` if there is none or its ranges would be lost."""
    session = current_session()
    if session is None:
        raise RecordError(
            "level='nsight' needs a process started under Nsight Systems: use `mrv2 record --level nsight`, or start "
            "the process, a notebook server too, with `nsys launch --trace=cuda,nvtx ...`"
        )
    status = nvtx_status()
    if status != "on":
        raise RecordError(f"the capture would hold no ranges: NVTX is {status}")
    return session


class NsightBackend(Backend):
    """Everything that nsys was told to trace at launch; exported and scrubbed when it is read."""

    def __init__(self, target: Target, steps: int | None) -> None:
        self._target = target
        self._steps = steps
        self._limit: StepLimit | None = None
        self._session = require_session()
        self._folder = tempfile.TemporaryDirectory(prefix="mrv2-record-")
        self._report = Path(self._folder.name) / "capture.nsys-rep"
        self._file = Path(self._folder.name) / "capture.sqlite"
        self._is_running = False
        self._lock = threading.Lock()

    def start(self) -> None:
        self._target.settle("start of recording")
        self._session.start(self._report)
        # nsys answers before the library in this process listens to NVTX
        time.sleep(_SETTLE_S)
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
            self._target.settle(END_OF_RECORDING)
            self._session.stop(self._report)

    def trace(self) -> Trace:
        from mrv2.trace.readers import nsight_sqlite

        return nsight_sqlite.read(self._export())

    def save_native(self, path: Path, meta: dict[str, Any]) -> bool:
        if not is_sqlite_name(path):
            return False
        stamp_and_scrub(self._export(), path, meta)
        return True

    def _export(self) -> Path:
        """Export once."""
        if not self._file.exists():
            self._session.export(self._report, self._file)
        return self._file


def is_sqlite_name(path: Path) -> bool:
    """Return whether a file name asks for an Nsight Systems export."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix == ".sqlite"


def stamp_and_scrub(raw: Path, out: Path, about: dict[str, Any]) -> None:
    """Write a scrubbed copy of an export that carries what `stamp` takes from `about`."""
    from mrv2.trace.scrub import scrub

    with closing(sqlite3.connect(raw)) as connection, connection:
        connection.execute("CREATE TABLE IF NOT EXISTS META_DATA_CAPTURE (name TEXT NOT NULL, value TEXT)")
        connection.execute("DELETE FROM META_DATA_CAPTURE WHERE name LIKE ?", (f"{STAMP_PREFIX}%",))
        rows = [(f"{STAMP_PREFIX}{key}", json.dumps(value)) for key, value in stamp(about).items()]
        connection.executemany("INSERT INTO META_DATA_CAPTURE (name, value) VALUES (?, ?)", rows)
    scrub(raw, out)
