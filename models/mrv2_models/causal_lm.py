"""The decoder stack that every family shares, and the interface that runners see.

Legend: T tokens, N logits rows, V vocabulary, H hidden size, Hq / Hkv heads of this rank, D head_dim.
A forward makes no host-device synchronisation and takes no branch on device values, so it can run on
a device worker thread or under CUDA graph capture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from mrv2_models.attention import AttentionMetadata, attend, attend_fused
from mrv2_models.config import ModelConfig
from mrv2_models.kv_cache import KVCacheSpec, LayerCache
from mrv2_models.layers import (
    GatedMLP,
    Linear,
    Placement,
    RMSNorm,
    VocabEmbedding,
    WeightSource,
    share_workspace,
    whole,
)

if TYPE_CHECKING:
    from mrv2_models.model_state import ModelState


class SelfAttention(nn.Module):
    """Projections around paged attention; a family says how queries and keys learn their positions."""

    def __init__(self, config: ModelConfig, cos_sin: torch.Tensor, place: Placement) -> None:
        super().__init__()
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.num_heads = place.shard.divide(heads, "num_attention_heads")
        self.num_kv_heads = place.shard.divide(kv_heads, "num_key_value_heads")
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        # [L, D], shared by all layers
        self.cos_sin = cos_sin
        qkv = {"q_proj": (heads, head_dim), "k_proj": (kv_heads, head_dim), "v_proj": (kv_heads, head_dim)}
        bias = config.attention_bias
        self.qkv = Linear(config.hidden_size, qkv, split="column", bias=bias, place=place)
        self.o = Linear(heads * head_dim, {"o_proj": (config.hidden_size, 1)}, split="row", bias=bias, place=place)

    # q [T, Hq, D], k [T, Hkv, D], positions [T] int32
    def rotate(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> None:
        """Apply the family's head norms and rotary embedding, in place."""
        raise TypeError(f"{type(self).__name__} must define rotate()")

    def head_norms(self) -> tuple[RMSNorm, RMSNorm] | None:
        """Return the norms that `rotate` applies to the heads of queries and keys, of one eps, or None."""
        return None

    # x, residual [T, H] -> [T, H]
    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        attn: AttentionMetadata,
        kv_cache: LayerCache,
        *,
        norm: RMSNorm | None = None,
        residual: torch.Tensor | None = None,
        partial: bool = False,
    ) -> torch.Tensor:
        """Return the attention of `x`; with `norm` and `residual`, if it `fuses`, ``residual + attention(norm(x))``.

        If `partial`, what comes back may be partial sums ``[S, T, H]`` float32 (`whole` adds them).
        """
        attended = self.attend(self.qkv(x, norm=norm), positions, attn, kv_cache)
        return self.o(attended, residual=residual, partial=partial)

    # x [T, H] or [S, T, H] float32, residual [T, H] -> ([T, H] or [S, T, H] float32, [T, H])
    def of_sum(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm: RMSNorm,
        positions: torch.Tensor,
        attn: AttentionMetadata,
        kv_cache: LayerCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the attention of ``norm(x + residual)``, maybe in partial sums (`whole`), and ``x + residual``."""
        qkv, summed = self.qkv.of_sum(x, residual, norm)
        return self.o(self.attend(qkv, positions, attn, kv_cache), partial=True), summed

    # qkv [T, (Hq + 2 Hkv) * D] -> [T, Hq * D]
    def attend(
        self, qkv: torch.Tensor, positions: torch.Tensor, attn: AttentionMetadata, kv_cache: LayerCache
    ) -> torch.Tensor:
        """Return the heads' attention, between the projections."""
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q, k, v = qkv.view(qkv.shape[0], sum(heads), self.head_dim).split(heads, dim=1)
        if attn.takes_fused(self.num_kv_heads, self.head_dim, q.dtype, kv_cache[0].dtype):
            norms = self.head_norms()
            weights, eps = (None, 0.0) if norms is None else ((norms[0].weight, norms[1].weight), norms[0].eps)
            out = attend_fused(q, k, v, weights, eps, self.cos_sin, positions, *kv_cache, attn, self.scale)
        else:
            self.rotate(q, k, positions)
            out = attend(q, k, v, *kv_cache, attn, self.scale)
        return out.flatten(1)

    def fuses(self, num_rows: int) -> bool:
        """Whether both products take in what surrounds them."""
        return self.qkv.fuses(num_rows) and self.o.fuses(num_rows)

    def weight_sources(self, prefix: str) -> Iterator[WeightSource]:
        """Yield the checkpoint tensors under ``<prefix>``."""
        yield from self.qkv.weight_sources(prefix)
        yield from self.o.weight_sources(prefix)


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP; additions to the residual stream are fused into the next norm.

    Where all four products of a layer fuse, which the number of rows decides, norms, activation and additions are
    parts of the products instead: five launches, and the stream itself goes from layer to layer.  Elsewhere the norms
    also add what a product that split its inputs leaves in parts, and what goes on may be partial sums ``[S, T, H]``;
    a product of few rows takes such a norm in.
    """

    def __init__(self, config: ModelConfig, attention: SelfAttention, place: Placement) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        self.attention = attention
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias, place=place)

    def fuses(self, num_rows: int) -> bool:
        """Whether all four products of so many rows take in what surrounds them."""
        return self.attention.fuses(num_rows) and self.mlp.fuses(num_rows)

    # x [T, H] or [S, T, H], residual [T, H] -> (what to add to the residual, residual), or (their sum [T, H], None)
    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        attn: AttentionMetadata,
        kv_cache: LayerCache,
        *,
        # [T, H]: ``input_norm(x)``, where whoever made x has computed it
        normed: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if residual is None and normed is None and self.fuses(x.shape[0]):
            x = self.attention(x, positions, attn, kv_cache, norm=self.input_norm, residual=x)
            return self.mlp(x, norm=self.post_norm, residual=x), None
        if residual is None:
            normed = self.input_norm(x) if normed is None else normed
            x, residual = self.attention(normed, positions, attn, kv_cache, partial=True), x
        else:
            x, residual = self.attention.of_sum(x, residual, self.input_norm, positions, attn, kv_cache)
        return self.mlp.of_sum(x, residual, self.post_norm)

    def weight_sources(self, prefix: str) -> Iterator[WeightSource]:
        """Yield the checkpoint tensors under ``<prefix>``."""
        yield from self.input_norm.weight_sources(f"{prefix}.input_layernorm")
        yield from self.attention.weight_sources(f"{prefix}.self_attn")
        yield from self.post_norm.weight_sources(f"{prefix}.post_attention_layernorm")
        yield from self.mlp.weight_sources(f"{prefix}.mlp")


class CausalLM(nn.Module):
    """A decoder-only language model over a paged cache; parameters take no gradient."""

    attention_cls: ClassVar[type[SelfAttention]] = SelfAttention
    # None = nothing is carried besides the KV cache
    model_state_cls: ClassVar[type[ModelState] | None] = None

    # cos_sin [L, D]
    def __init__(self, config: ModelConfig, cos_sin: torch.Tensor, place: Placement) -> None:
        super().__init__()
        self.config = config
        self.dtype, self.device, self.shard = place.dtype, place.device, place.shard
        # positions that the rotary table covers, in tokens
        self.max_model_len = cos_sin.shape[0]
        # numbers of layers after which the residual stream is tapped, for a drafter
        self.aux_layer_ids: tuple[int, ...] = ()
        self.embed = VocabEmbedding(config.vocab_size, config.hidden_size, place)
        self.layers = nn.ModuleList(
            DecoderLayer(config, self.attention_cls(config, cos_sin, place), place)
            for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        tied = config.tie_word_embeddings
        self.head = self.embed if tied else VocabEmbedding(config.vocab_size, config.hidden_size, place)
        share_workspace(self)

    def kv_cache_specs(self, block_size: int = 16) -> list[KVCacheSpec]:
        """Return one spec per layer; `block_size` in tokens."""
        spec = KVCacheSpec(
            num_kv_heads=self.shard.divide(self.config.num_key_value_heads, "num_key_value_heads"),
            head_dim=self.config.head_dim,
            dtype=self.dtype,
            block_size=block_size,
        )
        return [spec] * self.config.num_hidden_layers

    @torch.no_grad()
    def forward(
        self,
        # [T] int32
        input_ids: torch.Tensor,
        # [T] int32
        positions: torch.Tensor,
        attn: AttentionMetadata,
        # one (k_cache, v_cache) per layer
        kv_caches: Sequence[LayerCache],
        # [T, len(aux_layer_ids) * H], out
        aux_hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the step's keys and values and return the final normalised hidden states ``[T, H]``.

        `aux_hidden` receives the residual stream after ``aux_layer_ids[i]`` layers, side by side.
        """
        # in front of the lookup: what starts ahead reads it before it waits
        attn = attn.with_order(self.dtype, kv_caches[0][0])
        x, normed = self._embed(input_ids)
        residual = None
        self._tap(0, x, residual, aux_hidden)
        for index, (layer, kv_cache) in enumerate(zip(self.layers, kv_caches, strict=True), 1):
            x, residual = layer(x, residual, positions, attn, kv_cache, normed=normed)
            normed = None
            self._tap(index, x, residual, aux_hidden)
        return self.norm(x) if residual is None else self.norm.add(x, residual)[0]

    # input_ids [T] int32 -> ([T, H], [T, H])
    def _embed(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the first layer's input, and its norm unless the layer takes that in."""
        first = self.layers[0]
        assert isinstance(first, DecoderLayer), f"layer 0 is a {type(first).__name__}"
        if first.fuses(input_ids.shape[0]):
            return self.embed(input_ids), None
        return self.embed.normed(input_ids, first.input_norm)

    # x [T, H] or [S, T, H], residual [T, H], aux_hidden [T, taps * H]
    def _tap(
        self, num_done: int, x: torch.Tensor, residual: torch.Tensor | None, aux_hidden: torch.Tensor | None
    ) -> None:
        if aux_hidden is None or num_done not in self.aux_layer_ids:
            return
        x = whole(x, aux_hidden.dtype)
        taps = aux_hidden.view(x.shape[0], len(self.aux_layer_ids), x.shape[1])
        for place, wanted in enumerate(self.aux_layer_ids):
            if wanted == num_done:
                if residual is None:
                    taps[:, place].copy_(x)
                else:
                    torch.add(x, residual, out=taps[:, place])

    # hidden [N, H] -> [N, V]
    @torch.no_grad()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of `hidden` rows in the model's dtype."""
        return self.head.project(hidden)

    def weight_sources(self) -> Iterator[WeightSource]:
        """Yield every checkpoint tensor that this rank loads, under its Hugging Face name."""
        yield from self.embed.weight_sources("model.embed_tokens")
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer), f"layer {index} is a {type(layer).__name__}"
            yield from layer.weight_sources(f"model.layers.{index}")
        yield from self.norm.weight_sources("model.norm")
        if self.head is not self.embed:
            yield from self.head.weight_sources("lm_head")
