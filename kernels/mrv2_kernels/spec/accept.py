"""How many drafts a target accepts, by its probabilities: rejection sampling in three kinds.

Draft d_i, i = 1 .. m, was drawn from q_i; the target gives it p_i(d_i) in logits row i - 1, which follows the
last sampled token and d_1 .. d_{i-1}.  u_i is uniform, a pure function of (seed, position, i).

    standard    accept d_i iff u_i q_i(d_i) < p_i(d_i); the first that is refused ends it
                (Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", Algorithm 1)
    block       c_0 = 1,  c_i = min(1, c_{i-1} p_i(d_i) / q_i(d_i))
                S_i = sum over x of max(0, c_i p_{i+1}(x) - q_{i+1}(x))
                h_i = S_i / (S_i + 1 - c_i), h_m = c_m; the last i with u_i <= h_i is the accepted length, so that
                a refused draft can be saved by a later one (Sun et al. 2024, "Block Verification Accelerates
                Speculative Decoding", Algorithm 2)
    synthetic   accept d_i iff u_i < rate_i: measures what speculation would bring, changes the text

Without a distribution a draft is certain, q_i(d_i) = 1.  A draft of -1 (none) ends the run.  A greedy request
accepts the leading drafts that are its arg-max.  The token behind the accepted drafts is drawn by `recover`.
"""

from __future__ import annotations

from typing import Literal

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._numerics import accumulator_dtype
from mrv2_kernels._triton import cdiv, next_power_of_2, tl, triton
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.sampling.gumbel import check_logits
from mrv2_kernels.sampling.noise import ACCEPT_DOMAIN, uniform_fp32, uniform_torch
from mrv2_kernels.spec.draft_probs import DraftProbs, draft_prob, scaled_logit, scaled_torch, target_probs_torch

Method = Literal["standard", "block", "synthetic"]
_METHODS = ("standard", "block", "synthetic")
_BLOCK = 4096
_RESIDUAL_BLOCK = 1024


@triton.jit
def _stats_kernel(
    partial_ptr,
    logits_ptr,
    logits_stride,
    logit_slots_ptr,
    local_positions_ptr,
    draft_tokens_ptr,
    draft_stride,
    temperature_ptr,
    vocab,
    K: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Maximum, its lowest id, and mass relative to the maximum, by block, of rows that have a draft behind them."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    num_blocks = tl.num_programs(1)
    slot = tl.load(logit_slots_ptr + row).to(tl.int64)
    place = tl.load(local_positions_ptr + row)
    draft = tl.load(draft_tokens_ptr + slot * draft_stride + place, mask=place < K, other=-1)
    if draft >= 0:
        token = block * BLOCK + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + row * logits_stride + token, mask=token < vocab, other=float("-inf"))
        logits = scaled_logit(logits.to(partial_ptr.dtype.element_ty), tl.load(temperature_ptr + slot), SCALED)
        has_nan = tl.max((logits != logits).to(tl.int32), axis=0) > 0
        top = tl.max(logits, axis=0)
        first = tl.min(tl.where(logits == top, token, 0x7FFFFFFF), axis=0)
        mass = tl.sum(tl.where(logits > float("-inf"), tl.exp(logits - top), 0.0), axis=0)
        out_ptr = partial_ptr + row * 3 * num_blocks + block
        tl.store(out_ptr, tl.where(has_nan, float("nan"), top))
        tl.store(out_ptr + num_blocks, tl.where(has_nan, float("nan"), mass))
        tl.store(out_ptr + 2 * num_blocks, first.to(partial_ptr.dtype.element_ty))


@triton.jit
def _accept_kernel(
    num_accepted_ptr,
    log_mass_ptr,
    joint_ptr,
    partial_ptr,
    residual_ptr,
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
    rates_ptr,
    num_blocks,
    num_residual_blocks,
    METHOD: tl.constexpr,
    DENSE: tl.constexpr,
    MAPPED: tl.constexpr,
    # block verification with a distribution runs twice: before the masses S_i are there, and after
    FINAL: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCKS: tl.constexpr,
    RESIDUAL_BLOCKS: tl.constexpr,
):
    acc: tl.constexpr = log_mass_ptr.dtype.element_ty
    req = tl.program_id(0).to(tl.int64)
    first = tl.load(cu_num_logits_ptr + req).to(tl.int64)
    num_drafts = (tl.load(cu_num_logits_ptr + req + 1) - first).to(tl.int32) - 1
    slot = tl.load(idx_mapping_ptr + req).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot)
    seed = tl.load(seeds_ptr + slot)
    is_greedy = temperature == 0.0
    entry = tl.arange(0, BLOCKS)
    residual_entry = tl.arange(0, RESIDUAL_BLOCKS)
    accepted = tl.zeros([], tl.int32)
    running = tl.full([], 1, tl.int1)
    # c_i, and u_i of the draft before
    joint = tl.full([], 1.0, acc)
    u = tl.full([], 1.0, tl.float32)
    for j in range(num_drafts + 1):
        row = first + j
        draft = tl.load(draft_tokens_ptr + slot * draft_stride + j, mask=j < num_drafts, other=-1)
        has_draft = running & (draft >= 0)
        prob = tl.zeros([], acc)
        q = tl.full([], 1.0, acc)
        logit = tl.load(logits_ptr + row * logits_stride + draft, mask=has_draft, other=float("-inf")).to(acc)
        is_best = tl.full([], 0, tl.int1)
        if METHOD != 2:
            if has_draft:
                row_ptr = partial_ptr + row * 3 * num_blocks + entry
                tops = tl.load(row_ptr, mask=entry < num_blocks, other=float("-inf"))
                masses = tl.load(row_ptr + num_blocks, mask=entry < num_blocks, other=0.0)
                firsts = tl.load(row_ptr + 2 * num_blocks, mask=entry < num_blocks, other=0.0)
                top = tl.max(tops, axis=0)
                has_nan = tl.max((masses != masses).to(tl.int32), axis=0) > 0
                total = tl.sum(tl.where(tops > float("-inf"), masses * tl.exp(tops - top), 0.0), axis=0)
                log_mass = tl.where(has_nan, float("nan"), top + tl.log(total))
                best = tl.min(tl.where(tops == top, firsts, float("inf")), axis=0)
                is_best = (best == draft.to(acc)) & (has_nan == 0) & (top > float("-inf"))
                prob = tl.exp(scaled_logit(logit, temperature, SCALED) - log_mass)
                tl.store(log_mass_ptr + row, log_mass)
                if DENSE:
                    q_ptr = probs_ptr + slot * probs_slot_stride + j * probs_stride
                    q = draft_prob(q_ptr, from_target_ptr, draft, True, MAPPED).to(acc)
                    q = tl.where(q > 0.0, q, 1.0)
        tl.store(joint_ptr + row, joint)
        if (METHOD == 1) & (j > 0):
            if running:
                h = joint
                if has_draft:
                    if DENSE:
                        if FINAL:
                            out_ptr = residual_ptr + row * num_residual_blocks + residual_entry
                            mask = residual_entry < num_residual_blocks
                            mass = tl.sum(tl.load(out_ptr, mask=mask, other=0.0), axis=0)
                            h = tl.where(mass + (1.0 - joint) > 0.0, mass / (mass + (1.0 - joint)), 1.0)
                            h = tl.where(mass == mass, h, 0.0)
                    else:
                        rest = 1.0 - joint * prob
                        h = tl.where(rest > 0.0, joint * (1.0 - prob) / rest, 1.0)
                        h = tl.where(prob == prob, h, 0.0)
                is_accepted = tl.where(is_greedy, joint > 0.0, u <= h)
                accepted = tl.where(is_accepted, j, accepted)
        u = uniform_fp32(seed, tl.load(positions_ptr + row), tl.full([], 33554432, tl.int32) + j)
        if METHOD == 0:
            is_accepted = tl.where(is_greedy, is_best, (prob >= q) | (u * q < prob)) & has_draft
            accepted += is_accepted.to(tl.int32)
            running = is_accepted
        elif METHOD == 1:
            ratio = tl.minimum(joint * prob / q, 1.0)
            joint = tl.where(is_greedy, tl.where(is_best, joint, 0.0), tl.where(prob == prob, ratio, 0.0))
            running = has_draft
        else:
            rate = tl.load(rates_ptr + j, mask=j < num_drafts, other=0.0)
            running = has_draft & (u < rate) & (logit > float("-inf"))
            accepted += running.to(tl.int32)
    tl.store(num_accepted_ptr + req, accepted)


@triton.jit
def _residual_mass_kernel(
    residual_ptr,
    log_mass_ptr,
    joint_ptr,
    logits_ptr,
    logits_stride,
    logit_slots_ptr,
    local_positions_ptr,
    draft_tokens_ptr,
    draft_stride,
    temperature_ptr,
    probs_ptr,
    probs_slot_stride,
    probs_stride,
    from_target_ptr,
    vocab,
    K: tl.constexpr,
    MAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum over a block of ``max(0, c p - q)``, of rows that have a draft behind them."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(logit_slots_ptr + row).to(tl.int64)
    place = tl.load(local_positions_ptr + row)
    draft = tl.load(draft_tokens_ptr + slot * draft_stride + place, mask=place < K, other=-1)
    temperature = tl.load(temperature_ptr + slot)
    if (draft >= 0) & (temperature != 0.0):
        token = block * BLOCK + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + row * logits_stride + token, mask=token < vocab, other=float("-inf"))
        logits = scaled_logit(logits.to(residual_ptr.dtype.element_ty), temperature, SCALED)
        p = tl.load(joint_ptr + row) * tl.exp(logits - tl.load(log_mass_ptr + row))
        q_ptr = probs_ptr + slot * probs_slot_stride + place * probs_stride
        q = draft_prob(q_ptr, from_target_ptr, token, token < vocab, MAPPED)
        mass = tl.sum(tl.where(p > q, p - q, 0.0), axis=0)
        tl.store(residual_ptr + row * tl.num_programs(1) + block, mass)


def accept_drafts_triton(
    # [B] int32, out: leading drafts that are accepted
    num_accepted: torch.Tensor,
    # [N] float32 (float64 for float64 logits), out: log of the sum of exp(logits / T); of rows before a draft
    log_mass: torch.Tensor,
    # [N] as log_mass, out: c_i, by which `recover` weighs the target; 1 but for "block"
    joint: torch.Tensor,
    # [N, V] any float dtype, any row stride
    logits: torch.Tensor,
    # [N] int32: row of the request state, drafts before the row, position of the row's input token
    logit_slots: torch.Tensor,
    local_positions: torch.Tensor,
    positions: torch.Tensor,
    # [R, >= K] int64
    draft_tokens: torch.Tensor,
    # [B] int32, exactly B long
    idx_mapping: torch.Tensor,
    # [>= B + 1] int32
    cu_num_logits: torch.Tensor,
    # [R] float32, 0 = greedy
    temperature: torch.Tensor,
    # [R] int64
    seeds: torch.Tensor,
    *,
    method: Method,
    scaled: bool,
    draft_probs: DraftProbs | None = None,
    # [>= K] float32, for "synthetic"
    rates: torch.Tensor | None = None,
) -> None:
    """Count the accepted drafts of each request; see the module.  `scaled` logits are divided by T already."""
    num_rows, vocab = check_logits(logits)
    num_reqs, acc = idx_mapping.shape[0], accumulator_dtype(logits.dtype)
    width = draft_tokens.shape[1]
    num_blocks, num_residual_blocks = cdiv(vocab, _BLOCK), cdiv(vocab, _RESIDUAL_BLOCK)
    code = _METHODS.index(method)
    assert method != "synthetic" or rates is not None, "synthetic acceptance needs its rates"
    partial = log_mass
    if method != "synthetic":
        partial = torch.empty(num_rows, 3, num_blocks, dtype=acc, device=logits.device)
        _stats_kernel[(num_rows, num_blocks)](
            partial,
            logits,
            logits.stride(0),
            logit_slots,
            local_positions,
            draft_tokens,
            draft_tokens.stride(0),
            temperature,
            vocab,
            K=width,
            SCALED=scaled,
            BLOCK=_BLOCK,
        )
    dense = draft_probs is not None and method != "synthetic"
    probs, from_target = draft_probs or DraftProbs(temperature.view(1, 1, -1))
    mapped = from_target is not None
    twice = dense and method == "block"
    residual = torch.empty(num_rows, num_residual_blocks, dtype=acc, device=logits.device) if twice else log_mass
    for final in (False, True) if twice else (True,):
        _accept_kernel[(num_reqs,)](
            num_accepted,
            log_mass,
            joint,
            partial,
            residual,
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
            from_target if mapped else num_accepted,
            temperature if rates is None else rates,
            num_blocks,
            num_residual_blocks,
            METHOD=code,
            DENSE=dense,
            MAPPED=mapped,
            FINAL=final,
            SCALED=scaled,
            BLOCKS=next_power_of_2(num_blocks),
            RESIDUAL_BLOCKS=next_power_of_2(num_residual_blocks),
            num_warps=1,
        )
        if final:
            break
        _residual_mass_kernel[(num_rows, num_residual_blocks)](
            residual,
            log_mass,
            joint,
            logits,
            logits.stride(0),
            logit_slots,
            local_positions,
            draft_tokens,
            draft_tokens.stride(0),
            temperature,
            probs,
            probs.stride(0),
            probs.stride(1),
            from_target if mapped else num_accepted,
            vocab,
            K=width,
            MAPPED=mapped,
            SCALED=scaled,
            BLOCK=_RESIDUAL_BLOCK,
        )


def accept_drafts_torch(
    # [B] int32, out: leading drafts that are accepted
    num_accepted: torch.Tensor,
    # [N] float32 (float64 for float64 logits), out: log of the sum of exp(logits / T); of rows before a draft
    log_mass: torch.Tensor,
    # [N] as log_mass, out: c_i, by which `recover` weighs the target; 1 but for "block"
    joint: torch.Tensor,
    # [N, V] any float dtype, any row stride
    logits: torch.Tensor,
    # [N] int32: row of the request state, drafts before the row, position of the row's input token
    logit_slots: torch.Tensor,
    local_positions: torch.Tensor,
    positions: torch.Tensor,
    # [R, >= K] int64
    draft_tokens: torch.Tensor,
    # [B] int32, exactly B long
    idx_mapping: torch.Tensor,
    # [>= B + 1] int32
    cu_num_logits: torch.Tensor,
    # [R] float32, 0 = greedy
    temperature: torch.Tensor,
    # [R] int64
    seeds: torch.Tensor,
    *,
    method: Method,
    scaled: bool,
    draft_probs: DraftProbs | None = None,
    # [>= K] float32, for "synthetic"
    rates: torch.Tensor | None = None,
) -> None:
    """Torch reference of `accept_drafts`."""
    num_reqs, acc, device = idx_mapping.shape[0], log_mass.dtype, logits.device
    slots, bounds = idx_mapping.long(), cu_num_logits[: num_reqs + 1].long()
    first, num_drafts = bounds[:-1], bounds.diff() - 1
    is_greedy = temperature[slots] == 0.0
    accepted = torch.zeros(num_reqs, dtype=torch.int64, device=device)
    running = torch.ones(num_reqs, dtype=torch.bool, device=device)
    c, u = torch.ones(num_reqs, dtype=acc, device=device), torch.ones(num_reqs, device=device)
    for j in range(draft_tokens.shape[1] + 1):
        within = j <= num_drafts
        row = torch.where(within, first + j, first)
        columns = draft_tokens[slots, j] if j < draft_tokens.shape[1] else torch.full_like(slots, -1)
        draft = torch.where(j < num_drafts, columns, -1)
        has_draft = running & (draft >= 0)
        token = draft.clamp(min=0)
        x = scaled_torch(logits[row], temperature[slots], scaled, acc)
        total = x.logsumexp(dim=1)
        total = torch.where(total == float("inf"), float("nan"), total)
        logit = x.gather(1, token.unsqueeze(1)).squeeze(1)
        prob = torch.where(has_draft, (logit - total).exp(), 0.0)
        is_best = has_draft & (x.argmax(dim=1) == draft) & ~total.isnan() & (total > float("-inf"))
        q = torch.ones_like(prob)
        if draft_probs is not None:
            q_row = target_probs_torch(draft_probs, slots, min(j, draft_tokens.shape[1] - 1), x.shape[1]).to(acc)
            mine = q_row.gather(1, token.unsqueeze(1)).squeeze(1)
            q = torch.where(mine > 0, mine, 1.0)
        log_mass[row[has_draft]] = total[has_draft]
        joint[row[within]] = c[within]
        if method == "block" and j > 0:
            if draft_probs is not None:
                p = (x - total.unsqueeze(1)).exp()
                mass = (c.unsqueeze(1) * p - q_row).clamp(min=0).sum(dim=1)
                h = torch.where(mass + (1 - c) > 0, mass / (mass + (1 - c)), 1.0)
                h = torch.where(mass.isnan(), 0.0, h)
            else:
                rest = 1 - c * prob
                h = torch.where(rest > 0, c * (1 - prob) / rest, 1.0)
                h = torch.where(prob.isnan(), 0.0, h)
            h = torch.where(has_draft, h, c)
            is_accepted = running & torch.where(is_greedy, c > 0, u <= h)
            accepted = torch.where(is_accepted & within, j, accepted)
        key = torch.full((num_reqs, 1), ACCEPT_DOMAIN + j, dtype=torch.int32, device=device)
        u = uniform_torch(seeds[slots], positions[row], key).squeeze(1)
        if method == "standard":
            running = has_draft & torch.where(is_greedy, is_best, (prob >= q) | (u * q < prob))
            accepted += running
        elif method == "block":
            ratio = (c * prob / q).clamp(max=1)
            c = torch.where(is_greedy, torch.where(is_best, c, 0.0), torch.where(prob.isnan(), 0.0, ratio))
            running = has_draft
        else:
            assert rates is not None, "synthetic acceptance needs its rates"
            rate = rates[j] if j < rates.shape[0] else 0.0
            running = has_draft & (u < rate) & (logit > float("-inf"))
            accepted += running
    num_accepted.copy_(accepted)


accept_drafts = dispatch(accept_drafts_triton, accept_drafts_torch)


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    cases = []
    for dtype in ("bf16", "fp32", "fp64"):
        acc = "*fp64" if dtype == "fp64" else "*fp32"
        rows = {
            "logits_ptr": f"*{dtype}",
            "logits_stride": "i32",
            "draft_tokens_ptr": "*i64",
            "draft_stride": "i32",
            "temperature_ptr": "*fp32",
        }
        by_row = {"logit_slots_ptr": "*i32", "local_positions_ptr": "*i32", "vocab": "i32"}
        dense = {
            "probs_ptr": "*fp32",
            "probs_slot_stride": "i64",
            "probs_stride": "i32",
            "from_target_ptr": "*i32",
            "log_mass_ptr": acc,
            "joint_ptr": acc,
        }
        scaled = {"SCALED": dtype != "bf16"}
        cases.append(
            AotCase(_stats_kernel, {"partial_ptr": acc, **rows, **by_row}, {"K": 3, **scaled, "BLOCK": _BLOCK})
        )
        cases.append(
            AotCase(
                _residual_mass_kernel,
                {"residual_ptr": acc, **rows, **by_row, **dense},
                {"K": 3, "MAPPED": True, **scaled, "BLOCK": _RESIDUAL_BLOCK},
            )
        )
        requests = {
            "num_accepted_ptr": "*i32",
            "partial_ptr": acc,
            "residual_ptr": acc,
            "positions_ptr": "*i32",
            "idx_mapping_ptr": "*i32",
            "cu_num_logits_ptr": "*i32",
            "seeds_ptr": "*i64",
            "rates_ptr": "*fp32",
            "num_blocks": "i32",
            "num_residual_blocks": "i32",
        }
        for method, is_dense in ((0, True), (1, True), (1, False), (2, False)):
            constants = {"METHOD": method, "DENSE": is_dense, "MAPPED": is_dense, "FINAL": True, **scaled}
            constants |= {"BLOCKS": 32, "RESIDUAL_BLOCKS": 128}
            cases.append(AotCase(_accept_kernel, {**rows, **dense, **requests}, constants, num_warps=1))
    return cases
