"""How a benchmark writes down that a candidate failed."""

from __future__ import annotations


def reason_of(error: BaseException) -> str:
    """Return an error as one line of at most 200 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
