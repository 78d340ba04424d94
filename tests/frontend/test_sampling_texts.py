"""Sampling parameters that are texts: bad words, thinking markers, stop strings before the minimum length."""

from __future__ import annotations

import pytest

from mrv2 import RequestError, SamplingParams
from mrv2.engine.messages import EngineOutput, EngineRequest
from mrv2.engine.output_processor import OutputProcessor
from mrv2.engine.row_sampling import row_sampling
from mrv2.tokenizer import Tokenizer


def test_a_bad_word_is_forbidden_at_the_start_and_behind_a_space(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    (request,) = processor.add_request("r", None, [1], SamplingParams(bad_words=["dog", [3, 4]]))
    texts = [tokenizer.decode(list(word)) for word in request.bad_words]
    assert texts[0] == "dog" and request.bad_words[-1] == (3, 4)
    assert set(texts[:-1]) <= {"dog", " dog"}


def test_markers_become_tokens_once_for_all_sequences(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    params = SamplingParams(n=2, thinking_token_budget=3, thinking_start="fox", thinking_end=[5, 6])
    for request in processor.add_request("r", None, [1], params):
        assert tokenizer.decode(list(request.thinking_start)) == "fox"
        assert request.thinking_end == (5, 6)


@pytest.mark.parametrize("given", [{"bad_words": ["dog"]}, {"thinking_token_budget": 3}])
def test_texts_without_a_tokenizer_are_refused_and_leave_nothing_behind(given: dict) -> None:
    processor = OutputProcessor(None)
    with pytest.raises(RequestError, match="needs a tokenizer.*give token ids"):
        processor.add_request("r", None, [1], SamplingParams(**given))
    assert processor.num_unfinished == 0
    message = EngineRequest(req_id="r", prompt_token_ids=[1], params=SamplingParams(**given))
    with pytest.raises(RequestError, match="give token ids"):
        row_sampling(message, seed=0, stop_ids=frozenset(), vocab_size=100, max_logprobs=20)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"allowed_token_ids": [5, 100]}, "allowed_token_ids: token id 100 is outside the vocabulary 0..99"),
        ({"logit_bias": {100: 1.0}}, "logit_bias: token id 100"),
        ({"bad_words": [[1, 100]]}, "bad_words: token id 100"),
        ({"logprob_token_ids": [100]}, "logprob_token_ids: token id 100"),
        ({"logprobs": 21}, "this engine gives 0 to 20"),
        ({"bad_words": [[1] * 600] * 2}, "1200 tokens together"),
        ({"allowed_token_ids": [5], "bad_words": [[5]]}, "leaves no token"),
        ({"allowed_token_ids": [9], "min_tokens": 2}, "leaves no token"),
        ({"thinking_token_budget": 1, "thinking_start": [1], "thinking_end": [1]}, "the same tokens"),
    ],
)
def test_what_only_the_engine_can_check_names_itself(given: dict, message: str) -> None:
    request = EngineRequest(req_id="r", prompt_token_ids=[1], params=SamplingParams(**given))
    with pytest.raises(RequestError, match=message):
        row_sampling(request, seed=0, stop_ids=frozenset({9}), vocab_size=100, max_logprobs=20)


def test_no_stop_string_is_looked_for_before_the_minimum_length(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("dog fox dog fox")
    first = len(tokenizer.encode("dog"))
    for min_tokens in (0, first, len(tokens)):
        processor = OutputProcessor(tokenizer)
        params = SamplingParams(stop="dog", min_tokens=min_tokens, max_tokens=50)
        processor.add_request("r", None, [1], params)
        done = [processor.process([EngineOutput(req_id="r", new_token_ids=[token])]) for token in tokens]
        stopped = [index for index, step in enumerate(done) if step.abort_ids]
        if min_tokens == 0:
            assert stopped == [first - 1]
        elif min_tokens == first:
            assert len(stopped) == 1 and stopped[0] >= first
        else:
            assert stopped == []
