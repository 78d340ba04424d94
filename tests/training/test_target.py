"""The target in plain torch is the serving model, in both of its layouts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from models.paged_harness import PagedHarness
from mrv2.training.target import FrozenTarget
from mrv2_models.causal_lm import DecoderLayer
from mrv2_models.errors import UnsupportedModelError
from mrv2_models.registry import load_model
from training.cases import CPU, tiny_target

IDS = torch.randint(3, 512, (3, 21), generator=torch.Generator().manual_seed(4))


def test_dense_batches_give_the_logits_of_the_serving_model() -> None:
    target, serving = tiny_target(), load_model("tiny-llama", dtype="float32", load_format="dummy")
    ours = F.linear(target.features(IDS).final, target.head)
    theirs = PagedHarness(serving).step({str(i): row.tolist() for i, row in enumerate(IDS)})
    for index, logits in enumerate(theirs.values()):
        torch.testing.assert_close(ours[index], logits, rtol=1e-4, atol=1e-4)


def test_a_tap_is_the_residual_stream_after_so_many_layers() -> None:
    """The serving model's own layers, one after the other, on one dialogue."""
    target, serving = tiny_target(), load_model("tiny-llama", dtype="float32", load_format="dummy")
    ids = IDS[0].tolist()
    harness, seen = PagedHarness(serving), [serving.embed(IDS[0])]

    def note(_: object, __: object, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        seen.append(output[0] + output[1])

    for layer in serving.layers:
        assert isinstance(layer, DecoderLayer)
        layer.register_forward_hook(note)
    harness.step({"a": ids})
    taps = target.features(IDS[:1], (0, 1, 2)).taps[0].chunk(3, dim=-1)
    for ours, theirs in zip(taps, seen, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_decoding_row_by_row_gives_the_dense_logits() -> None:
    """Rows stand at different positions, and one is overwritten by a second dialogue half-way."""
    target = tiny_target()
    dense = F.linear(target.features(IDS).final, target.head)
    cache = target.allocate_cache(3, 32)
    starts = torch.tensor([0, 4, 9])
    for step in range(30):
        place = step - starts
        inside = (place >= 0) & (place < IDS.shape[1])
        tokens = IDS[torch.arange(3), place.clamp(0, IDS.shape[1] - 1)]
        logits = target.decode(tokens, place.clamp(0, IDS.shape[1] - 1), cache)
        for row in torch.nonzero(inside).flatten().tolist():
            torch.testing.assert_close(logits[row], dense[row, place[row]], rtol=1e-4, atol=1e-4)
    other = IDS.flip(1)
    dense = F.linear(target.features(other).final, target.head)
    for step in range(8):
        logits = target.decode(other[:, step], torch.full((3,), step), cache)
        torch.testing.assert_close(logits, dense[:, step], rtol=1e-4, atol=1e-4)


def test_other_families_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="trained for Llama models"):
        FrozenTarget("tiny-qwen3", dtype="float32", device=CPU, load_format="dummy")
