"""The named workloads are what their names promise, on every machine."""

from __future__ import annotations

import pytest

from mrv2.bench.workloads import NAMES, make_workload
from mrv2.errors import ConfigError

QWEN_VOCAB = 151_936


@pytest.mark.parametrize(
    "name, count, input_len, output_len",
    [("a", 1, 128, 512), ("b", 8, 128, 512), ("c", 32, 128, 512), ("d", 64, 128, 512), ("f", 512, 32, 256)],
)
def test_uniform_workloads(name: str, count: int, input_len: int, output_len: int) -> None:
    workload = make_workload(name, vocab_size=QWEN_VOCAB)
    assert [(r.input_len, r.output_len) for r in workload.requests] == [(input_len, output_len)] * count
    assert workload.temperature == 0.0
    assert all(0 <= token < QWEN_VOCAB for r in workload.requests for token in r.prompt_token_ids)


def test_mixed_workload_has_the_published_sums() -> None:
    workload = make_workload("e", vocab_size=QWEN_VOCAB)
    assert len(workload.requests) == 256
    assert workload.num_input_tokens == 142_827
    assert workload.num_output_tokens == 133_966
    assert workload.temperature == 0.6
    assert max(token for r in workload.requests for token in r.prompt_token_ids) == 10_000


def test_mixed_workload_fits_a_small_vocabulary() -> None:
    small = make_workload("e", vocab_size=512)
    assert small.num_output_tokens == 133_966
    assert max(token for r in small.requests for token in r.prompt_token_ids) == 511


@pytest.mark.parametrize("name", NAMES)
def test_a_workload_is_the_same_each_time(name: str) -> None:
    assert make_workload(name, vocab_size=512, scale=8) == make_workload(name, vocab_size=512, scale=8)


def test_a_scaled_workload_has_another_name() -> None:
    scaled = make_workload("c", vocab_size=512, scale=16)
    assert scaled.name == "c/16"
    assert scaled.scale == 16
    assert [(r.input_len, r.output_len) for r in scaled.requests] == [(8, 32)] * 2
    assert make_workload("a", vocab_size=512, scale=1000).requests[0].output_len == 1


def test_engine_requests_are_fresh_and_run_to_their_length() -> None:
    workload = make_workload("e", vocab_size=512, scale=64)
    first, second = workload.engine_requests(), workload.engine_requests()
    assert first[0].prompt_token_ids is not second[0].prompt_token_ids
    for index, (request, made) in enumerate(zip(workload.requests, first, strict=True)):
        assert made.params.ignore_eos
        assert made.params.max_tokens == request.output_len
        assert made.params.seed == index
    assert len({request.req_id for request in first}) == len(first)


def test_a_shortened_workload_keeps_the_prompts() -> None:
    workload = make_workload("b", vocab_size=512, scale=4)
    short = workload.shortened(3)
    assert short.name != workload.name
    assert short.num_input_tokens == workload.num_input_tokens
    assert {r.output_len for r in short.requests} == {3}


def test_unknown_names_and_scales_are_refused() -> None:
    with pytest.raises(ConfigError, match="workloads are a, b"):
        make_workload("z", vocab_size=512)
    with pytest.raises(ConfigError, match="scale=0"):
        make_workload("a", vocab_size=512, scale=0)


@pytest.mark.parametrize("name", ["d", "f"])
def test_drawn_twins_differ_from_the_greedy_workload_in_sampling_alone(name: str) -> None:
    greedy = make_workload(name, vocab_size=512, scale=8)
    for twin, expected in ((f"{name}-t1", (1.0, 0, 1.0)), (f"{name}-k50", (1.0, 50, 0.9))):
        drawn = make_workload(twin, vocab_size=512, scale=8)
        assert drawn.requests == greedy.requests
        assert drawn.name == f"{twin}/8"
        assert "greedy" not in drawn.description
        for request in drawn.engine_requests() + drawn.shortened(2).engine_requests():
            assert (request.params.temperature, request.params.top_k, request.params.top_p) == expected
