"""Output kinds, n > 1, stop strings, logprobs, aborts: from engine outputs to request outputs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv2 import RequestError, RequestOutputKind, SamplingParams
from mrv2.engine.messages import EngineOutput, TokenLogprob
from mrv2.engine.output_processor import OutputProcessor, ProcessedOutputs
from mrv2.engine.step_outputs import EngineOutputs, TokenColumn
from mrv2.outputs import RequestOutput
from mrv2.tokenizer import Tokenizer

DELTA, CUMULATIVE, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY


def out(req_id: str, tokens: list[int], **fields: object) -> EngineOutput:
    return EngineOutput(req_id=req_id, new_token_ids=tokens, **fields)  # type: ignore[arg-type]


def feed(processor: OutputProcessor, *steps: list[EngineOutput]) -> tuple[list[RequestOutput], list[str]]:
    outputs, aborts = [], []
    for step in steps:
        done = processor.process(step)
        outputs += done.outputs
        aborts += done.abort_ids
    return outputs, aborts


def test_one_request_becomes_n_sequences_that_share_parent_and_params(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer, eos_token_ids=(2, 0))
    processor.add_request("a", None, [1], SamplingParams())
    params = SamplingParams(n=3)
    sequences = processor.add_request("b", "x", [7, 8], params, priority=4)
    assert [s.req_id for s in sequences] == ["b/0", "b/1", "b/2"]
    assert [s.sample_index for s in sequences] == [0, 1, 2]
    for sequence in sequences:
        assert (sequence.parent_index, sequence.priority, sequence.eos_token_ids) == (1, 4, (2, 0))
        assert sequence.params is params and sequence.prompt_token_ids == [7, 8]


@given(
    text=st.sampled_from(["fox 你好 🎉🎉 dog", "aSTbSTOPc", "", "éé STO"]),
    cuts=st.lists(st.integers(0, 30), max_size=6),
    stop=st.sampled_from([None, "STOP", "🎉 d", "dog"]),
    include=st.booleans(),
)
@settings(max_examples=300)
def test_all_kinds_agree_however_the_tokens_arrive(
    tokenizer: Tokenizer, text: str, cuts: list[int], stop: str | None, include: bool
) -> None:
    """Joined deltas, the last cumulative output and the final one say the same; so do one-token steps."""
    tokens = tokenizer.encode(text)
    borders = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    splits = [
        [tokens[a:b] for a, b in pairwise(borders)] or [[]],
        [[token] for token in tokens] or [[]],
    ]
    seen = set()
    for chunks in splits:
        for kind in RequestOutputKind:
            processor = OutputProcessor(tokenizer)
            params = SamplingParams(max_tokens=100, stop=stop, include_stop_str_in_output=include, output_kind=kind)
            processor.add_request("r", text, [1], params)
            steps = [[out("r", chunk)] for chunk in chunks]
            steps[-1][0].finish_reason = "length"
            outputs, _ = feed(processor, *steps)
            completions = [o.outputs[0] for o in outputs]
            if kind is DELTA:
                final_text = "".join(c.text for c in completions)
                final_ids = [t for c in completions for t in c.token_ids]
            else:
                final_text, final_ids = completions[-1].text, completions[-1].token_ids
            assert kind is not FINAL_ONLY or len(outputs) == 1
            assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
            assert processor.num_unfinished == 0
            seen.add((final_text, tuple(final_ids), completions[-1].finish_reason, completions[-1].stop_reason))
    assert len(seen) == 1
    final_text, _, reason, stop_reason = seen.pop()
    if stop is not None and stop in text:
        assert (reason, stop_reason) == ("stop", stop)
        assert final_text == text[: text.index(stop)] + (stop if include else "")
    else:
        assert (reason, stop_reason, final_text) == ("length", None, text)


def test_a_stop_string_cuts_the_tokens_and_aborts_the_sequence(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add_request("r", None, [1], SamplingParams(stop="S", max_tokens=50, output_kind=FINAL_ONLY))
    a, s, b = (tokenizer.encode(text) for text in ("a", "S", "b"))
    outputs, aborts = feed(processor, [out("r", a)], [out("r", [*a, *s, *b])], [out("r", b)], [out("r", b)])
    assert aborts == ["r"]
    assert len(outputs) == 1 and outputs[0].outputs[0].token_ids == [*a, *a, *s]
    assert outputs[0].outputs[0].text == "aa"
    assert processor.num_generated_tokens == 3


def test_no_abort_for_a_sequence_that_the_engine_has_ended(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add_request("r", None, [1], SamplingParams(stop="S"))
    outputs, aborts = feed(processor, [out("r", tokenizer.encode("S"), finish_reason="length")])
    assert aborts == [] and outputs[0].outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("include", [False, True])
def test_the_stop_token_is_kept_as_id_and_dropped_as_text(
    tokenizer: Tokenizer, kind: RequestOutputKind, include: bool
) -> None:
    processor = OutputProcessor(tokenizer, eos_token_ids=tokenizer.eos_token_ids)
    (fox,), dog = tokenizer.encode("x"), tokenizer.encode("y")
    params = SamplingParams(stop_token_ids=dog, include_stop_str_in_output=include, output_kind=kind)
    processor.add_request("r", None, [1], params)
    outputs, _ = feed(processor, [out("r", [fox, dog[0]], finish_reason="stop", stop_reason=dog[0])])
    completion = outputs[-1].outputs[0]
    assert completion.token_ids == [fox, dog[0]]
    assert completion.text == ("xy" if include else "x")
    assert completion.stop_reason == dog[0]


def test_the_models_own_end_token_is_no_stop_reason(tokenizer: Tokenizer) -> None:
    end, pad = tokenizer.eos_token_ids
    for token, params, expected in [
        (end, SamplingParams(), None),
        (pad, SamplingParams(), pad),
        (end, SamplingParams(stop_token_ids=[end]), end),
    ]:
        processor = OutputProcessor(tokenizer, eos_token_ids=(end, pad))
        processor.add_request("r", None, [1], params)
        outputs, _ = feed(processor, [out("r", [token], finish_reason="stop", stop_reason=token)])
        assert outputs[0].outputs[0].stop_reason == expected


def test_n_final_only_waits_for_the_last_sequence() -> None:
    processor = OutputProcessor(None)
    processor.add_request("r", None, [1], SamplingParams(n=2, output_kind=FINAL_ONLY))
    outputs, _ = feed(processor, [out("r/1", [5], finish_reason="length"), out("r/0", [6])], [out("r/0", [7])])
    assert outputs == []
    outputs, _ = feed(processor, [out("r/0", [8], finish_reason="error", stop_reason="NaN")])
    (output,) = outputs
    assert output.finished and [c.index for c in output.outputs] == [0, 1]
    assert [c.token_ids for c in output.outputs] == [[6, 7, 8], [5]]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("error", "NaN")


def test_n_streams() -> None:
    for kind, expected in [(DELTA, [[[6]], [[7], [5]]]), (CUMULATIVE, [[[6], []], [[6, 7], [5]]])]:
        processor = OutputProcessor(None)
        processor.add_request("r", None, [1], SamplingParams(n=2, output_kind=kind))
        outputs, _ = feed(processor, [out("r/0", [6])], [out("r/0", [7]), out("r/1", [5])])
        assert [[c.token_ids for c in o.outputs] for o in outputs] == expected


def test_logprobs_have_the_sampled_token_first_and_add_up(tokenizer: Tokenizer) -> None:
    rows = [TokenLogprob([9, 3, 4], [-2.0, -0.5, -1.0], 7), TokenLogprob([3, 3, 4], [-0.25, -0.25, -1.5], 1)]
    for kind in RequestOutputKind:
        processor = OutputProcessor(tokenizer)
        processor.add_request("r", None, [1], SamplingParams(logprobs=2, output_kind=kind))
        outputs, _ = feed(
            processor, [out("r", [9], logprobs=rows[:1])], [out("r", [3], logprobs=rows[1:], finish_reason="length")]
        )
        completion = outputs[-1].outputs[0]
        assert completion.cumulative_logprob == -2.25
        assert completion.logprobs is not None
        first, last = completion.logprobs[0], completion.logprobs[-1]
        assert len(completion.logprobs) == (1 if kind is DELTA else 2)
        assert list(last) == [3, 4] and last[3].rank == 1 and last[3].decoded_token == tokenizer.token_text(3)
        if kind is not DELTA:
            assert list(first) == [9, 3, 4]
            assert [first[t].rank for t in first] == [7, 1, 2]


def test_without_tokenizer_texts_are_empty_and_stop_strings_are_refused() -> None:
    processor = OutputProcessor(None)
    with pytest.raises(RequestError, match="stop_token_ids"):
        processor.add_request("r", None, [1], SamplingParams(stop="x"))
    processor.add_request("r", None, [1], SamplingParams(logprobs=0))
    outputs, _ = feed(processor, [out("r", [5], logprobs=[TokenLogprob([5], [-1.0], 1)], finish_reason="length")])
    completion = outputs[0].outputs[0]
    assert completion.text == "" and completion.logprobs is not None
    assert completion.logprobs[0][5].decoded_token is None


def test_detokenize_off(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add_request("r", None, [1], SamplingParams(detokenize=False))
    outputs, _ = feed(processor, [out("r", tokenizer.encode("fox"), finish_reason="length")])
    assert outputs[0].outputs[0].text == ""


def test_abort_ends_what_still_runs(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add_request("r", None, [1], SamplingParams(n=2, output_kind=FINAL_ONLY))
    feed(processor, [out("r/0", tokenizer.encode("x"), finish_reason="length"), out("r/1", tokenizer.encode("y"))])
    done = processor.abort(["r", "unknown"])
    assert done.abort_ids == ["r/1"]
    (output,) = done.outputs
    assert output.finished and [c.finish_reason for c in output.outputs] == ["length", "abort"]
    assert [c.text for c in output.outputs] == ["x", "y"]
    assert feed(processor, [out("r/1", [], finish_reason="abort")]) == ([], [])
    assert processor.abort(["r"]).outputs == []


def test_a_withdrawn_request_leaves_no_trace() -> None:
    processor = OutputProcessor(None)
    for name in ("a", "b", "c"):
        processor.add_request(name, None, [1], SamplingParams(n=2))
    with pytest.raises(RequestError, match="in use"):
        processor.add_request("b", None, [1], SamplingParams())
    processor.withdraw(["b", "c"])
    assert processor.num_unfinished == 1
    assert processor.add_request("b", None, [1], SamplingParams())[0].parent_index == 1
    processor.withdraw(["a"])
    assert processor.add_request("d", None, [1], SamplingParams())[0].parent_index == 2


def test_metrics_and_cached_tokens() -> None:
    processor = OutputProcessor(None)
    processor.add_request("r", None, [1], SamplingParams(n=2, output_kind=FINAL_ONLY))
    outputs, _ = feed(
        processor,
        [out("r/0", [1, 2], num_cached_tokens=16), out("r/1", [3], num_cached_tokens=32)],
        [out("r/0", [1], finish_reason="length"), out("r/1", [1], finish_reason="length")],
    )
    metrics = outputs[0].metrics
    assert outputs[0].num_cached_tokens == 16
    assert metrics is not None and metrics.num_generation_tokens == 5
    assert metrics.arrival_ts <= metrics.first_token_ts <= metrics.last_token_ts
    assert metrics.first_token_latency >= 0.0


def random_params(rng: np.random.Generator, tokenizer: Tokenizer | None) -> SamplingParams:
    kind = list(RequestOutputKind)[rng.integers(len(RequestOutputKind))]
    stop = "o" if tokenizer is not None and rng.random() < 0.3 else None
    return SamplingParams(n=int(rng.integers(1, 3)), output_kind=kind, stop=stop)


@pytest.mark.parametrize("seed", range(20))
def test_columns_say_what_their_outputs_say(seed: int, tokenizer: Tokenizer) -> None:
    """Random requests, ends and aborts: one front end takes columns, its twin every output by itself."""
    rng = np.random.default_rng(seed)
    of_engine = tokenizer if rng.random() < 0.6 else None
    twins = OutputProcessor(of_engine), OutputProcessor(of_engine)
    alive: list[str] = []
    req_ids: list[str] = []
    num_columns = num_requests = 0
    for step in range(200):
        if rng.random() < 0.1 and len(alive) < 12:
            params = random_params(rng, of_engine)
            made = [twin.add_request(f"q{num_requests}", None, [1], params) for twin in twins]
            num_requests += 1
            new = [message.req_id for message in made[0]]
            alive += new
            firsts = [out(req_id, [int(rng.integers(40))]) for req_id in new]
            done = [twin.process(firsts) for twin in twins]
            assert shown(done[0]) == shown(done[1])
            alive = [req_id for req_id in alive if req_id not in done[0].abort_ids]
        if rng.random() < 0.03 and num_requests:
            done = [twin.abort([f"q{num_requests - 1}"]) for twin in twins]
            assert shown(done[0]) == shown(done[1])
            alive = [req_id for req_id in alive if req_id not in done[0].abort_ids]
        if req_ids != alive and rng.random() < 0.9:
            # now and then the engine has not heard of an end yet
            req_ids = list(alive)
        if not req_ids:
            continue
        tokens = rng.integers(0, 40, len(req_ids))
        ending = np.flatnonzero(rng.random(len(req_ids)) < 0.02).tolist()
        special = {row: out(req_ids[row], [int(tokens[row])], finish_reason="length") for row in ending}
        outputs = EngineOutputs()
        outputs += TokenColumn(req_ids, tokens, step, special)
        num_columns += not special
        done = [twins[0].process(outputs), twins[1].process(list(outputs))]
        assert shown(done[0]) == shown(done[1]), step
        assert twins[0].num_generated_tokens == twins[1].num_generated_tokens
        gone = {req_ids[row] for row in ending} | set(done[0].abort_ids)
        alive = [req_id for req_id in alive if req_id not in gone]
    assert num_columns > 20, "too few columns without an end"


def shown(done: ProcessedOutputs) -> tuple[object, ...]:
    """Everything of a step that callers see, but the clock."""
    return done.abort_ids, [
        (o.request_id, o.finished, o.outputs, o.metrics and o.metrics.num_generation_tokens) for o in done.outputs
    ]
