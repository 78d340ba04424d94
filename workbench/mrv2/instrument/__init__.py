"""Names for every part of a step, a recorder for them, and a guard against hidden synchronisation."""

from mrv2.instrument.context import current_step, set_step
from mrv2.instrument.nsight_python import nsight_python_ranges
from mrv2.instrument.nvtx_sink import nvtx_status
from mrv2.instrument.ranges import captured_stage, stage
from mrv2.instrument.recorder import (
    Recorder,
    Span,
    StageSummary,
    device_time_per_step,
    host_time_per_step,
    overlap_fraction,
    recording,
)
from mrv2.instrument.sync_guard import SyncGuard, SyncRecord, no_sync, sync_allowed, sync_guard

__all__ = [
    "Recorder",
    "Span",
    "StageSummary",
    "SyncGuard",
    "SyncRecord",
    "captured_stage",
    "current_step",
    "device_time_per_step",
    "host_time_per_step",
    "no_sync",
    "nsight_python_ranges",
    "nvtx_status",
    "overlap_fraction",
    "recording",
    "set_step",
    "stage",
    "sync_allowed",
    "sync_guard",
]
