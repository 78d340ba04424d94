"""EAGLE-3: the target's residual stream at three depths, fused, beside the next token's embedding.

    h      = fc(tap_1 | tap_2 | tap_3)                  first step; afterwards h is the layer's own output
    x      = attention(input_layernorm(embedding) | hidden_norm(h)) + h
    output = mlp(post_attention_layernorm(x)) + x;      logits = head(norm(output))

(Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test".)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mrv2_models.attention import AttentionMetadata
from mrv2_models.causal_lm import CausalLM
from mrv2_models.config import ModelConfig
from mrv2_models.drafters.config import DraftConfig
from mrv2_models.drafters.head import DraftHead
from mrv2_models.kv_cache import LayerCache
from mrv2_models.layers import GatedMLP, Linear, Placement, RMSNorm, WeightSource
from mrv2_models.llama import LlamaAttention


class Eagle3Attention(LlamaAttention):
    """Attention whose queries, keys and values read two hidden states side by side."""

    # cos_sin [L, D]
    def __init__(self, config: ModelConfig, cos_sin: torch.Tensor, place: Placement) -> None:
        super().__init__(config, cos_sin, place)
        self.qkv = Linear(2 * config.hidden_size, self.qkv.outputs, split="column", bias=False, place=place)


class Eagle3Head(DraftHead):
    """An EAGLE-3 draft head."""

    # cos_sin [L, D]
    def __init__(self, config: DraftConfig, target: CausalLM, cos_sin: torch.Tensor) -> None:
        super().__init__(config, target, cos_sin)
        place, hidden, eps = self.place, config.hidden_size, config.rms_norm_eps
        taps = len(config.aux_layer_ids)
        self.fuse = Linear(taps * hidden, {"fc": (hidden, 1)}, split="column", bias=False, place=place)
        self.input_norm = RMSNorm(hidden, eps, place)
        self.hidden_norm = RMSNorm(hidden, eps, place)
        self.attention = Eagle3Attention(config.layer_config(), cos_sin, place)
        self.post_norm = RMSNorm(hidden, eps, place)
        self.mlp = GatedMLP(hidden, config.intermediate_size, bias=False, place=place)

    # tapped [T, taps * H], final [T, H] -> [T, H]
    @torch.no_grad()
    def features(self, tapped: torch.Tensor | None, final: torch.Tensor) -> torch.Tensor:
        """Fuse the tapped layers."""
        assert tapped is not None, "an EAGLE-3 head needs the target's tapped layers"
        return self.fuse(tapped)

    @torch.no_grad()
    def forward(
        self,
        # [T] int32
        input_ids: torch.Tensor,
        # [T, H]
        features: torch.Tensor,
        # [T] int32
        positions: torch.Tensor,
        attn: AttentionMetadata,
        kv_cache: LayerCache,
    ) -> torch.Tensor:
        """See `DraftHead.forward`."""
        both = torch.cat([self.input_norm(self.embed(input_ids)), self.hidden_norm(features)], dim=-1)
        x, residual = self.post_norm.add(self.attention(both, positions, attn, kv_cache), features)
        return self.mlp(x) + residual

    def weight_sources(self) -> Iterator[WeightSource]:
        """Yield every tensor of the head's checkpoint but ``d2t``."""
        for source in self.fuse.weight_sources(""):
            yield WeightSource("fc.weight", source.shape, source.keep, source.dest, source.mean, source.std)
        yield from self.input_norm.weight_sources("midlayer.input_layernorm")
        yield from self.hidden_norm.weight_sources("midlayer.hidden_norm")
        yield from self.attention.weight_sources("midlayer.self_attn")
        yield from self.post_norm.weight_sources("midlayer.post_attention_layernorm")
        yield from self.mlp.weight_sources("midlayer.mlp")
        yield from super().weight_sources()
