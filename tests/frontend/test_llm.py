"""`LLM` over a scripted core that echoes the prompt: forms of prompts, order, errors, streams, threads."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest

from frontend.fake_core import CRASH_TOKEN, INTERRUPT_TOKEN, FakeCore, fake_core, fake_core_of_three
from mrv2 import LLM, ConfigError, EngineDeadError, RequestError, SamplingParams
from mrv2.engine.client import InprocClient
from mrv2.prompts import parse_prompts

TEN = SamplingParams(max_tokens=10, ignore_eos=True)


def core_of(llm: LLM) -> FakeCore:
    assert isinstance(llm.client, InprocClient)
    return llm.client._service.core  # type: ignore[return-value]


def test_forms_of_prompts(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("the fox")
    forms: list[Any] = ["the fox", {"prompt": "the fox"}, ids, {"prompt_token_ids": ids}]
    params = SamplingParams(max_tokens=len(ids))
    for form in forms:
        (output,) = llm.generate(form, params, use_tqdm=False)
        assert output.prompt_token_ids == ids and output.outputs[0].text == "the fox"
        assert output.prompt == (None if form in forms[2:] else "the fox")
    outputs = llm.generate(forms, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [ids] * 4
    assert llm.generate([], params) == []


@pytest.mark.parametrize(
    "prompt, message",
    [
        (7, "a list of integers"),
        ([1, "x"], "must be a str|integers"),
        ([[1.5]], "integers"),
        ({"text": "x"}, "prompt key 'text'"),
        ({"prompt_token_idz": [1]}, "did you mean 'prompt_token_ids'"),
        ({}, "must be a str"),
        ([None], "must be a str"),
    ],
)
def test_bad_prompts_are_refused(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, TEN, use_tqdm=False)
    assert core_of(llm).admitted == []


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    lengths = [9, 1, 5, 3, 7]
    params = [SamplingParams(max_tokens=n) for n in lengths]
    outputs = llm.generate([[10 + n] for n in lengths], params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [[10 + n] * n for n in lengths]
    assert all(o.finished for o in outputs)


def test_params_and_priorities_must_fit_the_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 sampling_params for 3 prompts"):
        llm.generate([[1], [2], [3]], [TEN, TEN], use_tqdm=False)
    with pytest.raises(RequestError, match="0 sampling_params"):
        llm.generate([[1]], [], use_tqdm=False)
    with pytest.raises(RequestError, match="must be SamplingParams, not str"):
        llm.generate([[1]], ["x"], use_tqdm=False)  # type: ignore[list-item]
    with pytest.raises(RequestError, match="one integer for each of 2"):
        llm.generate([[1], [2]], TEN, use_tqdm=False, priority=[1])
    llm.generate([[1], [2]], TEN, use_tqdm=False, priority=[3, -4])
    assert [r.priority for r in core_of(llm).admitted] == [3, -4]


def test_no_params_means_the_models_own(llm: LLM) -> None:
    llm.generate([[1]], use_tqdm=False)
    params = core_of(llm).admitted[0].params
    assert (params.temperature, params.top_k, params.max_tokens) == (0.6, 20, 16)


def test_a_refused_request_disturbs_nothing(model_folder: Path) -> None:
    with LLM(model_folder, core_factory=fake_core, max_model_len=50) as llm:
        with pytest.raises(RequestError, match="too long"):
            llm.generate([[1], [2] * 50], TEN, use_tqdm=False)
        stream = llm.stream([5, 6], TEN)
        next(stream)
        with pytest.raises(RequestError, match="too long"):
            llm.stream([2] * 50, TEN)
        assert len(list(stream)) == 9
        assert llm.generate([[3]], TEN, use_tqdm=False)[0].outputs[0].token_ids == [3] * 10
        served = [r for r in core_of(llm).admitted if r.prompt_token_ids in ([5, 6], [3])]
        assert [r.parent_index for r in served] == [0, 1], "a refused request must not shift the seeds of others"


def test_an_exception_inside_generate_aborts_what_it_submitted(llm: LLM) -> None:
    class Broken:
        def __init__(self, **options: Any) -> None:
            self.format_dict = {"elapsed": 1.0}

        def set_postfix_str(self, text: str, refresh: bool) -> None:
            raise OSError("terminal gone")

        def close(self) -> None: ...

    params = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=10**6)]
    with pytest.raises(OSError, match="terminal gone"):
        llm.generate([[1], [2]], params, use_tqdm=Broken)  # type: ignore[arg-type]
    assert core_of(llm).running == {}
    assert llm.generate([[3]], TEN, use_tqdm=False)[0].outputs[0].token_ids == [3] * 10
    assert llm._mailboxes == {}


def test_ctrl_c_ends_generate_and_leaves_the_engine_usable(llm: LLM) -> None:
    stream = llm.stream([7], TEN)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[INTERRUPT_TOKEN]], TEN, use_tqdm=False)
    assert len([token for output in stream for token in output.outputs[0].token_ids]) == 10
    assert core_of(llm).running == {} and llm._mailboxes == {}


def test_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([[1], [2]], TEN)
    shown = capsys.readouterr().err
    assert "2/2" in shown and "tok/s" in shown


def test_chat(llm: LLM) -> None:
    message = [{"role": "user", "content": "fox"}]
    (output,) = llm.chat(message, TEN, use_tqdm=False)
    assert output.prompt == "<|start|>user\nfox<|end|>\n<|start|>assistant\n"
    assert output.prompt_token_ids == llm.get_tokenizer().encode(output.prompt, add_special_tokens=False)
    outputs = llm.chat([message, message], TEN, False, chat_template="{{ name }}", chat_template_kwargs={"name": "x"})
    assert [o.prompt for o in outputs] == ["x", "x"]
    with pytest.raises(RequestError, match="at least one message"):
        llm.chat([], TEN, use_tqdm=False)


def test_streams_can_be_interleaved_with_everything_else(llm: LLM) -> None:
    first, second = llm.stream([1, 2], TEN), llm.stream("the fox", SamplingParams(max_tokens=4), cumulative=True)
    assert next(first).outputs[0].token_ids == [1]
    llm.generate([[9]], SamplingParams(max_tokens=30), use_tqdm=False)
    assert [t for o in first for t in o.outputs[0].token_ids] == [2, 1, 2, 1, 2, 1, 2, 1, 2]
    assert [len(o.outputs[0].token_ids) for o in second] == [1, 2, 3, 4]
    with pytest.raises(StopIteration):
        next(first)


def test_closing_or_dropping_a_stream_aborts_it(llm: LLM) -> None:
    with llm.stream([1], SamplingParams(max_tokens=10**6)) as stream:
        next(stream)
    assert core_of(llm).aborted == [stream.request_id] and list(stream) == []
    dropped = llm.stream([1], SamplingParams(max_tokens=10**6))
    request_id = dropped.request_id
    next(dropped)
    del dropped
    gc.collect()
    llm.generate([[2]], TEN, use_tqdm=False)
    assert core_of(llm).aborted[-1] == request_id


def test_abort_from_outside_ends_the_output(llm: LLM) -> None:
    stream = llm.stream([1], SamplingParams(max_tokens=10**6))
    next(stream)
    llm.abort(stream.request_id)
    *_, last = stream
    assert last.finished and last.outputs[0].finish_reason == "abort"
    llm.abort(["no such request"])


@pytest.mark.parametrize("factory", [fake_core, fake_core_of_three])
def test_stop_strings_end_the_sequence_in_the_engine_too(model_folder: Path, factory: Any) -> None:
    with LLM(model_folder, core_factory=factory) as llm:
        params = SamplingParams(stop=["x 你"], max_tokens=500)
        (output,) = llm.generate("fox 你好 dog", params, use_tqdm=False)
        assert output.outputs[0].text == "fo" and output.outputs[0].stop_reason == "x 你"
        assert core_of(llm).running == {}
        streamed = list(llm.stream("fox 你好 dog", params))
        assert "".join(o.outputs[0].text for o in streamed) == "fo"
        assert streamed[-1].outputs[0].finish_reason == "stop"


def test_the_end_token_ends_a_sequence_unless_ignored(llm: LLM) -> None:
    end = llm.get_tokenizer().eos_token_ids[0]
    ended, ignored = llm.generate([[5, end, 6]] * 2, [TEN.replace(ignore_eos=False), TEN], use_tqdm=False)
    assert ended.outputs[0].token_ids == [5, end]
    assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", None)
    assert ignored.outputs[0].token_ids == [5, end, 6, 5, end, 6, 5, end, 6, 5]


def test_a_preset_has_no_tokenizer() -> None:
    with LLM("tiny-llama", core_factory=fake_core) as llm:
        with pytest.raises(RequestError, match="prompts as token ids"):
            llm.generate("text", TEN, use_tqdm=False)
        with pytest.raises(RequestError, match="without a tokenizer"):
            llm.chat([{"role": "user", "content": "x"}], TEN)
        assert llm.generate([1, 2], TEN, use_tqdm=False)[0].outputs[0].text == ""
        assert core_of(llm).admitted[0].eos_token_ids == (2,)


def test_options_reach_the_engine_and_bad_ones_fail_before_it_loads(model_folder: Path) -> None:
    def never(config: Any) -> FakeCore:
        raise AssertionError("the engine must not be loaded")

    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
        LLM(model_folder, core_factory=never, max_num_sequences=3)
    with pytest.raises(ConfigError, match="did you mean 'tokenizer'"):
        LLM(model_folder, core_factory=never, tokeniser="x")
    with LLM(model_folder, core_factory=fake_core, enforce_eager=True, max_num_seqs=3) as llm:
        assert llm.config.max_num_seqs == 3 and llm.config.knobs.cuda_graphs == "off"
        assert llm.set(runner="v1").runner == "v1"
        assert llm.snapshot().knobs["runner"] == "v1"


@pytest.mark.parametrize("place", ["inproc", "thread", "process"])
def test_every_place_serves_and_dies_alike(model_folder: Path, place: Any) -> None:
    with LLM(model_folder, engine=place, core_factory=fake_core) as llm:
        (output,) = llm.generate("the fox", SamplingParams(max_tokens=3, n=2, logprobs=1), use_tqdm=False)
        assert [len(c.token_ids) for c in output.outputs] == [3, 3]
        assert "".join(o.outputs[0].text for o in llm.stream("fox", SamplingParams(max_tokens=2)))
        with pytest.raises(EngineDeadError, match="scripted crash"):
            llm.generate([[CRASH_TOKEN]], TEN, use_tqdm=False)
        with pytest.raises(EngineDeadError, match="scripted crash"):
            llm.generate([[1]], TEN, use_tqdm=False)
        assert llm._mailboxes == {}


@pytest.mark.parametrize("place", ["inproc", "thread"])
def test_several_threads_share_one_engine(model_folder: Path, place: Any) -> None:
    with LLM(model_folder, engine=place, core_factory=fake_core) as llm:
        results: dict[int, list[int]] = {}

        def work(number: int) -> None:
            for _ in range(5):
                (output,) = llm.generate([[number]], TEN, use_tqdm=False)
                results.setdefault(number, []).extend(output.outputs[0].token_ids)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert results == {n: [n] * 50 for n in range(6)}


def test_an_abort_wakes_a_generate_in_another_thread(model_folder: Path) -> None:
    with LLM(model_folder, engine="thread", core_factory=fake_core) as llm:
        results: list[Any] = []
        thread = threading.Thread(
            target=lambda: results.extend(llm.generate([[1]], SamplingParams(max_tokens=10**9), use_tqdm=False))
        )
        thread.start()
        while not llm.snapshot().num_running:
            assert thread.is_alive(), "generate ended by itself"
        llm.abort("0")
        thread.join(10)
        assert results[0].outputs[0].finish_reason == "abort"


def test_a_lost_output_is_an_error_not_a_hang(llm: LLM) -> None:
    stream = llm.stream([1], SamplingParams(max_tokens=10**6))
    core_of(llm).running.clear()
    with pytest.raises(EngineDeadError, match="its last output was lost"):
        next(stream)


def test_parse_prompts_takes_a_token_list_as_one_prompt() -> None:
    assert [p.token_ids for p in parse_prompts([1, 2], None)] == [[1, 2]]
    assert [p.token_ids for p in parse_prompts([[1, 2], [3]], None)] == [[1, 2], [3]]
    assert [p.token_ids for p in parse_prompts([[]], None)] == [[]]
