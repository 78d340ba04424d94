"""The V2 sampler: per-feature states that live in rows, and one pass over the logits.

Each feature is a state object with the same verbs (`SamplerFeature`): `add` stages a request's
parameters into the arena, whose one launch applies them, and `apply` changes the logits in place.  A
feature that no request of the batch uses launches nothing: a host flag a row decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mrv2.runner.protocol import RowSampling, SchedulerOutput
from mrv2.runner.resources import RunnerResources
from mrv2.runner.v2.arena import DeviceArena
from mrv2.runner.v2.sampling.bad_words import BAD_WORDS_ROW_WORDS, BadWordsState
from mrv2.runner.v2.sampling.context import LogitsHolder, SamplerFeature, SamplingContext
from mrv2.runner.v2.sampling.logit_bias import BIAS_ROW_WORDS, LogitBiasState
from mrv2.runner.v2.sampling.logprobs import LOGPROB_IDS_ROW_WORDS, LogprobPlan, LogprobState
from mrv2.runner.v2.sampling.penalties import PENALTY_WORDS, PenaltyState
from mrv2.runner.v2.sampling.processors import LogitsProcessorState, ProcessorPlan
from mrv2.runner.v2.sampling.thinking_budget import THINKING_ROW_WORDS, ThinkingBudgetState
from mrv2.runner.v2.variants import DRAW_SECTIONS, DrawPlan, TokenDraw

# name -> words of a row (0 = one element), dtype
SAMPLING_SECTIONS: dict[str, tuple[int, torch.dtype]] = {
    **{name: (0, dtype) for name, dtype in DRAW_SECTIONS.items()},
    "penalties": (PENALTY_WORDS, torch.float32),
    # history tokens that the penalties have counted; 0 = the row is new
    "counted_len": (0, torch.int32),
    # bit i = the row uses logits processor i
    "processors": (0, torch.int32),
    "logit_bias": (BIAS_ROW_WORDS, torch.int32),
    "bad_words": (BAD_WORDS_ROW_WORDS, torch.int32),
    "thinking": (THINKING_ROW_WORDS, torch.int32),
    "logprob_ids": (LOGPROB_IDS_ROW_WORDS, torch.int32),
}


@dataclass(slots=True)
class SamplingPlan:
    """What the host knows of a batch's sampling; handed to the device with the batch."""

    # in order of application, each with what its `plan` returned
    features: list[tuple[SamplerFeature, Any]]
    draw: DrawPlan
    # None = no request of the batch wants log-probabilities
    logprobs: LogprobPlan | None
    # batch row -> why its request must end; filled by device code
    errors: dict[int, str]
    # logits rows that must not yield a token, filled by device code: whether one is reached, the drafts decide
    failed: list[int]


class Sampler:
    """Owns the features in the order in which they are applied."""

    def __init__(self, resources: RunnerResources, arena: DeviceArena) -> None:
        device, max_num_seqs = resources.device, resources.max_num_seqs
        self.arena = arena
        max_logits_rows = max_num_seqs * (1 + resources.max_num_spec_tokens)
        self.token_draw = TokenDraw(device, arena, max_num_seqs, max_logits_rows)
        self.logprobs = LogprobState(resources, arena)
        # [R] bool: the row uses a feature; most batches are done with one look at it
        self._has_feature = np.zeros(max_num_seqs, dtype=np.bool_)
        self.features: list[SamplerFeature] = [
            LogitBiasState(arena, max_num_seqs),
            PenaltyState(device, arena, max_num_seqs),
            BadWordsState(arena, max_num_seqs),
            LogitsProcessorState(resources.processors, resources.processor_tables, arena, max_num_seqs),
            ThinkingBudgetState(arena, max_num_seqs),
        ]

    def add(self, row: int, params: RowSampling, prompt_len: int) -> None:
        """Stage a request's parameters."""
        for feature in self.features:
            feature.add(row, params, prompt_len)
        self._has_feature[row] = any(feature.used[row] for feature in self.features)
        self.token_draw.add(row, params)
        self.logprobs.add(row, params, prompt_len)

    def plan(self, scheduled: SchedulerOutput, rows: np.ndarray, variant: str) -> SamplingPlan:
        """Return what has to be launched for the batch `rows` [B]; `variant` is the knob `sampler`."""
        features: list[tuple[SamplerFeature, Any]] = []
        if self._has_feature[rows].any():
            num_logits = scheduled.num_draft_tokens + 1
            features = [
                (feature, feature.plan(rows, num_logits)) for feature in self.features if feature.used[rows].any()
            ]
        ran = next((planned for _, planned in features if isinstance(planned, ProcessorPlan)), None)
        return SamplingPlan(
            features,
            self.token_draw.plan(rows, variant),
            self.logprobs.plan(scheduled, rows),
            *((ran.errors, ran.failed) if ran is not None else ({}, [])),
        )

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
        logits = self._with_features(logits, ctx, plan)
        self.token_draw.draw(plan.draw, logits, ctx, sampled, may_change=bool(plan.features))

    def target(self, logits: torch.Tensor, ctx: SamplingContext, plan: SamplingPlan) -> torch.Tensor:
        """Return what verification by probabilities reads; device code. [N, V]

        Divided by the temperature and masked if ``plan.draw.is_truncated``, else without either.
        """
        return self.token_draw.target(plan.draw, self._with_features(logits, ctx, plan), ctx)

    @staticmethod
    def _with_features(logits: torch.Tensor, ctx: SamplingContext, plan: SamplingPlan) -> torch.Tensor:
        if plan.features:
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
            for feature, planned in plan.features:
                feature.apply(logits, ctx, planned)
            for row in plan.failed:
                logits[row] = float("nan")
        return logits


def sample_rows(
    holder: LogitsHolder,
    sampler: Sampler,
    plan: SamplingPlan,
    # [N, 1] int64, out
    sampled: torch.Tensor,
) -> None:
    """Draw one token a logits row; device code."""
    sampler.sample(holder.logits, holder.ctx, plan, sampled.view(-1))
