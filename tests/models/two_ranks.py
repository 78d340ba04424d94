"""One of two tensor-parallel ranks; started by test_sharding.py with: rank, rendezvous file, output file."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from models.paged_harness import PagedHarness
from mrv2_models.registry import load_model

PROMPT = list(range(7, 60))
CHUNK = 40


def logits(rank: int, world_size: int, preset: str) -> torch.Tensor:
    """Return the logits of PROMPT in two chunks, [len(PROMPT), V], of one rank."""
    model = load_model(preset, dtype="float64", load_format="dummy", rank=rank, world_size=world_size)
    harness = PagedHarness(model)
    parts = [harness.step({"a": PROMPT[:CHUNK]})["a"], harness.step({"a": PROMPT[CHUNK:]})["a"]]
    return torch.cat(parts)


if __name__ == "__main__":
    rank, rendezvous, output = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    torch.save(logits(rank, 2, "tiny-qwen3"), output)
    dist.destroy_process_group()
