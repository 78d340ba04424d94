"""`LLM` over the real engine: a tiny float64 model on the host backend."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mrv2 import LLM, RequestError, RequestOutput, SamplingParams
from mrv2.instrument import stages

SMALL: dict[str, Any] = dict(
    device="host",
    dtype="float64",
    load_format="dummy",
    max_model_len=128,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    num_gpu_blocks=64,
    debug_checks=True,
)
PROMPTS = [[1 + i, 7, 300 - i, *range(10, 12 + 9 * i)] for i in range(5)]
SEEDED = [SamplingParams(max_tokens=6 + i, seed=40 + i, temperature=0.8, ignore_eos=True) for i in range(5)]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Iterator[LLM]:
    with LLM(model_folder, **SMALL) as made:
        yield made


@pytest.fixture(scope="module")
def expected(engine: LLM) -> list[list[int]]:
    """Each request alone."""
    return [
        tokens(engine.generate([prompt], params, use_tqdm=False))[0]
        for prompt, params in zip(PROMPTS, SEEDED, strict=True)
    ]


def test_a_batch_gives_what_each_request_gives_alone(engine: LLM, expected: list[list[int]]) -> None:
    outputs = engine.generate(PROMPTS, SEEDED, use_tqdm=False)
    assert tokens(outputs) == expected
    assert [len(each) for each in expected] == [6, 7, 8, 9, 10]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


@pytest.mark.parametrize("place", ["thread", "process"])
def test_the_place_of_the_engine_changes_no_token(model_folder: Path, place: Any, expected: list[list[int]]) -> None:
    with LLM(model_folder, engine=place, **SMALL) as llm:
        assert tokens(llm.generate(PROMPTS, SEEDED, use_tqdm=False)) == expected
        llm.record(True)
        llm.generate(PROMPTS[0], SEEDED[0], use_tqdm=False)
        spans = llm.record(False)
        assert {"host", "device"} <= {span.kind for span in spans}
        assert {stages.SCHEDULE, stages.FORWARD} <= {span.name for span in spans}


def test_knobs_turned_while_requests_run_change_no_token(engine: LLM, expected: list[list[int]]) -> None:
    streams = [engine.stream(prompt, params) for prompt, params in zip(PROMPTS, SEEDED, strict=True)]
    found: list[list[int]] = [[] for _ in streams]
    changes = [{"runner": "v1"}, {"async_scheduling": False}, {"runner": "v2"}, {"async_scheduling": True}]
    for change in changes:
        found[0] += next(streams[0]).outputs[0].token_ids
        engine.set(**change)
    for into, stream in zip(found, streams, strict=True):
        into += [token for output in stream for token in output.outputs[0].token_ids]
    assert found == expected


def test_unseeded_runs_repeat_from_a_fresh_engine_and_samples_differ(model_folder: Path) -> None:
    params = SamplingParams(n=3, max_tokens=8, ignore_eos=True)
    runs = []
    for _ in range(2):
        with LLM(model_folder, seed=5, **SMALL) as llm:
            runs.append(tokens(llm.generate([[1, 2, 3], [1, 2, 3]], params, use_tqdm=False)))
    assert runs[0] == runs[1]
    assert len({tuple(each) for each in runs[0]}) == 6


def test_sample_0_of_n_is_the_request_alone(engine: LLM, expected: list[list[int]]) -> None:
    (output,) = engine.generate(PROMPTS[1], SEEDED[1].replace(n=3), use_tqdm=False)
    assert output.outputs[0].token_ids == expected[1]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3


def test_logprobs_of_greedy_tokens_are_the_best(engine: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=3, ignore_eos=True)
    (output,) = engine.generate("the fox", params, use_tqdm=False)
    completion = output.outputs[0]
    assert completion.logprobs is not None and completion.cumulative_logprob is not None
    assert [next(iter(row)) for row in completion.logprobs] == completion.token_ids
    assert all([entry.rank for entry in row.values()] == [1, 2, 3] for row in completion.logprobs)
    total = sum(next(iter(row.values())).logprob for row in completion.logprobs)
    assert completion.cumulative_logprob == pytest.approx(total)


def test_a_stop_string_frees_the_sequence(engine: LLM) -> None:
    whole = engine.generate("the fox", SamplingParams(seed=3, max_tokens=30, ignore_eos=True), use_tqdm=False)
    text = whole[0].outputs[0].text
    stop = text[9:12]
    params = SamplingParams(seed=3, max_tokens=30, ignore_eos=True, stop=[stop])
    (output,) = engine.generate("the fox", params, use_tqdm=False)
    assert output.outputs[0].text == text[: text.index(stop)]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    pieces = [piece.outputs[0].text for piece in engine.stream("the fox", params)]
    assert "".join(pieces) == output.outputs[0].text
    picture = engine.snapshot()
    assert picture.num_running == picture.num_waiting == 0


def test_no_max_tokens_runs_to_the_models_limit(engine: LLM) -> None:
    (output,) = engine.generate([5] * 100, SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 28 and output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    "prompt, priority, message",
    [
        ([1] * 128, None, "max_model_len=128"),
        ([512], None, "outside the vocabulary"),
        ([-1], None, "outside the vocabulary"),
        ([[]], None, "empty"),
        ([1], [1], "scheduling_policy='priority'"),
    ],
)
def test_what_can_never_be_served_is_refused_before_anything_runs(
    engine: LLM, prompt: Any, priority: list[int] | None, message: str, expected: list[list[int]]
) -> None:
    step = engine.snapshot().step
    with pytest.raises(RequestError, match=message):
        engine.generate(prompt, SEEDED[0], use_tqdm=False, priority=priority)
    picture = engine.snapshot()
    assert picture.num_running == picture.num_waiting == 0 and picture.step == step
    assert tokens(engine.generate(PROMPTS[0], SEEDED[0], use_tqdm=False)) == expected[:1]


def test_prefix_hits_are_reported(model_folder: Path) -> None:
    with LLM(model_folder, **SMALL) as llm:
        prompt, params = list(range(20, 70)), SamplingParams(max_tokens=2, seed=1, ignore_eos=True)
        first, second = (llm.generate(prompt, params, use_tqdm=False)[0] for _ in range(2))
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 48)
        assert tokens([first]) == tokens([second])


@pytest.mark.slow
def test_a_real_model_answers() -> None:
    with LLM("smollm2-135m-instruct", device="host", dtype="float32", max_model_len=256, max_num_seqs=2) as llm:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        params = SamplingParams(temperature=0, max_tokens=20)
        (answer,) = llm.chat(question, params, use_tqdm=False)
        assert answer.outputs[0].text == "The capital of France is Paris."
        assert answer.outputs[0].finish_reason == "stop" and answer.outputs[0].stop_reason is None
        (stopped,) = llm.chat(question, params.replace(stop=[" is Par"]), use_tqdm=False)
        assert stopped.outputs[0].text == "The capital of France"
        assert answer.prompt is not None
        pieces = [out.outputs[0].text for out in llm.stream({"prompt": answer.prompt}, params)]
        assert "".join(pieces) == answer.outputs[0].text and len(pieces) > 5


@pytest.mark.slow
def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    script = Path(__file__).parents[2] / "examples" / "vllm_style.py"
    runpy.run_path(str(script))["main"]("smollm2-135m-instruct")
    shown = capsys.readouterr().out
    assert "The capital of France is Paris." in shown and "(0 prompt tokens cached)" in shown
