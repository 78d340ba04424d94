"""Runs the logits processors, so that an error in one ends a request and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from mrv2.logits_processor import LogitsContext, LogitsProcessor, RowTable
from mrv2.runner.protocol import RowSampling
from mrv2.runner.v2.arena import DeviceArena
from mrv2.runner.v2.sampling.context import SamplingContext


@dataclass(slots=True)
class ProcessorPlan:
    """Who uses what in a step, and what became of it."""

    # index of the processor, and (batch row, first logits row, logits rows) of the requests that use it
    users: list[tuple[int, list[tuple[int, int, int]]]]
    # logits rows in which a processor failed; grows in device code
    failed: list[int] = field(default_factory=list)
    # batch row -> text; written by device code, read once the step's output has arrived
    errors: dict[int, str] = field(default_factory=dict)


class LogitsProcessorState:
    """All processors as one feature; bit i of the arena's section "processors" [R] = the row uses processor i."""

    def __init__(
        self, processors: Sequence[LogitsProcessor], tables: Sequence[RowTable], arena: DeviceArena, max_num_seqs: int
    ) -> None:
        self.processors = processors
        self.arena = arena
        self.used = np.zeros(max_num_seqs, dtype=np.bool_)
        # [R]
        self._bits = np.zeros(max_num_seqs, dtype=np.int32)
        # rows whose `add_request` raised
        self._failed: dict[int, str] = {}
        for table in tables:
            table.bind(arena)

    def add(self, row: int, params: RowSampling, prompt_len: int) -> None:
        was_used, bits = self.used[row], 0
        self._failed.pop(row, None)
        for index, processor in enumerate(self.processors):
            if processor.argument in params.extra_args:
                bits |= 1 << index
                try:
                    processor.add_request(row, params)
                except Exception as error:  # whatever a plug-in raises ends its request only
                    self._failed[row] = _text(processor, "add_request", error)
        if bits or was_used:
            self.arena.stage_scalar("processors", row, bits)
        self._bits[row], self.used[row] = bits, bits != 0

    def plan(self, rows: np.ndarray, num_logits: np.ndarray) -> ProcessorPlan:
        """Return who uses which processor in the batch `rows` [B]."""
        bits = self._bits[rows]
        failed = {at: self._failed[row] for at, row in enumerate(rows.tolist()) if row in self._failed}
        counts = num_logits.tolist()
        firsts = (np.cumsum(num_logits) - num_logits).tolist()
        failed_rows = [row for at in failed for row in range(firsts[at], firsts[at] + counts[at])]
        users = []
        for index in range(len(self.processors)):
            users_at = np.flatnonzero(bits >> index & 1).tolist()
            mine = [(at, firsts[at], counts[at]) for at in users_at if at not in failed]
            if mine:
                users.append((index, mine))
        return ProcessorPlan(users, failed_rows, failed)

    def apply(self, logits: torch.Tensor, ctx: SamplingContext, planned: ProcessorPlan) -> None:
        arena = self.arena
        slots = ctx.logit_slots
        bits = arena["processors"][slots.long()]
        for index, rows in planned.users:
            context = LogitsContext(
                slots,
                ctx.positions,
                (bits >> index & 1).bool(),
                arena["token_ids"],
                arena["prompt_len"],
                arena["total_len"],
                *ctx.drafts,
            )
            self._apply_one(self.processors[index], logits, context, rows, planned)

    @staticmethod
    def _apply_one(
        processor: LogitsProcessor,
        logits: torch.Tensor,
        context: LogitsContext,
        users: list[tuple[int, int, int]],
        planned: ProcessorPlan,
    ) -> None:
        before = logits.clone()
        try:
            processor.apply_staged_writes()
            processor.apply(logits, context)
        except Exception:  # whose request it is shows row by row
            logits.copy_(before)
            for batch_row, row in ((at, first + i) for at, first, count in users for i in range(count)):
                alone = before[row : row + 1].clone()
                try:
                    processor.apply_staged_writes()
                    processor.apply(alone, context.row(row))
                except Exception as error:  # whatever a plug-in raises ends its request only
                    planned.errors.setdefault(batch_row, _text(processor, "apply", error))
                    planned.failed.append(row)
                else:
                    logits[row : row + 1].copy_(alone)
        else:
            # rows that do not use it are as they were, whatever it did to them
            logits.copy_(torch.where(context.used.unsqueeze(1), logits, before))


def _text(processor: LogitsProcessor, verb: str, error: Exception) -> str:
    return f"logits processor {type(processor).__name__}.{verb} failed: {type(error).__name__}: {error}"
