"""From requests to logits rows: two ints a row, so that no request state is ever expanded."""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import next_power_of_2, tl, triton
from mrv2_kernels.aot_case import AotCase

_WARP = 32


@triton.jit
def _expand_kernel(
    logit_slots_ptr,
    local_positions_ptr,
    idx_mapping_ptr,
    cu_num_logits_ptr,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0)
    first = tl.load(cu_num_logits_ptr + req)
    count = tl.load(cu_num_logits_ptr + req + 1) - first
    slot = tl.load(idx_mapping_ptr + req)
    j = tl.arange(0, BLOCK)
    tl.store(logit_slots_ptr + first + j, slot + tl.zeros([BLOCK], tl.int32), mask=j < count)
    tl.store(local_positions_ptr + first + j, j, mask=j < count)


def expand_logit_rows_triton(
    # [N] int32, out: logits row -> request row
    logit_slots: torch.Tensor,
    # [N] int32, out: index of the row among its request's
    local_positions: torch.Tensor,
    # [B] int32, exactly B long
    idx_mapping: torch.Tensor,
    # [>= B + 1] int32
    cu_num_logits: torch.Tensor,
    *,
    max_rows: int,
) -> None:
    """Fill both for every logits row; `max_rows` bounds the rows of one request."""
    _expand_kernel[(idx_mapping.shape[0],)](
        logit_slots,
        local_positions,
        idx_mapping,
        cu_num_logits,
        BLOCK=max(_WARP, next_power_of_2(max_rows)),
        num_warps=1,
    )


def expand_logit_rows_torch(
    # [N] int32, out: logits row -> request row
    logit_slots: torch.Tensor,
    # [N] int32, out: index of the row among its request's
    local_positions: torch.Tensor,
    # [B] int32, exactly B long
    idx_mapping: torch.Tensor,
    # [>= B + 1] int32
    cu_num_logits: torch.Tensor,
    *,
    max_rows: int,
) -> None:
    """Torch reference of `expand_logit_rows`."""
    bounds = cu_num_logits[: idx_mapping.shape[0] + 1]
    counts = bounds.diff()
    size = logit_slots.shape[0]
    logit_slots.copy_(torch.repeat_interleave(idx_mapping, counts, output_size=size))
    starts = torch.repeat_interleave(bounds[:-1], counts, output_size=size)
    local_positions.copy_(torch.arange(size, dtype=torch.int32, device=starts.device) - starts)


expand_logit_rows = dispatch(expand_logit_rows_triton, expand_logit_rows_torch)


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    names = ("logit_slots", "local_positions", "idx_mapping", "cu_num_logits")
    return [
        AotCase(
            kernel=_expand_kernel,
            signature={f"{name}_ptr": "*i32" for name in names},
            constexprs={"BLOCK": _WARP},
            num_warps=1,
        )
    ]
