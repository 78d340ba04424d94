"""Loads an engine where the caller wants it to run."""

from __future__ import annotations

from typing import Literal

from mrv2.config import EngineConfig
from mrv2.engine.client import EngineClient, InprocClient
from mrv2.engine.process_client import ProcessClient
from mrv2.engine.remote_client import ThreadClient
from mrv2.engine.service import CoreFactory, make_core
from mrv2.errors import ConfigError, nearest

EnginePlace = Literal["inproc", "thread", "process"]

_CLIENTS: dict[str, type[InprocClient | ThreadClient | ProcessClient]] = {
    "inproc": InprocClient,
    "thread": ThreadClient,
    "process": ProcessClient,
}


def make_client(config: EngineConfig, place: str = "inproc", factory: CoreFactory = make_core) -> EngineClient:
    """Load an engine in the caller's thread ("inproc"), a background "thread" or a child "process"."""
    if place not in _CLIENTS:
        legal = ", ".join(map(repr, _CLIENTS))
        raise ConfigError(f"engine={place!r}{nearest(str(place), _CLIENTS)}; legal values are {legal}")
    return _CLIENTS[place](config, factory)
