"""The frozen target model in plain torch, for large dense batches: what a draft head reads and imitates.

It computes what the serving model computes (a test compares their logits), over two other layouts: whole
dialogues padded on the right, and one token for each of many rows over a contiguous cache.

Legend: B rows, T positions, H hidden size, Hq / Hkv heads, D head_dim, L cache length, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from mrv2_models.causal_lm import DecoderLayer
from mrv2_models.config import ModelConfig
from mrv2_models.errors import UnsupportedModelError
from mrv2_models.registry import LoadFormat, load_model, resolve_model
from mrv2_models.weights import WEIGHTS_NAME


@dataclass(frozen=True)
class LayerWeights:
    """The matrices of one decoder layer, fused as the serving model holds them."""

    # [H]
    input_norm: torch.Tensor
    # [(Hq + 2 Hkv) * D, H]
    qkv: torch.Tensor
    # [H, Hq * D]
    o: torch.Tensor
    # [H]
    post_norm: torch.Tensor
    # [2 * intermediate, H], gate first
    gate_up: torch.Tensor
    # [H, intermediate]
    down: torch.Tensor


@dataclass(frozen=True)
class TargetFeatures:
    """What the target computes for a batch of dialogues."""

    # [B, T, taps * H]; the residual stream after each tapped layer
    taps: torch.Tensor
    # [B, T, H]; the final normalised hidden states
    final: torch.Tensor


class FrozenTarget:
    """A Llama model of one device whose weights take no gradient."""

    def __init__(self, model_name: str, *, dtype: str, device: torch.device, load_format: LoadFormat = "auto") -> None:
        """Load a model by name or folder, see `mrv2_models.registry.resolve_model`.

        Raises `UnsupportedModelError` for a family other than Llama, or one with biases.
        """
        found = resolve_model(model_name)
        config = found.config
        if config.model_type != "llama" or config.attention_bias or config.mlp_bias:
            raise UnsupportedModelError(
                f"{config.name!r} ({config.model_type}): draft heads are trained for Llama models without biases"
            )
        model = load_model(model_name, dtype=dtype, device=device, load_format=load_format)
        self.config: ModelConfig = config
        self.folder, self.device, self.dtype = found.folder, model.device, model.dtype
        # a name that can be given again; of a folder its last part
        self.name = config.name if Path(model_name).is_dir() else model_name
        self.embedding = model.embed.weight.detach()
        self.head = model.head.weight.detach()
        self.norm = model.norm.weight.detach()
        self.layers: list[LayerWeights] = []
        for layer in model.layers:
            assert isinstance(layer, DecoderLayer), f"unexpected layer {type(layer).__name__}"
            self.cos_sin = layer.attention.cos_sin
            self.layers.append(
                LayerWeights(
                    layer.input_norm.weight.detach(),
                    layer.attention.qkv.weight.detach(),
                    layer.attention.o.weight.detach(),
                    layer.post_norm.weight.detach(),
                    layer.mlp.gate_up.weight.detach(),
                    layer.mlp.down.weight.detach(),
                )
            )
        self.heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)

    def sha256(self) -> str | None:
        """Return the hash of the weights file: of the GGUF if they were converted from one; None if random."""
        if self.folder is None:
            return None
        provenance = self.folder / "provenance.json"
        if provenance.is_file():
            return json.loads(provenance.read_text(encoding="utf-8")).get("gguf_sha256")
        return _file_hash(self.folder / WEIGHTS_NAME)

    # ids [B, T] -> taps [B, T, len(tap_layers) * H], final [B, T, H]
    @torch.no_grad()
    def features(self, ids: torch.Tensor, tap_layers: Sequence[int] = ()) -> TargetFeatures:
        """Run whole dialogues from position 0; a tap i is the residual stream after i layers are done."""
        x = F.embedding(ids, self.embedding)
        cos, sin = self.cos_sin[: ids.shape[1]].chunk(2, dim=-1)
        tapped = {}
        for index, layer in enumerate(self.layers):
            if index in tap_layers:
                tapped[index] = x
            q, k, v = self._project(x, layer)
            q, k = rotate(q, cos[:, None], sin[:, None]), rotate(k, cos[:, None], sin[:, None])
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = self._finish(x, out.transpose(1, 2).flatten(2), layer)
        if len(self.layers) in tap_layers:
            tapped[len(self.layers)] = x
        taps = torch.cat([tapped[i] for i in tap_layers], dim=-1) if tap_layers else x.new_empty((*x.shape[:2], 0))
        return TargetFeatures(taps, self._norm(x, self.norm))

    def allocate_cache(self, num_rows: int, length: int) -> torch.Tensor:
        """Return a zeroed cache ``[layers, 2, B, Hkv, L, D]``."""
        shape = (len(self.layers), 2, num_rows, self.heads[1], length, self.config.head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    # tokens, positions [B] int64, cache [layers, 2, B, Hkv, L, D] -> logits [B, V]
    @torch.no_grad()
    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """Feed one token a row at its own position, store its key and value, return the logits that follow."""
        num_rows, length = tokens.shape[0], cache.shape[4]
        rows = torch.arange(num_rows, device=tokens.device)
        cos, sin = self.cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        # [B, 1, 1, L]
        hidden_keys = (torch.arange(length, device=tokens.device) > positions[:, None])[:, None, None]
        num_kv, head_dim = self.heads[1], self.config.head_dim
        x = F.embedding(tokens, self.embedding)
        for layer, (keys, values) in zip(self.layers, cache, strict=True):
            q, k, v = self._project(x, layer)
            keys[rows, :, positions] = rotate(k, cos, sin)
            values[rows, :, positions] = v
            # the query heads of one key head stand beside each other: [B, Hkv, Hq / Hkv, D]
            q = rotate(q, cos, sin).view(num_rows, num_kv, -1, head_dim) * head_dim**-0.5
            scores = (q @ keys.transpose(-1, -2)).masked_fill(hidden_keys, float("-inf"))
            out = torch.softmax(scores, dim=-1, dtype=torch.float32).to(self.dtype) @ values
            x = self._finish(x, out.flatten(1), layer)
        return F.linear(self._norm(x, self.norm), self.head)

    # x [..., H] -> q [..., Hq, D], k and v [..., Hkv, D]
    def _project(self, x: torch.Tensor, layer: LayerWeights) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        qkv = F.linear(self._norm(x, layer.input_norm), layer.qkv)
        q, k, v = qkv.unflatten(-1, (sum(self.heads), self.config.head_dim)).split(self.heads, dim=-2)
        return q, k, v

    # x [..., H], attended [..., Hq * D] -> [..., H]
    def _finish(self, x: torch.Tensor, attended: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        x = x + F.linear(attended, layer.o)
        gate, up = F.linear(self._norm(x, layer.post_norm), layer.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, layer.down)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)


# x [..., D], cos and sin broadcast to [..., D / 2] -> [..., D]
def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the two halves of each head by its position's angles, in the precision of the angles."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to the device without the host waiting for the device's earlier work."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _file_hash(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
