"""Build a step's model inputs on the device: prompt token ids, positions and sequence lengths.

``positions[t] = num_computed_tokens[slot] + (t - query_start_loc[b])`` for token t of request b, and
``seq_lens[b] = num_computed_tokens[slot] + query_len``.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import cdiv, tl, triton
from mrv2_kernels.aot_case import AotCase

_BLOCK = 1024


@triton.jit
def _prefill_inputs_kernel(
    input_ids_ptr,
    idx_mapping_ptr,
    query_start_loc_ptr,
    token_ids_ptr,
    token_ids_stride,
    prefill_len_ptr,
    num_computed_tokens_ptr,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0)
    slot = tl.load(idx_mapping_ptr + req).to(tl.int64)
    num_computed = tl.load(num_computed_tokens_ptr + slot)
    num_left = tl.load(prefill_len_ptr + slot) - num_computed
    if num_left > 0:
        start = tl.load(query_start_loc_ptr + req)
        length = tl.minimum(tl.load(query_start_loc_ptr + req + 1) - start, num_left)
        source_ptr = token_ids_ptr + slot * token_ids_stride + num_computed
        for base in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
            offset = base + tl.arange(0, BLOCK)
            ids = tl.load(source_ptr + offset, mask=offset < length)
            tl.store(input_ids_ptr + start + offset, ids, mask=offset < length)


def prepare_prefill_inputs_triton(
    # [T_pad] int32
    input_ids: torch.Tensor,
    # [B] int32, exactly B long
    idx_mapping: torch.Tensor,
    # [>= B + 1] int32
    query_start_loc: torch.Tensor,
    # [R, L] int32
    token_ids: torch.Tensor,
    # [R] int32
    prefill_len: torch.Tensor,
    # [R] int32
    num_computed_tokens: torch.Tensor,
    *,
    max_query_len: int,
) -> None:
    """Copy the scheduled part of each unfinished prefill into `input_ids`.

    Tokens at or past a request's prefill length are left alone: `combine_sampled_and_draft_tokens`
    writes them.  `max_query_len` (tokens) only sizes the grid.
    """
    num_reqs = idx_mapping.shape[0]
    if num_reqs == 0:
        return
    _prefill_inputs_kernel[(num_reqs, max(1, cdiv(max_query_len, _BLOCK)))](
        input_ids,
        idx_mapping,
        query_start_loc,
        token_ids,
        token_ids.stride(0),
        prefill_len,
        num_computed_tokens,
        BLOCK=_BLOCK,
    )


def prepare_prefill_inputs_torch(
    # [T_pad] int32
    input_ids: torch.Tensor,
    # [B] int32, exactly B long
    idx_mapping: torch.Tensor,
    # [>= B + 1] int32
    query_start_loc: torch.Tensor,
    # [R, L] int32
    token_ids: torch.Tensor,
    # [R] int32
    prefill_len: torch.Tensor,
    # [R] int32
    num_computed_tokens: torch.Tensor,
    *,
    max_query_len: int,
) -> None:
    """Torch reference of `prepare_prefill_inputs`."""
    slots, position = _slots_and_positions(idx_mapping, query_start_loc, num_computed_tokens)
    ids = token_ids[slots, position.clamp(max=token_ids.shape[1] - 1)]
    target = input_ids[: slots.shape[0]]
    target.copy_(torch.where(position < prefill_len[slots], ids, target))


prepare_prefill_inputs = dispatch(prepare_prefill_inputs_triton, prepare_prefill_inputs_torch)


@triton.jit(do_not_specialize=["num_reqs", "num_tokens_padded", "num_reqs_padded"])
def _pos_seq_lens_kernel(
    positions_ptr,
    seq_lens_ptr,
    idx_mapping_ptr,
    query_start_loc_ptr,
    num_computed_tokens_ptr,
    num_reqs,
    num_tokens_padded,
    num_reqs_padded,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0)
    chunk = tl.program_id(1)
    stride = tl.num_programs(1) * BLOCK
    start = tl.load(query_start_loc_ptr + req)
    if req == num_reqs:
        for base in range(start + chunk * BLOCK, num_tokens_padded, stride):
            token = base + tl.arange(0, BLOCK)
            tl.store(positions_ptr + token, 0, mask=token < num_tokens_padded)
        for base in range(req + chunk * BLOCK, num_reqs_padded, stride):
            row = base + tl.arange(0, BLOCK)
            tl.store(seq_lens_ptr + row, 0, mask=row < num_reqs_padded)
    else:
        num_computed = tl.load(num_computed_tokens_ptr + tl.load(idx_mapping_ptr + req).to(tl.int64))
        length = tl.load(query_start_loc_ptr + req + 1) - start
        if chunk == 0:
            tl.store(seq_lens_ptr + req, num_computed + length)
        for base in range(chunk * BLOCK, length, stride):
            offset = base + tl.arange(0, BLOCK)
            tl.store(positions_ptr + start + offset, num_computed + offset, mask=offset < length)


def prepare_pos_seq_lens_triton(
    # [T_pad] int32
    positions: torch.Tensor,
    # [B_pad] int32
    seq_lens: torch.Tensor,
    # [B] int32, exactly B long
    idx_mapping: torch.Tensor,
    # [>= B + 1] int32
    query_start_loc: torch.Tensor,
    # [R] int32
    num_computed_tokens: torch.Tensor,
    *,
    max_query_len: int,
) -> None:
    """Write positions and sequence lengths (tokens, this step's included); padding becomes 0.

    `max_query_len` (tokens) only sizes the grid.
    """
    num_reqs = idx_mapping.shape[0]
    _pos_seq_lens_kernel[(num_reqs + 1, max(1, cdiv(max_query_len, _BLOCK)))](
        positions,
        seq_lens,
        idx_mapping,
        query_start_loc,
        num_computed_tokens,
        num_reqs,
        positions.shape[0],
        seq_lens.shape[0],
        BLOCK=_BLOCK,
    )


def prepare_pos_seq_lens_torch(
    # [T_pad] int32
    positions: torch.Tensor,
    # [B_pad] int32
    seq_lens: torch.Tensor,
    # [B] int32, exactly B long
    idx_mapping: torch.Tensor,
    # [>= B + 1] int32
    query_start_loc: torch.Tensor,
    # [R] int32
    num_computed_tokens: torch.Tensor,
    *,
    max_query_len: int,
) -> None:
    """Torch reference of `prepare_pos_seq_lens`."""
    num_reqs = idx_mapping.shape[0]
    slots, position = _slots_and_positions(idx_mapping, query_start_loc, num_computed_tokens)
    positions[: slots.shape[0]] = position
    positions[slots.shape[0] :] = 0
    seq_lens[:num_reqs] = num_computed_tokens[idx_mapping] + query_start_loc[: num_reqs + 1].diff()
    seq_lens[num_reqs:] = 0


prepare_pos_seq_lens = dispatch(prepare_pos_seq_lens_triton, prepare_pos_seq_lens_torch)


def _slots_and_positions(
    # [B] int32
    idx_mapping: torch.Tensor,
    # [>= B + 1] int32
    query_start_loc: torch.Tensor,
    # [R] int32
    num_computed_tokens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return slot and position of every scheduled token, both [T] int32."""
    num_reqs = idx_mapping.shape[0]
    num_tokens = int(query_start_loc[num_reqs])
    lengths = query_start_loc[: num_reqs + 1].diff()
    slots = torch.repeat_interleave(idx_mapping, lengths, output_size=num_tokens)
    first = num_computed_tokens[idx_mapping] - query_start_loc[:num_reqs]
    token = torch.arange(num_tokens, dtype=torch.int32, device=idx_mapping.device)
    return slots, token + torch.repeat_interleave(first, lengths, output_size=num_tokens)


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    return [
        AotCase(
            kernel=_prefill_inputs_kernel,
            signature={
                "input_ids_ptr": "*i32",
                "idx_mapping_ptr": "*i32",
                "query_start_loc_ptr": "*i32",
                "token_ids_ptr": "*i32",
                "token_ids_stride": "i32",
                "prefill_len_ptr": "*i32",
                "num_computed_tokens_ptr": "*i32",
            },
            constexprs={"BLOCK": _BLOCK},
        ),
        AotCase(
            kernel=_pos_seq_lens_kernel,
            signature={
                "positions_ptr": "*i32",
                "seq_lens_ptr": "*i32",
                "idx_mapping_ptr": "*i32",
                "query_start_loc_ptr": "*i32",
                "num_computed_tokens_ptr": "*i32",
                "num_reqs": "i32",
                "num_tokens_padded": "i32",
                "num_reqs_padded": "i32",
            },
            constexprs={"BLOCK": _BLOCK},
        ),
    ]
