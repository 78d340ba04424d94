"""Log-probabilities between a step's arrays and a request's results."""

from __future__ import annotations

import numpy as np

from mrv2.engine.messages import PromptLogprobs, TokenLogprob
from mrv2.runner.protocol import PromptLogprobRows, RowSampling, StepOutput


def token_logprob(
    output: StepOutput, row: int, first_row: int, place: int, sampling: RowSampling
) -> TokenLogprob | None:
    """Return what the request in batch row `row` is told of its new token `place`; None if it asked for nothing.

    `first_row` is its first row among the step's logits rows.
    """
    rows, at = output.wide_logprobs.get(row), place
    width = 1 + (len(sampling.logprob_token_ids) or sampling.num_logprobs)
    if rows is None:
        rows, at = output.logprobs, first_row + place
    if rows is None or width == 0:
        return None
    return TokenLogprob(rows.token_ids[at, :width].tolist(), rows.logprobs[at, :width].tolist(), int(rows.ranks[at]))


class PromptCollector:
    """Puts the runs of a prompt's log-probabilities together; a run that comes twice is taken once.

    Preempted half-way, a request computes its prompt again from the start: what arrived before is kept.
    """

    def __init__(self, prompt_len: int) -> None:
        self.prompt_len = prompt_len
        self._runs: list[PromptLogprobRows] = []
        # position of the first prompt token that is still missing
        self._next = 1

    @property
    def complete(self) -> bool:
        return self._next >= self.prompt_len

    def add(self, runs: list[PromptLogprobRows]) -> None:
        """Take what a step brought."""
        for run in runs:
            assert run.start <= self._next, f"prompt log-probabilities jump from {self._next} to {run.start}"
            end = run.start + len(run.rows.ranks)
            if end > self._next:
                self._runs.append(run)
                self._next = end

    def take(self) -> PromptLogprobs:
        """Return positions 1, 2, ... of the whole prompt; raises `AssertionError` if some are missing."""
        assert self.complete, f"prompt log-probabilities up to {self._next} of {self.prompt_len} positions are there"
        runs, self._runs = self._runs, []
        parts, at = [], 1
        for run in runs:
            inside = slice(at - run.start, None)
            parts.append((run.rows.token_ids[inside], run.rows.logprobs[inside], run.rows.ranks[inside]))
            at = run.start + len(run.rows.ranks)
        if not parts:
            return PromptLogprobs(np.zeros((0, 1), np.int64), np.zeros((0, 1), np.float32), np.zeros(0, np.int64))
        ids, logprobs, ranks = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        return PromptLogprobs(ids, logprobs, ranks)
