"""Attention over the paged cache: what a step tells it, and the choice of kernel.

Legend: B_pad requests and T_pad tokens of the padded step, MB blocks per row, NB blocks, BS block size,
Hq / Hkv query / KV heads of this rank, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

from mrv2_kernels._numerics import bytes_of
from mrv2_kernels.attention.decode import decode_num_splits, paged_attention_decode
from mrv2_kernels.attention.fused_decode import fused_decode_attention
from mrv2_kernels.attention.kv_write import write_kv
from mrv2_kernels.attention.order import longest_first
from mrv2_kernels.attention.paged import paged_attention
from mrv2_kernels.attention.plan import decode_choice
from mrv2_kernels.gemm.pdl import has_pdl

AttentionBackend = Literal["triton", "sdpa"]
# what the split-KV choice assumes where there is no GPU to ask
DEFAULT_NUM_SMS = 132


@dataclass(slots=True, kw_only=True)
class AttentionMetadata:
    """One step as attention sees it; tensors are persistent buffers of the runner, sliced to the bucket."""

    # [B_pad, MB] int32, rows of padding hold the null block 0
    block_tables: torch.Tensor
    # [B_pad + 1] int32, padded requests have no query
    query_start_loc: torch.Tensor
    # [B_pad] int32, 0 for padded requests
    seq_lens: torch.Tensor
    # [T_pad] int32, -1 for padded tokens
    slot_mapping: torch.Tensor
    # upper bound over the step, in tokens
    max_query_len: int
    # every request has exactly one query token, so T_pad == B_pad
    uniform_decode: bool
    # "triton" means our kernels, which on a CPU are their torch references
    backend: AttentionBackend = "triton"
    # [B + 1], only for "sdpa": query_start_loc as the host knows it, without padding
    query_start_loc_np: np.ndarray | None = None
    # [B], only for "sdpa": seq_lens or an upper bound of them, without padding
    max_seq_lens_np: np.ndarray | None = None
    # [B_pad] int32, the order in which `attend_fused` starts the requests; None = as they come
    order: torch.Tensor | None = None

    def takes_fused(
        self, num_kv_heads: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype | None = None
    ) -> bool:
        """Whether `attend_fused` serves this step: a function of the padded batch and the heads of this rank."""
        if not self.uniform_decode or self.backend != "triton":
            return False
        return decode_choice(self.seq_lens.shape[0], num_kv_heads, head_dim, dtype, cache_dtype).fused

    def with_order(
        self,
        dtype: torch.dtype,
        # [NB, BS, Hkv, D]
        k_cache: torch.Tensor,
    ) -> AttentionMetadata:
        """Return this step with its `order`, where the choice for the padded batch has one, or as it is.

        `dtype` is that of the queries.  A model calls it once a forward pass, in front of the lookup of embeddings:
        attention that starts ahead reads the order before it waits (`mrv2_kernels.gemm.pdl`).
        """
        num_kv_heads, head_dim = k_cache.shape[2:]
        if not self.takes_fused(num_kv_heads, head_dim, dtype, k_cache.dtype):
            return self
        choice = decode_choice(self.seq_lens.shape[0], num_kv_heads, head_dim, dtype, k_cache.dtype)
        return replace(self, order=longest_first(self.seq_lens)) if choice.ordered else self


def attend(
    # [T_pad, Hq, D]
    q: torch.Tensor,
    # [T_pad, Hkv, D]
    k: torch.Tensor,
    # [T_pad, Hkv, D]
    v: torch.Tensor,
    # [NB, BS, Hkv, D]
    k_cache: torch.Tensor,
    # [NB, BS, Hkv, D]
    v_cache: torch.Tensor,
    attn: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """Write the step's keys and values, then return the causal attention ``[T_pad, Hq, D]``.

    Rows of padded tokens are unspecified.  Nothing beyond ``seq_lens`` influences the result.
    """
    write_kv(k, v, k_cache, v_cache, attn.slot_mapping)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if attn.backend == "sdpa":
        _sdpa(q, k_cache, v_cache, attn, out, scale)
    elif attn.uniform_decode:
        splits = decode_num_splits(q.shape[0], k_cache.shape[2], num_sms(q.device))
        paged_attention_decode(
            q, k_cache, v_cache, attn.block_tables, attn.seq_lens, out, scale=scale, num_splits=splits
        )
    else:
        paged_attention(
            q,
            k_cache,
            v_cache,
            attn.block_tables,
            attn.query_start_loc,
            attn.seq_lens,
            out,
            scale=scale,
            max_query_len=attn.max_query_len,
            pdl=has_pdl(q),
        )
    return out


def attend_fused(
    # [B_pad, Hq, D]
    q: torch.Tensor,
    # [B_pad, Hkv, D]
    k: torch.Tensor,
    # [B_pad, Hkv, D]
    v: torch.Tensor,
    # [D] each, or None for heads without norms
    norm_weights: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    # [L, D]
    cos_sin: torch.Tensor,
    # [B_pad] int32
    positions: torch.Tensor,
    # [NB, BS, Hkv, D]
    k_cache: torch.Tensor,
    # [NB, BS, Hkv, D]
    v_cache: torch.Tensor,
    attn: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """Norm and rotate the heads, write keys and values and return the attention ``[B_pad, Hq, D]``, in one launch.

    For steps with `takes_fused`; equals the family's `rotate` followed by `attend`.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    choice = decode_choice(q.shape[0], k_cache.shape[2], q.shape[2], q.dtype, k_cache.dtype)
    fused_decode_attention(
        q,
        k,
        v,
        norm_weights,
        eps,
        cos_sin,
        positions,
        k_cache,
        v_cache,
        attn.block_tables,
        attn.seq_lens,
        attn.slot_mapping,
        out,
        scale=scale,
        plan=choice.plan,
        order=attn.order,
        pdl=choice.ahead and has_pdl(q),
    )
    return out


@cache
def num_sms(device: torch.device) -> int:
    """Return the number of multiprocessors of a CUDA device, or what the CPU path pretends to have."""
    if device.type != "cuda":
        return DEFAULT_NUM_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


# [NB, BS, Hkv, D], [n] -> [n * BS, Hkv, D]
def _blocks_of(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    return bytes_of(cache)[blocks].view(cache.dtype).flatten(0, 1)


def _sdpa(
    # [T_pad, Hq, D]
    q: torch.Tensor,
    # [NB, BS, Hkv, D]
    k_cache: torch.Tensor,
    # [NB, BS, Hkv, D]
    v_cache: torch.Tensor,
    attn: AttentionMetadata,
    # [T_pad, Hq, D]
    out: torch.Tensor,
    scale: float,
) -> None:
    """Gather each request's blocks and call torch's attention: slow, simple, for eager steps only.

    Shapes come from the host's upper bounds, masks from the device's lengths, so nothing waits.
    """
    if attn.query_start_loc_np is None or attn.max_seq_lens_np is None:
        raise ValueError(
            "attention backend 'sdpa' needs query_start_loc_np and max_seq_lens_np, which only eager steps have; "
            "use backend='triton' under CUDA graphs"
        )
    block_size = k_cache.shape[1]
    starts = attn.query_start_loc_np.tolist()
    for request, bound in enumerate(attn.max_seq_lens_np.tolist()):
        first, last = starts[request], starts[request + 1]
        num_blocks = -(-bound // block_size)
        blocks = attn.block_tables[request, :num_blocks]
        seq_len = attn.seq_lens[request]
        key_positions = torch.arange(num_blocks * block_size, device=q.device)
        query_positions = seq_len - (last - first) + torch.arange(last - first, device=q.device)
        written = (key_positions < seq_len)[:, None, None]
        # a slot that nobody wrote may hold NaN, which a mask on the scores alone would let through
        k, v = (
            torch.where(written, _blocks_of(cache, blocks).to(q.dtype), torch.zeros((), dtype=q.dtype, device=q.device))
            for cache in (k_cache, v_cache)
        )
        attended = F.scaled_dot_product_attention(
            q[first:last].transpose(0, 1).unsqueeze(0),
            k.transpose(0, 1).unsqueeze(0),
            v.transpose(0, 1).unsqueeze(0),
            attn_mask=key_positions[None, :] <= query_positions[:, None],
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        out[first:last] = attended.squeeze(0).transpose(0, 1)
