"""A sequence as the scheduler sees it: known tokens, progress, and what is still in flight."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

import numpy as np

from mrv2.engine.grammar.backend import GrammarMatcher
from mrv2.engine.grammar.compiler import GrammarTicket
from mrv2.engine.logprob_rows import PromptCollector
from mrv2.engine.messages import DraftCounts, EngineRequest, FinishReason
from mrv2.runner.protocol import RowSampling


class RequestStatus(enum.Enum):
    """Where a request is: a preempted one waits again."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """Counters of one sequence.

    ``known``    tokens that the host knows (prompt + delivered outputs)
    ``computed`` tokens whose KV is written once every launched step has run (optimistic)
    A step that reaches ``num_ahead`` yields at least one more token; it is in flight until its output
    arrives.  With k drafts in the step it may yield up to 1 + k: `num_ahead` and `computed` count them
    all at once (both are upper bounds then), and the output takes back the rejected ones from both.
    Preemption turns steps in flight into stale ones: their tokens are still delivered, but touch none
    of the reset counters.
    """

    # filled at admission
    message: EngineRequest
    sampling: RowSampling
    max_tokens: int
    max_model_len: int
    stop_ids: frozenset[int]
    arrival: int

    # filled by the scheduler
    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    # computed tokens of the steps whose output has arrived
    num_confirmed: int = 0
    # steps in flight that yield, and the drafts among their tokens
    num_in_flight: int = 0
    num_drafts_in_flight: int = 0
    # drafts that its newest step leaves behind for the next one
    num_proposed: int = 0
    # those of them, or beyond them, that its grammar forces
    num_forced: int = 0
    # of the outputs that have arrived
    drafts: DraftCounts = field(default_factory=DraftCounts)
    num_stale: int = 0
    # counts preemptions; a step of an older epoch is stale
    epoch: int = 0
    has_row: bool = False
    num_wasted_steps: int = 0
    num_cached_tokens: int = -1
    finish_reason: FinishReason | None = None

    # filled by the engine core: the state of a request that follows a grammar, in step with its known tokens
    grammar: GrammarMatcher | None = None
    # not None = the grammar is not compiled yet, and the request waits
    grammar_ticket: GrammarTicket | None = None
    # why the grammar allows no further token
    dead_end: str | None = None

    # filled by the KV cache manager
    block_ids: tuple[list[int], ...] = ()
    block_hashes: list[bytes] = field(default_factory=list)
    num_published_blocks: int = 0
    # tokens that the blocks hold
    capacity: int = 0
    # bits of the drafters that have filled every computed position of the blocks
    filled: int = 0

    # derived, kept as plain numbers: the step loop reads them for every request
    prompt_len: int = field(init=False)
    num_known: int = field(init=False)
    # known tokens at which the request ends by length
    max_len: int = field(init=False)
    # a step brings it a token and nothing else: no log-probabilities, and no plug-in that may end it
    is_plain: bool = field(init=False)
    # None = no log-probabilities of the prompt are wanted
    prompt_logprobs: PromptCollector | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.token_ids = list(self.message.prompt_token_ids)
        self.prompt_len = self.num_known = len(self.token_ids)
        if self.sampling.num_prompt_logprobs >= 0:
            self.prompt_logprobs = PromptCollector(self.prompt_len)
        self.max_len = min(self.prompt_len + self.max_tokens, self.max_model_len)
        s = self.sampling
        wants_logprobs = s.num_logprobs >= 0 or s.logprob_token_ids or s.num_prompt_logprobs >= 0
        self.is_plain = not (wants_logprobs or s.extra_args)

    @property
    def req_id(self) -> str:
        return self.message.req_id

    @property
    def key(self) -> tuple[int, int]:
        """Order of service: priority (lower first), then arrival."""
        return (self.message.priority, self.arrival)

    @property
    def num_outputs(self) -> int:
        return self.num_known - self.prompt_len

    @property
    def num_ahead(self) -> int:
        """Tokens known or in flight, every draft accepted: what may be computed at most."""
        return self.num_known + self.num_in_flight + self.num_drafts_in_flight

    @property
    def has_work(self) -> bool:
        """False if nothing is left to compute, or what is in flight completes the request whatever it is."""
        num_expected = self.num_known + self.num_in_flight
        return self.num_computed < num_expected + self.num_drafts_in_flight and num_expected < self.max_len

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def reads_prefix(self) -> bool:
        """False while every position of the prompt must be computed, for its log-probabilities."""
        return self.prompt_logprobs is None or self.prompt_logprobs.complete

    def sampling_to_come(self) -> RowSampling:
        """Return the sampling of a new row, without what has been delivered."""
        done = self.prompt_logprobs is not None and self.prompt_logprobs.complete
        return replace(self.sampling, num_prompt_logprobs=-1) if done else self.sampling

    def take(self, token: int) -> tuple[FinishReason | None, int | str | None]:
        """Append a token that arrived from the device; return whether and why it ends the request."""
        if token >= 0 and self.grammar is not None and not self.grammar.accept(token):
            self.dead_end = f"the sampled token {token} does not continue the grammar"
            token = -1
        if token < 0:
            return "error", self.dead_end or "the logits of this request held NaN, or every token was masked"
        self.token_ids.append(token)
        self.num_known += 1
        # a grammar's end token may be none of the stop ids (`ignore_eos`): nothing can follow it all the same
        if token in self.stop_ids or (self.grammar is not None and self.grammar.terminated):
            return "stop", token
        return ("length", None) if self.num_known >= self.max_len else (None, None)

    def known_tokens(self) -> np.ndarray:
        """Return the known tokens. [num_known] int32"""
        return np.array(self.token_ids, dtype=np.int32)

    def reset_progress(self) -> None:
        """Preemption: forget what was computed; steps in flight become stale."""
        self.num_stale += self.num_in_flight
        self.num_in_flight = self.num_drafts_in_flight = 0
        self.num_computed = self.num_confirmed = 0
        self.num_published_blocks = 0
        self.epoch += 1
        self.status = RequestStatus.PREEMPTED
