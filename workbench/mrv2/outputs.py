"""What a request returns; attribute names as in vLLM's offline API."""

from __future__ import annotations

from dataclasses import dataclass, field

from mrv2.engine.messages import DraftCounts, FinishReason


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position."""

    logprob: float
    # 1 = most likely
    rank: int | None = None
    # text of this token alone; None without a tokenizer
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence (or, with DELTA, what is new in it)."""

    # which of the request's n sequences
    index: int
    text: str
    token_ids: list[int]
    # sum over the sampled tokens of the whole sequence; None unless logprobs were asked for
    cumulative_logprob: float | None = None
    # one dict per token of `token_ids`: the sampled token and the k most likely
    logprobs: list[dict[int, Logprob]] | None = None
    # "stop", "length", "abort" or "error"; None while running
    finish_reason: FinishReason | None = None
    # the stop string or stop token id that ended it, or an error text
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, seen by the front end; `*_ts` in seconds of ``time.monotonic``."""

    # seconds since the epoch
    arrival_time: float
    arrival_ts: float
    # 0.0 = not yet
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    num_generation_tokens: int = 0
    # drafts of the sequences that have ended: acceptance by position, mean accepted length, wasted ones
    drafts: DraftCounts = field(default_factory=DraftCounts)

    @property
    def first_token_latency(self) -> float:
        """Seconds from arrival to the first token; 0.0 before it."""
        return self.first_token_ts - self.arrival_ts if self.first_token_ts else 0.0


@dataclass(slots=True)
class RequestOutput:
    """State of one request: all its sequences, or with DELTA those that have something new."""

    request_id: str
    # None when the prompt was given as token ids
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    # True once every sequence has finished
    finished: bool
    metrics: RequestMetrics | None = None
    # prompt tokens found in the prefix cache
    num_cached_tokens: int = 0
    # one dict per prompt token, None for the first; None if none were asked for, with DELTA in the first output only
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
