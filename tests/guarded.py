"""Steps under the sync guard, for tests of what an engine waits for."""

from __future__ import annotations

import os
from collections.abc import Callable

from mrv2.instrument import SyncGuard, SyncRecord, sync_allowed, sync_guard
from serving import Collector

# set by conftest.py
WORKERS_PER_GPU = int(os.environ.get("MRV2_TEST_WORKERS_PER_GPU", "1"))


def violations(guard: SyncGuard) -> list[SyncRecord]:
    """Return what the guard saw and nobody allowed.

    Launches that were held up count unless other workers use the same GPU: then its time slices hold them up.
    """
    return [r for r in guard.violations if WORKERS_PER_GPU == 1 or r.kind != "launch_backpressure"]


def guarded_steps(collector: Collector, feed: Callable[[int], None], num_steps: int, *, index: int = 0) -> SyncGuard:
    """Run steps of up to four requests that come and go, then drain; return what the guard saw of it.

    `feed` submits request number `index` and those after it.
    """
    core = collector.core
    first = core.scheduler.step
    with sync_guard(core.device, mode="error") as guard:
        while core.scheduler.step - first < num_steps:
            idle = not core.scheduler.requests
            if idle or (len(core.scheduler.running) < 4 and core.scheduler.step % 9 == 0):
                feed(index)
                index += 1
            collector.step()
        with sync_allowed("end of the test"):
            core.drain()
    return guard
