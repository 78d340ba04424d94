"""What CUDA's calls do to their caller, by name: the one list that all readers share."""

from __future__ import annotations

import re

from mrv2.trace.table import SyncType

# cudaLaunchKernel_v7000, cudaLaunchKernel_ptsz, cuMemcpyDtoHAsync_v2
_SUFFIX = re.compile(r"(_v\d+|_ptsz|_ptds)+$")

# these hold the calling thread until the device has come so far
_BLOCKING = {
    "cudaEventSynchronize": SyncType.EVENT,
    "cuEventSynchronize": SyncType.EVENT,
    "cudaStreamSynchronize": SyncType.STREAM,
    "cuStreamSynchronize": SyncType.STREAM,
    "cudaDeviceSynchronize": SyncType.CONTEXT,
    "cudaThreadSynchronize": SyncType.CONTEXT,
    "cuCtxSynchronize": SyncType.CONTEXT,
}
_STREAM_WAIT = frozenset({"cudaStreamWaitEvent", "cuStreamWaitEvent"})
# these look and return; the profiler records them as synchronisation all the same
_QUERY = frozenset({"cudaEventQuery", "cuEventQuery", "cudaStreamQuery", "cuStreamQuery"})


def plain_name(name: str) -> str:
    """Return a call's name without its version suffix."""
    return _SUFFIX.sub("", name)


def sync_type_of(name: str) -> SyncType | None:
    """Return what kind of synchronisation the call (without suffix) is, or None."""
    if name in _STREAM_WAIT:
        return SyncType.STREAM_WAIT
    return _BLOCKING.get(name)


def is_query(name: str) -> bool:
    """Return whether the call (without suffix) only asks whether work has finished."""
    return name in _QUERY
