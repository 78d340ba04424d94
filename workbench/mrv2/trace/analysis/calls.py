"""What a CUDA call may do to the thread that makes it, beyond the explicit synchronisation of `readers.cuda_calls`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# these return when the data has arrived
_BLOCKING_COPIES = _words(
    "cudaMemcpy cudaMemcpy2D cudaMemcpy3D cudaMemcpyToSymbol cudaMemcpyFromSymbol cudaMemcpyToArray "
    "cudaMemcpyFromArray cudaMemcpy2DToArray cudaMemcpy2DFromArray cudaMemcpyPeer cudaMemcpy3DPeer "
    "cuMemcpy cuMemcpyHtoD cuMemcpyDtoH cuMemcpyAtoH cuMemcpyHtoA cuMemcpy2D cuMemcpy2DUnaligned cuMemcpy3D "
    "cuMemcpyPeer cuMemcpy3DPeer"
)
# copies inside device memory and sets need not hold the caller
_BLOCKING_SETS = _words("cudaMemset cudaMemset2D cudaMemset3D")
_ALLOCATIONS = _words(
    "cudaMalloc cudaMallocPitch cudaMalloc3D cudaMallocArray cudaMallocHost cudaHostAlloc cudaMallocManaged cudaFree "
    "cudaFreeHost cudaFreeArray cuMemAlloc cuMemAllocPitch cuMemAllocHost cuMemHostAlloc cuMemAllocManaged cuMemFree "
    "cuMemFreeHost cuMemCreate cuMemRelease cuMemMap cuMemUnmap cuMemSetAccess cudaMallocAsync cudaFreeAsync "
    "cuMemAllocAsync cuMemFreeAsync cudaMallocFromPoolAsync cuMemAllocFromPoolAsync"
)
# stream-ordered ones hold nobody
_ASYNC_ALLOCATIONS = frozenset(name for name in _ALLOCATIONS if name.endswith("Async"))
_REGISTRATIONS = _words("cudaHostRegister cudaHostUnregister cuMemHostRegister cuMemHostUnregister")
_MODULE_LOADS = _words(
    "cuModuleLoad cuModuleLoadData cuModuleLoadDataEx cuModuleLoadFatBinary cuModuleUnload cuLibraryLoadData "
    "cuLibraryLoadFromFile cuLibraryUnload cudaLibraryLoadData cudaLibraryLoadFromFile cudaLibraryUnload"
)
# torch operators that read device values into Python; on a device tensor each waits
_FRAMEWORK_READS = _words(
    "aten::_local_scalar_dense aten::item aten::nonzero aten::is_nonzero aten::masked_select aten::argwhere "
    "aten::unique_consecutive aten::_unique2 aten::equal aten::repeat_interleave"
)


def is_blocking_copy(name: str) -> bool:
    """Return whether the call (without suffix) moves or sets memory and waits for it."""
    return name in _BLOCKING_COPIES or name in _BLOCKING_SETS


def is_allocation(name: str) -> bool:
    """Return whether the call manages memory or loads code: what a bubble's cause ``alloc`` means."""
    return name in _ALLOCATIONS or name in _REGISTRATIONS or name in _MODULE_LOADS


def is_implicit_sync(name: str) -> bool:
    """Return whether the call, though no synchronisation by name, may wait for the device."""
    return is_blocking_copy(name) or (is_allocation(name) and name not in _ASYNC_ALLOCATIONS)


def is_framework_read(name: str) -> bool:
    """Return whether the range is a torch operator that hands a device value to Python."""
    return name in _FRAMEWORK_READS


def rows_named(ids: np.ndarray, strings: list[str], wanted: Callable[[str], bool]) -> np.ndarray:
    """Return which rows carry a name that `wanted` accepts; bool [rows]."""
    if not len(ids):
        return np.zeros(0, np.bool_)
    # one answer for each string that occurs, looked up by id
    occurs = np.bincount(ids[ids >= 0], minlength=len(strings)).astype(np.bool_)
    accepted = np.zeros(len(strings) + 1, np.bool_)
    for i in np.flatnonzero(occurs).tolist():
        accepted[i] = wanted(strings[i])
    # id -1 finds the False at the end
    return accepted[ids]
