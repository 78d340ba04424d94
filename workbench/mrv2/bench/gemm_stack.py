"""The weights of all layers that the benchmark of matrix products multiplies, and timing of graphs of them."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch

from mrv2.bench.gemm_cases import DTYPE, NUM_LAYERS, PRODUCTS, Quantization
from mrv2.device import Device
from mrv2.instrument import recording
from mrv2_kernels.gemm import quantise_rows

STAGE, BEFORE = "measure", "measure: before"
_REPLAYS = 21


class Weight(NamedTuple):
    """The weights of one product of one layer."""

    # [N, K], bf16 or e4m3
    values: torch.Tensor
    # [N] float32: of 8-bit weights
    scale: torch.Tensor | None


class Stack:
    """The weights of all layers, and timing."""

    def __init__(self, device: Device, quantization: Quantization | None = None) -> None:
        self.device = device
        self.quantization: Quantization | None = quantization
        # [H]
        self.norm = device.full((PRODUCTS[0].num_inputs,), 1.0, DTYPE)
        # per product, per layer
        self.weights: list[list[Weight]] = []
        device.main.run(STAGE, self._fill)
        device.synchronize("gemms: weights")

    def _fill(self) -> None:
        generator = torch.Generator(self.norm.device).manual_seed(0)
        for product in PRODUCTS:
            self.weights.append([])
            for _ in range(NUM_LAYERS):
                values = self.norm.new_empty((product.num_outputs, product.num_inputs))
                # keeps a chain's values at size one
                values.normal_(std=product.num_inputs**-0.5, generator=generator)
                kept = (values, None) if self.quantization is None else quantise_rows(values)
                self.weights[-1].append(Weight(*kept))

    def graph_seconds(self, work: Callable[[], None], before: Callable[[], None]) -> float:
        """Return the median time of a replay of `work`; `before` runs ahead of each, untimed."""
        self.device.main.run(BEFORE, before)
        self.device.main.run(STAGE, work)
        self.device.synchronize("gemms: warm-up")
        graph = self.device.capture(work)
        for _ in range(2):
            self.device.main.run(STAGE, graph.replay)
        with recording(self.device, capacity=1 << 10) as recorder:
            for _ in range(_REPLAYS):
                self.device.main.run(BEFORE, before)
                self.device.main.run(STAGE, graph.replay)
            self.device.synchronize("gemms")
            spans = [span for span in recorder.spans() if span.kind == "device" and span.name == STAGE]
            times = [span.end_ns - span.start_ns for span in spans]
        assert len(times) == _REPLAYS, f"{_REPLAYS} replays were submitted, {len(times)} were timed"
        return median(times) * 1e-9
