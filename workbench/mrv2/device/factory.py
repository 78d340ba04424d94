"""`make_device`: one call for both backends."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import torch

from mrv2.device.base import Device
from mrv2.device.host import HostDevice
from mrv2.errors import ConfigError


def make_device(
    kind: Literal["auto", "cuda", "host"] = "auto",
    *,
    poison: bool = False,
    random_delay_s: float = 0.0,
    delay_streams: Collection[str] | None = None,
    seed: int = 0,
) -> Device:
    """Return the device: "cuda", "host", or "auto" for CUDA where there is one.

    `poison`, `random_delay_s`, `delay_streams` and `seed` are for tests (`HostDevice`); CUDA knows only
    `poison`.  Raises `ConfigError` if CUDA is asked for and missing, or cannot do what is asked.
    """
    if kind not in ("auto", "cuda", "host"):
        raise ConfigError(f"device={kind!r}: legal values are 'auto', 'cuda', 'host'")
    has_cuda = torch.cuda.is_available()
    if kind == "host" or (kind == "auto" and not has_cuda):
        return HostDevice(poison=poison, random_delay_s=random_delay_s, delay_streams=delay_streams, seed=seed)
    if not has_cuda:
        raise ConfigError("device='cuda': torch finds no CUDA device; use device='host', or install a CUDA torch")
    if random_delay_s:
        raise ConfigError("random_delay_s works on the host backend only; use device='host'")
    from mrv2.device.cuda import CudaDevice

    return CudaDevice(poison=poison)
