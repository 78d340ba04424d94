"""Which token follows each input token of a prompt: the one whose log-probability the prompt asks for.

    targets[t] = token_ids[row, p + 1]   p = positions[t], row = row of t's request,  if p + 1 < prompt_len[row]
    targets[t] = -1                      otherwise: what follows is no prompt token

Legend: T tokens of the step, B requests, R request rows, L tokens a row can hold, n tokens asked for.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import cdiv, tl, triton
from mrv2_kernels.aot_case import AotCase

_BLOCK = 256


@triton.jit(do_not_specialize=["first", "num_targets", "num_reqs"])
def _prompt_targets_kernel(
    targets_ptr,
    first,
    num_targets,
    positions_ptr,
    idx_mapping_ptr,
    query_start_loc_ptr,
    num_reqs,
    token_ids_ptr,
    row_len,
    prompt_len_ptr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < num_targets
    token = first + place
    # the last request that begins at or before the token
    low = tl.zeros([BLOCK], tl.int32)
    high = tl.zeros([BLOCK], tl.int32) + num_reqs - 1
    for _ in range(20):
        middle = (low + high + 1) // 2
        begins = tl.load(query_start_loc_ptr + middle, mask=mask, other=0) <= token
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle - 1)
        high = tl.maximum(high, low)
    slot = tl.load(idx_mapping_ptr + low, mask=mask, other=0).to(tl.int64)
    position = tl.load(positions_ptr + token, mask=mask, other=0) + 1
    is_prompt = mask & (position < tl.load(prompt_len_ptr + slot, mask=mask, other=0))
    target = tl.load(token_ids_ptr + slot * row_len + position, mask=is_prompt, other=-1)
    tl.store(targets_ptr + place, target.to(tl.int64), mask=mask)


def prompt_targets_triton(
    # [n] int64, out: for the tokens first, ..., first + n - 1 of the step
    targets: torch.Tensor,
    # [>= T] int32
    positions: torch.Tensor,
    # [B] int32, exactly B long
    idx_mapping: torch.Tensor,
    # [>= B + 1] int32
    query_start_loc: torch.Tensor,
    # [R, L] int32
    token_ids: torch.Tensor,
    # [R] int32
    prompt_len: torch.Tensor,
    *,
    first: int,
) -> None:
    """Write the prompt token that follows each token of a run of the step, -1 where there is none."""
    num_targets = targets.shape[0]
    if num_targets == 0:
        return
    _prompt_targets_kernel[(cdiv(num_targets, _BLOCK),)](
        targets,
        first,
        num_targets,
        positions,
        idx_mapping,
        query_start_loc,
        idx_mapping.shape[0],
        token_ids,
        token_ids.shape[1],
        prompt_len,
        BLOCK=_BLOCK,
    )


def prompt_targets_torch(
    # [n] int64, out: for the tokens first, ..., first + n - 1 of the step
    targets: torch.Tensor,
    # [>= T] int32
    positions: torch.Tensor,
    # [B] int32, exactly B long
    idx_mapping: torch.Tensor,
    # [>= B + 1] int32
    query_start_loc: torch.Tensor,
    # [R, L] int32
    token_ids: torch.Tensor,
    # [R] int32
    prompt_len: torch.Tensor,
    *,
    first: int,
) -> None:
    """Torch reference of `prompt_targets`."""
    num_reqs, end = idx_mapping.shape[0], first + targets.shape[0]
    tokens = torch.arange(first, end, dtype=torch.int32, device=targets.device)
    owner = torch.searchsorted(query_start_loc[1 : num_reqs + 1].contiguous(), tokens, right=True)
    slots = idx_mapping[owner].long()
    follower = positions[first:end].long() + 1
    inside = follower < prompt_len[slots]
    found = token_ids[slots, follower.clamp(max=token_ids.shape[1] - 1)].long()
    targets.copy_(torch.where(inside, found, -1))


prompt_targets = dispatch(prompt_targets_triton, prompt_targets_torch)


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    return [
        AotCase(
            kernel=_prompt_targets_kernel,
            signature={
                "targets_ptr": "*i64",
                "first": "i32",
                "num_targets": "i32",
                "positions_ptr": "*i32",
                "idx_mapping_ptr": "*i32",
                "query_start_loc_ptr": "*i32",
                "num_reqs": "i32",
                "token_ids_ptr": "*i32",
                "row_len": "i32",
                "prompt_len_ptr": "*i32",
            },
            constexprs={"BLOCK": _BLOCK},
        )
    ]
