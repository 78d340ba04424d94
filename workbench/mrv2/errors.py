"""Errors that speak to the user: what was given, what is legal, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MRV2Error(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(MRV2Error, ValueError):
    """An option is unknown, out of range, or cannot be combined with another."""


class RequestError(MRV2Error, ValueError):
    """A request can never be served as given (too long, larger than the KV pool, bad parameter)."""


class EngineDeadError(MRV2Error, RuntimeError):
    """The engine stopped; the message carries its last error."""


class SyncError(MRV2Error, RuntimeError):
    """A host-device synchronisation happened where none is allowed."""


def nearest(name: str, legal: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest legal name, or an empty string."""
    found = difflib.get_close_matches(name, list(legal), n=1, cutoff=0.4)
    return f"; did you mean {found[0]!r}?" if found else ""
