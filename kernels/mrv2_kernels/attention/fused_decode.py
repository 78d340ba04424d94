"""A decode step's attention in one launch: head norms, rotary embedding, KV write, paged attention.

For each request's newest token, with h = q or k head (the norm only where weights are given):

    h = rotate(h / sqrt(mean(h^2) + eps) * weight, position)
    cache[slot] = (k, v)
    out = softmax(scale * q . [cached keys, k]) . [cached values, v]

Program (request, KV head, split) folds tiles split, split + n, split + 2n ... of the cached context, n
being the splits in use, which follows from the length on the device; the others leave at once.  The last
split in use adds the new token from registers and writes it to the cache, which no program of the launch
reads there.  The last program of a (request, KV head) to arrive combines the shares, in their order, so
that the result does not depend on who arrives last:

    out = sum_s 2^(lse_s - m) * out_s / sum_s 2^(lse_s - m),    m = max_s lse_s

With an order (`mrv2_kernels.attention.order`) requests start in it, and the heads of one side by side; each program
computes what it does without one, so results are bit by bit the same.

With PDL (`mrv2_kernels.gemm.pdl`) each program fetches order, lengths, blocks, angles and the first tile of its share
of the context before it waits for q, k and v: an earlier step wrote them, or this step's preparation, or for the order
the start of the forward pass, and a gate stands in between, the lookup of embeddings.  Measured on an H200 in a forward
pass of Qwen3-0.6B at 384 tokens of context (traces/bench/h200-forward-tuning.json): 708 us without PDL and 609 with it
for one request, 877 and 785 for 8, 1,381 and 1,268 for 32; as kernels one by one 750, 926 and 1,403.

Legend: B_pad = requests with padding, NB = blocks, BS = block size, MB = blocks a row, Hq / Hkv =
query / KV heads, D = head size, L = positions in the table.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import next_power_of_2, tl, triton
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.attention._tiles import (
    LOG2_E,
    as_kept,
    as_pairs,
    attend_tiles,
    check_inputs,
    combine_shares,
    fold_pairs,
    fold_tile,
    heads_at_once,
    join_columns,
    load_block_ids,
    load_tile,
    normed_and_rotated,
    split_columns,
)
from mrv2_kernels.attention.decode import paged_attention_decode_torch
from mrv2_kernels.attention.kv_write import write_kv_torch
from mrv2_kernels.attention.order import check_order
from mrv2_kernels.attention.plan import MAX_SPLIT_PAIRS, DecodePlan, arrivals_of
from mrv2_kernels.gemm.pdl import gdc_launch_dependents, gdc_wait, has_pdl
from mrv2_kernels.gemm.unpack import unpacks
from mrv2_kernels.layers.rope import qk_norm_rope_torch, rotary_embedding_torch


@triton.jit(do_not_specialize=["num_splits", "tiles_per_split"])
def _fused_decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_sin_ptr,
    positions_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    seq_lens_ptr,
    slot_mapping_ptr,
    order_ptr,
    out_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    arrivals_ptr,
    q_stride,
    k_stride,
    v_stride,
    out_stride,
    table_stride,
    num_splits,
    tiles_per_split,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EPS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
    UNPACK: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    if HAS_ORDER:
        request = tl.load(order_ptr + tl.program_id(1)).to(tl.int64)
        kv_head = tl.program_id(0)
    else:
        request = tl.program_id(0).to(tl.int64)
        kv_head = tl.program_id(1)
    split = tl.program_id(2)
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    in_head = dims < HEAD_DIM
    partners = (dims + HALF) % HEAD_DIM
    # before the wait: what launches long before this one's predecessor wrote (the docstring says why it is there)
    if PDL:
        gdc_launch_dependents()
    seq_len = tl.load(seq_lens_ptr + request)
    num_cached = tl.maximum(seq_len - 1, 0)
    num_tiles = tl.cdiv(num_cached, BLOCK_N)
    num_shares = tl.minimum(tl.maximum(tl.cdiv(num_tiles, tiles_per_split), 1), num_splits)
    if BLOCK_SPLITS > 1:
        if split >= num_shares:
            # of every program, the idle ones included
            if PDL:
                gdc_wait()
            return
    position = tl.load(positions_ptr + request).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + request).to(tl.int64)
    q_weight = tl.load(q_weight_ptr + dims, mask=in_head & HAS_NORM, other=0.0).to(tl.float32)
    q_partner_weight = tl.load(q_weight_ptr + partners, mask=in_head & HAS_NORM, other=0.0).to(tl.float32)
    k_weight = tl.load(k_weight_ptr + dims, mask=in_head & HAS_NORM, other=0.0).to(tl.float32)
    k_partner_weight = tl.load(k_weight_ptr + partners, mask=in_head & HAS_NORM, other=0.0).to(tl.float32)
    table_ptr = block_tables_ptr + request * table_stride
    k_head_ptr = k_cache_ptr + kv_head * HEAD_DIM
    v_head_ptr = v_cache_ptr + kv_head * HEAD_DIM
    TOKEN_STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    first_keys = split * BLOCK_N + tl.arange(0, BLOCK_N)
    first_ids = load_block_ids(table_ptr, first_keys, num_cached, BLOCK_SIZE)
    PAIRS: tl.constexpr = k_cache_ptr.dtype.element_ty == tl.float8e4nv
    if PAIRS:
        first_k, first_v = load_tile(
            as_pairs(k_head_ptr),
            as_pairs(v_head_ptr),
            first_ids,
            first_keys,
            num_cached,
            TOKEN_STRIDE // 2,
            BLOCK_SIZE,
            HEAD_DIM // 2,
            BLOCK_D // 2,
            True,
        )
    else:
        first_k, first_v = load_tile(
            k_head_ptr, v_head_ptr, first_ids, first_keys, num_cached, TOKEN_STRIDE, BLOCK_SIZE, HEAD_DIM, BLOCK_D, True
        )
    angles_ptr = cos_sin_ptr + position * HEAD_DIM + dims % HALF
    cos = tl.load(angles_ptr, mask=in_head, other=0.0).to(tl.float32)
    sin = tl.load(angles_ptr + HALF, mask=in_head, other=0.0).to(tl.float32)
    signed_sin = tl.where(dims < HALF, -sin, sin)
    if PDL:
        gdc_wait()

    in_group = rows < GROUP
    heads = kv_head * GROUP + rows
    mask = in_group[:, None] & in_head[None, :]
    tile = heads[:, None] * HEAD_DIM + dims[None, :]
    q_row_ptr = q_ptr + request * q_stride
    k_row_ptr = k_ptr + request * k_stride + kv_head * HEAD_DIM
    q = tl.load(q_row_ptr + tile, mask=mask, other=0.0)
    q_partner = tl.load(q_row_ptr + heads[:, None] * HEAD_DIM + partners[None, :], mask=mask, other=0.0)
    k = tl.load(k_row_ptr + dims, mask=in_head, other=0.0)
    k_partner = tl.load(k_row_ptr + partners, mask=in_head, other=0.0)
    v = tl.load(v_ptr + request * v_stride + kv_head * HEAD_DIM + dims, mask=in_head, other=0.0)

    q = normed_and_rotated(
        q,
        q_partner,
        q_weight[None, :],
        q_partner_weight[None, :],
        cos[None, :],
        signed_sin[None, :],
        HEAD_DIM,
        HAS_NORM,
        EPS,
        1,
    ).to(q_ptr.dtype.element_ty)
    # rounded as the cache rounds it, so that later steps read what this one used
    k = normed_and_rotated(k, k_partner, k_weight, k_partner_weight, cos, signed_sin, HEAD_DIM, HAS_NORM, EPS, 0)
    k = as_kept(k.to(k_ptr.dtype.element_ty), k_cache_ptr.dtype.element_ty)
    v = as_kept(v, v_cache_ptr.dtype.element_ty)
    holds_new = (split == num_shares - 1) & (seq_len > 0)
    written = in_head & (split == num_shares - 1) & (slot >= 0)
    tl.store(k_head_ptr + slot * TOKEN_STRIDE + dims, k, mask=written)
    tl.store(v_head_ptr + slot * TOKEN_STRIDE + dims, v, mask=written)

    score = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], axis=1) * scale_log2
    row_max = tl.where(holds_new, score, float("-inf"))
    row_sum = tl.where(holds_new, 1.0, 0.0) + tl.zeros([BLOCK_M], tl.float32)
    new_value = tl.where(holds_new, v.to(tl.float32), 0.0)
    acc = new_value[None, :] + tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if split < num_tiles:
        first_visible = (first_keys < num_cached)[None, :]
        if PAIRS:
            q_even, q_odd = split_columns(q, BLOCK_M, BLOCK_D)
            acc_even, acc_odd = split_columns(acc, BLOCK_M, BLOCK_D)
            acc_even, acc_odd, row_max, row_sum = fold_pairs(
                q_even,
                q_odd,
                first_k,
                first_v,
                acc_even,
                acc_odd,
                row_max,
                row_sum,
                first_visible,
                scale_log2,
                True,
                PRECISION,
                UNPACK,
            )
            acc = join_columns(acc_even, acc_odd, BLOCK_M, BLOCK_D)
        else:
            acc, row_max, row_sum = fold_tile(
                q, first_k, first_v, acc, row_max, row_sum, first_visible, scale_log2, True, PRECISION
            )
    acc, row_max, row_sum = attend_tiles(
        q,
        acc,
        row_max,
        row_sum,
        tl.zeros([BLOCK_M], tl.int32) + num_cached,
        k_head_ptr,
        v_head_ptr,
        table_ptr,
        (split + num_shares) * BLOCK_N,
        num_cached,
        num_shares * BLOCK_N,
        scale_log2,
        TOKEN_STRIDE,
        BLOCK_SIZE,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_N,
        True,
        PRECISION,
        UNPACK,
    )
    # padding has row_sum 0 and yields zeros
    acc = acc / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
    out_row_ptr = out_ptr + request * out_stride
    if BLOCK_SPLITS == 1:
        tl.store(out_row_ptr + tile, acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        if num_shares == 1:
            tl.store(out_row_ptr + tile, acc.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            first_part = request * (NUM_KV_HEADS * GROUP) * num_splits
            part = heads * num_splits + split
            request_out_ptr = partial_out_ptr + first_part * HEAD_DIM
            request_lse_ptr = partial_lse_ptr + first_part
            tl.store(request_out_ptr + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)
            tl.store(request_lse_ptr + part, row_max + tl.log2(row_sum), mask=in_group)
            # every thread's stores come before the arrival that publishes them
            tl.debug_barrier()
            arrivals = arrivals_ptr + request * NUM_KV_HEADS + kv_head
            if tl.atomic_add(arrivals, 1) == num_shares - 1:
                tl.store(arrivals, 0)
                combine_shares(
                    request_out_ptr,
                    request_lse_ptr,
                    out_row_ptr,
                    kv_head * GROUP,
                    num_splits,
                    num_shares,
                    GROUP,
                    BLOCK_GROUP,
                    HEAD_DIM,
                    BLOCK_D,
                    BLOCK_SPLITS,
                )


def fused_decode_attention_triton(
    # [B_pad, Hq, D], token stride free; left as it is
    q: torch.Tensor,
    # [B_pad, Hkv, D], token stride free; left as it is
    k: torch.Tensor,
    # [B_pad, Hkv, D], token stride free
    v: torch.Tensor,
    # [D] each, or None for heads without norms
    norm_weights: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    # [L, D]
    cos_sin: torch.Tensor,
    # [B_pad] int32
    positions: torch.Tensor,
    # [NB, BS, Hkv, D], contiguous
    k_cache: torch.Tensor,
    # [NB, BS, Hkv, D], contiguous
    v_cache: torch.Tensor,
    # [B_pad, MB] int32
    block_tables: torch.Tensor,
    # [B_pad] int32, tokens including the new one; 0 = padding
    seq_lens: torch.Tensor,
    # [B_pad] int32, where the new token goes; -1 = nowhere
    slot_mapping: torch.Tensor,
    # [B_pad, Hq, D], token stride free
    out: torch.Tensor,
    *,
    scale: float,
    plan: DecodePlan,
    # [B_pad] int32, every row once
    order: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Write each new token to the cache and its attention to `out`; padding rows get zeros.

    Take `plan` from `decode_plan`.  With an `order` the requests start in it, the heads of each side by side; results
    are the same.  `pdl` starts the launch before the one in front of it has ended (programmatic dependent launch,
    `mrv2_kernels.gemm.pdl`).  Launches on one device share arrival counters, so they must be ordered: on one stream,
    or by events.  Raises `ValueError` for float64 (only the torch twin computes that), for layouts and orders that
    the kernel cannot read, and for `pdl` on a GPU without it.
    """
    check_inputs("fused_decode_attention", q, k_cache, v_cache, out)
    batch, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    for name, x in (("k", k), ("v", v)):
        if x.stride(2) != 1 or x.stride(1) != head_dim:
            raise ValueError(f"fused_decode_attention: {name} needs adjacent heads, got strides {x.stride()}")
    if pdl and not has_pdl(q):
        raise ValueError(f"fused_decode_attention: pdl=True needs compute capability 9.0; {q.device} fails has_pdl")
    check_order("fused_decode_attention", order, batch)
    if batch == 0:
        return
    num_splits = plan.num_splits
    if num_splits == 1:
        partial_out = partial_lse = arrivals = out
    elif batch * num_kv_heads > MAX_SPLIT_PAIRS:
        raise ValueError(
            f"fused_decode_attention: {num_splits} splits of {batch} requests x {num_kv_heads} KV heads exceed "
            f"{MAX_SPLIT_PAIRS} pairs; take the plan from decode_plan, which does not split there"
        )
    else:
        arrivals = arrivals_of(q.device)
        partial_out = torch.empty((batch, num_heads, num_splits, head_dim), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty((batch, num_heads, num_splits), dtype=torch.float32, device=q.device)
    group = num_heads // num_kv_heads
    q_weight, k_weight = norm_weights or (q, k)
    # the first dimension starts fastest
    pairs = (batch, num_kv_heads) if order is None else (num_kv_heads, batch)
    _fused_decode_kernel[(*pairs, num_splits)](
        q,
        k,
        v,
        q_weight,
        k_weight,
        cos_sin,
        positions,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        slot_mapping,
        seq_lens if order is None else order,
        out,
        partial_out,
        partial_lse,
        arrivals,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        out.stride(0),
        block_tables.stride(0),
        num_splits,
        plan.tiles_per_split,
        scale * LOG2_E,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        BLOCK_D=next_power_of_2(head_dim),
        BLOCK_M=max(16, next_power_of_2(group)),
        BLOCK_N=plan.block_n,
        BLOCK_SPLITS=next_power_of_2(num_splits),
        BLOCK_GROUP=heads_at_once(group, num_splits, next_power_of_2(head_dim)),
        HAS_NORM=norm_weights is not None,
        EPS=eps,
        HAS_ORDER=order is not None,
        PDL=pdl,
        PRECISION="ieee",
        UNPACK=unpacks(q, k_cache.dtype),
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        **({"launch_pdl": True} if pdl else {}),
        **({"maxnreg": plan.max_registers} if plan.max_registers else {}),
    )


def fused_decode_attention_torch(
    # [B_pad, Hq, D]
    q: torch.Tensor,
    # [B_pad, Hkv, D]
    k: torch.Tensor,
    # [B_pad, Hkv, D]
    v: torch.Tensor,
    # [D] each
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
    # [B_pad, MB] int32
    block_tables: torch.Tensor,
    # [B_pad] int32
    seq_lens: torch.Tensor,
    # [B_pad] int32
    slot_mapping: torch.Tensor,
    # [B_pad, Hq, D]
    out: torch.Tensor,
    *,
    scale: float,
    plan: DecodePlan,
    # [B_pad] int32, every row once
    order: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Reference of `fused_decode_attention`, the host backend's implementation; never splits, in any order the same."""
    check_order("fused_decode_attention", order, q.shape[0])
    q, k = q.clone(), k.clone()
    if norm_weights is None:
        rotary_embedding_torch(q, k, cos_sin, positions)
    else:
        qk_norm_rope_torch(q, k, *norm_weights, eps, cos_sin, positions)
    write_kv_torch(k, v, k_cache, v_cache, slot_mapping)
    paged_attention_decode_torch(q, k_cache, v_cache, block_tables, seq_lens, out, scale=scale, num_splits=1)


fused_decode_attention = dispatch(fused_decode_attention_triton, fused_decode_attention_torch)


def aot_cases() -> list[AotCase]:
    """Return representative signatures of each kernel of this module: Qwen3-0.6B and SmolLM2-135M."""
    pointers = ("q", "k", "v", "q_weight", "k_weight", "k_cache", "v_cache", "out")
    signature: dict[str, str] = {f"{name}_ptr": "*bf16" for name in pointers}
    signature |= {"scale_log2": "fp32", "cos_sin_ptr": "*fp32"}
    signature |= dict.fromkeys(("partial_out_ptr", "partial_lse_ptr"), "*fp32")
    integers = ("positions", "block_tables", "seq_lens", "slot_mapping", "order", "arrivals")
    signature |= {f"{name}_ptr": "*i32" for name in integers}
    strides = ("q_stride", "k_stride", "v_stride", "out_stride", "table_stride", "num_splits", "tiles_per_split")
    signature |= dict.fromkeys(strides, "i32")
    shared: dict[str, object] = {
        "BLOCK_SIZE": 16,
        "BLOCK_M": 16,
        "tiles_per_split": 2,
        "EPS": 1e-6,
        "PRECISION": "ieee",
        "UNPACK": False,
        "HAS_ORDER": False,
    }
    qwen3: dict[str, object] = {"NUM_KV_HEADS": 8, "GROUP": 2, "HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_N": 64}
    smollm2: dict[str, object] = {"NUM_KV_HEADS": 3, "GROUP": 3, "HEAD_DIM": 64, "BLOCK_D": 64, "BLOCK_N": 128}
    normed = shared | qwen3 | {"HAS_NORM": True, "PDL": True, "BLOCK_SPLITS": 32, "BLOCK_GROUP": 2}
    eight_bits = signature | dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), "*fp8e4nv")
    return [
        AotCase(_fused_decode_kernel, signature, normed),
        AotCase(_fused_decode_kernel, eight_bits, normed | {"UNPACK": True}),
        AotCase(
            _fused_decode_kernel,
            signature,
            normed | {"BLOCK_N": 16, "BLOCK_SPLITS": 4},
            num_warps=1,
            max_registers=160,
        ),
        AotCase(
            _fused_decode_kernel, signature, normed | {"BLOCK_N": 32, "BLOCK_SPLITS": 1, "HAS_ORDER": True}, num_warps=1
        ),
        AotCase(
            _fused_decode_kernel,
            signature,
            shared | smollm2 | {"HAS_NORM": False, "PDL": False, "BLOCK_SPLITS": 1, "BLOCK_GROUP": 4},
        ),
    ]
