"""Work of which only the newest request counts: what dragging a timeline asks for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class LatestWins(Generic[_T]):
    """Hands requests to `work` on one thread of its own; a request that waits is replaced by a newer one.

    The thread starts with the first request and ends by itself when none came for `idle_s` seconds, so nothing has to
    be closed and an owner that is dropped can be collected.  What `work` raises goes to `on_error`.
    """

    def __init__(
        self, work: Callable[[_T], None], on_error: Callable[[BaseException], None], *, idle_s: float = 2.0
    ) -> None:
        self._work = work
        self._on_error = on_error
        self._idle_s = idle_s
        self._changed = threading.Condition()
        # at most one request
        self._waiting: list[_T] = []
        self._is_running = False
        self._is_busy = False
        self.num_done = 0
        self.num_dropped = 0

    def submit(self, request: _T) -> None:
        """Ask for `request` and return at once."""
        with self._changed:
            self.num_dropped += len(self._waiting)
            self._waiting = [request]
            self._changed.notify_all()
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="mrv2-timeline", daemon=True).start()

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to do; return False if that took longer than `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._is_busy, timeout)

    def _run(self) -> None:
        while (request := self._next()) is not None:
            try:
                self._work(request[0])
            except Exception as error:  # whatever it is, the reader must see it rather than a dead view
                self._on_error(error)
            finally:
                with self._changed:
                    self._is_busy = False
                    self.num_done += 1
                    self._changed.notify_all()

    def _next(self) -> list[_T] | None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._waiting, self._idle_s):
                self._is_running = False
                return None
            request, self._waiting = self._waiting, []
            self._is_busy = True
            return request
