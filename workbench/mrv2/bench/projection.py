"""The memory floor of the workloads on GPUs that were not measured here: computed, never measured.

A data sheet's bandwidth is never reached.  The projection takes the share that reads reached on the one GPU of the
same table that was measured, an H200: 4.3 of 4.8 TB/s (sums over 4 GiB of float32).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mrv2.bench.roofline import CostCard, ModelCost
from mrv2.bench.workloads import make_workload
from mrv2.errors import ConfigError, nearest
from mrv2_models.config import ModelConfig

REACHED = 4.3 / 4.8


@dataclass(frozen=True)
class DataSheet:
    """One GPU as its maker describes it."""

    # bytes a second
    bandwidth: float
    # dense bf16 FLOP/s
    flops: float


DATA_SHEETS = {
    "h100": DataSheet(3.35e12, 989e12),
    "h200": DataSheet(4.8e12, 989e12),
    "b200": DataSheet(8.0e12, 2250e12),
    "gb200": DataSheet(8.0e12, 2500e12),
    "gb300": DataSheet(8.0e12, 2500e12),
}


def project(
    gpus: Sequence[str], names: Sequence[str], config: ModelConfig, dtype: torch.dtype
) -> dict[str, dict[str, float]]:
    """Return workload -> GPU -> output tokens a second of the memory floor; the first GPU is always an H200.

    Raises:
        ConfigError: a GPU without a data sheet here, or an unknown workload.
    """
    for gpu in gpus:
        if gpu not in DATA_SHEETS:
            raise ConfigError(f"unknown GPU {gpu!r}{nearest(gpu, DATA_SHEETS)}; known are {', '.join(DATA_SHEETS)}")
    cost = ModelCost.of(config, dtype)
    found: dict[str, dict[str, float]] = {}
    for name in names:
        workload = make_workload(name, vocab_size=config.vocab_size)
        card = CostCard.of(workload, cost, max_num_seqs=256, max_num_batched_tokens=8192)
        found[name] = {
            gpu: card.tokens_per_second(REACHED * DATA_SHEETS[gpu].bandwidth, DATA_SHEETS[gpu].flops)
            for gpu in dict.fromkeys(("h200", *gpus))
        }
    return found


def report(projected: dict[str, dict[str, float]], model: str) -> str:
    """Return the projection as a table."""
    gpus = list(next(iter(projected.values())))
    lines = [
        f"{model}: memory floor in output tok/s, computed from data sheets at {REACHED:.0%} of their bandwidth; "
        "nothing here was measured",
        f"{'workload':>9}" + "".join(f"{gpu:>12}" for gpu in gpus),
    ]
    lines += [f"{name:>9}" + "".join(f"{rates[gpu]:>12,.0f}" for gpu in gpus) for name, rates in projected.items()]
    return "\n".join(lines)
