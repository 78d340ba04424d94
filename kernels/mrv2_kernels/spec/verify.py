"""Token-exact verification: a draft is accepted iff it is the token the target itself draws there.

Row j of a request holds the target's own seeded draw t_j after the last sampled token and drafts
d_1 .. d_j.  The leading drafts with d_{j+1} = t_j are accepted; the first t_j that differs is emitted too:

    accepted    = the number of leading j < m - 1 with d_{j+1} = t_j     (m logits rows)
    sampled     = t_0 .. t_accepted,   num_sampled = accepted + 1,   num_rejected = m - num_sampled

So the emitted tokens are those of decoding without drafts, whatever the drafter proposes.  A draft of
-1 (none) never matches.  A request that yields no token in this step gets 0 and 0.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import next_power_of_2, tl, triton
from mrv2_kernels.aot_case import AotCase

_WARP = 32


@triton.jit
def _verify_token_exact_kernel(
    sampled_ptr,
    sampled_stride,
    num_sampled_ptr,
    num_rejected_ptr,
    targets_ptr,
    draft_tokens_ptr,
    draft_stride,
    idx_mapping_ptr,
    cu_num_logits_ptr,
    yields_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    first = tl.load(cu_num_logits_ptr + req)
    num_rows = tl.load(cu_num_logits_ptr + req + 1) - first
    slot = tl.load(idx_mapping_ptr + req).to(tl.int64)
    yields = tl.load(yields_ptr + req)
    j = tl.arange(0, BLOCK)
    target = tl.load(targets_ptr + first + j, mask=j < num_rows, other=-1)
    is_draft = j < num_rows - 1
    draft = tl.load(draft_tokens_ptr + slot * draft_stride + j, mask=is_draft, other=-1)
    differs = is_draft & ((draft != target) | (draft < 0))
    accepted = tl.min(tl.where(differs, j, num_rows - 1), axis=0)
    emitted = (j <= accepted) & (yields > 0)
    tl.store(sampled_ptr + req * sampled_stride + j, tl.where(emitted, target, -1), mask=j < WIDTH)
    tl.store(num_sampled_ptr + req, tl.where(yields > 0, accepted + 1, 0))
    tl.store(num_rejected_ptr + req, tl.where(yields > 0, num_rows - accepted - 1, 0))


def verify_token_exact_triton(
    # [B, K + 1] int64, out: emitted tokens, -1 behind them
    sampled: torch.Tensor,
    # [B] int32, out
    num_sampled: torch.Tensor,
    # [B] int32, out
    num_rejected: torch.Tensor,
    # [N] int64: the target's draw of every logits row
    targets: torch.Tensor,
    # [R, >= K] int64
    draft_tokens: torch.Tensor,
    # [B] int32, exactly B long
    idx_mapping: torch.Tensor,
    # [>= B + 1] int32, at most K + 1 rows a request
    cu_num_logits: torch.Tensor,
    # [B] int32: 0 if the request yields no token in this step
    yields: torch.Tensor,
) -> None:
    """Accept the leading drafts that equal the target's draws; see the module."""
    _verify_token_exact_kernel[(idx_mapping.shape[0],)](
        sampled,
        sampled.stride(0),
        num_sampled,
        num_rejected,
        targets,
        draft_tokens,
        draft_tokens.stride(0),
        idx_mapping,
        cu_num_logits,
        yields,
        WIDTH=sampled.shape[1],
        BLOCK=max(_WARP, next_power_of_2(sampled.shape[1])),
        num_warps=1,
    )


def verify_token_exact_torch(
    # [B, K + 1] int64, out: emitted tokens, -1 behind them
    sampled: torch.Tensor,
    # [B] int32, out
    num_sampled: torch.Tensor,
    # [B] int32, out
    num_rejected: torch.Tensor,
    # [N] int64: the target's draw of every logits row
    targets: torch.Tensor,
    # [R, >= K] int64
    draft_tokens: torch.Tensor,
    # [B] int32, exactly B long
    idx_mapping: torch.Tensor,
    # [>= B + 1] int32, at most K + 1 rows a request
    cu_num_logits: torch.Tensor,
    # [B] int32: 0 if the request yields no token in this step
    yields: torch.Tensor,
) -> None:
    """Torch reference of `verify_token_exact`."""
    num_reqs, width = sampled.shape
    bounds = cu_num_logits[: num_reqs + 1]
    num_rows = bounds.diff().unsqueeze(1)
    j = torch.arange(width, dtype=torch.int32, device=sampled.device)
    index = (bounds[:-1].unsqueeze(1) + j).clamp(max=targets.shape[0] - 1)
    target = torch.where(j < num_rows, targets[index], -1)
    drafts = torch.full((num_reqs, width), -1, dtype=torch.int64, device=sampled.device)
    columns = min(width - 1, draft_tokens.shape[1])
    drafts[:, :columns] = draft_tokens[idx_mapping, :columns]
    differs = (j < num_rows - 1) & ((drafts != target) | (drafts < 0))
    accepted = torch.where(differs, j, num_rows - 1).amin(dim=1)
    speaks = yields > 0
    sampled.copy_(torch.where((j <= accepted.unsqueeze(1)) & speaks.unsqueeze(1), target, -1))
    num_sampled.copy_(torch.where(speaks, accepted + 1, 0))
    num_rejected.copy_(torch.where(speaks, num_rows.squeeze(1) - accepted - 1, 0))


verify_token_exact = dispatch(verify_token_exact_triton, verify_token_exact_torch)


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    longs = {f"{name}_ptr": "*i64" for name in ("sampled", "targets", "draft_tokens")}
    names = ("num_sampled", "num_rejected", "idx_mapping", "cu_num_logits", "yields")
    return [
        AotCase(
            kernel=_verify_token_exact_kernel,
            signature=longs
            | {f"{name}_ptr": "*i32" for name in names}
            | {"sampled_stride": "i32", "draft_stride": "i32"},
            constexprs={"WIDTH": 4, "BLOCK": _WARP},
            num_warps=1,
        )
    ]
