"""Tiny random models written to disk by transformers, the numerical reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

SHAPE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 512,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-untied": ("qwen3", {"tie_word_embeddings": False}),
    "qwen3-bias": ("qwen3", {"attention_bias": True}),
}
CLASSES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


def reference_model(variant: str) -> PreTrainedModel:
    """Return a random transformers model in float32; every weight differs from its neutral value."""
    family, changes = VARIANTS[variant]
    config_cls, model_cls = CLASSES[family]
    config = config_cls(**{**SHAPE, **changes}, attn_implementation="eager")
    torch.manual_seed(sum(map(ord, variant)))
    model = model_cls(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        centre = 1.0 if "norm" in name else 0.0
        parameter.copy_(centre + torch.randn_like(parameter) * 0.15)
    return model


def write_folder(variant: str, folder: Path, **options: Any) -> PreTrainedModel:
    """Save `reference_model` as a Hugging Face folder and return it."""
    model = reference_model(variant)
    model.save_pretrained(folder, **options)
    return model
