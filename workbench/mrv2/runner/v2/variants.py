"""The last step of sampling, in five ways: temperature, min-p, top-k, top-p, and the draw itself.

`gumbel_fused`, `gumbel_two_pass` and `softmax_race` draw the same tokens; `gumbel_blocked` and `torch_sort` other
tokens of the same distribution.  All are pure functions of the logits and of (seed, position).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mrv2.device import Device
from mrv2.runner.protocol import RowSampling
from mrv2.runner.v2.arena import DeviceArena
from mrv2.runner.v2.sampling.context import SamplingContext
from mrv2_kernels._numerics import accumulator_dtype
from mrv2_kernels.sampling.gumbel import gumbel_sample
from mrv2_kernels.sampling.gumbel_blocked import gumbel_blocked_sample
from mrv2_kernels.sampling.gumbel_fused import gumbel_fused_sample
from mrv2_kernels.sampling.softmax_race import softmax_race_sample
from mrv2_kernels.sampling.temperature import apply_temperature
from mrv2_kernels.sampling.torch_sort import torch_sort_sample
from mrv2_kernels.sampling.truncation import Truncation
from mrv2_kernels.sampling.workspace import DrawWorkspace

# sections of the arena, one element a row
DRAW_SECTIONS: dict[str, torch.dtype] = {
    "seeds": torch.int64,
    "temperature": torch.float32,
    "min_p": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
}


@dataclass(frozen=True, slots=True)
class DrawPlan:
    """What the host knows of a batch: which of the rows' features have to be launched at all."""

    variant: str
    has_greedy: bool = True
    # a temperature other than 0 and 1 occurs
    is_scaled: bool = True
    # a random row with min-p, top-k or top-p occurs; every row is one
    is_truncated: bool = True
    all_truncated: bool = False

    def for_graph(self) -> DrawPlan:
        """Return the plan of the graph that serves this batch: it launches at least as much, and is a `graph_plans`."""
        is_scaled = self.is_truncated or (self.is_scaled and self.variant == "gumbel_two_pass")
        return DrawPlan(self.variant, is_scaled=is_scaled, is_truncated=self.is_truncated)


# a temperature other than 0 and 1 occurs, a truncation occurs
_KINDS = ((False, False), (True, False), (True, True))


def graph_plans(variant: str) -> list[DrawPlan]:
    """Return the plans that `DrawPlan.for_graph` may return for `variant`: the kinds of draws that are captured."""
    plans = [DrawPlan(variant, is_scaled=s, is_truncated=t).for_graph() for s, t in _KINDS]
    return list(dict.fromkeys(plans))


class TokenDraw:
    """Keeps the parameters that every request has, and draws by the variant that the plan names."""

    def __init__(self, device: Device, arena: DeviceArena, max_num_seqs: int, max_logits_rows: int) -> None:
        self.arena = arena
        # [R] float32 and bool, host
        self.temperature_np = np.zeros(max_num_seqs, dtype=np.float32)
        self.is_truncated_np = np.zeros(max_num_seqs, dtype=np.bool_)
        self.workspace = DrawWorkspace(
            device.zeros((max_logits_rows,), torch.int64), device.zeros((max_logits_rows,), torch.int32)
        )

    def add(self, row: int, params: RowSampling) -> None:
        """Stage a request's parameters."""
        self.temperature_np[row] = params.temperature
        limits = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        self.is_truncated_np[row] = limits and params.temperature != 0.0
        self.arena.stage_scalar("temperature", row, params.temperature)
        self.arena.stage_scalar("seeds", row, params.seed)
        self.arena.stage_scalar("min_p", row, params.min_p)
        self.arena.stage_scalar("top_k", row, params.top_k)
        self.arena.stage_scalar("top_p", row, params.top_p)

    def plan(self, rows: np.ndarray, variant: str) -> DrawPlan:
        """Return what has to be launched for the batch `rows` [B] by `variant`, a value of the knob `sampler`."""
        temperature, is_truncated = self.temperature_np[rows], self.is_truncated_np[rows]
        return DrawPlan(
            variant,
            has_greedy=bool((temperature == 0.0).any()),
            is_scaled=bool(((temperature != 0.0) & (temperature != 1.0)).any()),
            is_truncated=bool(is_truncated.any()),
            all_truncated=bool(is_truncated.all()),
        )

    def draw(
        self,
        plan: DrawPlan,
        # [N, V]
        logits: torch.Tensor,
        ctx: SamplingContext,
        # [N] int64, out
        sampled: torch.Tensor,
        *,
        may_change: bool,
    ) -> None:
        """Draw one token a row; device code.  `may_change` says that `logits` are float32 or float64 and disposable."""
        arena = self.arena
        truncation = self._truncation(plan)
        draw(
            plan,
            logits,
            sampled,
            ctx.logit_slots,
            ctx.positions,
            arena["temperature"],
            arena["seeds"],
            truncation=truncation,
            workspace=self.workspace,
            may_change=may_change,
        )

    def target(self, plan: DrawPlan, logits: torch.Tensor, ctx: SamplingContext) -> torch.Tensor:
        """Return a scaled and masked copy of `logits` [N, V] if a row is truncated, else `logits`; device code."""
        truncation = self._truncation(plan)
        if truncation is None:
            return logits
        return truncation.apply(logits, ctx.logit_slots, self.arena["temperature"])

    def _truncation(self, plan: DrawPlan) -> Truncation | None:
        if not plan.is_truncated:
            return None
        arena = self.arena
        return Truncation(arena["min_p"], arena["top_k"], arena["top_p"], plan.all_truncated)


def draw(
    plan: DrawPlan,
    # [N, V] any float dtype
    logits: torch.Tensor,
    # [N] int64, out
    sampled: torch.Tensor,
    # [N] int32
    logit_slots: torch.Tensor,
    positions: torch.Tensor,
    # [R] float32, int64
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    *,
    truncation: Truncation | None,
    workspace: DrawWorkspace,
    may_change: bool = False,
) -> None:
    """Draw one token a row by ``plan.variant``: -1 where a row holds NaN or nothing above -inf."""
    where = (sampled, logit_slots, positions, temperature, seeds)
    match plan.variant:
        case "gumbel_fused":
            gumbel_fused_sample(logits, *where, workspace=workspace, truncation=truncation)
        case "gumbel_blocked":
            gumbel_blocked_sample(logits, *where, workspace=workspace, truncation=truncation)
        case "gumbel_two_pass":
            is_processed = plan.is_scaled or truncation is not None
            if is_processed:
                logits = _processed(logits, logit_slots, temperature, truncation, may_change)
            gumbel_sample(logits, *where, scaled=is_processed)
        case "softmax_race":
            logits = _processed(logits, logit_slots, temperature, truncation, may_change)
            softmax_race_sample(logits, *where, has_greedy=plan.has_greedy)
        case "torch_sort":
            torch_sort_sample(logits, *where, truncation=truncation)
        case _:
            raise AssertionError(f"no sampler is called {plan.variant!r}")


def _processed(
    logits: torch.Tensor,
    logit_slots: torch.Tensor,
    temperature: torch.Tensor,
    truncation: Truncation | None,
    may_change: bool,
) -> torch.Tensor:
    """Return logits that are scaled and masked, in float32 or float64; a copy unless they may change."""
    if not may_change:
        logits = logits.to(accumulator_dtype(logits.dtype), copy=True)
    apply_temperature(logits, logit_slots, temperature)
    if truncation is not None:
        truncation.mask(logits, logit_slots)
    return logits
