"""NVTX ranges in the domain ``mrv2``: registered names, a category per kind, the step as payload."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

DOMAIN = "mrv2"
CATEGORIES = {"host": "host stage", "device": "device stage", "wait": "wait"}
_COLORS = {"host": 0xFF4C78A8, "device": 0xFF54A24B, "wait": 0xFFE45756}


class _Attributes(threading.local):
    """Reused event attributes by (name, kind); per thread, or another thread could change the payload."""

    def __init__(self) -> None:
        self.attributes: dict[tuple[str, str], Any] = {}


class NvtxSink:
    """Pushes and pops ranges on the calling thread."""

    def __init__(self, domain: Any) -> None:
        self._domain = domain
        self._push, self._pop = _range_calls(domain)
        self._categories = {kind: domain.get_category_id(text) for kind, text in CATEGORIES.items()}
        self._per_thread = _Attributes()

    def push(self, name: str, kind: str, step: int | None) -> None:
        """Open a range; `kind` is "host", "device" or "wait", and `step` becomes the payload."""
        cache = self._per_thread.attributes
        attributes = cache.get((name, kind))
        if attributes is None:
            attributes = cache[(name, kind)] = self._domain.get_event_attributes(
                message=name, color=_COLORS[kind], category=self._categories[kind]
            )
        attributes.payload = -1 if step is None else step
        self._push(attributes)

    def pop(self) -> None:
        """Close the range opened last on this thread."""
        self._pop()


def _range_calls(domain: Any) -> tuple[Callable[[Any], object], Callable[[], object]]:
    """Return the calls that open and close a range in `domain`."""
    if hasattr(domain, "push_range"):
        return domain.push_range, domain.pop_range
    # nvtx 0.2.11, the newest that nsys 2023 understands, keeps them outside of its domains
    from nvtx import _lib as calls

    return lambda attributes: calls.push_range(attributes, domain.handle), lambda: calls.pop_range(domain.handle)


def make_sink(module: ModuleType | Any | None = None) -> NvtxSink | None:
    """Return a sink, or None when ``MRV2_NVTX=0``, `nvtx` is missing, or no tool listens.

    `module` stands in for the `nvtx` package.
    """
    if os.environ.get("MRV2_NVTX", "") == "0":
        return None
    if module is None:
        try:
            import nvtx as module  # type: ignore[no-redef]
        except ImportError:
            return None
    assert module is not None, "the nvtx package imported as None"
    domain = module.get_domain(DOMAIN)
    # newer packages hand out a dummy when no tool is attached at start-up; it never becomes a real one
    return None if type(domain).__name__ == "DummyDomain" else NvtxSink(domain)


def nvtx_status() -> str:
    """Say in words whether ranges reach a tool, and if not, why."""
    if os.environ.get("MRV2_NVTX", "") == "0":
        return "off: MRV2_NVTX=0"
    try:
        import nvtx
    except ImportError:
        return "off: the package nvtx is not installed (pip install nvtx)"
    if type(nvtx.get_domain(DOMAIN)).__name__ == "DummyDomain":
        return (
            "off: no tool listens; start the process under nsys. If it is, its nsys is too old for this "
            "nvtx package: pip install nvtx==0.2.11"
        )
    return "on"
