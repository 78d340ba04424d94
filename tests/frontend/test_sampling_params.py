"""`SamplingParams`: defaults as in vLLM, ranges, refusals, greedy normal form."""

from __future__ import annotations

import pickle

import pytest

from mrv2 import RequestError, RequestOutputKind, SamplingParams
from mrv2.sampling_params import UNSUPPORTED, supported_names


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert params.skip_special_tokens and params.detokenize
    assert not params.ignore_eos and not params.include_stop_str_in_output
    assert params.output_kind is RequestOutputKind.CUMULATIVE


@pytest.mark.parametrize("temperature", [0, 0.0, 9e-6])
def test_a_tiny_temperature_is_greedy_and_neutralises_the_filters(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.5, top_k=7, min_p=0.2)
    assert params.is_greedy
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, 0, 0.0)


def test_normal_forms() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[3, 4], top_k=-1, seed=-1, logprobs=True, max_tokens=None)
    assert params.stop_strings == ("end",)
    assert params.stop_token_ids == (3, 4)
    assert (params.top_k, params.seed, params.logprobs, params.max_tokens) == (0, None, 1, None)
    assert SamplingParams().stop_strings == () and SamplingParams().stop_token_ids == ()


@pytest.mark.parametrize(
    "given, legal",
    [
        ({"n": 0}, ">= 1"),
        ({"temperature": -0.1}, ">= 0"),
        ({"temperature": float("nan")}, ">= 0"),
        ({"temperature": float("inf")}, "finite"),
        ({"temperature": "hot"}, "number"),
        ({"top_p": 0.0}, r"\(0, 1\]"),
        ({"top_p": 1.5}, r"\(0, 1\]"),
        ({"top_k": -2}, "-1"),
        ({"top_k": 2.5}, "integer"),
        ({"min_p": 1.1}, r"\[0, 1\]"),
        ({"seed": 2**63}, str(2**63 - 1)),
        ({"seed": 1.5}, "integer"),
        ({"max_tokens": 0}, ">= 1"),
        ({"min_tokens": 17}, "max_tokens=16"),
        ({"logprobs": -2}, "-1"),
        ({"prompt_logprobs": 1.5}, "integer >= 0"),
        ({"logprob_token_ids": [3, 3]}, "distinct"),
        ({"logprobs": 1, "logprob_token_ids": [3]}, "exclude each other"),
        ({"presence_penalty": 2.1}, r"\[-2, 2\]"),
        ({"frequency_penalty": float("nan")}, r"\[-2, 2\]"),
        ({"repetition_penalty": 0.0}, r"\(0, 2\]"),
        ({"logit_bias": {3: 101.0}}, r"\[-100, 100\]"),
        ({"logit_bias": {-1: 1.0}}, ">= 0"),
        ({"allowed_token_ids": []}, "1 to 1024"),
        ({"bad_words": [""]}, "empty"),
        ({"bad_words": "no"}, "list"),
        ({"thinking_token_budget": -1}, ">= 0"),
        ({"thinking_end": ""}, "16 tokens"),
        ({"extra_args": {1: 2}}, "dict"),
        ({"ignore_eos": 1}, "True or False"),
        ({"stop": [""]}, "empty"),
        ({"stop": [3]}, "string"),
        ({"stop_token_ids": [-1]}, ">= 0"),
        ({"output_kind": "DELTA"}, "RequestOutputKind.DELTA"),
        ({"n": 2, "temperature": 0}, "greedy"),
        ({"stop": "x", "detokenize": False}, "detokenize=True"),
    ],
)
def test_a_bad_value_names_itself_and_the_legal_range(given: dict, legal: str) -> None:
    with pytest.raises(RequestError, match=legal) as caught:
        SamplingParams(**given)
    assert next(iter(given)) in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"spaces_between_special_tokens": False},
        {"truncate_prompt_tokens": 3},
        {"logits_processors": [print]},
    ],
)
def test_what_is_not_supported_is_refused_with_what_is(given: dict) -> None:
    with pytest.raises(RequestError, match="not supported yet by this engine.*temperature"):
        SamplingParams(**given)


def test_neutral_values_of_unsupported_names_are_accepted() -> None:
    assert SamplingParams(**UNSUPPORTED) == SamplingParams()
    assert SamplingParams(bad_words=[], logit_bias={}, presence_penalty=0).is_greedy is False


def test_an_unknown_name_gets_the_nearest_legal_one() -> None:
    with pytest.raises(RequestError, match="'temprature'; did you mean 'temperature'"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]
    assert "truncate_prompt_tokens" not in supported_names()


def test_frozen_replaceable_picklable() -> None:
    params = SamplingParams(n=2, stop=["a"], seed=5)
    assert pickle.loads(pickle.dumps(params)) == params
    assert params.replace(seed=6) == SamplingParams(n=2, stop=["a"], seed=6)
    with pytest.raises(RequestError, match="top_p"):
        params.replace(top_p=2.0)
    with pytest.raises(AttributeError):
        params.seed = 7  # type: ignore[misc]
