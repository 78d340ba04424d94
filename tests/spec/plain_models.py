"""A Llama target and both kinds of draft head in plain torch, on whole histories: the engine must draft the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

Weights = dict[str, torch.Tensor]


def weights_of(module: Any) -> Weights:
    """Return a module's tensors by their checkpoint names, in float64 on the CPU."""
    return {source.name: source.dest.detach().cpu().double() for source in module.weight_sources()}


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """x [T, heads, D] by halves."""
    half = x.shape[-1] // 2
    angle = positions[:, None].double() * theta ** -(torch.arange(half).double() / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def attention(w: Weights, prefix: str, x: torch.Tensor, cfg: Any, theta: float) -> torch.Tensor:
    """Causal attention of a whole sequence. x [T, in] -> [T, H]"""
    heads, kv_heads, size = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
    length = x.shape[0]
    positions = torch.arange(length)
    q = rotate((x @ w[f"{prefix}.q_proj.weight"].T).view(length, heads, size), positions, theta)
    k = rotate((x @ w[f"{prefix}.k_proj.weight"].T).view(length, kv_heads, size), positions, theta)
    v = (x @ w[f"{prefix}.v_proj.weight"].T).view(length, kv_heads, size)
    k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * size**-0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    out = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)
    return out.reshape(length, heads * size) @ w[f"{prefix}.o_proj.weight"].T


def mlp(w: Weights, prefix: str, x: torch.Tensor) -> torch.Tensor:
    gate, up = x @ w[f"{prefix}.gate_proj.weight"].T, x @ w[f"{prefix}.up_proj.weight"].T
    return (torch.nn.functional.silu(gate) * up) @ w[f"{prefix}.down_proj.weight"].T


def decoder_layer(w: Weights, prefix: str, x: torch.Tensor, cfg: Any, theta: float) -> torch.Tensor:
    x = x + attention(
        w, f"{prefix}.self_attn", rms(x, w[f"{prefix}.input_layernorm.weight"], cfg.rms_norm_eps), cfg, theta
    )
    return x + mlp(w, f"{prefix}.mlp", rms(x, w[f"{prefix}.post_attention_layernorm.weight"], cfg.rms_norm_eps))


class PlainTarget:
    """The target on whole histories."""

    def __init__(self, model: Any) -> None:
        self.cfg, self.w = model.config, weights_of(model)
        self.embedding = self.w["model.embed_tokens.weight"]
        self.head = self.embedding if self.cfg.tie_word_embeddings else self.w["lm_head.weight"]

    def hidden(self, tokens: Iterable[int], taps: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the final normed hidden states [T, H] and the tapped residual streams [T, taps * H]."""
        x = self.embedding[torch.tensor(list(tokens))]
        stream = [x]
        for i in range(self.cfg.num_hidden_layers):
            stream.append(decoder_layer(self.w, f"model.layers.{i}", stream[-1], self.cfg, self.cfg.rope.theta))
        final = rms(stream[-1], self.w["model.norm.weight"], self.cfg.rms_norm_eps)
        return final, torch.cat([stream[i] for i in taps], dim=-1) if taps else final[:, :0]


class PlainHead:
    """A draft head that drafts from a whole history, one token after the other, without any cache."""

    def __init__(self, head: Any, target: PlainTarget) -> None:
        self.cfg, self.w, self.target = head.config, weights_of(head), target
        # [V_d], draft id -> target id
        self.ids = torch.arange(self.cfg.vocab_size) if head.to_target is None else head.to_target.cpu()

    def features(self, history: list[int]) -> torch.Tensor:
        """Return what the head reads of positions 0 .. n - 2. [n - 1, H]"""
        final, tapped = self.target.hidden(history[:-1], self.cfg.aux_layer_ids)
        return tapped @ self.w["fc.weight"].T if self.cfg.method == "eagle3" else final

    def output(self, tokens: list[int], features: torch.Tensor) -> torch.Tensor:
        """Return the layer's outputs [T, H] over (token behind each position, features of each position)."""
        w, cfg, eps, theta = self.w, self.cfg, self.cfg.rms_norm_eps, self.cfg.rope_theta
        embedded = self.target.embedding[torch.tensor(tokens)]
        if cfg.method == "mtp":
            x = torch.cat([rms(embedded, w["enorm.weight"], eps), rms(features, w["hnorm.weight"], eps)], dim=-1)
            return decoder_layer(w, "layer", x @ w["eh_proj.weight"].T, cfg, theta)
        normed = rms(features, w["midlayer.hidden_norm.weight"], eps)
        x = torch.cat([rms(embedded, w["midlayer.input_layernorm.weight"], eps), normed], dim=-1)
        x = attention(w, "midlayer.self_attn", x, cfg, theta) + features
        return x + mlp(w, "midlayer.mlp", rms(x, w["midlayer.post_attention_layernorm.weight"], eps))

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """Return the logits of the draft vocabulary. [V_d]"""
        return rms(output, self.w["norm.weight"], self.cfg.rms_norm_eps) @ self.target.head[self.ids].T

    def drafts(self, history: list[int], count: int, pick: Any = None) -> list[int]:
        """Draft `count` tokens behind a history; `pick` (step, logits) -> draft id, the likeliest by default."""
        tokens, features, found = list(history[1:]), self.features(history), []
        for step in range(count):
            output = self.output(tokens, features)
            logits = self.logits(output[-1])
            token = int(self.ids[int(logits.argmax()) if pick is None else pick(step, logits)])
            found.append(token)
            tokens.append(token)
            features = torch.cat([features, output[-1:]])
        return found


class PlainModel:
    """A whole language model as drafter."""

    def __init__(self, model: Any) -> None:
        self.plain = PlainTarget(model)
        self.ids = torch.arange(model.config.vocab_size)

    def drafts(self, history: list[int], count: int, pick: Any = None) -> list[int]:
        """Draft `count` tokens behind a history."""
        tokens = list(history)
        for step in range(count):
            logits = self.plain.hidden(tokens)[0][-1] @ self.plain.head.T
            tokens.append(int(logits.argmax()) if pick is None else pick(step, logits))
        return tokens[len(history) :]
