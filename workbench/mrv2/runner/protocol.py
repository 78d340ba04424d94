"""What the engine and a runner say to each other: ids and arrays, never a `Request`.

Legend: B = requests scheduled in a step, R = rows (``max_num_seqs``), G = KV cache groups.
Row allocation inside a runner is a deterministic function of the sequence of `SchedulerOutput`
messages (free in sorted id order, then add in list order), so that any number of ranks agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

if TYPE_CHECKING:
    from mrv2.config import Knobs
    from mrv2.device import Stream
    from mrv2.runner.grammar_masks import GrammarMasks


@dataclass(slots=True, kw_only=True)
class RowSampling:
    """Sampling parameters of one request as the device sees them (neutral values = feature off)."""

    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # always set at admission, 64-bit unsigned
    num_logprobs: int = -1  # -1 = none; k = the sampled token's and the k most likely
    # instead of the most likely: the sampled token's and these
    logprob_token_ids: tuple[int, ...] = ()
    num_prompt_logprobs: int = -1  # -1 = none; k as above, for every prompt token but the first
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()  # () = every token
    # while fewer outputs than this are known, the stop ids are masked
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    thinking: ThinkingBudget | None = None
    # arguments of logits processors, by name
    extra_args: dict[str, Any] = field(default_factory=dict)

    @property
    def has_penalty(self) -> bool:
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def has_bias(self) -> bool:
        return bool(self.logit_bias or self.allowed_token_ids or (self.min_tokens and self.stop_token_ids))


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """After `budget` generated tokens between the two markers the end marker is forced."""

    budget: int
    start: tuple[int, ...]
    end: tuple[int, ...]


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
    # B ids, in scheduling order; a new request is scheduled in the step that adds it.  The very list of the
    # step before, unchanged: the same requests decode once more
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
    # a request of the batch follows a grammar: `sample_tokens` may bring a mask
    has_grammar: bool = False
    # drafts that each request that yields a token gets for its next step
    num_next_drafts: int = 0

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)


@dataclass(slots=True)
class DraftChains:
    """What requests of a step must or will say by their grammar, as drafts for the step behind it."""

    # [C] int32: index of the request in `SchedulerOutput.req_ids`
    batch_rows: np.ndarray
    # [C] int32: position of the first token in the request's history, and number of tokens
    starts: np.ndarray
    lengths: np.ndarray
    # [C, M] int32
    tokens: np.ndarray


@dataclass(slots=True)
class GrammarMask:
    """Which tokens the requests of a step that follow a grammar may yield, one mask a logits row of theirs."""

    # [G] int32: index of the request in `SchedulerOutput.req_ids`, and drafts of the request before the row
    batch_rows: np.ndarray
    places: np.ndarray
    # [G, W] int32, from `Executor.take_grammar_bits`; bit t = token t may come next
    bits: np.ndarray
    # None = no grammar forces anything
    chains: DraftChains | None = None

    def logits_rows(
        self,
        # [B] int32, of the step
        num_draft_tokens: np.ndarray,
    ) -> np.ndarray:
        """Return the logits row of each mask, where requests stand in scheduling order. [G] int32"""
        firsts = np.cumsum(num_draft_tokens + 1) - (num_draft_tokens + 1)
        return (firsts[self.batch_rows] + self.places).astype(np.int32)


@dataclass(slots=True)
class LogprobRows:
    """Log-probabilities of n positions; column 0 is the token that stands there, columns 1..k the others.

    The others are the k most likely, best first, or those that the request named.
    """

    # [n, 1+k] int64
    token_ids: np.ndarray
    # [n, 1+k] float32
    logprobs: np.ndarray
    # [n] int64, rank of the token in column 0, 1 = most likely
    ranks: np.ndarray


@dataclass(slots=True)
class PromptLogprobRows:
    """Log-probabilities of a run of prompt tokens, the first of them at position `start` >= 1."""

    start: int
    rows: LogprobRows


@dataclass(slots=True)
class StepOutput:
    """What a step produced, on the host; arrays are owned by the receiver."""

    step: int
    req_ids: list[str]
    # [B, 1+K] int64; -1 among the first `num_sampled` = the logits held NaN, or nothing above -inf
    sampled_token_ids: np.ndarray
    # [B] int32: 0 for a non-final prefill chunk
    num_sampled: np.ndarray
    # n = logits rows, 1 + drafts a request, the first ones those of its emitted tokens; None = no request wants up to
    # `MAX_LOGPROBS` of them
    logprobs: LogprobRows | None = None
    # batch row -> its own log-probabilities (n = 1 + drafts), where they are more, or of named tokens
    wide_logprobs: dict[int, LogprobRows] = field(default_factory=dict)
    # batch row -> runs of its prompt, in order
    prompt_logprobs: dict[int, list[PromptLogprobRows]] = field(default_factory=dict)
    # batch row -> why a logits row of it holds NaN (a logits processor failed); of no account if it yields no -1
    errors: dict[int, str] = field(default_factory=dict)


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
    # of these, graphs of whole steps
    num_step_replays: int = 0
    extra: dict[str, int] = field(default_factory=dict)


class GraphSet(Protocol):
    """Graphs of one kind, by key."""

    def missing(self, knobs: Knobs) -> Sequence[object]:
        """Return the keys that `knobs` dispatch, that are wanted by now and that have no graph yet."""
        ...

    def capture(self, stream: Stream, knobs: Knobs) -> None:
        """Capture these; no step is in flight, and the forward's buffers hold inert rows."""
        ...


class Runner(Protocol):
    """Both runners; the engine calls `execute_model` then `sample_tokens`, once a step each."""

    name: Literal["v1", "v2"]
    # most steps that may be in flight at once
    max_queue_depth: int
    # what it replays besides the graphs of the forward pass
    graph_sets: Sequence[GraphSet]

    @property
    def stats(self) -> RunnerStats: ...

    def execute_model(self, scheduled: SchedulerOutput) -> None: ...

    # where the masks of the un-sampled step are filled
    grammar_masks: GrammarMasks

    def sample_tokens(self, grammar: GrammarMask | None = None) -> AsyncOutput:
        """Sample; requests that follow a grammar only from what `grammar` allows them."""
        ...

    def take_drafts(self, req_ids: list[str]) -> np.ndarray:
        """Wait for the drafts that lie ready for requests which followed a grammar in their last step. [n, K] int64"""
        ...

    def reset(self) -> None:
        """Forget every request (all steps are drained); blocks stay with the engine."""
        ...
