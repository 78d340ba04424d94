"""From a name, a folder or a config to a loaded model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from mrv2_kernels.gemm.fp8 import MIN_CAPABILITY
from mrv2_models import smollm2
from mrv2_models.causal_lm import CausalLM
from mrv2_models.config import ModelConfig, ModelType, preset_names
from mrv2_models.errors import ModelFileError, UnsupportedModelError
from mrv2_models.layers import Placement, Quantization
from mrv2_models.llama import LlamaForCausalLM
from mrv2_models.parallel import Shard
from mrv2_models.qwen3 import Qwen3ForCausalLM
from mrv2_models.rope import cos_sin_table
from mrv2_models.weights import fill_random, load_weights

LoadFormat = Literal["auto", "dummy"]

FAMILIES: dict[ModelType, type[CausalLM]] = {"llama": LlamaForCausalLM, "qwen3": Qwen3ForCausalLM}
# names of models whose real weights can be fetched, and how
FETCHABLE: dict[str, Callable[[], Path]] = {smollm2.MODEL_NAME: smollm2.ensure_smollm2}


@dataclass(frozen=True)
class ResolvedModel:
    """A model that was found: its config and, if it has weights and a tokenizer, its folder."""

    config: ModelConfig
    folder: Path | None


@dataclass(frozen=True)
class ModelInfo:
    """One line of the list of models that can be named."""

    name: str
    model_type: ModelType
    num_parameters: int
    # "preset": shape only, random weights; "fetch": real weights, downloaded and converted on first use
    kind: Literal["preset", "fetch"]


def resolve_model(model: str | Path | ModelConfig) -> ResolvedModel:
    """Find a model: a config as given, a folder, a fetchable name (fetched if need be) or a preset.

    Raises `ModelFileError` with the legal names if there is no such model.
    """
    if isinstance(model, ModelConfig):
        return ResolvedModel(model, None)
    if Path(model).is_dir():
        return ResolvedModel(ModelConfig.from_pretrained(model), Path(model))
    if model in FETCHABLE:
        folder = FETCHABLE[str(model)]()
        return ResolvedModel(ModelConfig.from_pretrained(folder), folder)
    if model in preset_names():
        return ResolvedModel(ModelConfig.from_preset(str(model)), None)
    raise ModelFileError(
        f"no model {str(model)!r}: neither a folder, nor a fetchable model ({', '.join(FETCHABLE)}), "
        f"nor a preset ({', '.join(preset_names())})"
    )


def load_model(
    model: str | Path | ModelConfig,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    load_format: LoadFormat = "auto",
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    max_model_len: int | None = None,
    quantization: Quantization | None = None,
) -> CausalLM:
    """Build a model and fill its weights.

    Args:
        model: config, folder, fetchable name or preset, see `resolve_model`.
        dtype: of weights and activations; "auto" = the published one.
        load_format: "auto" reads the folder's safetensors, "dummy" draws random weights from `seed`.
        rank, world_size: the tensor-parallel part to hold; more than one rank communicates over the
            default process group of ``torch.distributed``.
        max_model_len: longest context in tokens; by default the longest that the config allows.
        quantization: "fp8" keeps the weights of the layers' products as 8-bit floats, quantised while they are read;
            embeddings, head, norms and activations stay in `dtype`.

    Raises:
        ModelFileError: no such model, or its files do not fit its config.
        UnsupportedModelError: the config needs something that is not implemented.
        ShardError: a dimension does not divide over the ranks.
        ValueError: `max_model_len` is out of range.
    """
    if load_format not in get_args(LoadFormat):
        raise ValueError(f"load_format={load_format!r} must be one of {', '.join(get_args(LoadFormat))}")
    found = resolve_model(model)
    config = found.config
    if load_format == "auto" and found.folder is None:
        raise ModelFileError(
            f"{config.name!r} is a shape without weights: pass load_format='dummy' for random ones, "
            "or the path of a model folder"
        )
    length = config.max_model_len if max_model_len is None else max_model_len
    if not 1 <= length <= config.max_model_len:
        raise ValueError(f"max_model_len={length} must be in 1..{config.max_model_len}, what {config.name!r} allows")
    target = torch.device(device)
    torch_dtype = config.resolve_dtype(dtype)
    if target.type == "cuda" and torch_dtype == torch.float64:
        raise UnsupportedModelError("dtype float64 runs on the CPU only; on CUDA use float32, bfloat16 or float16")
    if quantization not in (None, *get_args(Quantization)):
        raise ValueError(f"quantization={quantization!r} must be None or one of {', '.join(get_args(Quantization))}")
    if quantization == "fp8" and target.type == "cuda" and torch.cuda.get_device_capability(target) < MIN_CAPABILITY:
        raise UnsupportedModelError(
            f"quantization='fp8' needs compute capability {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}, "
            f"{torch.cuda.get_device_name(target)} has less; leave it out"
        )
    place = Placement(torch_dtype, target, Shard(rank, world_size), quantization)
    # angles keep at least float32 precision: half types would blur positions beyond a few hundred
    table_dtype = torch.float64 if place.dtype == torch.float64 else torch.float32
    cos_sin = cos_sin_table(config.rope, config.head_dim, length).to(table_dtype).to(target)
    loaded = FAMILIES[config.model_type](config, cos_sin, place)
    if load_format == "dummy":
        fill_random(loaded, seed)
    else:
        assert found.folder is not None, "load_format='auto' without a folder was refused above"
        load_weights(loaded, found.folder)
    return loaded.eval()


def available_models() -> list[ModelInfo]:
    """Return every model that can be named: the fetchable ones first, then the presets."""
    fetchable = [_model_info(name, smollm2.SHAPE_PRESET, "fetch") for name in FETCHABLE]
    return fetchable + [_model_info(name, name, "preset") for name in preset_names()]


def _model_info(name: str, preset: str, kind: Literal["preset", "fetch"]) -> ModelInfo:
    config = ModelConfig.from_preset(preset)
    return ModelInfo(name, config.model_type, config.num_parameters, kind)
