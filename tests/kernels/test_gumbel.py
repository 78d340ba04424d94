"""Gumbel sampling: the hash and its noise by definition, equal twins, and what a draw may depend on."""

from __future__ import annotations

import math

import pytest
import torch

from mrv2_kernels.sampling.gumbel import gumbel_sample
from mrv2_kernels.sampling.noise import exponential_noise, gumbel_noise_torch

INF = float("inf")
NAN = float("nan")
TWINS = ["torch", "triton"]
MASK = 0xFFFFFFFF


def murmur3(words: list[int], h: int) -> int:
    """Return the 32-bit Murmur3 hash of 32-bit words, starting at h."""

    def rotate(x: int, bits: int) -> int:
        return ((x << bits) | (x >> (32 - bits))) & MASK

    for word in words:
        h ^= rotate(word * 0xCC9E2D51 & MASK, 15) * 0x1B873593 & MASK
        h = rotate(h, 13) * 5 + 0xE6546B64 & MASK
    h ^= 4 * len(words)
    h = (h ^ h >> 16) * 0x85EBCA6B & MASK
    h = (h ^ h >> 13) * 0xC2B2AE35 & MASK
    return h ^ h >> 16


def draw(
    twin: str,
    logits: torch.Tensor,
    *,
    slots: list[int] | None = None,
    positions: list[int] | None = None,
    temperature: tuple[float, ...] = (1.0,),
    seeds: tuple[int, ...] = (0,),
    scaled: bool = False,
) -> list[int]:
    num_rows = logits.shape[0]
    sampled = torch.full((num_rows,), -9)
    getattr(gumbel_sample, twin)(
        logits,
        sampled,
        torch.tensor(slots or [0] * num_rows, dtype=torch.int32),
        torch.tensor(positions or list(range(num_rows)), dtype=torch.int32),
        torch.tensor(temperature),
        torch.tensor(seeds),
        scaled=scaled,
    )
    return sampled.tolist()


def make_logits(num_rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a [num_rows, vocab] view of a wider buffer; the padding is NaN."""
    generator = torch.Generator().manual_seed(num_rows * vocab)
    buffer = torch.full((num_rows, vocab + 3), NAN, dtype=dtype)
    buffer[:, :vocab] = 2 * torch.randn(num_rows, vocab, generator=generator)
    return buffer[:, :vocab]


@pytest.mark.parametrize("twin", TWINS)
def test_noise_is_the_stated_function_of_seed_position_and_token(twin):
    seeds = [0, -1, -(2**63), 0x0123456789ABCDEF, 2**40 + 3]
    positions = [0, 1, 2**30 + 5, 131071, 7]
    out32, out64 = torch.empty(5, 33), torch.empty(5, 33, dtype=torch.float64)
    args = (torch.tensor(seeds), torch.tensor(positions, dtype=torch.int32))
    getattr(exponential_noise, twin)(out32, *args)
    getattr(exponential_noise, twin)(out64, *args)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for token in range(33):
            words = [seed & MASK, seed >> 32 & MASK, position, token]
            first, second = murmur3(words, 0), murmur3(words, 0x3C6EF372)
            assert out32[row, token] == pytest.approx(-math.log1p(-(first + 0.5) / 2**32), rel=4e-7)
            u = (first << 21 | second >> 11) / 2**53
            assert out64[row, token] == pytest.approx(-math.log1p(-u), rel=1e-13)


def test_noise_twins_agree():
    args = (torch.tensor([5, -7]), torch.tensor([0, 999], dtype=torch.int32))
    for dtype, rtol in ((torch.float32, 5e-7), (torch.float64, 2e-15)):
        outs = [torch.full((2, 3000), NAN, dtype=dtype)[:, :2500] for _ in TWINS]
        for out, twin in zip(outs, TWINS, strict=True):
            getattr(exponential_noise, twin)(out, *args)
        torch.testing.assert_close(*outs, rtol=rtol, atol=0)
    gumbel = gumbel_noise_torch(*args, 2500, torch.float64)
    torch.testing.assert_close(gumbel, -outs[0].log())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_rows", "vocab"), [(1, 49), (9, 1000), (3, 4101)])
def test_twins_agree_on_strided_logits(dtype, num_rows, vocab):
    logits = make_logits(num_rows, vocab, dtype)
    kwargs = {
        "slots": [(3 * row + 1) % 5 for row in range(num_rows)],
        "temperature": (0.0, 1.0, 0.6, 1.7, 0.0),
        "seeds": (1, 2, -3, 2**61, 5),
    }
    by_torch = draw("torch", logits, **kwargs)
    assert draw("triton", logits, **kwargs) == by_torch
    for row, slot in enumerate(kwargs["slots"]):
        if kwargs["temperature"][slot] == 0:
            assert by_torch[row] == int(logits[row].argmax())


@pytest.mark.parametrize("twin", TWINS)
def test_the_draw_is_the_argmax_of_scaled_logits_plus_noise(twin):
    logits = make_logits(6, 300, torch.float64)
    noise = gumbel_noise_torch(torch.full((6,), 11), torch.arange(6, dtype=torch.int32), 300, torch.float64)
    temperature = torch.tensor(0.8).double()
    expected = (logits / temperature + noise).argmax(dim=1).tolist()
    assert draw(twin, logits, temperature=(0.8,), seeds=(11,)) == expected
    scaled = logits / temperature
    assert draw(twin, scaled, temperature=(0.8,), seeds=(11,), scaled=True) == expected


@pytest.mark.parametrize("twin", TWINS)
def test_a_draw_depends_on_seed_and_position_alone(twin):
    logits = make_logits(1, 700).expand(6, 700)
    alone = [draw(twin, logits[:1], positions=[p], seeds=(4,))[0] for p in range(3)]
    batch = draw(
        twin,
        logits,
        slots=[2, 1, 0, 1, 0, 2],
        positions=[0, 1, 2, 0, 0, 2],
        temperature=(1.0, 1.0, 1.0),
        seeds=(9, 4, 4),
    )
    assert [batch[3], batch[1], batch[5]] == alone
    assert batch[0] == alone[0]
    assert len(set(draw(twin, logits, positions=[10, 20, 30, 40, 50, 60]))) > 1


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_cannot_be_sampled_give_minus_one(twin, temperature):
    logits = torch.zeros(5, 2500)
    logits[0, 2400] = NAN
    logits[1] = -INF
    logits[2] = -INF
    logits[2, 2301] = -3.0
    logits[3, 8] = INF
    assert draw(twin, logits, temperature=(temperature,))[:4] == [-1, -1, 2301, 8]
    assert 0 <= draw(twin, logits, temperature=(temperature,))[4] < 2500


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ties_go_to_the_lowest_id(twin, dtype):
    logits = torch.zeros(3, 6000, dtype=dtype)
    logits[1, [5000, 4100, 4700]] = 1.0
    logits[2, [5999, 17]] = 2.0
    assert draw(twin, logits, temperature=(0.0,)) == [0, 4100, 17]


@pytest.mark.parametrize("twin", TWINS)
def test_output_may_be_a_column_and_rows_may_be_none(twin):
    sampled = torch.full((2, 3), -9)
    getattr(gumbel_sample, twin)(
        torch.eye(2),
        sampled[:, 0],
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        torch.tensor([0.0]),
        torch.tensor([0]),
    )
    assert sampled.tolist() == [[0, -9, -9], [1, -9, -9]]
    assert draw(twin, torch.empty(0, 9), slots=[], positions=[]) == []


def test_wrong_layout_is_refused():
    for twin in TWINS:
        with pytest.raises(AssertionError, match="inner stride 2"):
            draw(twin, torch.zeros(2, 10)[:, ::2])
