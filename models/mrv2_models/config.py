"""`ModelConfig`: the part of a Hugging Face ``config.json`` that a model here is built from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch

from mrv2_models.errors import ModelFileError, UnsupportedModelError

ModelType = Literal["llama", "qwen3"]
RopeType = Literal["default", "linear", "llama3"]

PRESET_DIR = Path(__file__).parent / "presets"
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base frequency and how it is stretched to a longer context."""

    theta: float = 10_000.0
    rope_type: RopeType = "default"
    factor: float = 1.0
    # llama3 only: wavelengths below original/high keep their frequency, above original/low are divided by factor
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # llama3 only, in tokens
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and arithmetic of a decoder-only model; names as in the Hugging Face config."""

    name: str
    model_type: ModelType
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    # in tokens, before a linear rope factor
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    # bias on the q, k, v and o projections
    attention_bias: bool = False
    # bias on the gate, up and down projections
    mlp_bias: bool = False
    # dtype the weights were published in; what dtype="auto" means
    torch_dtype: str = "float32"
    bos_token_id: int | None = None
    # every id that ends a sequence
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_pretrained(cls, path: str | Path) -> ModelConfig:
        """Read ``config.json`` (and the eos ids of ``generation_config.json``) from a model folder.

        Raises `ModelFileError` for a missing or malformed file and `UnsupportedModelError` for a model
        that no family here implements.
        """
        folder = Path(path)
        raw = _read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        return cls.from_dict(
            raw,
            name=folder.resolve().name,
            source=str(folder / "config.json"),
            generation=_read_json(generation) if generation.exists() else None,
        )

    @classmethod
    def from_preset(cls, name: str) -> ModelConfig:
        """Read a named config that ships with this package (shape only, no weights)."""
        if name not in preset_names():
            raise ModelFileError(f"no preset named {name!r}; presets are {', '.join(preset_names())}")
        path = PRESET_DIR / f"{name}.json"
        return cls.from_dict(_read_json(path), name=name, source=str(path))

    @classmethod
    def from_dict(
        cls,
        raw: Mapping[str, Any],
        *,
        name: str,
        source: str = "config",
        generation: Mapping[str, Any] | None = None,
    ) -> ModelConfig:
        """Build a config from the keys of a ``config.json``; `source` names it in errors."""
        _refuse_unsupported(raw, source)

        def need(key: str) -> Any:
            if raw.get(key) is None:
                raise ModelFileError(f"{source}: key {key!r} is missing")
            return raw[key]

        num_heads = int(need("num_attention_heads"))
        num_kv_heads = int(raw.get("num_key_value_heads") or num_heads)
        hidden_size = int(need("hidden_size"))
        if num_heads % num_kv_heads:
            raise ModelFileError(
                f"{source}: num_attention_heads={num_heads} must be a multiple of num_key_value_heads={num_kv_heads}"
            )
        default_head_dim = 128 if raw["model_type"] == "qwen3" else hidden_size // num_heads
        head_dim = int(raw.get("head_dim") or default_head_dim)
        if head_dim % 2:
            raise ModelFileError(f"{source}: head_dim={head_dim} must be even for a rotary embedding")
        eos = (generation or {}).get("eos_token_id")
        return cls(
            name=name,
            model_type=cast(ModelType, raw["model_type"]),
            hidden_size=hidden_size,
            intermediate_size=int(need("intermediate_size")),
            num_hidden_layers=int(need("num_hidden_layers")),
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=int(need("vocab_size")),
            max_position_embeddings=int(need("max_position_embeddings")),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=_parse_rope(raw, source),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", False)),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            torch_dtype=_parse_dtype(raw, source),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=_as_ids(raw.get("eos_token_id") if eos is None else eos),
        )

    @property
    def max_model_len(self) -> int:
        """Longest context in tokens that the rotary embedding is made for."""
        stretch = self.rope.factor if self.rope.rope_type == "linear" else 1.0
        return int(self.max_position_embeddings * stretch)

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model; a tied embedding counts once."""
        hidden, head_dim = self.hidden_size, self.head_dim
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        attention = 2 * hidden * head_dim * (heads + kv_heads)
        attention += self.attention_bias * (head_dim * (heads + 2 * kv_heads) + hidden)
        attention += 2 * head_dim * (self.model_type == "qwen3")
        mlp = 3 * hidden * self.intermediate_size + self.mlp_bias * (2 * self.intermediate_size + hidden)
        embeddings = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_hidden_layers * (attention + mlp + 2 * hidden) + hidden

    def resolve_dtype(self, dtype: str | torch.dtype) -> torch.dtype:
        """Turn a dtype name, or "auto" for the published one, into a torch dtype."""
        if isinstance(dtype, torch.dtype):
            name = str(dtype).removeprefix("torch.")
        else:
            name = self.torch_dtype if dtype == "auto" else dtype
        if name not in DTYPES:
            raise UnsupportedModelError(f"dtype {name!r} is not supported; legal are 'auto', {', '.join(DTYPES)}")
        return DTYPES[name]


def preset_names() -> list[str]:
    """Return the names that `ModelConfig.from_preset` knows, sorted."""
    return sorted(path.stem for path in PRESET_DIR.glob("*.json"))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ModelFileError(f"{path} does not exist; a model folder holds config.json and *.safetensors")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelFileError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def _refuse_unsupported(raw: Mapping[str, Any], source: str) -> None:
    legal = get_args(ModelType)
    if raw.get("model_type") not in legal:
        raise UnsupportedModelError(
            f"{source}: model_type {raw.get('model_type')!r} is not implemented; families are {', '.join(legal)}"
        )
    layer_types = set(raw.get("layer_types") or ()) - {"full_attention"}
    refusals = {
        "quantization_config": raw.get("quantization_config") is not None,
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "use_sliding_window": bool(raw.get("use_sliding_window", False)),
        "layer_types": bool(layer_types),
        "partial_rotary_factor": raw.get("partial_rotary_factor", 1.0) != 1.0,
        "mlp_bias": raw["model_type"] == "qwen3" and bool(raw.get("mlp_bias", False)),
    }
    for key, refused in refusals.items():
        if refused:
            raise UnsupportedModelError(
                f"{source}: {key}={raw.get(key)!r} is not implemented for {raw['model_type']}; "
                "only unquantised SiLU models with full attention and full rotary embedding are"
            )


def _parse_rope(raw: Mapping[str, Any], source: str) -> RopeConfig:
    params = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(params, Mapping) or any(isinstance(value, Mapping) for value in params.values()):
        raise UnsupportedModelError(f"{source}: rope parameters must be one flat object, found {params!r}")
    rope_type = params.get("rope_type") or params.get("type") or "default"
    if rope_type not in get_args(RopeType):
        raise UnsupportedModelError(
            f"{source}: rope type {rope_type!r} is not implemented; legal are {', '.join(get_args(RopeType))}"
        )
    if params.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(f"{source}: a partial rotary embedding is not implemented")
    needed = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }[rope_type]
    for key in needed:
        if params.get(key) is None:
            raise ModelFileError(f"{source}: rope type {rope_type!r} needs the key {key!r}")
    scaling: dict[str, Any] = {key: float(params[key]) for key in needed}
    if rope_type == "llama3":
        scaling["original_max_position_embeddings"] = int(params["original_max_position_embeddings"])
    theta = params.get("rope_theta") or raw.get("rope_theta") or 10_000.0
    return RopeConfig(theta=float(theta), rope_type=cast(RopeType, rope_type), **scaling)


def _parse_dtype(raw: Mapping[str, Any], source: str) -> str:
    name = str(raw.get("torch_dtype") or raw.get("dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModelError(f"{source}: torch_dtype {name!r} is not one of {', '.join(DTYPES)}")
    return name


def _as_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(token) for token in value) if isinstance(value, (list, tuple)) else (int(value),)
