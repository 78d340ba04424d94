"""Multi-token prediction: one more layer of the target, fed its final hidden state and the next token.

    x      = eh_proj(enorm(embedding of the next token) | hnorm(h))     h: the target's final normed hidden state;
    output = decoder_layer(x);  logits = head(norm(output))            afterwards the layer's own output

(DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2, with one module.)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mrv2_models.attention import AttentionMetadata
from mrv2_models.causal_lm import CausalLM, DecoderLayer
from mrv2_models.drafters.config import DraftConfig
from mrv2_models.drafters.head import DraftHead
from mrv2_models.kv_cache import LayerCache
from mrv2_models.layers import Linear, RMSNorm, WeightSource, whole
from mrv2_models.llama import LlamaAttention


class MTPHead(DraftHead):
    """A multi-token-prediction head in DeepSeek's layout."""

    # cos_sin [L, D]
    def __init__(self, config: DraftConfig, target: CausalLM, cos_sin: torch.Tensor) -> None:
        super().__init__(config, target, cos_sin)
        place, hidden, eps = self.place, config.hidden_size, config.rms_norm_eps
        self.embedding_norm = RMSNorm(hidden, eps, place)
        self.hidden_norm = RMSNorm(hidden, eps, place)
        self.join = Linear(2 * hidden, {"eh_proj": (hidden, 1)}, split="column", bias=False, place=place)
        layer = config.layer_config()
        self.layer = DecoderLayer(layer, LlamaAttention(layer, cos_sin, place), place)

    # tapped [T, taps * H], final [T, H] -> [T, H]
    def features(self, tapped: torch.Tensor | None, final: torch.Tensor) -> torch.Tensor:
        """Take the final normed hidden states as they are."""
        return final

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
        both = torch.cat([self.embedding_norm(self.embed(input_ids)), self.hidden_norm(features)], dim=-1)
        x, residual = self.layer(self.join(both), None, positions, attn, kv_cache)
        return x if residual is None else whole(x, residual.dtype) + residual

    def weight_sources(self) -> Iterator[WeightSource]:
        """Yield every tensor of the head's checkpoint but ``d2t``."""
        yield from self.embedding_norm.weight_sources("enorm")
        yield from self.hidden_norm.weight_sources("hnorm")
        for source in self.join.weight_sources(""):
            yield WeightSource("eh_proj.weight", source.shape, source.keep, source.dest, source.mean, source.std)
        yield from self.layer.weight_sources("layer")
        yield from super().weight_sources()
