"""Log-probabilities the V1 way: a log-softmax over whole rows, prompts one at a time and each in one piece.

Legend: B requests, T tokens of the step, V vocabulary, k log-probabilities beside a token's own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from mrv2.device import Stream
from mrv2.runner.async_logprobs import (
    LogprobPool,
    LogprobSlots,
    LogprobTensors,
    LogprobTransfer,
    PromptChunk,
    PromptPiece,
    StepLogprobs,
)
from mrv2.runner.resources import RunnerResources
from mrv2.runner.v1.cached_request import CachedRequestState
from mrv2.runner.v1.input_batch import InputBatch
from mrv2.runner.v1.speculation import LogitRows
from mrv2.runner.v1.step_sender import StepSender
from mrv2.sampling_params import MAX_LOGPROBS
from mrv2_models.causal_lm import CausalLM

PROMPT_WAIT = "v1: prompt logprobs"


class LogprobWork(NamedTuple):
    """A step's log-probabilities as device code needs them; memory of the ids first."""

    # [words] int32
    words: torch.Tensor
    narrow: LogprobTensors | None
    # first logits row, rows, tensors, [m] int32 tokens that the request named or None
    wide: list[tuple[int, int, LogprobTensors, torch.Tensor | None]]
    # tensors, and [n] int32 tokens that follow those of the chunk
    prompts: list[tuple[PromptChunk, LogprobTensors, torch.Tensor]]


class LogprobKeeper:
    """Finds out who wants what, and owns the pinned destinations."""

    def __init__(self, resources: RunnerResources, *, count: int) -> None:
        r = resources
        self.device = r.device
        self.slots = LogprobSlots(
            r.device,
            count=count,
            max_num_seqs=r.max_num_seqs * (1 + r.max_num_spec_tokens),
            max_num_logprobs=min(MAX_LOGPROBS, r.vocab_size),
        )
        self.pool = LogprobPool(r.device)
        self.sender = StepSender(r.device, "v1 logprob ids", depth=count + 1)

    def transfers(
        self,
        batch: InputBatch,
        requests: dict[str, CachedRequestState],
        # [B] bool, in batch order
        discard: np.ndarray,
        # [B + 1]
        query_start_loc: np.ndarray,
        rows: LogitRows,
    ) -> StepLogprobs | None:
        """Return the step's tensors and their destinations; None if no request of the batch wants any."""
        if not batch.logprob_reqs:
            return None
        step, narrow = StepLogprobs(), -1
        starts = query_start_loc.tolist()
        for row, req_id in enumerate(batch.ids):
            state = requests[req_id]
            params, num_named = state.sampling, len(state.sampling.logprob_token_ids)
            if num_named or params.num_logprobs > MAX_LOGPROBS:
                if not discard[row]:
                    width = 1 + (num_named or params.num_logprobs)
                    step.wide[row] = LogprobTransfer.make(self.device, self.pool, int(rows.counts[row]), width)
            else:
                narrow = max(narrow, params.num_logprobs)
            computed = int(batch.num_computed_tokens.np[row])
            last = min(computed + starts[row + 1] - starts[row], state.num_prompt_tokens - 1)
            if params.num_prompt_logprobs >= 0 and last > computed:
                width, count = 1 + params.num_prompt_logprobs, last - computed
                chunk = PromptChunk(starts[row], starts[row] + count, width)
                chunk.pieces.append(PromptPiece(row, 0, count, computed + 1, width))
                step.prompts.append((chunk, LogprobTransfer.make(self.device, self.pool, count, width)))
        if narrow >= 0:
            step.narrow = LogprobTransfer.make(self.device, self.slots, rows.num_rows, 1 + narrow)
        return step

    def work(
        self,
        number: int,
        step: StepLogprobs,
        batch: InputBatch,
        requests: dict[str, CachedRequestState],
        rows: LogitRows,
        stream: Stream,
    ) -> LogprobWork:
        """Send the ids that step `number` needs and return what is to be gathered."""
        states = [requests[req_id] for req_id in batch.ids]
        named = [row for row in step.wide if states[row].sampling.logprob_token_ids]
        parts = [np.array(states[row].sampling.logprob_token_ids, dtype=np.int32) for row in named]
        for chunk, _ in step.prompts:
            (piece,) = chunk.pieces
            followers = states[piece.batch_row].prompt_token_ids[piece.start : piece.start + piece.count]
            parts.append(np.array(followers, dtype=np.int32))
        words, views = self.sender.send(number, parts, stream)
        ids = dict(zip(named, views, strict=False))
        return LogprobWork(
            words,
            step.narrow.tensors if step.narrow is not None else None,
            [
                (int(rows.firsts[row]), int(rows.counts[row]), transfer.tensors, ids.get(row))
                for row, transfer in step.wide.items()
            ],
            [
                (chunk, transfer.tensors, view)
                for (chunk, transfer), view in zip(step.prompts, views[len(named) :], strict=True)
            ],
        )

    @staticmethod
    def finishes_prompt(step: StepLogprobs, batch: InputBatch) -> bool:
        """Return whether the step computes the last rows of a prompt."""
        pieces = [piece for chunk, _ in step.prompts for piece in chunk.pieces]
        return any(p.start + p.count == batch.num_prompt_tokens[p.batch_row] for p in pieces)


# Device code: reads nothing but its arguments.


def gather_logprobs(
    # [B, V]
    logprobs: torch.Tensor,
    # [B] int64, -1 = none
    chosen: torch.Tensor,
    out: LogprobTensors,
    # [m] ids; None = the most likely
    named: torch.Tensor | None = None,
) -> None:
    """Write each chosen token's log-probability and rank, and those of the k most likely or of the named tokens."""
    if named is None:
        others, ids = logprobs.topk(out.ids.shape[1] - 1, dim=-1)
    else:
        ids = named.long().expand(len(chosen), -1)
        others = logprobs.gather(1, ids)
    own = logprobs.gather(1, chosen.clamp(min=0).unsqueeze(1))
    out.ids.copy_(torch.cat([chosen.unsqueeze(1), ids], dim=1))
    out.logprobs.copy_(torch.cat([own, others], dim=1))
    out.ranks.copy_((logprobs >= own).sum(dim=1))


def gather_prompts(
    model: CausalLM,
    # [T, H]
    hidden: torch.Tensor,
    work: LogprobWork,
) -> None:
    """Log-probabilities of each prompt's tokens of the step, logits of all of them at once."""
    for chunk, out, followers in work.prompts:
        logits = model.compute_logits(hidden[chunk.begin : chunk.end])
        logprobs = logits.log_softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        gather_logprobs(logprobs, followers.long(), out)
