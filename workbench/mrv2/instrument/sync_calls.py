"""Which torch calls make the host wait for the device; the modes that see them on the guarded thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter_ns, thread_time_ns
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mrv2.instrument import context

if TYPE_CHECKING:
    from mrv2.instrument.sync_guard import SyncGuard

_READ = (
    "copy the value into a Device.pinned buffer with Stream.copy, record an event and read the buffer after "
    "Event.synchronize(reason), or keep the computation on the device"
)
_SIZE = "its result's size is known only to the device: use a fixed size with a mask, index_select or torch.where"
_UPLOAD = "stage the values in a Device.pinned buffer and send them with Stream.copy"

# calls that wait when they are handed a device tensor: they read its values ...
_READING = frozenset({
    "item", "tolist", "numpy", "cpu", "is_nonzero", "equal", "allclose",
    "__bool__", "__int__", "__float__", "__complex__", "__index__", "__array__", "__repr__", "__format__",
    "__contains__", "__deepcopy__", "__reduce_ex__", "__dlpack__",
    # with sizes or values that are device scalars
    "arange", "linspace", "zeros", "ones", "full", "empty", "eye", "randint", "randperm", "tensor",
})  # fmt: skip
# ... or the size of their result depends on them
_SIZING = frozenset({
    "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "tensor_split",
})  # fmt: skip
# a device tensor goes in, only its metadata is read
_METADATA_ONLY = {"empty_like", "new_empty", "new_empty_strided", "sym_size", "sym_stride", "is_same_size"}

# the driver polls a full launch queue; a thread that the operating system or the GIL has set aside uses no processor,
# and is back within a few time slices
_SET_ASIDE_NS = 20_000_000


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, slice):
            yield from _tensors((value.start, value.stop, value.step))


class Held:
    """How long a call holds its thread: from its making to `stop`."""

    __slots__ = ("_busy", "_start", "counted_ns")

    def __init__(self) -> None:
        self._start, self._busy, self.counted_ns = perf_counter_ns(), thread_time_ns(), 0

    def stop(self) -> Held:
        """Take the time: of the thread at work, or by the clock where that is beyond any time slice."""
        busy, elapsed = thread_time_ns() - self._busy, perf_counter_ns() - self._start
        self.counted_ns = elapsed if elapsed > _SET_ASIDE_NS else busy
        return self


class CallMode(TorchFunctionMode):
    """Sees every torch call of the guarded thread and reports those that wait."""

    def __init__(self, guard: SyncGuard) -> None:
        super().__init__()
        self._guard = guard

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        guard = self._guard
        if context.local.exempt:
            return func(*args, **kwargs)
        found = _find(guard, getattr(func, "__name__", ""), args, kwargs)
        if found is None:
            held = Held()
            result = func(*args, **kwargs)
            guard.count_call(func, held.stop())
            return result
        kind, call, remedy = found
        if guard.mode == "error":
            guard.flag(kind, call, remedy)
        start = perf_counter_ns()
        with context.Exempt():
            result = func(*args, **kwargs)
        guard.flag(kind, call, remedy, duration_ns=perf_counter_ns() - start)
        return result


def _find(guard: SyncGuard, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str, str] | None:
    """Return (kind, call, remedy) if the call waits for the device."""
    if name in _READING or name in _SIZING:
        owned = any(guard.owns(t) for t in _tensors([*args, *kwargs.values()]))
        return ("sync", f"{name}() on a device tensor", _READ if name in _READING else _SIZE) if owned else None
    if name in ("__getitem__", "__setitem__"):
        return _find_indexing(guard, name, args)
    if name in ("copy_", "to", "cuda"):
        return _find_copy(guard, name, args, kwargs)
    if name == "where" and len(args) == 1 and not kwargs and guard.owns(args[0]):
        return "sync", "where(condition) on a device tensor", _SIZE
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        repeats = kwargs.get("repeats", args[-1] if args else None)
        if isinstance(repeats, torch.Tensor) and guard.owns(repeats):
            return "sync", "repeat_interleave() with repeats on the device", "pass output_size="
    return None


def _find_indexing(guard: SyncGuard, name: str, args: tuple[Any, ...]) -> tuple[str, str, str] | None:
    target, index = args[0], args[1]
    on_device = guard.owns(target)
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, slice) and any(guard.owns(t) for t in _tensors((part,))):
            return "sync", f"{name} with a slice bound on the device", _READ
        if isinstance(part, torch.Tensor):
            is_mask = part.dtype in (torch.bool, torch.uint8)
            if guard.owns(part):
                if is_mask and not (name == "__setitem__" and _is_scalar(args[2])):
                    return "sync", f"{name} with a boolean mask on the device", _SIZE
                if part.dim() == 0 and not is_mask:
                    return "sync", f"{name} with a scalar index on the device", "use index_select or gather"
            elif on_device and part.dim() > 0:
                return "blocking_copy", f"{name} on a device tensor with a host index", _UPLOAD
        elif on_device and not isinstance(part, (int, slice, str)) and hasattr(part, "__len__"):
            return "blocking_copy", f"{name} on a device tensor with a host index", _UPLOAD
    return None


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.dim() == 0


def _find_copy(
    guard: SyncGuard, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, str, str] | None:
    target, rest = args[0], args[1:]
    flags = [value for value in rest if isinstance(value, bool)]
    non_blocking = bool(kwargs.get("non_blocking", flags[0] if flags else False))
    if name == "copy_":
        src = rest[0] if rest else kwargs["src"]
        # on the host backend both sides look alike here; `OffStreamMode` sees the copy
        return copy_problem(guard, target, src, non_blocking) if target.is_cuda != src.is_cuda else None
    to = _destination(name, rest, kwargs)
    if to == "cpu" and guard.owns(target):
        if non_blocking:
            return "pinned_alloc", "to('cpu', non_blocking=True)", _READ
        return "sync", "to('cpu') on a device tensor", _READ
    if to == "cuda" and target.device.type == "cpu":
        return copy_problem(guard, None, target, non_blocking)
    return None


def _destination(name: str, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return the device type that ``to`` or ``cuda`` asks for, or None when it only changes the dtype."""
    if name == "cuda":
        return "cuda"
    for value in (kwargs.get("device"), kwargs.get("other"), *rest[:1]):
        if isinstance(value, torch.Tensor):
            return value.device.type
        if isinstance(value, torch.device):
            return value.type
        if isinstance(value, str):
            return value.split(":")[0]
    return None


def copy_problem(
    guard: SyncGuard, dst: torch.Tensor | None, src: torch.Tensor, non_blocking: bool
) -> tuple[str, str, str] | None:
    """Return what makes this copy between host and device wait, or None.

    `dst` is None for a copy into fresh device memory.  A "non-blocking" copy waits silently when its
    host side is pageable, or when torch must make a host-side temporary first.
    """
    dst_owned = dst is None or guard.owns(dst)
    if dst_owned == guard.owns(src):
        return None
    host = src if dst_owned else dst
    assert host is not None, "a copy out of the device has a destination"
    way = "host to device" if dst_owned else "device to host"
    if not non_blocking:
        return "blocking_copy", f"{way} copy without non_blocking=True", "use Stream.copy"
    if not guard.is_pinned(host):
        return "pageable_copy", f"{way} copy with pageable host memory", "take the host side from Device.pinned"
    if not host.is_contiguous():
        return "strided_copy", f"{way} copy with strided host memory", "copy a contiguous slice of a pinned buffer"
    if dst_owned and dst is not None and dst.dtype != src.dtype:
        return (
            "strided_copy",
            f"{way} copy that converts {src.dtype} to {dst.dtype} on the host",
            "give the pinned buffer the dtype of the device tensor",
        )
    return None


class OffStreamMode(TorchDispatchMode):
    """Host backend: sees operators that touch device memory on the guarded thread instead of a stream."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True, the default, imports all of torch's compiler at the first operator (seconds)
        return False

    def __init__(self, guard: SyncGuard) -> None:
        super().__init__()
        self._guard = guard

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        guard = self._guard
        if not context.local.exempt and not _only_views(func):
            if any(guard.owns(t) for t in _tensors([*args, *kwargs.values()])):
                guard.flag(
                    "off_stream",
                    f"{func} on a device tensor outside a stream",
                    "submit it with Stream.run or Stream.copy; here it races with the workers",
                )
        return func(*args, **kwargs)


def _only_views(func: Any) -> bool:
    """Return whether every result of the operator is a view of an argument, so that no data is touched."""
    if func._schema.name.split("::")[-1] in _METADATA_ONLY:
        return True
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
