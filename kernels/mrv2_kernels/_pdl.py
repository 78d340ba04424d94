"""Programmatic dependent launch: a kernel starts while the one in front of it on the stream still runs.

Every program of a kernel so launched calls `wait_for_previous`, those that leave early included, and reads
before that nothing but what no kernel of a step writes (weights).  The wait lasts until the kernel in front
has ended and its writes are visible.  As every kernel of a chain waits, the end of one is the end of all
before it, so memory may be reused as on an ordinary stream.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; PTX `griddepcontrol`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from mrv2_kernels._triton import HAS_TRITON, tl, triton


@triton.jit
def wait_for_previous():
    """Wait until the kernel in front has ended; returns at once in an ordinary launch."""
    tl.extra.cuda.gdc_wait()


@triton.jit
def launch_dependents():
    """Let the kernel behind start once every program has said so or ended."""
    tl.extra.cuda.gdc_launch_dependents()


@cache
def supports_pdl(device: torch.device) -> bool:
    """Return whether launches on `device` can overlap: a CUDA device of compute capability 9.0 or later."""
    if device.type != "cuda" or not HAS_TRITON:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(pdl: bool, device: torch.device) -> dict[str, Any]:
    """Return the launch options of a kernel; raises `ValueError` for `pdl` where the device lacks it."""
    if not pdl:
        return {}
    if not supports_pdl(device):
        raise ValueError(f"pdl=True needs compute capability 9.0, which {device} has not; ask supports_pdl first")
    return {"launch_pdl": True}
