"""Programmatic dependent launch: a kernel starts while its predecessor still runs (compute capability 9.0 on).

A kernel of this package says at once that its successor may start (`gdc_launch_dependents`), fetches weights, and
only then waits (`gdc_wait`) for its predecessor's results:

    kernel n      |launch|weights n  |wait|x|multiply|store|
    kernel n + 1         |launch|weights n + 1            |wait|x|multiply|store|
    kernel n + 2                |launch|weights n + 2 ...                     |wait| ...

`gdc_wait` returns when the predecessor has ended and its stores are visible.  Three rules keep that safe:

1. Every program executes `gdc_wait`.  So kernel n ends only after kernel n - 1 has ended, and by induction all
   earlier ones have: what follows the wait of n + 1 sees the results of every earlier kernel.
2. Before the wait nothing is read but weights, which no kernel of a step writes.
3. Before the wait nothing is written.  More than two kernels can be in flight (n + 1 starts n + 2 as soon as all
   its programs run, though n has not ended), so a store before the wait could hit a buffer that an older kernel
   still reads; after it, no older kernel runs.  The same makes one workspace enough for all products of a stream.

A kernel launched without the attribute waits for all of its predecessor, and so, by rule 1, for all before that; a
predecessor that never says `gdc_launch_dependents` says it by ending.  Both mix freely with these kernels.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from mrv2_kernels._triton import HAS_TRITON

if HAS_TRITON:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
elif not TYPE_CHECKING:
    gdc_launch_dependents = gdc_wait = None


@cache
def _supported(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


def has_pdl(x: torch.Tensor) -> bool:
    """Return whether kernels on the device of `x` may be launched ahead of their predecessors' end."""
    return x.is_cuda and _supported(x.device.index or 0)


__all__ = ["gdc_launch_dependents", "gdc_wait", "has_pdl"]
