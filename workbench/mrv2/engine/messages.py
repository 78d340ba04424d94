"""Picklable messages between a front end (`EngineClient`) and the engine core."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from mrv2.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np

FinishReason = Literal["stop", "length", "abort", "error"]
# when graphs are captured that a change of knobs asks for
CaptureTime = Literal["now", "between_steps"]


@dataclass(slots=True, kw_only=True)
class EngineRequest:
    """One sequence to generate (a request with ``n > 1`` becomes n of these)."""

    req_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    # lower value = served earlier (only with scheduling_policy="priority")
    priority: int = 0
    # index of this sequence among the n of its parent; enters the derived seed
    sample_index: int = 0
    # admission index of the parent; enters the derived seed of an unseeded request
    parent_index: int | None = None
    # ids that end the sequence besides params.stop_token_ids (generation config's eos list)
    eos_token_ids: tuple[int, ...] = ()
    # the texts of params.bad_words and of its thinking markers, as tokens
    bad_words: tuple[tuple[int, ...], ...] = ()
    thinking_start: tuple[int, ...] = ()
    thinking_end: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """What the params give as token ids needs no tokenizer."""
        params = self.params
        words = [tuple(word) for word in params.bad_words or () if not isinstance(word, str)]
        if not self.bad_words and len(words) == len(params.bad_words or ()):
            self.bad_words = tuple(words)
        if not self.thinking_start and not isinstance(params.thinking_start, str):
            self.thinking_start = tuple(params.thinking_start)
        if not self.thinking_end and not isinstance(params.thinking_end, str):
            self.thinking_end = tuple(params.thinking_end)


@dataclass(slots=True)
class TokenLogprob:
    """Log-probabilities at one generated position."""

    # 1+k ids: the sampled token first, then the k most likely
    token_ids: list[int]
    logprobs: list[float]
    # rank of the sampled token, 1 = most likely
    sampled_rank: int


@dataclass(slots=True)
class PromptLogprobs:
    """Log-probabilities of the tokens of a prompt but the first, which nothing precedes (n = prompt length - 1)."""

    # [n, 1+k]: the prompt's own token first, then the k most likely
    token_ids: np.ndarray
    logprobs: np.ndarray
    # [n], rank of the prompt's own token, 1 = most likely
    ranks: np.ndarray


@dataclass(slots=True)
class DraftCounts:
    """Drafts by position: those that the target saw, and those that it accepted."""

    num_drafted: list[int] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Count a verification of `num_drafts` drafts whose leading `num_accepted` were accepted."""
        self.merge(DraftCounts([1] * num_drafts, [int(at < num_accepted) for at in range(num_drafts)]))

    def merge(self, other: DraftCounts) -> None:
        """Add the counts of `other`."""
        missing = len(other.num_drafted) - len(self.num_drafted)
        self.num_drafted += [0] * missing
        self.num_accepted += [0] * missing
        for at, (drafted, accepted) in enumerate(zip(other.num_drafted, other.num_accepted, strict=True)):
            self.num_drafted[at] += drafted
            self.num_accepted[at] += accepted

    @property
    def num_wasted(self) -> int:
        """Drafts that were computed for nothing."""
        return sum(self.num_drafted) - sum(self.num_accepted)

    @property
    def acceptance(self) -> list[float]:
        """Share of the drafts at each position that were accepted."""
        return [a / d if d else 0.0 for a, d in zip(self.num_accepted, self.num_drafted, strict=True)]

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens per verification, its own draw included; None = nothing was drafted."""
        return 1 + sum(self.num_accepted) / self.num_drafted[0] if self.num_drafted else None


# without slots: fields at their defaults take neither time nor memory, see `TokenColumn`
@dataclass(kw_only=True)
class EngineOutput:
    """What one step brought to one sequence."""

    req_id: str
    new_token_ids: list[int]
    # the step that brought it; None = no step did (aborted, or refused by its grammar)
    step: int | None = None
    # drafts that the step verified; of its new tokens all but the last were drafts
    num_drafted: int = 0
    finish_reason: FinishReason | None = None
    # the stop token id that ended the sequence, or an error text
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprob] | None = None
    # with the first token
    prompt_logprobs: PromptLogprobs | None = None
    # prompt tokens found in the prefix cache when the request was first scheduled
    num_cached_tokens: int = 0
    # with the last token, if anything was drafted
    drafts: DraftCounts | None = None


@dataclass(slots=True, kw_only=True)
class KnobChange:
    """What the last change of knobs took."""

    # the first step with the new knobs
    step: int = 0
    # steps in flight that were waited for
    num_drained: int = 0
    # running requests that the new drafter had not followed: preempted, and computed once more
    num_recomputed: int = 0
    # running requests whose tokens a draft model read first
    num_caught_up: int = 0
    # graphs that the knobs ask for and that were not there
    num_graphs: int = 0


@dataclass(slots=True, kw_only=True)
class CaptureProgress:
    """Graphs that are being captured between steps; what has none yet runs without."""

    num_captured: int
    num_graphs: int
    # what is captured next, in words
    upcoming: str


@dataclass(slots=True, kw_only=True)
class EngineSnapshot:
    """A consistent picture between two steps; plain values only, never runner tensors."""

    step: int
    num_running: int
    num_waiting: int
    steps_in_flight: int
    kv_blocks_total: int
    kv_blocks_used: int
    kv_blocks_cached: int
    num_preemptions: int
    # host waits by reason since start
    waits: dict[str, int]
    knobs: dict[str, Any]
    # how they came into force
    change: KnobChange = field(default_factory=KnobChange)
    # None = every graph that they ask for is there
    capture: CaptureProgress | None = None
    # by draft position since start: drafts that the target saw, and those that it accepted
    num_drafted: list[int] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)
    # those among them that a grammar forced
    num_forced_drafted: int = 0
    num_forced_accepted: int = 0
    # running request ids -> (computed tokens, known tokens)
    requests: dict[str, tuple[int, int]] = field(default_factory=dict)
    # steps that may be in flight now: the knobs' depth, at most 2 while a running request follows a grammar
    effective_depth: int = 1
    # running requests that follow a grammar, and waiting ones whose grammar is being compiled
    num_grammar_running: int = 0
    num_grammar_compiling: int = 0

    @property
    def knobs_since(self) -> int:
        """The first step that `knobs` were in force for."""
        return self.change.step

    @property
    def drafts(self) -> DraftCounts:
        return DraftCounts(self.num_drafted, self.num_accepted)

    @property
    def acceptance(self) -> list[float]:
        """Share of the drafts at each position that were accepted."""
        return self.drafts.acceptance

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens per verification, its own draw included; None = nothing was drafted."""
        return self.drafts.mean_accepted_length
