"""Temperature and min-p: equal twins, untouched neutral rows, row strides."""

from __future__ import annotations

import pytest
import torch

from mrv2_kernels.sampling.min_p import apply_min_p
from mrv2_kernels.sampling.temperature import apply_temperature

INF = float("inf")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def make_logits(num_rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a [num_rows, vocab] view of a wider buffer; the padding is NaN."""
    generator = torch.Generator().manual_seed(num_rows * vocab)
    buffer = torch.full((num_rows, vocab + 15), float("nan"), dtype=dtype)
    buffer[:, :vocab] = 3 * torch.randn(num_rows, vocab, generator=generator)
    return buffer[:, :vocab]


def slots(num_rows: int, num_slots: int) -> torch.Tensor:
    return (torch.arange(num_rows) % num_slots).to(torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "vocab"), [(1, 49), (9, 333), (4, 4099)])
def test_temperature_twins_agree(dtype, num_rows, vocab):
    temperature = torch.tensor([0.7, 0.0, 1.0, 1.9])
    logits = make_logits(num_rows, vocab, dtype)
    twin = logits.clone()
    expected = logits.double() / torch.tensor([0.7, 1.0, 1.0, 1.9])[slots(num_rows, 4)].unsqueeze(1)
    apply_temperature.triton(logits, slots(num_rows, 4), temperature)
    apply_temperature.torch(twin, slots(num_rows, 4), temperature)
    if dtype == torch.bfloat16:
        # Triton's interpreter truncates to bf16, devices round
        torch.testing.assert_close(logits, twin, rtol=2**-7, atol=0)
    else:
        assert torch.equal(logits, twin)
    torch.testing.assert_close(twin, expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "vocab"), [(1, 49), (9, 333), (4, 4099)])
def test_min_p_keeps_what_is_likely_enough(dtype, num_rows, vocab):
    min_p = torch.tensor([0.05, 0.0, 1.0, 0.3])
    logits = make_logits(num_rows, vocab, dtype)
    twin = logits.clone()
    probs = logits.double().softmax(dim=1)
    ratio = probs / probs.amax(dim=1, keepdim=True)
    floor = min_p[slots(num_rows, 4)].double().unsqueeze(1)
    is_border = (ratio - floor).abs() < 1e-6
    apply_min_p.triton(logits, slots(num_rows, 4), min_p)
    apply_min_p.torch(twin, slots(num_rows, 4), min_p)
    assert torch.equal(logits, twin)
    assert torch.equal((logits > -INF) | is_border, (ratio >= floor) | is_border)


@pytest.mark.parametrize("twin", ["torch", "triton"])
def test_min_p_leaves_odd_rows_alone(twin):
    logits = torch.tensor([[1.0, float("nan"), -50.0], [-INF, -INF, -INF], [-INF, 2.0, -1e9]])
    expected = logits.clone()
    expected[2, 2] = -INF
    getattr(apply_min_p, twin)(logits, slots(3, 1), torch.tensor([0.5]))
    torch.testing.assert_close(logits, expected, equal_nan=True)


@pytest.mark.parametrize("op", [apply_temperature, apply_min_p])
@pytest.mark.parametrize("twin", ["torch", "triton"])
def test_no_rows_and_wrong_layout(op, twin):
    getattr(op, twin)(torch.empty(0, 5), slots(0, 1), torch.tensor([0.5]))
    if twin == "triton":
        with pytest.raises(AssertionError, match="inner stride 2"):
            op.triton(torch.zeros(2, 10)[:, ::2], slots(2, 1), torch.tensor([0.5]))
