"""`ModelConfig`: what is read from a Hugging Face folder, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mrv2_models.config import ModelConfig, preset_names
from mrv2_models.errors import ModelFileError, UnsupportedModelError
from mrv2_models.registry import available_models, resolve_model

LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
}


def make(**changes: object) -> ModelConfig:
    return ModelConfig.from_dict(LLAMA | changes, name="made")


def test_the_qwen3_preset_is_the_published_shape() -> None:
    config = ModelConfig.from_preset("qwen3-0.6b")
    assert config.head_dim == 128
    assert config.num_attention_heads * config.head_dim == 2 * config.hidden_size
    assert config.rope.theta == 1e6
    assert config.num_parameters == 596_049_920
    assert config.resolve_dtype("auto") == torch.bfloat16


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_a_model_that_can_be_named(name: str) -> None:
    found = resolve_model(name)
    assert found.folder is None
    assert found.config == ModelConfig.from_preset(name)
    info = {model.name: model for model in available_models()}[name]
    assert (info.kind, info.num_parameters) == ("preset", found.config.num_parameters)


def test_defaults_follow_the_hugging_face_classes() -> None:
    config = make()
    assert config.head_dim == 32
    assert config.rope.theta == 10_000.0
    assert config.rms_norm_eps == 1e-6
    assert not (config.tie_word_embeddings or config.attention_bias or config.mlp_bias)
    assert make(num_key_value_heads=None).num_key_value_heads == 4
    assert make(model_type="qwen3").head_dim == 128


@pytest.mark.parametrize("generation, expected", [([2, 0], (2, 0)), (7, (7,)), (None, (2, 3))])
def test_end_ids_come_from_the_generation_config_first(tmp_path: Path, generation: object, expected: tuple) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": [2, 3]}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    config = ModelConfig.from_pretrained(tmp_path)
    assert config.eos_token_ids == expected
    assert config.name == tmp_path.name


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
        {"rope_theta": 1.0, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
    ],
)
def test_rope_is_read_from_old_and_new_keys(keys: dict) -> None:
    config = make(**keys)
    assert (config.rope.rope_type, config.rope.theta, config.rope.factor) == ("linear", 5e5, 4.0)
    assert config.max_model_len == 4096


@pytest.mark.parametrize("rope_type", ["yarn", "dynamic", "longrope", "proportional"])
def test_other_rope_types_are_refused_by_name(rope_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"'{rope_type}' is not implemented; legal are default, linear"):
        make(rope_scaling={"rope_type": rope_type, "factor": 2.0})


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"model_type": "mamba2"}, "'mamba2' is not implemented; families are llama, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial rotary"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "one flat object"),
        ({"model_type": "qwen3", "mlp_bias": True}, "mlp_bias=True"),
        ({"torch_dtype": "float8_e4m3fn"}, "'float8_e4m3fn'"),
    ],
)
def test_what_is_not_implemented_is_refused(keys: dict, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        make(**keys)


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"vocab_size": None}, "key 'vocab_size' is missing"),
        ({"num_attention_heads": 5}, "num_attention_heads=5 must be a multiple of num_key_value_heads=2"),
        ({"head_dim": 33}, "head_dim=33 must be even"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3' needs the key 'low_freq_factor'"),
    ],
)
def test_a_config_that_cannot_be_built_is_a_file_error(keys: dict, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        make(**keys)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="config.json does not exist"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelFileError, match="config.json is not valid JSON"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelFileError, match="must hold a JSON object"):
        ModelConfig.from_pretrained(tmp_path)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ModelFileError, match=r"no model 'gpt-5'.*smollm2-135m-instruct.*qwen3-0\.6b"):
        resolve_model("gpt-5")
