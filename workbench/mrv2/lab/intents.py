"""Changes that were asked for: pending, then applied at a step or refused with the reason."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from mrv2.errors import ConfigError

IntentState = Literal["pending", "applied", "refused"]


@dataclass(eq=False)
class Intent:
    """One wish to change knobs."""

    number: int
    changes: dict[str, Any]
    # who asked: "panel", "cell", "preset ..."
    source: str
    asked: float
    state: IntentState = "pending"
    # the first step with the new knobs
    step: int | None = None
    # from the hand-over to the engine until it had drained and switched
    seconds: float | None = None
    reason: str = ""
    _done: threading.Event = field(default_factory=threading.Event)

    def apply(self, step: int, seconds: float) -> None:
        """The engine has switched."""
        self.step, self.seconds, self.state = step, seconds, "applied"
        self._done.set()

    def refuse(self, reason: str) -> None:
        """The engine has refused."""
        self.reason, self.state = reason, "refused"
        self._done.set()

    def wait(self, timeout: float | None = None) -> Intent:
        """Wait until it is applied; raises `ConfigError` if it is refused, `TimeoutError` if neither happens."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"{self.changes} is still pending after {timeout} s")
        if self.state == "refused":
            raise ConfigError(self.reason)
        return self

    def as_dict(self) -> dict[str, Any]:
        """Return it as the panel and sessions show it."""
        return {
            "number": self.number,
            "changes": self.changes,
            "source": self.source,
            "state": self.state,
            "step": self.step,
            "ms": None if self.seconds is None else round(1000 * self.seconds, 1),
            "reason": self.reason,
        }


class IntentLog:
    """The last intents in order; any thread may add one."""

    def __init__(self, keep: int = 200) -> None:
        self._lock = threading.Lock()
        self._intents: deque[Intent] = deque(maxlen=keep)
        self._number = 0

    def add(self, changes: dict[str, Any], source: str, now: float) -> Intent:
        """Note a wish."""
        with self._lock:
            self._number += 1
            intent = Intent(self._number, dict(changes), source, now)
            self._intents.append(intent)
            return intent

    def all(self) -> list[Intent]:
        """Return the intents, oldest first."""
        with self._lock:
            return list(self._intents)

    def refuse_pending(self, reason: str) -> None:
        """Nobody will apply them any more."""
        for intent in self.all():
            if intent.state == "pending":
                intent.refuse(reason)

    def by_knob(self) -> dict[str, dict[str, Any]]:
        """Return for each knob that was ever asked for what became of the last wish."""
        found: dict[str, dict[str, Any]] = {}
        for intent in self.all():
            for name in intent.changes:
                found[name] = intent.as_dict()
        return found
