"""Rotary position embedding of queries and keys, in place, alone or behind a per-head RMS norm.

Half-split layout: element i of a head pairs with element i + D/2,

    (a, b) -> (a * cos - b * sin, b * cos + a * sin),    cos_sin[position] = [cos | sin]

`qk_norm_rope` first norms each head:  h / sqrt(mean(h^2) + eps) * weight  (Qwen3).  Sums and products
are fp64 for fp64 input, else fp32; the result is rounded once.

Legend: T = tokens, Hq / Hkv = query / KV heads, D = head size, L = positions in the table.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._numerics import accumulator_dtype
from mrv2_kernels._triton import cdiv, next_power_of_2, tl, triton
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.gemm.pdl import gdc_launch_dependents, gdc_wait, has_pdl

# heads a program rotates; a tile of 8 x 64 pairs keeps two warps busy with 16-byte loads
HEADS_PER_PROGRAM = 8


@triton.jit
def _rotary_kernel(
    q_ptr,
    k_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_sin_ptr,
    positions_ptr,
    q_stride,
    k_stride,
    NUM_Q_HEADS: tl.constexpr,
    NUM_K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EPS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    ACC: tl.constexpr = tl.float64 if q_ptr.dtype.element_ty == tl.float64 else tl.float32
    Q_BLOCKS: tl.constexpr = (NUM_Q_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    if block < Q_BLOCKS:
        base_ptr = q_ptr + token * q_stride
        weight_ptr = q_weight_ptr
        first_head = block * BLOCK_HEADS
        num_heads = NUM_Q_HEADS
    else:
        base_ptr = k_ptr + token * k_stride
        weight_ptr = k_weight_ptr
        first_head = (block - Q_BLOCKS) * BLOCK_HEADS
        num_heads = NUM_K_HEADS
    pairs = tl.arange(0, BLOCK_HALF)
    heads = first_head + tl.arange(0, BLOCK_HEADS)
    in_pairs = pairs < HALF
    mask = (heads < num_heads)[:, None] & in_pairs[None, :]
    low_ptrs = base_ptr + heads[:, None] * (2 * HALF) + pairs[None, :]
    position = tl.load(positions_ptr + token).to(tl.int64)
    low = tl.load(low_ptrs, mask=mask, other=0.0).to(ACC)
    high = tl.load(low_ptrs + HALF, mask=mask, other=0.0).to(ACC)
    table_ptrs = cos_sin_ptr + position * (2 * HALF) + pairs
    cos = tl.load(table_ptrs, mask=in_pairs, other=0.0).to(ACC)[None, :]
    sin = tl.load(table_ptrs + HALF, mask=in_pairs, other=0.0).to(ACC)[None, :]
    if HAS_NORM:
        low_weight = tl.load(weight_ptr + pairs, mask=in_pairs, other=0.0).to(ACC)[None, :]
        high_weight = tl.load(weight_ptr + HALF + pairs, mask=in_pairs, other=0.0).to(ACC)[None, :]
        mean_square = tl.sum(low * low + high * high, axis=1) / (2 * HALF)
        inverse_rms = (1.0 / tl.sqrt(mean_square + EPS))[:, None]
        low = low * inverse_rms * low_weight
        high = high * inverse_rms * high_weight
    tl.store(low_ptrs, (low * cos - high * sin).to(q_ptr.dtype.element_ty), mask=mask)
    tl.store(low_ptrs + HALF, (high * cos + low * sin).to(q_ptr.dtype.element_ty), mask=mask)


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    has_norm: bool,
) -> None:
    num_tokens, num_q_heads, head_dim = q.shape
    num_k_heads = k.shape[1]
    if num_tokens == 0:
        return
    for name, x in (("q", q), ("k", k)):
        assert x.stride(2) == 1 and x.stride(1) == head_dim, f"{name} needs adjacent heads, got strides {x.stride()}"
    half, pdl = head_dim // 2, has_pdl(q)
    q_blocks = cdiv(num_q_heads, HEADS_PER_PROGRAM)
    k_blocks = cdiv(num_k_heads, HEADS_PER_PROGRAM)
    _rotary_kernel[(num_tokens, q_blocks + k_blocks)](
        q,
        k,
        q_weight,
        k_weight,
        cos_sin,
        positions,
        q.stride(0),
        k.stride(0),
        NUM_Q_HEADS=num_q_heads,
        NUM_K_HEADS=num_k_heads,
        HALF=half,
        BLOCK_HALF=next_power_of_2(half),
        BLOCK_HEADS=HEADS_PER_PROGRAM,
        HAS_NORM=has_norm,
        EPS=eps,
        PDL=pdl,
        num_warps=2,
        launch_pdl=pdl,
    )


def rotary_embedding_triton(
    # [T, Hq, D], token stride free
    q: torch.Tensor,
    # [T, Hkv, D], token stride free
    k: torch.Tensor,
    # [L, D]
    cos_sin: torch.Tensor,
    # [T] int32
    positions: torch.Tensor,
) -> None:
    """Rotate q and k in place; both may be views of one fused qkv tensor."""
    _launch(q, k, q, k, 0.0, cos_sin, positions, has_norm=False)


def rotary_embedding_torch(
    # [T, Hq, D]
    q: torch.Tensor,
    # [T, Hkv, D]
    k: torch.Tensor,
    # [L, D]
    cos_sin: torch.Tensor,
    # [T] int32
    positions: torch.Tensor,
) -> None:
    """Reference of `rotary_embedding`, the implementation of the host backend."""
    acc = accumulator_dtype(q.dtype)
    cos, sin = cos_sin.index_select(0, positions).to(acc)[:, None, :].chunk(2, dim=-1)
    for x in (q, k):
        low, high = x.to(acc).chunk(2, dim=-1)
        x.copy_(torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1))


def qk_norm_rope_triton(
    # [T, Hq, D], token stride free
    q: torch.Tensor,
    # [T, Hkv, D], token stride free
    k: torch.Tensor,
    # [D]
    q_weight: torch.Tensor,
    # [D]
    k_weight: torch.Tensor,
    eps: float,
    # [L, D]
    cos_sin: torch.Tensor,
    # [T] int32
    positions: torch.Tensor,
) -> None:
    """Norm each head of q and k, then rotate, in place and in one launch."""
    _launch(q, k, q_weight, k_weight, eps, cos_sin, positions, has_norm=True)


def qk_norm_rope_torch(
    # [T, Hq, D]
    q: torch.Tensor,
    # [T, Hkv, D]
    k: torch.Tensor,
    # [D]
    q_weight: torch.Tensor,
    # [D]
    k_weight: torch.Tensor,
    eps: float,
    # [L, D]
    cos_sin: torch.Tensor,
    # [T] int32
    positions: torch.Tensor,
) -> None:
    """Reference of `qk_norm_rope`, the implementation of the host backend."""
    acc = accumulator_dtype(q.dtype)
    cos, sin = cos_sin.index_select(0, positions).to(acc)[:, None, :].chunk(2, dim=-1)
    for x, weight in ((q, q_weight), (k, k_weight)):
        normed = torch.nn.functional.rms_norm(x.to(acc), x.shape[-1:], weight.to(acc), eps)
        low, high = normed.chunk(2, dim=-1)
        x.copy_(torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1))


rotary_embedding = dispatch(rotary_embedding_triton, rotary_embedding_torch)
qk_norm_rope = dispatch(qk_norm_rope_triton, qk_norm_rope_torch)


def aot_cases() -> list[AotCase]:
    """Return a representative signature of each kernel of this module."""
    signature = dict.fromkeys(("q_ptr", "k_ptr", "q_weight_ptr", "k_weight_ptr"), "*bf16")
    signature |= {"cos_sin_ptr": "*fp32", "positions_ptr": "*i32", "q_stride": "i32", "k_stride": "i32"}
    constants: dict[str, object] = {
        "NUM_Q_HEADS": 16,
        "NUM_K_HEADS": 8,
        "HALF": 64,
        "BLOCK_HALF": 64,
        "BLOCK_HEADS": HEADS_PER_PROGRAM,
        "HAS_NORM": True,
        "EPS": 1e-6,
        "PDL": True,
    }
    return [AotCase(_rotary_kernel, signature, constants, num_warps=2)]
