"""Do two runs agree? Where their tokens part, is it a tie that the arithmetic cannot resolve, or an error?

Two runs may differ legitimately where a matrix product has another shape and hence another order of
sums.  After the first different token everything differs, so only that one is judged: both tokens are
scored on the common prefix, and a difference of scores within the tolerance of the dtype is a tie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mrv2.engine.core import EngineCore
from mrv2.engine.messages import EngineRequest, TokenLogprob
from mrv2.sampling_params import MAX_LOGPROBS, SamplingParams
from mrv2_kernels.sampling.noise import gumbel_noise_torch

# in logits; half types: two steps of their grid at a logit of 16 to 32
TIE_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.03125, torch.bfloat16: 0.25}


@dataclass(frozen=True)
class Difference:
    """The first token at which two runs of a request part."""

    req_id: str
    # index among the generated tokens
    index: int
    # None: that run has no token here
    expected: int | None
    found: int | None
    # score of `expected` minus score of `found` (logits, at a temperature with their noise); None: not known
    margin: float | None
    tolerance: float

    @property
    def is_tie(self) -> bool:
        return self.margin is not None and abs(self.margin) <= self.tolerance

    def describe(self) -> str:
        """Return one line: where, what, and how close."""
        names = [str(token) if token is not None else "nothing" for token in (self.expected, self.found)]
        text = f"request {self.req_id}, generated token {self.index}: {names[0]} became {names[1]}"
        if self.margin is None:
            return f"{text}; not a tie: at least one of them is not among the {MAX_LOGPROBS} likeliest tokens"
        verdict = "tie" if self.is_tie else "not a tie"
        return f"{text}; {verdict}: margin {self.margin:.3g} logits, tolerance {self.tolerance:g}"


def find_differences(
    core: EngineCore,
    requests: Sequence[EngineRequest],
    expected: Mapping[str, list[int]],
    found: Mapping[str, list[int]],
) -> list[Difference]:
    """Return the first difference of each request whose tokens differ; runs a step of `core` for each."""
    return [
        _judge(core, request, expected[request.req_id], found[request.req_id])
        for request in requests
        if expected[request.req_id] != found[request.req_id]
    ]


def _judge(core: EngineCore, request: EngineRequest, expected: list[int], found: list[int]) -> Difference:
    same = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), None)
    index = min(len(expected), len(found)) if same is None else same
    tokens = [ids[index] if index < len(ids) else None for ids in (expected, found)]
    temperature = request.params.temperature
    tolerance = TIE_TOLERANCE[core.executor.model.dtype] / (temperature or 1.0)
    scores = _scores(core, request, expected[:index]) if None not in tokens else {}
    known = [scores.get(token) if token is not None else None for token in tokens]
    margin = known[0] - known[1] if known[0] is not None and known[1] is not None else None
    return Difference(request.req_id, index, tokens[0], tokens[1], margin, tolerance)


def _scores(core: EngineCore, request: EngineRequest, outputs: list[int]) -> dict[int, float]:
    """Return the score of the likeliest tokens after `outputs`: what the sampler takes the largest of."""
    logprobs = _next_logprobs(core, request.prompt_token_ids + outputs)
    scores = dict(zip(logprobs.token_ids, logprobs.logprobs, strict=True))
    temperature, seed = request.params.temperature, request.params.seed
    if temperature == 0.0:
        return scores
    if seed is None:
        # the seed came from the order of admission, so the noise cannot be drawn again
        return {}
    position = len(request.prompt_token_ids) + len(outputs) - 1
    noise = gumbel_noise_torch(
        torch.tensor([seed]), torch.tensor([position], dtype=torch.int32), core.executor.vocab_size, torch.float32
    )[0]
    return {token: score / temperature + float(noise[token]) for token, score in scores.items()}


def _next_logprobs(core: EngineCore, token_ids: list[int]) -> TokenLogprob:
    """Return the log-probabilities of the token after `token_ids`."""
    vocab = core.executor.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=min(MAX_LOGPROBS, vocab), ignore_eos=True)
    core.add_request(EngineRequest(req_id="agreement", prompt_token_ids=token_ids, params=params))
    found: list[TokenLogprob] = []
    while core.has_unfinished:
        for output in core.step():
            found += output.logprobs or []
    assert len(found) == 1, f"one token was asked for, {len(found)} came"
    return found[0]
