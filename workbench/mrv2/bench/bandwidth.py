"""Measured limits of a device: how fast it reads memory, and how fast it multiplies matrices.

Both are what plain torch operators reach on this device, not a data sheet: a bound that the engine
could exceed would be worthless, so each figure is the best of several operators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from mrv2.device import Device
from mrv2.instrument import recording

# far more than any last-level cache
_READ_BYTES = {"cuda": 4 << 30, "host": 256 << 20}
_ROW_ELEMENTS = 4096
_MATRIX_SIDE = {"cuda": 8192, "host": 1024}
_STAGE = "measure"


@dataclass(frozen=True)
class Limit:
    """One measured limit; `value` in bytes or FLOPs a second, `method` names the operator that reached it."""

    value: float
    method: str


@dataclass(frozen=True)
class DeviceLimits:
    """What the roofline is drawn from."""

    read: Limit
    matmul: Limit

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""
        return self.read.value

    @property
    def peak_flops(self) -> float:
        """FLOP/s of a matrix product in the model's dtype."""
        return self.matmul.value


def measure_limits(device: Device, dtype: torch.dtype) -> DeviceLimits:
    """Measure both limits on an idle device; the memory it takes is given back."""
    limits = DeviceLimits(measure_read_bandwidth(device), measure_matmul(device, dtype))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return limits


def measure_read_bandwidth(device: Device, *, num_bytes: int | None = None, repetitions: int = 5) -> Limit:
    """Read `num_bytes` (default 4 GiB on CUDA, 256 MiB on the host) with reductions; return the fastest's rate.

    A reduction reads everything and writes next to nothing, as a decode step does.  Each repetition is
    one stage on the main stream, timed by the recorder (CUDA events, or the worker's clock).
    """
    free, _ = device.memory_info()
    wanted = num_bytes or min(_READ_BYTES[device.type], free // 4)
    rows = max(1, wanted // (4 * _ROW_ELEMENTS))
    # [rows, 4096]
    data = device.full((rows, _ROW_ELEMENTS), 1.0, torch.float32)
    vector = device.full((_ROW_ELEMENTS,), 1.0, torch.float32)
    total, row_sums = device.empty((1,)), device.empty((rows,))
    methods: dict[str, Callable[[], object]] = {
        "torch.sum of float32": lambda: torch.sum(data.view(1, -1), 1, out=total),
        "torch.sum of float32 rows": lambda: torch.sum(data, 1, out=row_sums),
        "torch.mv of float32": lambda: torch.mv(data, vector, out=row_sums),
    }
    size = data.numel() * data.element_size()
    return _best({name: size / seconds_of(device, fn, repetitions) for name, fn in methods.items()})


def measure_matmul(device: Device, dtype: torch.dtype, *, side: int | None = None, repetitions: int = 5) -> Limit:
    """Multiply square matrices of `side` rows in `dtype`; return FLOP/s.

    The matrices are constant, which costs the least power: the fastest case, as fits a bound.
    """
    n = side or _MATRIX_SIDE[device.type]
    left, right = device.full((n, n), 0.5, dtype), device.full((n, n), 0.5, dtype)
    out = device.empty((n, n), dtype)
    seconds = seconds_of(device, lambda: torch.mm(left, right.t(), out=out), repetitions)
    name = str(dtype).removeprefix("torch.")
    return Limit(2 * n**3 / seconds, f"torch.mm of {n} x {n} {name}")


def _best(rates: dict[str, float]) -> Limit:
    method = max(rates, key=lambda name: rates[name])
    return Limit(rates[method], method)


def seconds_of(device: Device, fn: Callable[[], object], repetitions: int, *, per_stage: int = 3) -> float:
    """Return the median time of one call; several calls a stage hide the launch of the first."""

    def work() -> None:
        for _ in range(per_stage):
            fn()

    device.main.run(_STAGE, work)
    device.synchronize("measure: warm-up")
    with recording(device) as recorder:
        for _ in range(repetitions):
            device.main.run(_STAGE, work)
        device.synchronize("measure")
        times = [span.end_ns - span.start_ns for span in recorder.spans() if span.kind == "device"]
    assert len(times) == repetitions, f"{repetitions} stages were submitted, {len(times)} were timed"
    return median(times) * 1e-9 / per_stage
