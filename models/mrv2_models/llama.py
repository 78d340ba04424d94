"""The Llama family: Llama 2 and 3, SmolLM2, and whatever else says ``"model_type": "llama"``."""

from __future__ import annotations

from typing import ClassVar

import torch

from mrv2_kernels.layers import rotary_embedding
from mrv2_models.causal_lm import CausalLM, SelfAttention


class LlamaAttention(SelfAttention):
    """Rotary embedding on queries and keys."""

    # q [T, Hq, D], k [T, Hkv, D], positions [T] int32
    def rotate(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> None:
        rotary_embedding(q, k, self.cos_sin, positions)


class LlamaForCausalLM(CausalLM):
    """Llama: nothing beyond the shared decoder stack."""

    attention_cls: ClassVar[type[SelfAttention]] = LlamaAttention
