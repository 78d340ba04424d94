"""Stateless noise: a pure function of (seed, position, token), so that a draw depends on nothing else.

A 32-bit Murmur3 hash of the words seed_low, seed_high, position, token gives r.  With
``u = (r + 0.5) / 2^32`` the noises are

    E = -log(1 - u)        exponential
    g = -log(E)            Gumbel, so that argmax(logits + g) draws from softmax(logits)

Large g comes from u -> 0, where floating point is dense, so the rare tail is kept: u is assembled
from two exact 16-bit halves, and ``1 - u`` likewise from the halves of ~r.  float64 appends the top
21 bits of a second hash to r, so that float32 noise is the rounding of float64 noise.

Draws of different purpose must not share noise.  A vocabulary is smaller than 2^24, so that the upper bits
of the token's word name the purpose: none for the target's own draws, 1 << 24 for its blocks, and those below.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import cdiv, tl, triton
from mrv2_kernels.aot_case import AotCase

_BLOCK = 2048
# initial hash values of the first 32 and of the further 21 random bits; the kernels spell these constants out,
# because a kernel does not see its module's globals
_FIRST_DOMAIN = 0
_SECOND_DOMAIN = 0x3C6EF372
_C1, _C2, _C3 = 0xCC9E2D51, 0x1B873593, 0xE6546B64
_F1, _F2 = 0x85EBCA6B, 0xC2B2AE35
_NUM_BYTES = 16
# added to the token's word: whether a draft is accepted (plus its index in the step), the draw that replaces a
# rejected one, and the draw of draft k (0, 1, ...) under verification by probabilities, (1 + k) * DRAFT_DOMAIN.
# The index keeps steps apart that verify, or draft, at one position: a discarded draw must not be seen again.
# Kernels spell these numbers out too.
ACCEPT_DOMAIN = 1 << 25
RECOVER_DOMAIN = 1 << 26
DRAFT_DOMAIN = 1 << 27


@triton.jit
def _rotate_left(x, BITS: tl.constexpr):
    return (x << BITS) | (x >> (32 - BITS))


@triton.jit
def _absorb(h, word):
    word = _rotate_left(word * 0xCC9E2D51, 15) * 0x1B873593
    return _rotate_left(h ^ word, 13) * 5 + 0xE6546B64


@triton.jit
def _finalise(h):
    h = h ^ 16
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _hash(seed, position, token, DOMAIN: tl.constexpr):
    h = (seed & 0).to(tl.uint32) + DOMAIN
    h = _absorb(h, (seed & 0xFFFFFFFF).to(tl.uint32))
    h = _absorb(h, ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
    h = _absorb(h, position.to(tl.uint32))
    return _finalise(_absorb(h, token.to(tl.uint32)))


@triton.jit
def _complement(r):
    # ~r, whose -1 the interpreter of Triton 3.7 refuses for unsigned words
    return r ^ 0xFFFFFFFF


@triton.jit
def _unit_fp32(r):
    high = (r >> 16).to(tl.float32) * 1.52587890625e-05
    return high + ((r & 0xFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10


@triton.jit
def exponential_fp32(seed, position, token):
    """Return E in float32 for tensors of tokens; `seed` int64 and `position` int32 are scalars."""
    r = _hash(seed, position, token, 0)
    u = _unit_fp32(r)
    # -log(1 - u) / u = 1 + u/2 + ... + u^9/10, exact to float32 below a quarter
    series = u * 0.1 + 0.1111111111111111
    series = series * u + 0.125
    series = series * u + 0.14285714285714285
    series = series * u + 0.16666666666666666
    series = series * u + 0.2
    series = series * u + 0.25
    series = series * u + 0.3333333333333333
    series = series * u + 0.5
    series = series * u + 1.0
    return tl.where(u < 0.25, series * u, -tl.log(_unit_fp32(_complement(r))))


@triton.jit
def uniform_fp32(seed, position, token):
    """Return u in (0, 1], float32; arguments as for `exponential_fp32`."""
    return _unit_fp32(_hash(seed, position, token, 0))


@triton.jit
def _unit_fp64(first, second):
    high = first.to(tl.float64) * 2.3283064365386963e-10
    return high + ((second >> 11).to(tl.float64) + 0.5) * 1.1102230246251565e-16


@triton.jit
def exponential_fp64(seed, position, token):
    """Return E in float64; arguments as for `exponential_fp32`."""
    first = _hash(seed, position, token, 0)
    second = _hash(seed, position, token, 0x3C6EF372)
    u = _unit_fp64(first, second)
    # log1p(-u) = log(y) * u / (1 - y) with y = 1 - u rounded: the error of y cancels
    y = 1.0 - u
    step = 1.0 - y
    small = tl.where(step > 0.0, -tl.log(y) * (u / tl.where(step > 0.0, step, 1.0)), u)
    return tl.where(u < 0.25, small, -tl.log(_unit_fp64(_complement(first), _complement(second))))


@triton.jit
def loose_log2_uniform(seed, position, token):
    """Return y with ``y <= 2^23 (log2(u) + 159) < y + 0.09 * 2^23``, for a bound on g without a logarithm.

    A float's bits, read as an integer, are 2^23 times its exponent plus a chord below its logarithm.
    As ``-log(1 - u) >= u``, the Gumbel noise is at most ``-log(u)``, so ``g log2(e) <= 159 - 2^-23 y``
    but for the rounding of y, a relative 2^-23.
    """
    r = _hash(seed, position, token, 0)
    return r.to(tl.float32).to(tl.int32, bitcast=True).to(tl.float32)


@triton.jit
def _exponential_kernel(out_ptr, out_stride, seeds_ptr, positions_ptr, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seeds_ptr + row)
    position = tl.load(positions_ptr + row)
    if out_ptr.dtype.element_ty == tl.float64:
        noise = exponential_fp64(seed, position, token)
    else:
        noise = exponential_fp32(seed, position, token)
    tl.store(out_ptr + row * out_stride + token, noise, mask=token < vocab)


def exponential_noise_triton(
    # [N, V] float32 or float64, out
    out: torch.Tensor,
    # [N] int64
    seeds: torch.Tensor,
    # [N] int32
    positions: torch.Tensor,
) -> None:
    """Fill row i with E(seeds[i], positions[i], token): ``argmax(probs / E)`` draws from `probs`."""
    num_rows, vocab = _check(out)
    if num_rows == 0:
        return
    _exponential_kernel[(num_rows, cdiv(vocab, _BLOCK))](out, out.stride(0), seeds, positions, vocab, BLOCK=_BLOCK)


def exponential_noise_torch(
    # [N, V] float32 or float64, out
    out: torch.Tensor,
    # [N] int64
    seeds: torch.Tensor,
    # [N] int32
    positions: torch.Tensor,
) -> None:
    """Torch reference of `exponential_noise`."""
    _, vocab = _check(out)
    _exponential_into(out, seeds, positions, torch.arange(vocab, dtype=torch.int32, device=seeds.device))


def _exponential_into(out: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
    first = _hash_torch(seeds, positions, tokens, _FIRST_DOMAIN)
    if out.dtype == torch.float64:
        second = _hash_torch(seeds, positions, tokens, _SECOND_DOMAIN)
        u, rest = _unit_fp64_torch(first, second), _unit_fp64_torch(~first, ~second)
    else:
        u, rest = _unit_fp32_torch(first), _unit_fp32_torch(~first)
    torch.where(u < 0.25, u.neg().log1p_(), rest.log_(), out=out)
    out.neg_()


exponential_noise = dispatch(exponential_noise_triton, exponential_noise_torch)


def gumbel_noise_torch(
    # [N] int64
    seeds: torch.Tensor,
    # [N] int32
    positions: torch.Tensor,
    vocab: int,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return g [N, vocab] of `dtype` (float32 or float64)."""
    tokens = torch.arange(vocab, dtype=torch.int32, device=seeds.device)
    return gumbel_noise_of_torch(seeds, positions, tokens.unsqueeze(0), dtype)


def gumbel_noise_of_torch(
    # [N] int64
    seeds: torch.Tensor,
    # [N] int32
    positions: torch.Tensor,
    # [N, W] or [1, W] int32
    tokens: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return g [N, W] of the given tokens, in `dtype` (float32 or float64)."""
    noise = torch.empty(seeds.shape[0], tokens.shape[1], dtype=dtype, device=seeds.device)
    _exponential_into(noise, seeds, positions, tokens)
    return noise.log_().neg_()


def uniform_torch(
    # [N] int64
    seeds: torch.Tensor,
    # [N] int32
    positions: torch.Tensor,
    # [N, W] or [1, W] int32
    tokens: torch.Tensor,
) -> torch.Tensor:
    """Return u [N, W] float32 in (0, 1]."""
    return _unit_fp32_torch(_hash_torch(seeds, positions, tokens, _FIRST_DOMAIN))


def _signed(word: int) -> int:
    """Return the int32 with the bits of the 32-bit `word`."""
    return word - (1 << 32) if word >= 1 << 31 else word


def _rotate_left_torch(x: torch.Tensor, bits: int) -> torch.Tensor:
    carried = (x >> (32 - bits)).bitwise_and_((1 << bits) - 1)
    return (x << bits).bitwise_or_(carried)


def _shift_xor_torch(h: torch.Tensor, bits: int) -> torch.Tensor:
    return h.bitwise_xor_((h >> bits).bitwise_and_((1 << (32 - bits)) - 1))


def _absorb_torch(h: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    word = _rotate_left_torch(word * _signed(_C1), 15).mul_(_C2)
    return _rotate_left_torch(h ^ word, 13).mul_(5).add_(_signed(_C3))


def _hash_torch(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor, domain: int) -> torch.Tensor:
    """Return the hash [N, W] of `tokens` ([W] or [N, W]) as int32 bits; products wrap as the kernel's do."""
    h = torch.full_like(positions, domain, dtype=torch.int32)
    for word in (seeds.to(torch.int32), (seeds >> 32).to(torch.int32), positions.to(torch.int32)):
        h = _absorb_torch(h, word)
    h = _absorb_torch(h.unsqueeze(1), tokens)
    h = _shift_xor_torch(h.bitwise_xor_(_NUM_BYTES), 16).mul_(_signed(_F1))
    h = _shift_xor_torch(h, 13).mul_(_signed(_F2))
    return _shift_xor_torch(h, 16)


def _unit_fp32_torch(r: torch.Tensor) -> torch.Tensor:
    high = (r >> 16).bitwise_and_(0xFFFF).to(torch.float32).mul_(2.0**-16)
    return high.add_((r & 0xFFFF).to(torch.float32).add_(0.5).mul_(2.0**-32))


def _unit_fp64_torch(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    high = (first.to(torch.int64) & 0xFFFFFFFF).to(torch.float64).mul_(2.0**-32)
    low = (second >> 11).bitwise_and_(0x1FFFFF)
    return high.add_(low.to(torch.float64).add_(0.5).mul_(2.0**-53))


def _check(out: torch.Tensor) -> tuple[int, int]:
    assert out.dtype in (torch.float32, torch.float64), f"noise is float32 or float64, not {out.dtype}"
    assert out.stride(1) == 1, f"out has inner stride {out.stride(1)}: its rows must be contiguous"
    return out.shape[0], out.shape[1]


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    return [
        AotCase(
            kernel=_exponential_kernel,
            signature={
                "out_ptr": f"*{dtype}",
                "out_stride": "i32",
                "seeds_ptr": "*i64",
                "positions_ptr": "*i32",
                "vocab": "i32",
            },
            constexprs={"BLOCK": _BLOCK},
        )
        for dtype in ("fp32", "fp64")
    ]
