"""What the engine and a runner say to each other: ids and arrays, never a `Request`.

Legend: B = requests scheduled in a step, R = rows (``max_num_seqs``), G = KV cache groups.
Row allocation inside a runner is a deterministic function of the sequence of `SchedulerOutput`
messages (free in sorted id order, then add in list order), so that any number of ranks agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np


@dataclass(slots=True, kw_only=True)
class RowSampling:
    """Sampling parameters of one request as the device sees them (neutral values = feature off)."""

    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # always set at admission, 64-bit unsigned
    num_logprobs: int = -1  # -1 = none; k = the sampled token's and the k most likely


@dataclass(slots=True, kw_only=True)
class NewRequest:
    """A request that gets a row: new, resumed after preemption, or handed over by the other runner."""

    req_id: str
    # [prefill_len] int32: prompt + every output that the host knows
    token_ids: np.ndarray
    prompt_len: int
    # tokens whose KV is already in `block_ids` (prefix hit or hand-over)
    num_computed_tokens: int
    # G lists of physical block ids
    block_ids: tuple[list[int], ...]
    sampling: RowSampling


@dataclass(slots=True, kw_only=True)
class SchedulerOutput:
    """One step's work."""

    step: int
    # finished, aborted or preempted since the last step, sorted; freed before `new_requests` are added
    freed_req_ids: list[str]
    new_requests: list[NewRequest]
    # B ids, in scheduling order; a new request is scheduled in the step that adds it
    req_ids: list[str]
    # [B] int32, each >= 1
    num_scheduled_tokens: np.ndarray
    # [B] int32: tokens computed before this step, exact without speculation, else an upper bound
    num_computed_tokens: np.ndarray
    # [B] bool: the step reaches the end of the known tokens, so this request yields a token
    yields_token: np.ndarray
    # [B] int32: how many of the scheduled tokens are drafts
    num_draft_tokens: np.ndarray
    # blocks appended to requests that already have a row: id -> G lists
    new_block_ids: dict[str, tuple[list[int], ...]]
    # every block handed out for this step, of all requests; its old content is garbage
    fresh_block_ids: list[int] = field(default_factory=list)
    total_tokens: int = 0

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)


@dataclass(slots=True)
class LogprobRows:
    """Log-probabilities of one step; column 0 is the sampled token, columns 1..k the k most likely."""

    # [B, 1+k] int64
    token_ids: np.ndarray
    # [B, 1+k] float32
    logprobs: np.ndarray
    # [B] int64, rank of the sampled token, 1 = most likely
    ranks: np.ndarray


@dataclass(slots=True)
class StepOutput:
    """What a step produced, on the host; arrays are owned by the receiver."""

    step: int
    req_ids: list[str]
    # [B, 1+K] int64; -1 among the first `num_sampled` = the logits of that position held NaN
    sampled_token_ids: np.ndarray
    # [B] int32: 0 for a non-final prefill chunk
    num_sampled: np.ndarray
    # rows as many as logits rows: request b's start at `logprob_starts[b]`
    logprobs: LogprobRows | None = None
    # [B] int32, None = one row a request
    logprob_starts: np.ndarray | None = None


class AsyncOutput(Protocol):
    """A step in flight."""

    step: int

    def get(self) -> StepOutput:
        """Wait for the output copy (the one named wait of a step) and return host arrays."""
        ...


@dataclass(slots=True)
class RunnerStats:
    """Counters that a runner keeps for the panel; all since construction."""

    num_steps: int = 0
    num_graph_replays: int = 0
    extra: dict[str, int] = field(default_factory=dict)


class Runner(Protocol):
    """Both runners; the engine calls `execute_model` then `sample_tokens`, once a step each."""

    name: Literal["v1", "v2"]
    # most steps that may be in flight at once
    max_queue_depth: int

    @property
    def stats(self) -> RunnerStats: ...

    def execute_model(self, scheduled: SchedulerOutput) -> None: ...

    def sample_tokens(self) -> AsyncOutput: ...

    def reset(self) -> None:
        """Forget every request (all steps are drained); blocks stay with the engine."""
        ...
