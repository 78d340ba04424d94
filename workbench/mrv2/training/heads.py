"""The two shapes of draft head, in plain torch with the parameter names of their checkpoints.

At index p a head reads the token at p + 1 and the target's features at p, with rotary position p, and
predicts the token at p + 2.  For the next draft its own output takes the place of the features.

* `Eagle3Head` (EAGLE-3; Li et al. 2025): features = three layers of the target through `fc`; the layer's
  attention reads the normalised embedding beside the normalised features.
* `MTPHead` (multi-token prediction; DeepSeek-AI 2024, section 2.2): features = the target's final normalised
  hidden state; `eh_proj` joins embedding and features before an ordinary decoder layer.

Embedding and output rows are the target's own, frozen.  The residual stream is float32.

Legend: B rows, T positions, H hidden size, Hq / Hkv heads, D head_dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import nn

from mrv2.errors import ConfigError
from mrv2.training.target import FrozenTarget, TargetFeatures, rotate

Method = Literal["eagle3", "mtp"]
METHODS: tuple[str, ...] = get_args(Method)
EMBEDDING_STD, FUSION_STD = 0.02, 0.005


class AttentionMemory(Protocol):
    """Keys and values of earlier positions, and what a query may see of them."""

    # q [B, Hq, T, D], k and v [B, Hkv, T, D] -> [B, Hq, T, D]
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Take in the new keys and values; return the attention of the queries."""
        ...


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a head; all but the taps are the target's."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    # layers done before each feature is taken; EAGLE-3 only
    tap_layers: tuple[int, ...] = ()

    @classmethod
    def of_target(cls, target: FrozenTarget, method: str) -> HeadShape:
        """Return the shape of a head for this target; EAGLE-3 taps an early, a middle and a late layer."""
        if method not in METHODS:
            raise ConfigError(f"method {method!r} must be one of {', '.join(METHODS)}")
        c = target.config
        n = c.num_hidden_layers
        taps = (2, n // 2, n - 3) if method == "eagle3" else ()
        if taps and not 0 <= taps[0] < taps[1] < taps[2]:
            # too few layers for the usual places
            taps = (0, n // 2, n)
        return cls(
            c.hidden_size,
            c.intermediate_size,
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
            c.rms_norm_eps,
            taps,
        )


class Norm(nn.Module):
    """Root mean square norm in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    # x [..., H] -> [..., H] float32
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Projections around an attention memory; `in_features` is H or, beside an embedding, 2 H."""

    def __init__(self, shape: HeadShape, in_features: int) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        query, key = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj, self.k_proj = _linear(in_features, query), _linear(in_features, key)
        self.v_proj, self.o_proj = _linear(in_features, key), _linear(query, shape.hidden_size)

    # x [B, T, in], cos and sin [T, D / 2] -> [B, T, H]
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, memory: AttentionMemory) -> torch.Tensor:
        parts = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (part.transpose(1, 2) for part in parts)
        out = memory.attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = _linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = _linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = _linear(shape.intermediate_size, shape.hidden_size)

    # x [B, T, H] -> [B, T, H]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class HeadLayer(nn.Module):
    """The one decoder layer of a head; EAGLE-3's also normalises the features beside the embedding."""

    def __init__(self, shape: HeadShape, *, beside_embedding: bool) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = Norm(size, eps)
        if beside_embedding:
            self.hidden_norm = Norm(size, eps)
        self.self_attn = Attention(shape, 2 * size if beside_embedding else size)
        self.post_attention_layernorm = Norm(size, eps)
        self.mlp = MLP(shape)

    # x [B, T, in], residual [B, T, H] -> [B, T, H] float32
    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        memory: AttentionMemory,
    ) -> torch.Tensor:
        residual = residual + self.self_attn(x, cos, sin, memory).float()
        return residual + self.mlp(self.post_attention_layernorm(residual)).float()


class DraftHead(nn.Module, ABC):
    """What both shapes share: features in, one step, the norm before the target's output rows."""

    shape: HeadShape
    norm: Norm

    # -> [B, T, H] float32
    @abstractmethod
    def fuse(self, features: TargetFeatures) -> torch.Tensor:
        """Return what the first step reads of the target."""

    # embeddings and hidden [B, T, H], cos and sin [T, D / 2] -> [B, T, H] float32
    @abstractmethod
    def step(
        self,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        memory: AttentionMemory,
    ) -> torch.Tensor:
        """Return the output before `norm`: what the next step reads in place of the features."""

    @abstractmethod
    def start_from(self, target: FrozenTarget) -> None:
        """Begin as the target's last layer, which reads the target's features and nothing of the embedding."""


class Eagle3Head(DraftHead):
    """EAGLE-3: three tapped layers through `fc`, one layer that is 2 H wide at its attention's input."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = _linear(len(shape.tap_layers) * shape.hidden_size, shape.hidden_size)
        self.midlayer = HeadLayer(shape, beside_embedding=True)
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def fuse(self, features: TargetFeatures) -> torch.Tensor:
        return self.fc(_like(features.taps, self.fc.weight)).float()

    def step(
        self,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        memory: AttentionMemory,
    ) -> torch.Tensor:
        layer = self.midlayer
        x = torch.cat([layer.input_layernorm(embeddings), layer.hidden_norm(hidden)], dim=-1)
        return layer(x, hidden, cos, sin, memory)

    @torch.no_grad()
    def start_from(self, target: FrozenTarget) -> None:
        size = self.shape.hidden_size
        self.fc.weight.normal_(std=FUSION_STD)
        self.fc.weight[:, -size:] += torch.eye(size, device=self.fc.weight.device)
        _copy_last_layer(self.midlayer, target)
        self.midlayer.hidden_norm.weight.copy_(target.layers[-1].input_norm)
        self.midlayer.input_layernorm.weight.fill_(1.0)
        self.norm.weight.copy_(target.norm)


class MTPHead(DraftHead):
    """Multi-token prediction: `eh_proj` joins embedding and features, then one ordinary layer."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.enorm, self.hnorm = Norm(size, eps), Norm(size, eps)
        self.eh_proj = _linear(2 * size, size)
        self.layer = HeadLayer(shape, beside_embedding=False)
        self.norm = Norm(size, eps)

    def fuse(self, features: TargetFeatures) -> torch.Tensor:
        return features.final.float()

    def step(
        self,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        memory: AttentionMemory,
    ) -> torch.Tensor:
        joined = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden)], dim=-1)).float()
        return self.layer(self.layer.input_layernorm(joined), joined, cos, sin, memory)

    @torch.no_grad()
    def start_from(self, target: FrozenTarget) -> None:
        size = self.shape.hidden_size
        self.eh_proj.weight.normal_(std=2 * FUSION_STD)
        self.eh_proj.weight[:, size:] += torch.eye(size, device=self.eh_proj.weight.device)
        _copy_last_layer(self.layer, target)
        self.hnorm.weight.copy_(target.layers[-1].input_norm)
        self.norm.weight.copy_(target.norm)


def build_head(method: str, shape: HeadShape) -> DraftHead:
    """Return a head of one of `METHODS`, on the CPU in float32 with torch's default initialisation."""
    if method not in METHODS:
        raise ConfigError(f"method {method!r} must be one of {', '.join(METHODS)}")
    return Eagle3Head(shape) if method == "eagle3" else MTPHead(shape)


def _linear(in_features: int, out_features: int) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=False)


def _like(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Bring frozen activations to the weights' dtype; under autocast the product chooses its own."""
    return x.to(weight.dtype)


def _copy_last_layer(layer: HeadLayer, target: FrozenTarget) -> None:
    """Copy the target's last layer; of wider projections the features' half, the embedding's half small."""
    source, size = target.layers[-1], target.config.hidden_size
    sizes = [heads * target.config.head_dim for heads in target.heads]
    attention = layer.self_attn
    for proj, rows in zip((attention.q_proj, attention.k_proj, attention.v_proj), source.qkv.split(sizes)):
        proj.weight.normal_(std=EMBEDDING_STD)
        proj.weight[:, -size:] = rows.float()
    attention.o_proj.weight.copy_(source.o)
    gate, up = source.gate_up.chunk(2)
    layer.mlp.gate_proj.weight.copy_(gate)
    layer.mlp.up_proj.weight.copy_(up)
    layer.mlp.down_proj.weight.copy_(source.down)
    layer.post_attention_layernorm.weight.copy_(source.post_norm)
    layer.input_layernorm.weight.copy_(source.input_norm)
