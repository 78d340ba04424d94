"""The V2 sampler: per-feature states that live in rows, and one pass over the logits.

Each feature is a state object with the same verbs: `add(row, params)` stages a request's
parameters into the arena (the arena's one launch applies them) and `apply(logits, ctx)` changes the
logits in place.  A feature that no request of the batch uses launches nothing: a host flag a row
decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from mrv2.runner.protocol import RowSampling
from mrv2.runner.v2.arena import DeviceArena
from mrv2_kernels.sampling.gumbel import gumbel_sample
from mrv2_kernels.sampling.logprobs import topk_logprobs
from mrv2_kernels.sampling.min_p import apply_min_p
from mrv2_kernels.sampling.temperature import apply_temperature
from mrv2_kernels.sampling.top_k_top_p import apply_top_k_top_p

SAMPLING_SECTIONS: dict[str, torch.dtype] = {
    "seeds": torch.int64,
    "temperature": torch.float32,
    # 0 for greedy rows, else 1: the temperature that is left once the logits were divided
    "noise_scale": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
}


@dataclass(slots=True)
class SamplingContext:
    """Where each logits row comes from; request state itself is never expanded per row."""

    # [N] int32, logits row -> request row
    logit_slots: torch.Tensor
    # [N] int32, position of the input token that produced the row
    positions: torch.Tensor


class SamplerFeature(Protocol):
    """What a sampler feature can do."""

    # [R] bool, host: the row uses this feature
    used: np.ndarray

    def add(self, row: int, params: RowSampling) -> None: ...

    def apply(self, logits: torch.Tensor, ctx: SamplingContext) -> None: ...


class TemperatureState:
    """Divides by the temperature; greedy rows (0) and neutral rows (1) are left alone."""

    def __init__(self, arena: DeviceArena, max_num_seqs: int) -> None:
        self.arena = arena
        self.used = np.zeros(max_num_seqs, dtype=np.bool_)

    def add(self, row: int, params: RowSampling) -> None:
        self.used[row] = params.temperature not in (0.0, 1.0)
        self.arena.stage_scalar("temperature", row, params.temperature)
        self.arena.stage_scalar("noise_scale", row, float(params.temperature != 0.0))
        self.arena.stage_scalar("seeds", row, params.seed)

    def apply(self, logits: torch.Tensor, ctx: SamplingContext) -> None:
        apply_temperature(logits, ctx.logit_slots, self.arena["temperature"])


class MinPState:
    """Masks tokens less likely than ``min_p`` times the most likely one."""

    def __init__(self, arena: DeviceArena, max_num_seqs: int) -> None:
        self.arena = arena
        self.used = np.zeros(max_num_seqs, dtype=np.bool_)

    def add(self, row: int, params: RowSampling) -> None:
        self.used[row] = params.min_p > 0.0
        self.arena.stage_scalar("min_p", row, params.min_p)

    def apply(self, logits: torch.Tensor, ctx: SamplingContext) -> None:
        apply_min_p(logits, ctx.logit_slots, self.arena["min_p"])


class TopKTopPState:
    """Keeps the k most likely tokens, then the smallest set of them that holds the mass p."""

    def __init__(self, arena: DeviceArena, max_num_seqs: int) -> None:
        self.arena = arena
        self.used = np.zeros(max_num_seqs, dtype=np.bool_)

    def add(self, row: int, params: RowSampling) -> None:
        self.used[row] = params.top_k > 0 or params.top_p < 1.0
        self.arena.stage_scalar("top_k", row, params.top_k)
        self.arena.stage_scalar("top_p", row, params.top_p)

    def apply(self, logits: torch.Tensor, ctx: SamplingContext) -> None:
        apply_top_k_top_p(logits, ctx.logit_slots, self.arena["top_k"], self.arena["top_p"])


@dataclass(slots=True)
class SamplingPlan:
    """What the host knows of a batch's sampling; handed to the device with the batch."""

    features: list[SamplerFeature]
    # -1 = no request of the batch wants logprobs
    num_logprobs: int


class Sampler:
    """Owns the features in the order in which they are applied."""

    def __init__(self, arena: DeviceArena, max_num_seqs: int) -> None:
        self.arena = arena
        self.features: list[SamplerFeature] = [
            TemperatureState(arena, max_num_seqs),
            MinPState(arena, max_num_seqs),
            TopKTopPState(arena, max_num_seqs),
        ]
        self.num_logprobs_np = np.full(max_num_seqs, -1, dtype=np.int32)

    def add(self, row: int, params: RowSampling) -> None:
        """Stage a request's parameters."""
        for feature in self.features:
            feature.add(row, params)
        self.num_logprobs_np[row] = params.num_logprobs

    def plan(self, rows: np.ndarray) -> SamplingPlan:
        """Return what has to be launched for the batch `rows` [B]."""
        active = [bool(feature.used[rows].any()) for feature in self.features]
        # temperature alone is applied by the sampling kernel itself
        features = [f for f, on in zip(self.features, active, strict=True) if on] if any(active[1:]) else []
        return SamplingPlan(features, int(self.num_logprobs_np[rows].max(initial=-1)))

    def sample(
        self,
        # [N, V], raw; not changed
        logits: torch.Tensor,
        ctx: SamplingContext,
        plan: SamplingPlan,
        # [N] int64, out
        sampled: torch.Tensor,
    ) -> None:
        """Draw one token a row; device code."""
        noise_scale = self.arena["temperature"]
        if plan.features:
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
            for feature in plan.features:
                feature.apply(logits, ctx)
            noise_scale = self.arena["noise_scale"]
        gumbel_sample(logits, sampled, ctx.logit_slots, ctx.positions, noise_scale, self.arena["seeds"])


def gather_logprobs(
    # [N, V], raw
    logits: torch.Tensor,
    # [N] int64
    sampled: torch.Tensor,
    # [N, 1+k] int64, [N, 1+k] float32, [N] int64: out
    out_ids: torch.Tensor,
    out_logprobs: torch.Tensor,
    out_ranks: torch.Tensor,
) -> None:
    """Log-probabilities of the raw logits for the sampled and the k most likely tokens; device code."""
    topk_logprobs(logits, sampled, out_ids, out_logprobs, out_ranks)
