"""What the sampler must know of a batch; rebuilt whenever the batch changes.  B requests in the batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingMetadata:
    """Views of the persistent device arrays, None where no request of the batch uses the feature."""

    all_greedy: bool
    all_random: bool
    # [B] int32: 0, 1, 2, ...
    rows: torch.Tensor | None = None
    # [B] float32, 0 = greedy
    temperature: torch.Tensor | None = None
    # [B] int64
    seeds: torch.Tensor | None = None
    # [B] float32, 1 = off; given together with top_k
    top_p: torch.Tensor | None = None
    # [B] int32, 0 = off
    top_k: torch.Tensor | None = None
    # [B] float32, 0 = off
    min_p: torch.Tensor | None = None

    def expanded(
        self,
        # [N] int32: batch row of each logits row
        owners: torch.Tensor,
    ) -> SamplingMetadata:
        """Return the metadata of N logits rows; device code."""
        temperature, seeds = self.temperature, self.seeds
        return replace(
            self,
            rows=owners,
            temperature=None if temperature is None else temperature.index_select(0, owners),
            seeds=None if seeds is None else seeds.index_select(0, owners),
        )
