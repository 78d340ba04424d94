"""`SamplingParams`: how one request is sampled; names, defaults and meaning as in vLLM's offline API."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from mrv2.errors import RequestError, nearest
from mrv2.structured_outputs import StructuredOutputsParams, normalise

# below this a temperature means greedy decoding
GREEDY_EPS = 1e-5
# default of the engine's option max_logprobs
MAX_LOGPROBS = 20
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
# what a row of device state holds: ids in a list, stop ids, forbidden sequences and their tokens, marker tokens
MAX_IDS, MAX_STOP_IDS, MAX_LOGPROB_IDS = 1024, 128, 128
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS, MAX_MARKER_TOKENS = 128, 1024, 16

# vLLM's names that this engine knows but does not serve yet -> the value that means "off"
UNSUPPORTED: dict[str, Any] = {
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None,
    "logits_processors": None,
}


class RequestOutputKind(enum.Enum):
    """What a `RequestOutput` of an unfinished request carries."""

    # everything since the start
    CUMULATIVE = 0
    # what is new since the last output
    DELTA = 1
    # nothing: one output, when the request has finished
    FINAL_ONLY = 2


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request, checked when made; a bad value raises `RequestError`.

    A frozen object may be shared by any number of requests; `replace` makes a changed copy.
    After construction every list is a tuple.  Temperatures below 1e-5 mean
    greedy decoding and set ``temperature=0, top_p=1, top_k=0, min_p=0``.

    The logits are changed in this order: grammar, allowed tokens, bias, minimum length, penalties, bad words,
    logits processors, thinking budget, temperature, min_p, top_k, top_p.  Log-probabilities are those of
    the logits before all of it but the grammar.
    """

    # sequences per prompt, each with its own seed
    n: int = 1
    # [-2, 2]; subtracted from the logit of each token that was generated before
    presence_penalty: float = 0.0
    # [-2, 2]; the same, times the number of times that it was generated
    frequency_penalty: float = 0.0
    # (0, 2]; 1 = off; positive logits of tokens in prompt or output are divided by it, others multiplied
    repetition_penalty: float = 1.0
    # >= 0; 0 = greedy
    temperature: float = 1.0
    # (0, 1]; 1 = off
    top_p: float = 1.0
    # 0 or -1 = off
    top_k: int = 0
    # [0, 1]; 0 = off: drop tokens less likely than min_p times the most likely one
    min_p: float = 0.0
    # None or -1 = derived from the engine's seed and the admission index
    seed: int | None = None
    # texts that end a sequence
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    # go on after an end-of-sequence token
    ignore_eos: bool = False
    # None = up to the engine's max_model_len
    max_tokens: int | None = 16
    # tokens before which nothing may end the sequence: stop ids are masked, stop strings not looked for
    min_tokens: int = 0
    # None = no log-probabilities; k = those of the sampled token and of the k most likely; -1 = of all
    logprobs: int | None = None
    # the same for every token of the prompt but the first
    prompt_logprobs: int | None = None
    # log-probabilities of the sampled token and of these, instead of the most likely
    logprob_token_ids: Sequence[int] | None = None
    # False = token ids only, the text stays empty
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    # keep the text of the stop string or stop token at the end
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    # the form of the text; a dict of its fields will do
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    # token id -> number in [-100, 100] that is added to its logit
    logit_bias: dict[int, float] | None = None
    # None = every token
    allowed_token_ids: Sequence[int] | None = None
    # texts, or lists of token ids, that must not be generated; the prompt may hold their beginning
    bad_words: Sequence[str | Sequence[int]] | None = None
    # generated tokens between the two markers after which the end marker is forced; None = no limit
    thinking_token_budget: int | None = None
    # text or token ids
    thinking_start: str | Sequence[int] = "<think>"
    thinking_end: str | Sequence[int] = "</think>"
    logits_processors: Any = None
    # arguments of the engine's logits processors, by their names
    extra_args: dict[str, Any] | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> SamplingParams:
        """Refuse unknown names before the generated ``__init__`` runs."""
        legal = [f.name for f in fields(cls)]
        for name in kwargs:
            if name not in legal:
                raise RequestError(
                    f"unknown sampling parameter {name!r}{nearest(name, legal)}; "
                    f"supported are {', '.join(supported_names())}"
                )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, neutral in UNSUPPORTED.items():
            if not _is_neutral(getattr(self, name), neutral):
                raise RequestError(
                    f"{name}={getattr(self, name)!r}: {name} is not supported yet by this engine "
                    f"(leave it at {neutral!r}); supported are {', '.join(supported_names())}"
                )
        self._normalise()
        self._check_ranges()
        if self.temperature < GREEDY_EPS:
            self._set(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        if self.is_greedy and self.n > 1:
            raise RequestError(f"n={self.n} with greedy decoding would repeat one text; set n=1 or temperature > 0")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop``, whose normal form is a tuple, with that type."""
        assert isinstance(self.stop, tuple), f"stop={self.stop!r} was not normalised"
        return self.stop

    def replace(self, **changes: Any) -> SamplingParams:
        """Return a checked copy with `changes`."""
        return replace(self, **changes)

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _normalise(self) -> None:
        stop: Any = self.stop
        if stop is None or isinstance(stop, str):
            stop = () if stop is None else (stop,)
        if not _is_sequence(stop) or not all(isinstance(s, str) and s for s in stop):
            raise RequestError(f"stop={self.stop!r} must be a string or a list of strings, none of them empty")
        ids: Any = () if self.stop_token_ids is None else self.stop_token_ids
        if not _is_sequence(ids) or not all(_is_int(i) and i >= 0 for i in ids):
            raise RequestError(f"stop_token_ids={self.stop_token_ids!r} must be a list of token ids, each >= 0")
        self._set(stop=tuple(stop), stop_token_ids=tuple(int(i) for i in ids))
        for name in ("allowed_token_ids", "logprob_token_ids", "thinking_start", "thinking_end", "bad_words"):
            if isinstance(getattr(self, name), list):
                self._set(**{name: tuple(getattr(self, name))})
        for name in ("bad_words", "logit_bias", "extra_args"):
            if getattr(self, name) is not None and len(getattr(self, name)) == 0:
                self._set(**{name: None})
        if self.seed == -1 and not isinstance(self.seed, bool):
            self._set(seed=None)
        if self.top_k == -1 and not isinstance(self.top_k, bool):
            self._set(top_k=0)
        self._set(structured_outputs=normalise(self.structured_outputs))
        if self.logprobs is True:
            self._set(logprobs=1)

    def _check_ranges(self) -> None:
        _check("n", self.n, _is_int(self.n) and self.n >= 1, "an integer >= 1")
        _check("temperature", self.temperature, _in_range(self.temperature, 0.0), "a finite number >= 0 (0 = greedy)")
        top_p_ok = _in_range(self.top_p, 0.0, 1.0) and self.top_p > 0.0
        _check("top_p", self.top_p, top_p_ok, "a number in (0, 1] (1 = off)")
        _check("top_k", self.top_k, _is_int(self.top_k) and self.top_k >= 0, "an integer >= 1, or 0 or -1 (off)")
        _check("min_p", self.min_p, _in_range(self.min_p, 0.0, 1.0), "a number in [0, 1] (0 = off)")
        seed_ok = self.seed is None or (_is_int(self.seed) and SEED_MIN <= self.seed <= SEED_MAX)
        _check("seed", self.seed, seed_ok, f"None or an integer from {SEED_MIN} to {SEED_MAX}")
        max_ok = self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1)
        _check("max_tokens", self.max_tokens, max_ok, "an integer >= 1, or None (up to max_model_len)")
        min_ok = _is_int(self.min_tokens) and 0 <= self.min_tokens <= (self.max_tokens or self.min_tokens)
        _check("min_tokens", self.min_tokens, min_ok, f"an integer from 0 to max_tokens={self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            ok = value is None or (_is_int(value) and value >= -1)
            _check(name, value, ok, "None, an integer >= 0, or -1 (the whole vocabulary)")
        for name in ("presence_penalty", "frequency_penalty"):
            _check(
                name, getattr(self, name), _in_range(getattr(self, name), -2.0, 2.0), "a number in [-2, 2] (0 = off)"
            )
        repetition_ok = _in_range(self.repetition_penalty, 0.0, 2.0) and self.repetition_penalty > 0.0
        _check("repetition_penalty", self.repetition_penalty, repetition_ok, "a number in (0, 2] (1 = off)")
        self._check_lists()
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            _check(name, getattr(self, name), isinstance(getattr(self, name), bool), "True or False")
        kinds = ", ".join(f"RequestOutputKind.{kind.name}" for kind in RequestOutputKind)
        _check("output_kind", self.output_kind, isinstance(self.output_kind, RequestOutputKind), f"one of {kinds}")
        if self.stop and not self.detokenize:
            raise RequestError(f"stop={list(self.stop)!r} needs the text: set detokenize=True or use stop_token_ids")

    def _check_lists(self) -> None:
        bias: Any = self.logit_bias
        bias_ok = bias is None or (
            isinstance(bias, dict)
            and len(bias) <= MAX_IDS
            and all(_is_int(i) and i >= 0 and _in_range(value, -100.0, 100.0) for i, value in bias.items())
        )
        _check("logit_bias", bias, bias_ok, f"a dict of at most {MAX_IDS} token ids >= 0 to numbers in [-100, 100]")
        allowed, wanted, words = self.allowed_token_ids, self.logprob_token_ids, self.bad_words
        ok = allowed is None or _are_ids(allowed, MAX_IDS)
        _check("allowed_token_ids", allowed, ok, f"None or a list of 1 to {MAX_IDS} distinct token ids >= 0")
        ok = wanted is None or _are_ids(wanted, MAX_LOGPROB_IDS)
        _check("logprob_token_ids", wanted, ok, f"None or a list of 1 to {MAX_LOGPROB_IDS} distinct token ids >= 0")
        if wanted is not None and self.logprobs is not None:
            raise RequestError(f"logprobs={self.logprobs} and logprob_token_ids exclude each other: give one of them")
        legal = f"None or a list of at most {MAX_BAD_WORDS} texts or lists of token ids, none of them empty"
        ok = words is None or (_is_sequence(words) and len(words) <= MAX_BAD_WORDS and all(map(_is_marker, words)))
        _check("bad_words", words, ok, legal)
        budget = self.thinking_token_budget
        _check("thinking_token_budget", budget, budget is None or (_is_int(budget) and budget >= 0), "None or >= 0")
        for name in ("thinking_start", "thinking_end"):
            ok = _is_marker(getattr(self, name))
            _check(
                name, getattr(self, name), ok, f"a text or a list of token ids, 1 to {MAX_MARKER_TOKENS} tokens long"
            )
        args: Any = self.extra_args
        ok = args is None or (isinstance(args, dict) and all(isinstance(name, str) for name in args))
        _check("extra_args", args, ok, "None or a dict from names to values")


def supported_names() -> list[str]:
    """Return the names of the parameters that this engine serves."""
    return [f.name for f in fields(SamplingParams) if f.name not in UNSUPPORTED]


def _is_neutral(value: Any, neutral: Any) -> bool:
    empty = neutral is None and isinstance(value, (list, tuple, dict)) and not value
    same = isinstance(value, (int, float)) and isinstance(neutral, (int, float)) and value == neutral
    return empty or value is neutral or same


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _are_ids(value: Any, most: int) -> bool:
    is_list = _is_sequence(value) and 1 <= len(value) <= most
    return is_list and all(_is_int(i) and i >= 0 for i in value) and len(set(value)) == len(value)


def _is_marker(value: Any) -> bool:
    """True for a text or a list of token ids that is not empty."""
    if isinstance(value, str):
        return bool(value)
    return _is_sequence(value) and bool(value) and all(_is_int(i) and i >= 0 for i in value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _in_range(value: Any, low: float, high: float = float("inf")) -> bool:
    """True for a finite number in [low, high]; NaN compares false."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and low <= value <= high and value != float("inf")


def _check(name: str, value: Any, ok: bool, legal: str) -> None:
    if not ok:
        raise RequestError(f"{name}={value!r}: must be {legal}")
