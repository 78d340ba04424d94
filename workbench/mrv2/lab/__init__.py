"""The lab: an engine that serves requests in the background, and a panel that shows and steers it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mrv2.lab.ab import ABResult
    from mrv2.lab.load import Load
    from mrv2.lab.session import Session, open_session
    from mrv2.lab.stand_in import model_or
    from mrv2.lab.workbench import Workbench

__all__ = ["ABResult", "Load", "Session", "Workbench", "model_or", "open_session"]

# imported when first asked for: the workbench brings torch
_LAZY = {
    "ABResult": "mrv2.lab.ab",
    "Load": "mrv2.lab.load",
    "Session": "mrv2.lab.session",
    "Workbench": "mrv2.lab.workbench",
    "model_or": "mrv2.lab.stand_in",
    "open_session": "mrv2.lab.session",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'mrv2.lab' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
