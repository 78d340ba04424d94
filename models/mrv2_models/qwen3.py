"""The dense Qwen3 family: a Llama whose query and key heads are normalised before they are rotated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from mrv2_kernels.layers import qk_norm_rope
from mrv2_models.causal_lm import CausalLM, SelfAttention
from mrv2_models.config import ModelConfig
from mrv2_models.layers import Placement, RMSNorm, WeightSource


class Qwen3Attention(SelfAttention):
    """RMSNorm over each head of the queries and keys, then the rotary embedding, in one kernel."""

    def __init__(self, config: ModelConfig, cos_sin: torch.Tensor, place: Placement) -> None:
        super().__init__(config, cos_sin, place)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, place)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, place)

    # q [T, Hq, D], k [T, Hkv, D], positions [T] int32
    def rotate(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> None:
        q_norm, k_norm = self.q_norm, self.k_norm
        qk_norm_rope(q, k, q_norm.weight, k_norm.weight, q_norm.eps, self.cos_sin, positions)

    def head_norms(self) -> tuple[RMSNorm, RMSNorm]:
        """Return the norms of the queries' and of the keys' heads."""
        return self.q_norm, self.k_norm

    def weight_sources(self, prefix: str) -> Iterator[WeightSource]:
        """Yield the checkpoint tensors under ``<prefix>``."""
        yield from super().weight_sources(prefix)
        yield from self.q_norm.weight_sources(f"{prefix}.q_norm")
        yield from self.k_norm.weight_sources(f"{prefix}.k_norm")


class Qwen3ForCausalLM(CausalLM):
    """Qwen3 (dense)."""

    attention_cls: ClassVar[type[SelfAttention]] = Qwen3Attention
