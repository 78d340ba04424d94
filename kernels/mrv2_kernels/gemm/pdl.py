"""Programmatic dependent launch: a kernel starts while its predecessor still runs (compute capability 9.0 on).

A kernel of this kind says at once that its successor may start (`gdc_launch_dependents`; some products say it late,
`LinearPlan.release_late`), fetches weights, and only then waits (`gdc_wait`) for its predecessor's results:

    kernel n      |launch|weights n  |wait|x|multiply|store|
    kernel n + 1         |launch|weights n + 1            |wait|x|multiply|store|
    kernel n + 2                |launch|weights n + 2 ...                     |wait| ...

`gdc_wait` returns when the predecessor has ended and its stores are visible.  Three rules keep that safe:

1. Every program executes `gdc_wait`, one that leaves early too.  So kernel n ends only after kernel n - 1 has ended,
   and by induction all earlier ones have: what follows the wait of n + 1 sees the results of every earlier kernel.
2. Before the wait nothing is read but weights, which no kernel of a step writes, and what was written before the
   last gate in front of this one.  A gate is an ordinary launch, which starts when all before it have ended, or one
   that waits before it lets its successor start: whatever begins behind it begins after all before it have ended.
   Attention reads so lengths, positions, block tables and the order of a large batch, which the preparation of the
   step and the start of its forward pass write, and that of decodes the cached context, of which the step before wrote
   the last token.  The gate in between is the lookup of embeddings.  The second launches of the sampler read the
   requests' parameters behind its first launch, which is one too.
3. Before the wait nothing is written.  More than two kernels can be in flight (n + 1 starts n + 2 as soon as all
   its programs run, though n has not ended), so a store before the wait could hit a buffer that an older kernel
   still reads; after it, no older kernel runs.  The same makes one workspace enough for all products of a stream.
   One launch writes before its wait all the same: `state.mailbox.peek_step` starts behind the gate of its step, what
   it overwrites was read in front of that, and what it writes is read in the next step.

In a step these kernels (inputs, lookup, products, norms, activation, rotation, KV write, fused and mixed attention,
sampling, commit) have others around them (the upload, library products, copies), on one stream.  Both mix freely:

- a kernel launched without the attribute starts when its predecessor has ended, hence, by rule 1, when all before that
  have: it is never overtaken by one of these, which write nothing before their wait, and overtakes none;
- behind one that never says `gdc_launch_dependents` these start when it has ended, for it says so by ending; behind
  a library's kernel that says it early, `gdc_wait` returns only when that has ended;
- memory that the allocator hands on within the stream is written after a wait, when all who read it have ended;
- weights are written at load; every step begins with an ordinary launch, which starts when they have been written;
- a copy or an event between two kernels is waited for as a whole: the launch behind it is an ordinary one.
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
