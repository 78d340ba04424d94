"""Write the keys and values of a step into the paged cache.

    cache[slot // BS, slot % BS] = row,  for every token whose slot is not -1

A cache of 8-bit floats (e4m3) keeps each value rounded to three bits of mantissa, what is beyond 448 as 448.

Legend: T = tokens, NB = blocks, BS = block size, Hkv = KV heads, D = head size.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._numerics import as_kept as as_kept_torch
from mrv2_kernels._numerics import bytes_of
from mrv2_kernels._triton import next_power_of_2, tl, triton
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.attention._tiles import as_kept
from mrv2_kernels.gemm.pdl import gdc_launch_dependents, gdc_wait, has_pdl


@triton.jit
def _write_kv_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    k_stride,
    v_stride,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot >= 0:
        cols = tl.arange(0, BLOCK)
        mask = cols < ROW
        k = tl.load(k_ptr + token * k_stride + cols, mask=mask)
        v = tl.load(v_ptr + token * v_stride + cols, mask=mask)
        tl.store(k_cache_ptr + slot * ROW + cols, as_kept(k, k_cache_ptr.dtype.element_ty), mask=mask)
        tl.store(v_cache_ptr + slot * ROW + cols, as_kept(v, v_cache_ptr.dtype.element_ty), mask=mask)


def write_kv_triton(
    # [T_pad, Hkv, D], token stride free
    k: torch.Tensor,
    # [T_pad, Hkv, D], token stride free
    v: torch.Tensor,
    # [NB, BS, Hkv, D], contiguous
    k_cache: torch.Tensor,
    # [NB, BS, Hkv, D], contiguous
    v_cache: torch.Tensor,
    # [T_pad] int32, -1 = skip
    slot_mapping: torch.Tensor,
) -> None:
    """Scatter k and v into the caches; both may be views of one fused qkv tensor."""
    num_tokens, num_kv_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    for name, x in (("k", k), ("v", v)):
        assert x.stride(2) == 1 and x.stride(1) == head_dim, f"{name} needs adjacent heads, got strides {x.stride()}"
    assert k_cache.is_contiguous() and v_cache.is_contiguous(), "the KV caches must be contiguous"
    row = num_kv_heads * head_dim
    block, pdl = next_power_of_2(row), has_pdl(k)
    _write_kv_kernel[(num_tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        k.stride(0),
        v.stride(0),
        ROW=row,
        BLOCK=block,
        PDL=pdl,
        num_warps=min(max(block // 256, 1), 8),
        launch_pdl=pdl,
    )


def write_kv_torch(
    # [T_pad, Hkv, D]
    k: torch.Tensor,
    # [T_pad, Hkv, D]
    v: torch.Tensor,
    # [NB, BS, Hkv, D], contiguous
    k_cache: torch.Tensor,
    # [NB, BS, Hkv, D], contiguous
    v_cache: torch.Tensor,
    # [T_pad] int32, -1 = skip
    slot_mapping: torch.Tensor,
) -> None:
    """Reference of `write_kv`, the implementation of the host backend."""
    tokens = torch.nonzero(slot_mapping >= 0).squeeze(1)
    slots = slot_mapping.index_select(0, tokens).long()
    for rows, cache in ((k, k_cache), (v, v_cache)):
        by_slot = bytes_of(cache).view(-1, *cache.shape[2:])
        by_slot.index_copy_(0, slots, bytes_of(as_kept_torch(rows.index_select(0, tokens), cache.dtype)))


write_kv = dispatch(write_kv_triton, write_kv_torch)


def aot_cases() -> list[AotCase]:
    """Return a representative signature of each kernel of this module."""
    signature = dict.fromkeys(("k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr"), "*bf16")
    signature |= {"slot_mapping_ptr": "*i32", "k_stride": "i32", "v_stride": "i32"}
    eight_bits = signature | dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), "*fp8e4nv")
    constants: dict[str, object] = {"ROW": 1024, "BLOCK": 1024, "PDL": True}
    return [AotCase(_write_kv_kernel, each, constants) for each in (signature, eight_bits)]
