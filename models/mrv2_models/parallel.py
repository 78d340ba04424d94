"""Tensor parallelism: which part of a dimension a rank holds, and the two collectives that layers need."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from mrv2_models.errors import ShardError


@dataclass(frozen=True)
class Shard:
    """One rank's place among `world_size` ranks; a single rank costs nothing."""

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ShardError(f"rank={self.rank} must be in [0, world_size={self.world_size})")

    def divide(self, size: int, what: str) -> int:
        """Return `size` / `world_size`; `what` names the dimension if it does not divide (`ShardError`)."""
        if size % self.world_size:
            legal = [n for n in range(1, min(size, 64) + 1) if size % n == 0]
            raise ShardError(
                f"{what}={size} does not divide over world_size={self.world_size} ranks; "
                f"world sizes that fit are {', '.join(map(str, legal))}"
            )
        return size // self.world_size

    def part(self, size: int, what: str) -> slice:
        """Return this rank's contiguous part of a dimension of `size`."""
        length = self.divide(size, what)
        return slice(self.rank * length, (self.rank + 1) * length)


def all_reduce(x: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Sum `x` over all ranks, in place."""
    if shard.world_size > 1:
        dist.all_reduce(x)
    return x


def all_gather_last(x: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Concatenate the ranks' ``[..., n]`` along the last dimension: ``[..., world_size * n]``."""
    if shard.world_size == 1:
        return x
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(shard.world_size)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim=-1)
