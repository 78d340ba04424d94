"""The grammar mask: equal twins, odd vocabularies, untouched neighbours and padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrv2_kernels.sampling.bitmask import apply_bitmask

INF = float("inf")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def make_case(num_rows: int, num_masks: int, vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return a [N, vocab] view of a wider buffer, masks with garbage past the vocabulary, their rows, and booleans."""
    rng = np.random.default_rng(num_rows * vocab + num_masks)
    buffer = torch.full((num_rows, vocab + 7), 3.0, dtype=dtype)
    buffer[:, :vocab] = torch.from_numpy(rng.standard_normal((num_rows, vocab))).to(dtype)
    words = -(-vocab // 32)
    allowed = rng.random((num_masks, words * 32)) < 0.4
    bits = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    rows = rng.permutation(num_rows)[:num_masks].astype(np.int32)
    return buffer, torch.from_numpy(bits), torch.from_numpy(rows), torch.from_numpy(allowed[:, :vocab])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "num_masks", "vocab"),
    [(1, 1, 31), (5, 2, 32), (3, 3, 33), (9, 4, 4097), (2, 1, 49_152), (1, 1, 151_937)],
)
def test_twins_mask_what_is_not_allowed_and_nothing_else(dtype, num_rows, num_masks, vocab):
    buffer, bits, rows, allowed = make_case(num_rows, num_masks, vocab, dtype)
    expected = buffer.clone()
    for mask, row in enumerate(rows.tolist()):
        expected[row, :vocab][~allowed[mask]] = -INF
    for twin in ("triton", "torch"):
        got = buffer.clone()
        getattr(apply_bitmask, twin)(got[:, :vocab], bits, rows)
        assert torch.equal(got, expected), twin


@pytest.mark.parametrize("twin", ["torch", "triton"])
def test_nothing_all_and_one_token_allowed(twin):
    logits = torch.arange(3 * 40, dtype=torch.float32).view(3, 40)
    bits = torch.tensor([[0, 0], [-1, -1], [-(2**31), 0]], dtype=torch.int32)
    expected = logits.clone()
    expected[0] = -INF
    expected[2] = -INF
    expected[2, 31] = logits[2, 31]
    getattr(apply_bitmask, twin)(logits, bits, torch.tensor([0, 1, 2], dtype=torch.int32))
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("twin", ["torch", "triton"])
def test_nan_outside_the_mask_is_gone_and_inside_stays(twin):
    logits = torch.tensor([[float("nan"), 1.0, float("nan")]])
    getattr(apply_bitmask, twin)(logits, torch.tensor([[0b110]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    assert logits[0, 0] == -INF and logits[0, 1] == 1.0 and logits[0, 2].isnan()


@pytest.mark.parametrize("twin", ["torch", "triton"])
def test_no_masks(twin):
    logits = torch.ones(2, 5)
    getattr(apply_bitmask, twin)(logits, torch.empty(0, 1, dtype=torch.int32), torch.empty(0, dtype=torch.int32))
    assert torch.equal(logits, torch.ones(2, 5))


def test_short_masks_are_refused():
    with pytest.raises(AssertionError, match="cover 32 of 33 tokens"):
        apply_bitmask.triton(torch.ones(1, 33), torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
