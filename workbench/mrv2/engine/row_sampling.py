"""From `SamplingParams` to what the runners need of them, with the checks that need the engine's numbers."""

from __future__ import annotations

from mrv2.engine.messages import EngineRequest
from mrv2.errors import RequestError
from mrv2.runner.protocol import RowSampling, ThinkingBudget
from mrv2.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_MARKER_TOKENS, MAX_STOP_IDS


def row_sampling(
    message: EngineRequest, *, seed: int, stop_ids: frozenset[int], vocab_size: int, max_logprobs: int
) -> RowSampling:
    """Return the row of a request; raises `RequestError` for ids and counts that this engine cannot serve.

    `max_logprobs` is the most log-probabilities a position may ask for, -1 = the whole vocabulary.
    """
    params, name = message.params, f"request {message.req_id}"
    allowed, bias = tuple(params.allowed_token_ids or ()), params.logit_bias or {}
    wanted, words = tuple(params.logprob_token_ids or ()), message.bad_words
    # with a grammar its mask holds the stop ids back, for it knows whether anything else is left
    masks_stops = params.min_tokens > 0 and params.structured_outputs is None
    masked_stops = tuple(sorted(stop_ids)) if masks_stops else ()
    thinking = _thinking(message)
    for what, ids in (
        ("allowed_token_ids", allowed),
        ("logit_bias", bias),
        ("logprob_token_ids", wanted),
        ("stop_token_ids", masked_stops),
        ("bad_words", [token for word in words for token in word]),
        ("thinking markers", () if thinking is None else thinking.start + thinking.end),
    ):
        outside = [token for token in ids if token >= vocab_size]
        if outside:
            raise RequestError(f"{name}: {what}: token id {outside[0]} is outside the vocabulary 0..{vocab_size - 1}")
    if params.bad_words and not words:
        raise RequestError(f"{name}: bad_words={list(params.bad_words)} are texts without their tokens: give token ids")
    limit = vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size)
    num_words, num_tokens = len(words), sum(map(len, words))
    if num_words > MAX_BAD_WORDS or num_tokens > MAX_BAD_WORD_TOKENS:
        raise RequestError(
            f"{name}: bad_words are {num_words} token sequences of {num_tokens} tokens together (a text may have two); "
            f"the limits are {MAX_BAD_WORDS} and {MAX_BAD_WORD_TOKENS}"
        )
    if len(masked_stops) > MAX_STOP_IDS:
        raise RequestError(f"{name}: min_tokens masks at most {MAX_STOP_IDS} stop ids, these are {len(masked_stops)}")
    never = set(masked_stops) | {word[0] for word in words if len(word) == 1}
    if allowed and never.issuperset(allowed):
        raise RequestError(
            f"{name}: allowed_token_ids={list(allowed)} leaves no token to sample: bad_words and min_tokens mask all"
        )
    num_prompt_logprobs = _num_logprobs(name, "prompt_logprobs", params.prompt_logprobs, limit, vocab_size)
    if message.sample_index > 0:
        # the n sequences of a request share a prompt
        num_prompt_logprobs = -1
    return RowSampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=seed,
        num_logprobs=_num_logprobs(name, "logprobs", params.logprobs, limit, vocab_size),
        logprob_token_ids=wanted,
        num_prompt_logprobs=num_prompt_logprobs,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=bias,
        allowed_token_ids=allowed,
        min_tokens=params.min_tokens,
        stop_token_ids=masked_stops,
        bad_words=words,
        thinking=thinking,
        extra_args=params.extra_args or {},
    )


def _num_logprobs(name: str, what: str, given: int | None, limit: int, vocab_size: int) -> int:
    """Return how many the device computes; -1 = none."""
    if given is None:
        return -1
    count = vocab_size if given == -1 else given
    if count > limit:
        raise RequestError(
            f"{name}: {what}={given} asks for {count} log-probabilities a position, this engine gives 0 to {limit}; "
            "load it with a larger max_logprobs (-1 = the whole vocabulary)"
        )
    return count


def _thinking(message: EngineRequest) -> ThinkingBudget | None:
    budget = message.params.thinking_token_budget
    if budget is None:
        return None
    start, end = message.thinking_start, message.thinking_end
    for what, marker in (("thinking_start", start), ("thinking_end", end)):
        if not 1 <= len(marker) <= MAX_MARKER_TOKENS:
            raise RequestError(
                f"request {message.req_id}: thinking_token_budget={budget} needs {what} as 1 to {MAX_MARKER_TOKENS} "
                f"tokens, it has {len(marker)}; without a tokenizer give token ids"
            )
    if start == end:
        raise RequestError(f"request {message.req_id}: thinking_start and thinking_end are the same tokens {start}")
    return ThinkingBudget(budget, start, end)
