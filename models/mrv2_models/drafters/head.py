"""What the two kinds of draft heads share, and the interface that drafting sees.

A head at index p reads the token at p + 1 and the target's features at p, attends to its own cache up
to p (rotary position p), and guesses the token at p + 2.  Its own output stands for the features of
the next position, so that it can go on alone.

Legend: T tokens, N logits rows, H hidden size, V_d draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from mrv2_models.attention import AttentionMetadata
from mrv2_models.causal_lm import CausalLM
from mrv2_models.drafters.config import DraftConfig
from mrv2_models.errors import UnsupportedModelError
from mrv2_models.kv_cache import KVCacheSpec, LayerCache
from mrv2_models.layers import Placement, RMSNorm, VocabEmbedding, WeightSource


class DraftHead(nn.Module):
    """One decoder layer between the target's embedding and its output matrix; parameters take no gradient."""

    # cos_sin [L, D], the head's own rotary table
    def __init__(self, config: DraftConfig, target: CausalLM, cos_sin: torch.Tensor) -> None:
        super().__init__()
        if target.shard.world_size != 1:
            raise UnsupportedModelError(
                f"draft heads run on one rank, the target is spread over {target.shard.world_size}"
            )
        config.check_target(target.config)
        self.config = config
        self.cos_sin = cos_sin
        self.dtype, self.device = target.dtype, target.device
        self.place = Placement(target.dtype, target.device)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, self.place)
        # [V_d] int64, draft id -> target id; None = the whole vocabulary
        self.to_target: torch.Tensor | None = None
        # in a tuple: the target is not part of this module
        self._target = (target,)
        # [V_d, H], the target's rows of the tokens that can be drafted
        self._head_rows: torch.Tensor | None = None

    @property
    def embed(self) -> VocabEmbedding:
        """Return the target's token vectors."""
        return self._target[0].embed

    # offsets [V_d] int64: target id = draft id + offset
    def set_vocabulary(self, offsets: torch.Tensor | None) -> None:
        """Fix the tokens that can be drafted and gather their rows of the target's output matrix."""
        if offsets is None:
            self.to_target = self._head_rows = None
            return
        ids = torch.arange(offsets.shape[0], device=self.device) + offsets.to(self.device)
        self.to_target = ids
        self._head_rows = self._target[0].head.weight.detach().index_select(0, ids)

    def kv_cache_specs(self, block_size: int) -> list[KVCacheSpec]:
        """Return the spec of the one layer; `block_size` in tokens."""
        return [
            KVCacheSpec(
                num_kv_heads=self.config.num_key_value_heads,
                head_dim=self.config.head_dim,
                dtype=self.dtype,
                block_size=block_size,
            )
        ]

    # tapped [T, taps * H], final [T, H] -> [T, H]
    def features(self, tapped: torch.Tensor | None, final: torch.Tensor) -> torch.Tensor:
        """Return what the layer takes of the target's step: its tapped layers, or its final normed hidden states."""
        raise TypeError(f"{type(self).__name__} must define features()")

    def forward(
        self,
        # [T] int32, the token behind each position
        input_ids: torch.Tensor,
        # [T, H]
        features: torch.Tensor,
        # [T] int32
        positions: torch.Tensor,
        attn: AttentionMetadata,
        kv_cache: LayerCache,
    ) -> torch.Tensor:
        """Write the step's keys and values; return the features of the next positions ``[T, H]``."""
        raise TypeError(f"{type(self).__name__} must define forward()")

    # recurrent [N, H] -> [N, V_d]
    @torch.no_grad()
    def compute_logits(self, recurrent: torch.Tensor) -> torch.Tensor:
        """Return the logits over the draft vocabulary."""
        hidden = self.norm(recurrent)
        if self._head_rows is None:
            return self._target[0].head.project(hidden)
        return nn.functional.linear(hidden, self._head_rows)

    def weight_sources(self) -> Iterator[WeightSource]:
        """Yield every tensor of the head's checkpoint but ``d2t``."""
        yield from self.norm.weight_sources("norm")
