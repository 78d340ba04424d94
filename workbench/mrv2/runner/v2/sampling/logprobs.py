"""Log-probabilities of sampled tokens and of prompts: planned on the host, gathered from raw logits in row chunks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mrv2.runner.async_logprobs import (
    LogprobPool,
    LogprobSlots,
    LogprobTensors,
    LogprobTransfer,
    PromptChunk,
    PromptSegment,
    StepLogprobs,
    cut_into_chunks,
)
from mrv2.runner.protocol import RowSampling, SchedulerOutput
from mrv2.runner.resources import RunnerResources
from mrv2.runner.v2.arena import DeviceArena
from mrv2.sampling_params import MAX_LOGPROB_IDS, MAX_LOGPROBS
from mrv2_kernels.sampling.logprobs import topk_logprobs
from mrv2_kernels.sampling.prompt_targets import prompt_targets
from mrv2_kernels.sampling.token_logprobs import token_logprobs
from mrv2_models.causal_lm import CausalLM

LOGPROB_IDS_ROW_WORDS = MAX_LOGPROB_IDS


@dataclass(slots=True)
class WideRow:
    """A request whose log-probabilities are gathered on their own."""

    batch_row: int
    # its logits rows: the first, and how many
    first: int
    count: int
    # log-probabilities beside the sampled token's
    num: int
    # request row whose named tokens are meant; -1 = the most likely ones
    slot: int


@dataclass(slots=True)
class LogprobPlan:
    """What a batch wants; -1 and empty lists = nothing."""

    num_narrow: int
    wide: list[WideRow]
    chunks: list[PromptChunk]


class LogprobState:
    """Who wants which log-probabilities; named tokens lie in the arena's section "logprob_ids" [R, W]."""

    def __init__(self, resources: RunnerResources, arena: DeviceArena) -> None:
        r = resources
        self.device = r.device
        self.arena = arena
        self.slots = LogprobSlots(
            r.device,
            count=r.max_queue_depth + 1,
            max_num_seqs=r.max_num_seqs * (1 + r.max_num_spec_tokens),
            max_num_logprobs=min(MAX_LOGPROBS, r.vocab_size),
        )
        self.pool = LogprobPool(r.device)
        # [R] bool: the row wants any
        self.used = np.zeros(r.max_num_seqs, dtype=np.bool_)
        # [R]; -1 = none
        self._num_narrow = np.full(r.max_num_seqs, -1, dtype=np.int32)
        self._num_wide = np.full(r.max_num_seqs, -1, dtype=np.int32)
        self._num_named = np.zeros(r.max_num_seqs, dtype=np.int32)
        self._num_prompt = np.full(r.max_num_seqs, -1, dtype=np.int32)
        self._prompt_len = np.zeros(r.max_num_seqs, dtype=np.int32)

    def add(self, row: int, params: RowSampling, prompt_len: int) -> None:
        """Note what a request wants."""
        named = params.logprob_token_ids
        if named:
            self.arena.stage("logprob_ids", row, named)
        is_wide = bool(named) or params.num_logprobs > MAX_LOGPROBS
        self._num_narrow[row] = -1 if is_wide else params.num_logprobs
        self._num_wide[row] = (len(named) or params.num_logprobs) if is_wide else -1
        self._num_named[row] = len(named)
        self._num_prompt[row] = params.num_prompt_logprobs
        self._prompt_len[row] = prompt_len
        self.used[row] = is_wide or max(params.num_logprobs, params.num_prompt_logprobs) >= 0

    def plan(self, scheduled: SchedulerOutput, rows: np.ndarray) -> LogprobPlan | None:
        """Return what the batch `rows` [B] wants; None = nothing."""
        if not self.used[rows].any():
            return None
        num_narrow = int(self._num_narrow[rows].max(initial=-1))
        counts = scheduled.num_draft_tokens + 1
        firsts = np.cumsum(counts) - counts
        wide = [
            WideRow(
                row,
                int(firsts[row]),
                int(counts[row]),
                int(self._num_wide[slot]),
                int(slot) if self._num_named[slot] else -1,
            )
            for row, slot in enumerate(rows)
            if self._num_wide[slot] >= 0 and scheduled.yields_token[row]
        ]
        chunks = cut_into_chunks(self._segments(scheduled, rows)) if (self._num_prompt[rows] >= 0).any() else []
        return LogprobPlan(num_narrow, wide, chunks) if num_narrow >= 0 or wide or chunks else None

    def transfers(self, plan: LogprobPlan, num_rows: int) -> StepLogprobs:
        """Allocate the step's device tensors and take their pinned destinations."""
        device, step = self.device, StepLogprobs()
        if plan.num_narrow >= 0:
            step.narrow = LogprobTransfer.make(device, self.slots, num_rows, 1 + plan.num_narrow)
        for row in plan.wide:
            step.wide[row.batch_row] = LogprobTransfer.make(device, self.pool, row.count, 1 + row.num)
        for chunk in plan.chunks:
            step.prompts.append((chunk, LogprobTransfer.make(device, self.pool, chunk.end - chunk.begin, chunk.width)))
        return step

    def _segments(self, scheduled: SchedulerOutput, rows: np.ndarray) -> list[PromptSegment]:
        segments = []
        begin = 0
        columns = zip(
            rows.tolist(), scheduled.num_computed_tokens.tolist(), scheduled.num_scheduled_tokens.tolist(), strict=True
        )
        for batch_row, (slot, computed, num_tokens) in enumerate(columns):
            num_logprobs = int(self._num_prompt[slot])
            # the last token of a prompt is followed by a sampled one
            count = min(computed + num_tokens, int(self._prompt_len[slot]) - 1) - computed
            if num_logprobs >= 0 and count > 0:
                segments.append(PromptSegment(batch_row, begin, count, computed + 1, 1 + num_logprobs))
            begin += num_tokens
        return segments


# Device code: reads nothing but its arguments.


def gather_sampled(
    # [N, V], raw
    logits: torch.Tensor,
    # [N] int64
    sampled: torch.Tensor,
    narrow: LogprobTensors | None,
    wide: list[tuple[WideRow, LogprobTensors]],
    # [R, W] int32
    logprob_ids: torch.Tensor,
) -> None:
    """Log-probabilities of the sampled tokens and of the others that each request wants."""
    if narrow is not None:
        topk_logprobs(logits, sampled, *narrow)
    for row, out in wide:
        own = slice(row.first, row.first + row.count)
        if row.slot < 0:
            topk_logprobs(logits[own], sampled[own], *out)
        else:
            token_logprobs(logits[own], sampled[own], logprob_ids[row.slot, : row.num], *out)


def gather_prompt(
    model: CausalLM,
    # [T, H]
    hidden: torch.Tensor,
    # [T], [B], [>= B + 1] int32
    positions: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    # [R, L], [R] int32
    token_ids: torch.Tensor,
    prompt_len: torch.Tensor,
    chunks: list[tuple[PromptChunk, LogprobTensors]],
) -> None:
    """Log-probabilities of prompt tokens; logits exist for one chunk at a time."""
    for chunk, out in chunks:
        targets = torch.empty(chunk.end - chunk.begin, dtype=torch.int64, device=hidden.device)
        prompt_targets(targets, positions, idx_mapping, query_start_loc, token_ids, prompt_len, first=chunk.begin)
        topk_logprobs(model.compute_logits(hidden[chunk.begin : chunk.end]), targets, *out)
