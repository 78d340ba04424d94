"""Structured output through `LLM`, in every place an engine can run, and with real weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from grammar.serving import CONSTRAINTS, PERSON
from grammar.toy import write_toy_tokenizer
from mrv2 import LLM, ConfigError, RequestError, SamplingParams, StructuredOutputsParams

OPTIONS: dict[str, Any] = {"device": "host", "max_model_len": 160, "num_gpu_blocks": 64, "max_num_seqs": 8}


@pytest.mark.parametrize("place", ["inproc", "thread", "process"])
def test_generate_accepts_every_kind_wherever_the_engine_runs(place: Any, tmp_path: Path) -> None:
    with LLM("tiny-llama", engine=place, tokenizer=write_toy_tokenizer(tmp_path), **OPTIONS) as llm:
        params = [SamplingParams(seed=i, max_tokens=60, structured_outputs=c.params) for i, c in enumerate(CONSTRAINTS)]
        outputs = llm.generate(["ab"] * len(params), params, use_tqdm=False)
        for constraint, output in zip(CONSTRAINTS, outputs, strict=True):
            assert output.outputs[0].finish_reason == "stop"
            assert constraint.accepts(output.outputs[0].text), output.outputs[0].text
        with pytest.raises(RequestError, match="#/uniqueItems"):
            llm.generate("a", SamplingParams(structured_outputs={"json": {"type": "array", "uniqueItems": True}}))
        assert llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)[0].finished


def test_n_samples_and_streams_follow_the_grammar_each(tmp_path: Path) -> None:
    with LLM("tiny-llama", tokenizer=write_toy_tokenizer(tmp_path), **OPTIONS) as llm:
        params = SamplingParams(n=3, seed=5, max_tokens=60, structured_outputs={"regex": "[a-k]{2,6}!"})
        texts = [c.text for c in llm.generate("ab", params, use_tqdm=False)[0].outputs]
        assert len(set(texts)) > 1 and all(text.endswith("!") for text in texts)
        pieces = [output.outputs[0].text for output in llm.stream("ab", params.replace(n=1))]
        assert "".join(pieces).endswith("!")


def test_the_library_is_loaded_with_the_engine_when_it_is_named(tmp_path: Path) -> None:
    folder = write_toy_tokenizer(tmp_path)
    with LLM("tiny-llama", tokenizer=folder, structured_outputs_config={"backend": "xgrammar"}, **OPTIONS) as llm:
        assert llm.client.core.grammars.compiler._backend is not None  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="guidance.* is not supported; legal values: 'auto', 'xgrammar'"):
        LLM("tiny-llama", tokenizer=folder, structured_outputs_config={"backend": "guidance"}, **OPTIONS)
    with pytest.raises(ConfigError, match="'reasoning_parser' is not supported"):
        LLM("tiny-llama", tokenizer=folder, structured_outputs_config={"reasoning_parser": "x"}, **OPTIONS)


@pytest.mark.slow
def test_chat_with_real_weights_answers_in_the_form() -> None:
    """SmolLM2 with its own tokenizer: half of the requests must be JSON, half are free."""
    properties = {**PERSON["properties"], "job": {"enum": ["baker", "pilot"]}}  # type: ignore[dict-item]
    schema = {**PERSON, "properties": properties, "required": [*PERSON["required"], "job"]}
    bound = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    messages = [[{"role": "user", "content": f"Describe person {i}."}] for i in range(8)]
    params = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=64, structured_outputs=bound if i % 2 else None)
        for i in range(8)
    ]
    with LLM("smollm2-135m-instruct", device="host", dtype="float32", max_model_len=256, max_num_seqs=8) as llm:
        outputs = llm.chat(messages, params, use_tqdm=False)
    for output in outputs[1::2]:
        assert output.outputs[0].finish_reason == "stop", output
        jsonschema.validate(json.loads(output.outputs[0].text), schema)
    assert all(output.outputs[0].text for output in outputs[::2])
