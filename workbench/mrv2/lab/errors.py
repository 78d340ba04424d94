"""Where errors of buttons and background threads go, so that nobody misses them."""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from mrv2.errors import EngineDeadError


@dataclass(frozen=True)
class LabError:
    """One error, as the banner shows it."""

    number: int
    summary: str
    detail: str
    exception: BaseException | None


class ErrorStore:
    """Keeps the last errors; any thread may add one."""

    def __init__(self, keep: int = 20) -> None:
        self._lock = threading.Lock()
        self._errors: deque[LabError] = deque(maxlen=keep)
        self._num = 0
        # the error that ended the engine
        self.fatal: LabError | None = None

    def add(self, error: BaseException) -> None:
        """Keep an exception."""
        text = "".join(traceback.format_exception(error)).rstrip()
        lines = [line for line in str(error).splitlines() if line.strip()]
        summary = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
        kept = self._append(summary, text, error)
        if isinstance(error, EngineDeadError):
            self.fatal = self.fatal or kept

    def note(self, summary: str) -> None:
        """Keep a message that is no exception."""
        self._append(summary, "", None)

    def dismiss(self) -> None:
        """Forget all but the error that ended the engine."""
        with self._lock:
            self._errors.clear()
            if self.fatal is not None:
                self._errors.append(self.fatal)

    @property
    def latest(self) -> LabError | None:
        with self._lock:
            return self._errors[-1] if self._errors else None

    @property
    def first_exception(self) -> BaseException | None:
        """The oldest exception that was not dismissed."""
        with self._lock:
            return next((e.exception for e in self._errors if e.exception is not None), None)

    def guarded(self, call: Callable[..., Any]) -> Callable[..., None]:
        """Return `call` such that what it raises is kept here; for callbacks whose errors nobody would see."""

        @wraps(call)
        def run(*args: Any, **kwargs: Any) -> None:
            try:
                call(*args, **kwargs)
            except Exception as error:
                self.add(error)

        return run

    def _append(self, summary: str, detail: str, error: BaseException | None) -> LabError:
        with self._lock:
            self._num += 1
            kept = LabError(self._num, summary, detail, error)
            self._errors.append(kept)
            return kept
