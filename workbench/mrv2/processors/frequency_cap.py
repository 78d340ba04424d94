"""Forbid a token once it has been generated a given number of times."""

from __future__ import annotations

import torch

from mrv2.logits_processor import LogitsContext, LogitsProcessor, ProcessorSetup
from mrv2.runner.protocol import RowSampling
from mrv2.sampling_params import SamplingParams


class FrequencyCap(LogitsProcessor):
    """``extra_args={"frequency_cap": 3}``: no token occurs more than three times in the output."""

    argument = "frequency_cap"

    def __init__(self, setup: ProcessorSetup) -> None:
        super().__init__(setup)
        # [R, 1]
        self.caps = setup.table("cap", 1)

    def validate(self, params: SamplingParams) -> None:
        cap = (params.extra_args or {})[self.argument]
        if not isinstance(cap, int) or isinstance(cap, bool) or cap < 1:
            raise ValueError(f"{cap!r} must be an integer >= 1, the times that a token may occur")

    def add_request(self, row: int, params: RowSampling) -> None:
        self.caps.stage(row, [params.extra_args[self.argument]])

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> None:
        caps = self.caps.tensor[ctx.slots.long()]
        is_spent = (ctx.output_counts(logits.shape[1]) >= caps) & ctx.used.unsqueeze(1)
        logits.masked_fill_(is_spent, float("-inf"))
