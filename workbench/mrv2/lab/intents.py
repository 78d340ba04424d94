"""Changes that were asked for: pending, then applied at a step or refused with the reason."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from mrv2.engine.messages import KnobChange
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
    # what that took; None before it is applied
    change: KnobChange | None = None
    # from then on until the last missing graph was captured; None while one is missing
    capture_seconds: float | None = None
    reason: str = ""
    _done: threading.Event = field(default_factory=threading.Event)

    def apply(self, change: KnobChange, seconds: float) -> None:
        """The engine has switched; graphs that are missing follow."""
        self.step, self.seconds, self.change, self.state = change.step, seconds, change, "applied"
        if not change.num_graphs:
            self.complete(0.0)

    def complete(self, seconds: float) -> None:
        """Every graph that it asked for is there."""
        self.capture_seconds = seconds
        self._done.set()

    @property
    def lacks_graphs(self) -> bool:
        """It is applied, and steps that will have a graph still run without."""
        return self.state == "applied" and self.capture_seconds is None

    def refuse(self, reason: str) -> None:
        """The engine has refused."""
        self.reason, self.state = reason, "refused"
        self._done.set()

    def wait(self, timeout: float | None = None) -> Intent:
        """Wait until it is applied and has its graphs; raises `ConfigError` if it is refused, or `TimeoutError`."""
        if not self._done.wait(timeout):
            doing = "capturing graphs" if self.state == "applied" else "pending"
            raise TimeoutError(f"{self.changes} is still {doing} after {timeout} s")
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
            "recomputed": 0 if self.change is None else self.change.num_recomputed,
            "caught_up": 0 if self.change is None else self.change.num_caught_up,
            "graphs": 0 if self.change is None else self.change.num_graphs,
            "capture_ms": None if self.capture_seconds is None else round(1000 * self.capture_seconds, 1),
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
        """Nobody will apply them any more, nor capture what they lack."""
        for intent in self.all():
            if intent.state == "pending":
                intent.refuse(reason)
            elif intent.lacks_graphs:
                intent._done.set()

    def by_knob(self) -> dict[str, dict[str, Any]]:
        """Return for each knob that was ever asked for what became of the last wish."""
        found: dict[str, dict[str, Any]] = {}
        for intent in self.all():
            for name in intent.changes:
                found[name] = intent.as_dict()
        return found
