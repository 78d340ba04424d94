"""Logits equal transformers' for any way of splitting a sequence into steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.hf_folders import SHAPE, VARIANTS, write_folder
from models.paged_harness import PagedHarness
from mrv2_models.attention import AttentionBackend
from mrv2_models.causal_lm import CausalLM
from mrv2_models.registry import load_model

LENGTH = 150
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=list(VARIANTS))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[CausalLM, list[int], torch.Tensor]:
    """Our model, a sequence, and transformers' logits of it, [LENGTH, V]."""
    folder = Path(tmp_path_factory.mktemp(request.param))
    reference = write_folder(request.param, folder)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, SHAPE["vocab_size"], (LENGTH,), generator=generator)
    expected = reference(ids[None]).logits[0]
    assert expected.std() > 0.5, "the reference must be far from constant"
    return load_model(folder, dtype="float32"), ids.tolist(), expected


def assert_equal(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0.0)


@pytest.mark.parametrize("backend", ["triton", "sdpa"])
def test_full_prefill(pair: tuple[CausalLM, list[int], torch.Tensor], backend: AttentionBackend) -> None:
    model, ids, expected = pair
    assert_equal(PagedHarness(model, backend=backend).step({"a": ids})["a"], expected)


@pytest.mark.parametrize("backend", ["triton", "sdpa"])
def test_chunked_prefill_beside_other_requests(
    pair: tuple[CausalLM, list[int], torch.Tensor], backend: AttentionBackend
) -> None:
    model, ids, expected = pair
    harness = PagedHarness(model, backend=backend)
    harness.step({"b": ids[:17]})
    chunks = [(0, 1), (1, 33), (33, 97), (97, LENGTH)]
    parts = []
    for first, last in chunks:
        at = harness.computed["b"]
        out = harness.step({"a": ids[first:last], "b": ids[at : at + 1]}, pad_tokens=3, pad_requests=2)
        assert_equal(out["b"], expected[at : at + 1])
        parts.append(out["a"])
    assert_equal(torch.cat(parts), expected)


@pytest.mark.parametrize("backend", ["triton", "sdpa"])
def test_decode(pair: tuple[CausalLM, list[int], torch.Tensor], backend: AttentionBackend) -> None:
    model, ids, expected = pair
    harness = PagedHarness(model, backend=backend)
    harness.step({"a": ids[:60], "b": ids[:15]})
    for at in range(60, 84):
        other = harness.computed["b"]
        out = harness.step({"a": [ids[at]], "b": [ids[other]]}, pad_tokens=2, pad_requests=2)
        assert_equal(out["a"], expected[at : at + 1])
        assert_equal(out["b"], expected[other : other + 1])
