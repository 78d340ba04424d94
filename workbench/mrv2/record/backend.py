"""What every way of recording can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mrv2.errors import MRV2Error

if TYPE_CHECKING:
    from mrv2.trace import Trace

Level = Literal["stages", "kernels", "nsight"]

# of `Trace.meta`: what a recorder's own file format does not say by itself
_STAMPED = ("command", "level", "config", "knobs", "versions", "workload", "num_steps")


class RecordError(MRV2Error, RuntimeError):
    """A recording cannot be made as asked, or what was captured lacks what it should hold."""


class Backend(ABC):
    """One way of recording; made for one capture."""

    @abstractmethod
    def start(self) -> None:
        """Begin."""

    @abstractmethod
    def stop(self) -> None:
        """End; a second call does nothing.  May run on the engine's thread, between two of its steps."""

    @abstractmethod
    def trace(self) -> Trace:
        """Return what was recorded, after `stop`."""

    def save_native(self, path: Path, meta: dict[str, Any]) -> bool:
        """Write the recorder's own file format if `path` names it, scrubbed; return whether it did.

        Args:
            meta: what is known of the run; kept where the format has room for it.
        """
        return False


def stamp(about: dict[str, Any]) -> dict[str, Any]:
    """Return those values of `Trace.meta` that travel inside a file of another program's format."""
    return {key: about[key] for key in _STAMPED if about.get(key) is not None}
