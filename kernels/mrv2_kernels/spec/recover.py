"""The token behind the accepted drafts, and the outputs of a verification.

In the first row whose draft is not accepted the token is drawn from what the drafts did not cover,

    r(x) ~ max(0, c p(x) - q(x))        (one-hot drafts: p without the draft)

as ``argmax(log r + g)`` with noise of its own; behind the last draft, at a draft of -1 and in greedy rows it is the
target's own draw, ``argmax(log p + g)`` with the noise of a step without drafts.  One launch finds the best token of
each block for both, a second picks, and writes

    sampled = d_1 .. d_accepted, token,   num_sampled = accepted + 1,   num_rejected = rows - num_sampled

A row with NaN, or with nothing above -inf, yields -1.  A request that yields no token in this step gets 0 and 0.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import cdiv, next_power_of_2, tl, triton
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.sampling.gumbel import check_logits, gumbel_score
from mrv2_kernels.sampling.noise import RECOVER_DOMAIN, gumbel_noise_of_torch
from mrv2_kernels.spec.draft_probs import DraftProbs, draft_prob, scaled_logit, scaled_torch, target_probs_torch

_BLOCK = 1024


@triton.jit
def _store_best(out_ptr, num_blocks, score, token):
    has_nan = tl.max((score != score).to(tl.int32), axis=0) > 0
    best = tl.max(score, axis=0)
    first = tl.min(tl.where(score == best, token, 0x7FFFFFFF), axis=0)
    tl.store(out_ptr, tl.where(has_nan, float("nan"), best))
    tl.store(out_ptr + num_blocks, first.to(out_ptr.dtype.element_ty))


@triton.jit
def _recover_kernel(
    partial_ptr,
    num_accepted_ptr,
    log_mass_ptr,
    joint_ptr,
    logits_ptr,
    logits_stride,
    positions_ptr,
    draft_tokens_ptr,
    draft_stride,
    idx_mapping_ptr,
    cu_num_logits_ptr,
    temperature_ptr,
    seeds_ptr,
    probs_ptr,
    probs_slot_stride,
    probs_stride,
    from_target_ptr,
    vocab,
    RESIDUAL: tl.constexpr,
    DENSE: tl.constexpr,
    MAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    num_blocks = tl.num_programs(1)
    accepted = tl.load(num_accepted_ptr + req)
    row = tl.load(cu_num_logits_ptr + req).to(tl.int64) + accepted
    slot = tl.load(idx_mapping_ptr + req).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot)
    token = block * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * logits_stride + token, mask=token < vocab, other=float("-inf"))
    logits = scaled_logit(logits.to(partial_ptr.dtype.element_ty), temperature, SCALED)
    seed = tl.load(seeds_ptr + slot)
    position = tl.load(positions_ptr + row)
    score = logits
    if temperature != 0.0:
        score = gumbel_score(logits, temperature, seed, position, token, True)
    out_ptr = partial_ptr + req * 4 * num_blocks + block
    _store_best(out_ptr, num_blocks, score, token)
    if RESIDUAL:
        is_last = row + 1 == tl.load(cu_num_logits_ptr + req + 1)
        draft = tl.load(draft_tokens_ptr + slot * draft_stride + accepted, mask=is_last == 0, other=-1)
        rest = tl.full([BLOCK], float("-inf"), partial_ptr.dtype.element_ty)
        if (draft >= 0) & (temperature != 0.0):
            if DENSE:
                p = tl.load(joint_ptr + row) * tl.exp(logits - tl.load(log_mass_ptr + row))
                q_ptr = probs_ptr + slot * probs_slot_stride + accepted * probs_stride
                q = draft_prob(q_ptr, from_target_ptr, token, token < vocab, MAPPED)
                rest = tl.where(p > q, tl.log(tl.where(p > q, p - q, 1.0)), float("-inf"))
            else:
                rest = tl.where(token == draft, float("-inf"), logits)
            rest = gumbel_score(rest, temperature, seed, position, 67108864 + token, True)
        _store_best(out_ptr + 2 * num_blocks, num_blocks, rest, token)


@triton.jit
def _emit_kernel(
    sampled_ptr,
    sampled_stride,
    num_sampled_ptr,
    num_rejected_ptr,
    row_tokens_ptr,
    partial_ptr,
    num_accepted_ptr,
    draft_tokens_ptr,
    draft_stride,
    idx_mapping_ptr,
    cu_num_logits_ptr,
    yields_ptr,
    num_blocks,
    RESIDUAL: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, BLOCKS)
    mask = entry < num_blocks
    row_ptr = partial_ptr + req * 4 * num_blocks + entry
    scores = tl.load(row_ptr, mask=mask, other=float("-inf"))
    tokens = tl.load(row_ptr + num_blocks, mask=mask, other=0.0)
    is_none = tl.max((scores != scores).to(tl.int32), axis=0) > 0
    best = tl.max(scores, axis=0)
    is_none = is_none | (best == float("-inf"))
    drawn = tl.min(tl.where(scores == best, tokens, float("inf")), axis=0)
    if RESIDUAL:
        scores = tl.load(row_ptr + 2 * num_blocks, mask=mask, other=float("-inf"))
        tokens = tl.load(row_ptr + 3 * num_blocks, mask=mask, other=0.0)
        best = tl.max(tl.where(scores == scores, scores, float("-inf")), axis=0)
        # nothing left but roundings: the target as it is
        drawn = tl.where(best > float("-inf"), tl.min(tl.where(scores == best, tokens, float("inf")), axis=0), drawn)
    token = tl.where(is_none, -1.0, drawn).to(tl.int64)
    first = tl.load(cu_num_logits_ptr + req).to(tl.int64)
    num_rows = (tl.load(cu_num_logits_ptr + req + 1) - first).to(tl.int32)
    slot = tl.load(idx_mapping_ptr + req).to(tl.int64)
    yields = tl.load(yields_ptr + req) > 0
    accepted = tl.load(num_accepted_ptr + req)
    j = tl.arange(0, COLUMNS)
    draft = tl.load(draft_tokens_ptr + slot * draft_stride + j, mask=j < accepted, other=-1)
    emitted = tl.where(j < accepted, draft, tl.where(j == accepted, token, -1))
    emitted = tl.where(yields, emitted, -1)
    tl.store(sampled_ptr + req * sampled_stride + j, emitted, mask=j < WIDTH)
    tl.store(row_tokens_ptr + first + j, emitted, mask=j < num_rows)
    tl.store(num_sampled_ptr + req, tl.where(yields, accepted + 1, 0))
    tl.store(num_rejected_ptr + req, tl.where(yields, num_rows - accepted - 1, 0))


def recover_tokens_triton(
    # [B, K + 1] int64, out: emitted tokens, -1 behind them
    sampled: torch.Tensor,
    # [B] int32, out
    num_sampled: torch.Tensor,
    # [B] int32, out
    num_rejected: torch.Tensor,
    # [N] int64, out: the token emitted in each logits row, -1 = none
    row_tokens: torch.Tensor,
    # [B] int32, [N], [N]: from `accept_drafts`
    num_accepted: torch.Tensor,
    log_mass: torch.Tensor,
    joint: torch.Tensor,
    # [N, V] any float dtype, any row stride
    logits: torch.Tensor,
    # [N] int32
    positions: torch.Tensor,
    # [R, >= K] int64
    draft_tokens: torch.Tensor,
    # [B] int32, exactly B long
    idx_mapping: torch.Tensor,
    # [>= B + 1] int32, at most K + 1 rows a request
    cu_num_logits: torch.Tensor,
    # [B] int32: 0 if the request yields no token in this step
    yields: torch.Tensor,
    # [R] float32, 0 = greedy
    temperature: torch.Tensor,
    # [R] int64
    seeds: torch.Tensor,
    *,
    scaled: bool,
    residual: bool = True,
    draft_probs: DraftProbs | None = None,
) -> None:
    """Draw the last token of each request and write what it emits; without `residual` always from the target."""
    _, vocab = check_logits(logits)
    num_reqs, num_blocks = idx_mapping.shape[0], cdiv(vocab, _BLOCK)
    probs, from_target = draft_probs or DraftProbs(temperature.view(1, 1, -1))
    mapped = from_target is not None
    partial = torch.empty(num_reqs, 4, num_blocks, dtype=log_mass.dtype, device=logits.device)
    _recover_kernel[(num_reqs, num_blocks)](
        partial,
        num_accepted,
        log_mass,
        joint,
        logits,
        logits.stride(0),
        positions,
        draft_tokens,
        draft_tokens.stride(0),
        idx_mapping,
        cu_num_logits,
        temperature,
        seeds,
        probs,
        probs.stride(0),
        probs.stride(1),
        from_target if mapped else idx_mapping,
        vocab,
        RESIDUAL=residual,
        DENSE=draft_probs is not None,
        MAPPED=mapped,
        SCALED=scaled,
        BLOCK=_BLOCK,
    )
    _emit_kernel[(num_reqs,)](
        sampled,
        sampled.stride(0),
        num_sampled,
        num_rejected,
        row_tokens,
        partial,
        num_accepted,
        draft_tokens,
        draft_tokens.stride(0),
        idx_mapping,
        cu_num_logits,
        yields,
        num_blocks,
        RESIDUAL=residual,
        WIDTH=sampled.shape[1],
        COLUMNS=next_power_of_2(sampled.shape[1]),
        BLOCKS=next_power_of_2(num_blocks),
        num_warps=1,
    )


def recover_tokens_torch(
    # [B, K + 1] int64, out: emitted tokens, -1 behind them
    sampled: torch.Tensor,
    # [B] int32, out
    num_sampled: torch.Tensor,
    # [B] int32, out
    num_rejected: torch.Tensor,
    # [N] int64, out: the token emitted in each logits row, -1 = none
    row_tokens: torch.Tensor,
    # [B] int32, [N], [N]: from `accept_drafts`
    num_accepted: torch.Tensor,
    log_mass: torch.Tensor,
    joint: torch.Tensor,
    # [N, V] any float dtype, any row stride
    logits: torch.Tensor,
    # [N] int32
    positions: torch.Tensor,
    # [R, >= K] int64
    draft_tokens: torch.Tensor,
    # [B] int32, exactly B long
    idx_mapping: torch.Tensor,
    # [>= B + 1] int32, at most K + 1 rows a request
    cu_num_logits: torch.Tensor,
    # [B] int32: 0 if the request yields no token in this step
    yields: torch.Tensor,
    # [R] float32, 0 = greedy
    temperature: torch.Tensor,
    # [R] int64
    seeds: torch.Tensor,
    *,
    scaled: bool,
    residual: bool = True,
    draft_probs: DraftProbs | None = None,
) -> None:
    """Torch reference of `recover_tokens`."""
    num_reqs, width = sampled.shape
    device, vocab = logits.device, logits.shape[1]
    slots, accepted = idx_mapping.long(), num_accepted.long()
    bounds = cu_num_logits[: num_reqs + 1].long()
    row = bounds[:-1] + accepted
    x = scaled_torch(logits[row], temperature[slots], scaled, log_mass.dtype)
    is_random = temperature[slots] != 0.0
    tokens = torch.arange(vocab, dtype=torch.int32, device=device).unsqueeze(0)
    noise = gumbel_noise_of_torch(seeds[slots], positions[row], tokens, x.dtype)
    best, drawn = torch.where(is_random.unsqueeze(1), x + noise, x).max(dim=1)
    is_none = best.isnan() | (best == float("-inf"))
    columns = torch.arange(width, device=device)
    num_columns = min(width, draft_tokens.shape[1])
    drafts = torch.full((num_reqs, width), -1, dtype=torch.int64, device=device)
    drafts[:, :num_columns] = draft_tokens[slots, :num_columns]
    if residual:
        has_draft = row + 1 < bounds[1:]
        draft = torch.where(has_draft, drafts.gather(1, accepted.clamp(max=width - 1).unsqueeze(1)).squeeze(1), -1)
        is_replaced = (draft >= 0) & is_random
        if draft_probs is None:
            rest = x.scatter(1, draft.clamp(min=0).unsqueeze(1), float("-inf"))
        else:
            q = torch.stack([target_probs_torch(draft_probs, slots, k, vocab) for k in range(num_columns)], dim=1)
            q = q[torch.arange(num_reqs, device=device), accepted.clamp(max=num_columns - 1)]
            weight = joint[row].unsqueeze(1) * (x - log_mass[row].unsqueeze(1)).exp()
            rest = (weight - q).clamp(min=0).log()
        noise = gumbel_noise_of_torch(seeds[slots], positions[row], tokens + RECOVER_DOMAIN, x.dtype)
        rest = (rest + noise).nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
        best, other = rest.max(dim=1)
        drawn = torch.where(is_replaced & (best > float("-inf")), other, drawn)
    token = drawn.masked_fill(is_none, -1).unsqueeze(1)
    speaks = yields[:num_reqs] > 0
    accepted = accepted.unsqueeze(1)
    emitted = torch.where(columns < accepted, drafts, torch.where(columns == accepted, token, -1))
    emitted = torch.where(speaks.unsqueeze(1), emitted, -1)
    sampled.copy_(emitted)
    num_rows = bounds.diff().unsqueeze(1)
    row_tokens[(bounds[:-1].unsqueeze(1) + columns)[columns < num_rows]] = emitted[columns < num_rows]
    num_sampled.copy_(torch.where(speaks, accepted.squeeze(1) + 1, 0))
    num_rejected.copy_(torch.where(speaks, (num_rows - accepted).squeeze(1) - 1, 0))


recover_tokens = dispatch(recover_tokens_triton, recover_tokens_torch)


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    cases = []
    longs, ints = "*i64", "*i32"
    for dtype, residual, dense in (
        ("bf16", True, False),
        ("fp32", True, True),
        ("fp32", False, False),
        ("fp64", True, True),
    ):
        acc = "*fp64" if dtype == "fp64" else "*fp32"
        requests = {
            "partial_ptr": acc,
            "num_accepted_ptr": ints,
            "draft_tokens_ptr": longs,
            "draft_stride": "i32",
            "idx_mapping_ptr": ints,
            "cu_num_logits_ptr": ints,
        }
        drawing = {
            "log_mass_ptr": acc,
            "joint_ptr": acc,
            "logits_ptr": f"*{dtype}",
            "logits_stride": "i32",
            "positions_ptr": ints,
            "temperature_ptr": "*fp32",
            "seeds_ptr": longs,
            "probs_ptr": "*fp32",
            "probs_slot_stride": "i64",
            "probs_stride": "i32",
            "from_target_ptr": ints,
            "vocab": "i32",
        }
        constants = {"RESIDUAL": residual, "DENSE": dense, "MAPPED": dense, "SCALED": dtype != "bf16", "BLOCK": _BLOCK}
        cases.append(AotCase(_recover_kernel, {**requests, **drawing}, constants))
        outputs = {
            "sampled_ptr": longs,
            "sampled_stride": "i32",
            "num_sampled_ptr": ints,
            "num_rejected_ptr": ints,
            "row_tokens_ptr": longs,
            "yields_ptr": ints,
            "num_blocks": "i32",
        }
        constants = {"RESIDUAL": residual, "WIDTH": 4, "COLUMNS": 4, "BLOCKS": 128}
        cases.append(AotCase(_emit_kernel, {**requests, **outputs}, constants, num_warps=1))
    return cases
