"""Tensor parallelism: the ranks' parts are the whole, and together they compute the same."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from models import two_ranks
from models.hf_folders import write_folder
from mrv2_models.causal_lm import CausalLM
from mrv2_models.config import ModelConfig
from mrv2_models.errors import ShardError
from mrv2_models.parallel import Shard
from mrv2_models.registry import load_model


def by_source(model: CausalLM) -> dict[str, torch.Tensor]:
    """Return what a rank holds under the checkpoint's names."""
    return {source.name: source.dest for source in model.weight_sources()}


def assert_parts_are_the_whole(whole: CausalLM, parts: list[CausalLM]) -> None:
    held = [by_source(part) for part in parts]
    for name, expected in by_source(whole).items():
        pieces = [part[name] for part in held]
        if pieces[0].shape == expected.shape:
            assert all(torch.equal(piece, expected) for piece in pieces), f"{name} is not replicated"
            continue
        split = [d for d in range(expected.ndim) if pieces[0].shape[d] != expected.shape[d]]
        assert torch.equal(torch.cat(pieces, dim=split[0]), expected), f"{name} differs"


@pytest.mark.parametrize("variant", ["llama-biases", "qwen3-tied"])
def test_loaded_parts_are_the_whole(variant: str, tmp_path: Path) -> None:
    write_folder(variant, tmp_path)
    parts = [load_model(tmp_path, rank=rank, world_size=2) for rank in range(2)]
    assert_parts_are_the_whole(load_model(tmp_path), parts)
    assert parts[0].kv_cache_specs()[0].num_kv_heads == 1


def test_random_parts_are_the_whole() -> None:
    parts = [load_model("tiny-qwen3", load_format="dummy", rank=rank, world_size=2) for rank in range(2)]
    assert_parts_are_the_whole(load_model("tiny-qwen3", load_format="dummy"), parts)


def test_every_large_matrix_is_cut() -> None:
    whole = load_model("tiny-qwen3", load_format="dummy")
    part = load_model("tiny-qwen3", load_format="dummy", rank=1, world_size=2)
    for (name, full), held in zip(whole.named_parameters(), part.parameters(), strict=True):
        assert held.numel() == full.numel() // (2 if full.ndim == 2 else 1), name


@pytest.mark.parametrize(
    "preset, changes, world_size, message",
    [
        ("smollm2-135m", {}, 2, r"num_attention_heads=9 does not divide over world_size=2 .*fit are 1, 3, 9$"),
        ("tiny-llama", {"num_attention_heads": 4}, 2, "num_key_value_heads=1 does not divide over world_size=2"),
        ("tiny-qwen3", {"intermediate_size": 255}, 2, "gate_proj=255 does not divide over world_size=2"),
        ("tiny-qwen3", {}, 3, "vocab_size=512 does not divide over world_size=3"),
    ],
)
def test_a_dimension_that_does_not_divide_is_refused(
    preset: str, changes: dict[str, int], world_size: int, message: str
) -> None:
    config = dataclasses.replace(ModelConfig.from_preset(preset), **changes)
    with pytest.raises(ShardError, match=message):
        load_model(config, load_format="dummy", world_size=world_size)


def test_a_rank_lies_inside_the_world() -> None:
    with pytest.raises(ShardError, match=r"rank=2 must be in \[0, world_size=2\)"):
        Shard(2, 2)


def test_two_ranks_compute_what_one_does(tmp_path: Path) -> None:
    outputs = [tmp_path / f"logits-{rank}.pt" for rank in range(2)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    script = [sys.executable, str(Path(__file__).with_name("two_ranks.py"))]
    ranks = [
        subprocess.Popen([*script, str(rank), str(tmp_path / "rendezvous"), str(output)], env=env)
        for rank, output in enumerate(outputs)
    ]
    assert [process.wait(timeout=240) for process in ranks] == [0, 0]
    expected = two_ranks.logits(0, 1, "tiny-qwen3")
    for output in outputs:
        torch.testing.assert_close(torch.load(output), expected, atol=1e-10, rtol=0.0)
