"""The option table: every name has an effect, or is refused with what is legal."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from mrv2 import ConfigError, EngineConfig, Knobs
from mrv2.options import FIXED, OPTIONS, build_config

DEFAULT = EngineConfig(model="m")
DEFAULT_KNOBS = Knobs()


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"enforce_eager": True}, {"knobs": DEFAULT_KNOBS.with_changes(cuda_graphs="off")}),
        ({"enforce_eager": False}, {}),
        ({"async_scheduling": False}, {"knobs": DEFAULT_KNOBS.with_changes(async_scheduling=False)}),
        ({"async_scheduling": None, "enable_prefix_caching": None}, {}),
        ({"compilation_config": {"cudagraph_mode": "NONE"}}, {"knobs": DEFAULT_KNOBS.with_changes(cuda_graphs="off")}),
        ({"compilation_config": {"cudagraph_mode": "full"}}, {}),
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"dtype": "float"}, {"dtype": "float32"}),
        ({"dtype": torch.bfloat16}, {"dtype": "bfloat16"}),
        ({"num_gpu_blocks_override": 77}, {"num_gpu_blocks": 77}),
        ({"load_format": "safetensors"}, {"load_format": "auto"}),
        ({"load_format": "dummy"}, {"load_format": "dummy"}),
        ({"gpu_memory_utilization": 1}, {"gpu_memory_utilization": 1}),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 64}, {"max_num_seqs": 8, "max_num_batched_tokens": 64}),
        ({"max_model_len": 100, "seed": 4, "block_size": 32}, {"max_model_len": 100, "seed": 4, "block_size": 32}),
        ({"scheduling_policy": "priority"}, {"scheduling_policy": "priority"}),
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8"}),
        ({"enable_chunked_prefill": False}, {"enable_chunked_prefill": False}),
        ({"skip_tokenizer_init": True}, {"skip_tokenizer_init": True}),
        ({"runner": "v1", "device": "host"}, {"knobs": DEFAULT_KNOBS.with_changes(runner="v1"), "device": "host"}),
        ({"knobs": Knobs(queue_depth=3), "runner": "v2"}, {"knobs": Knobs(queue_depth=3)}),
        ({"tensor_parallel_size": 1, "quantization": None, "trust_remote_code": False}, {}),
    ],
)
def test_options_reach_their_fields(given: dict, expected: dict) -> None:
    assert build_config("m", **given) == replace(DEFAULT, **expected)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"max_num_seq": 3}, "'max_num_seq'; did you mean 'max_num_seqs'"),
        ({"enforce_eagerly": True}, "did you mean 'enforce_eager'"),
        ({"tensor_parallel_size": 2}, "one device"),
        ({"speculative_config": {"method": "ngram"}}, "num_speculative_tokens"),
        ({"speculative_config": {"method": "medusa", "num_speculative_tokens": 2}}, "'medusa' is not supported"),
        ({"quantization": "awq"}, "'fp8'"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "'auto', 'fp8'"),
        ({"logits_processors": print}, "list of classes"),
        ({"trust_remote_code": True}, "never run"),
        ({"max_num_seqs": "3"}, "an integer"),
        ({"max_num_seqs": True}, "an integer"),
        ({"max_num_seqs": 0}, "at least 1"),
        ({"dtype": "int8"}, "'bfloat16'"),
        ({"load_format": "gguf"}, "'auto', 'dummy'"),
        ({"enforce_eager": 1}, "True or False"),
        ({"compilation_config": 3}, "cudagraph_mode"),
        ({"compilation_config": {"mode": 3}}, "'cudagraph_mode'"),
        ({"compilation_config": {"cudagraph_mode": "PIECEWISE"}}, "'NONE' and 'FULL'"),
        ({"enforce_eager": True, "cuda_graphs": "model"}, "enforce_eager and cuda_graphs contradict"),
        ({"num_gpu_blocks": 3, "num_gpu_blocks_override": 4}, "contradict"),
        ({"runner": "v3"}, "'v2', 'v1'"),
        ({"queue_depth": 9}, "1, 2, 3, 4"),
        ({"runner": "v1", "queue_depth": 4}, "queue_depth"),
        ({"knobs": {"runner": "v1"}}, "Knobs object"),
    ],
)
def test_what_is_not_legal_is_refused_with_what_is(given: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_config("m", **given)


def test_the_table_covers_every_field_and_no_name_twice() -> None:
    own = {f.name for f in fields(EngineConfig)} - {"model", "knobs"} | {f.name for f in fields(Knobs)}
    assert own <= set(OPTIONS)
    assert not set(OPTIONS) & set(FIXED)
    for option in OPTIONS.values():
        owner = Knobs if option.field.startswith("knobs.") else EngineConfig
        assert option.field.removeprefix("knobs.") in {f.name for f in fields(owner)}
