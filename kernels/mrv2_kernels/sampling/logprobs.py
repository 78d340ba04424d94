"""Log-probabilities of the sampled token and of the k most likely ones, without a [N, V] log-softmax.

``logprob_i = x_i - max - log(sum_j exp(x_j - max))``.  The most likely tokens are found among the
logits first; only theirs and the sampled token's log-probability is computed.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._numerics import accumulator_dtype
from mrv2_kernels._triton import tl, triton
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.sampling._select import collect, lane_floor, lane_maxima
from mrv2_kernels.sampling.token_logprobs import token_logprobs_triton

_BLOCK = 4096
_NUM_WARPS = 16
# more than so many are found by sorting the row
_MAX_SEARCHED = 256


@triton.jit
def _next_best(row_ptr, vocab, last_value, last_id, ACC: tl.constexpr, BLOCK: tl.constexpr):
    """Return value and id of the token that follows (last_value, last_id) in the ranking."""
    absent: tl.constexpr = 1 << 30
    lane = tl.arange(0, BLOCK)
    values = tl.full([BLOCK], float("-inf"), ACC)
    ids = tl.full([BLOCK], absent, tl.int32)
    for base in range(0, vocab, BLOCK):
        token = base + lane
        logits = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf")).to(ACC)
        follows = (logits < last_value) | ((logits == last_value) & (token > last_id))
        is_better = follows & (token < vocab) & ((logits > values) | (ids == absent))
        values = tl.where(is_better, logits, values)
        ids = tl.where(is_better, token, ids)
    best = tl.max(values, axis=0)
    return best, tl.min(tl.where(values == best, ids, absent), axis=0)


@triton.jit(do_not_specialize=["num_best"])
def _topk_logprobs_kernel(
    out_ids_ptr,
    out_ids_stride,
    out_logprobs_ptr,
    out_logprobs_stride,
    out_ranks_ptr,
    logits_ptr,
    logits_stride,
    sampled_ptr,
    sampled_stride,
    scratch_ptr,
    vocab,
    num_best,
    BLOCK: tl.constexpr,
):
    acc: tl.constexpr = scratch_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    ids_ptr = out_ids_ptr + row * out_ids_stride
    logprobs_ptr = out_logprobs_ptr + row * out_logprobs_stride
    lanes_ptr = scratch_ptr + row * 3 * BLOCK
    values_ptr = lanes_ptr + BLOCK
    tokens_ptr = values_ptr + BLOCK
    sampled = tl.load(sampled_ptr + row * sampled_stride)
    top, has_nan = lane_maxima(row_ptr, vocab, lanes_ptr, BLOCK)
    if (sampled < 0) | has_nan | (tl.abs(top) == float("inf")):
        tl.store(out_ranks_ptr + row, 0)
        for column in range(num_best + 1):
            tl.store(ids_ptr + column, -1)
            tl.store(logprobs_ptr + column, float("nan"))
    else:
        floor, reaching = lane_floor(lanes_ptr, top, num_best, BLOCK)
        chosen = tl.load(row_ptr + sampled).to(acc)
        num_found, _, row_mass, rank = collect(row_ptr, vocab, top, floor, chosen, values_ptr, tokens_ptr, BLOCK)
        log_mass = tl.log(row_mass)
        tl.store(out_ranks_ptr + row, rank.to(tl.int64))
        tl.store(ids_ptr, sampled)
        tl.store(logprobs_ptr, (chosen - top - log_mass).to(tl.float32))
        if (num_found <= BLOCK) & (reaching >= num_best):
            entry = tl.arange(0, BLOCK)
            values = tl.load(values_ptr + entry, mask=entry < num_found, other=float("-inf"))
            tokens = tl.load(tokens_ptr + entry, mask=entry < num_found, other=float("inf"))
            for column in range(1, num_best + 1):
                best = tl.max(values, axis=0)
                token = tl.min(tl.where(values == best, tokens, float("inf")), axis=0)
                tl.store(ids_ptr + column, token.to(tl.int64))
                tl.store(logprobs_ptr + column, (best - top - log_mass).to(tl.float32))
                values = tl.where(tokens == token, float("-inf"), values)
        else:
            best = tl.full([], float("inf"), acc)
            index = -1
            for column in range(1, num_best + 1):
                best, index = _next_best(row_ptr, vocab, best, index, acc, BLOCK)
                tl.store(ids_ptr + column, index.to(tl.int64))
                tl.store(logprobs_ptr + column, (best - top - log_mass).to(tl.float32))


def topk_logprobs_triton(
    # [N, V] any float dtype, any row stride
    logits: torch.Tensor,
    # [N] int64, -1 = no token
    sampled: torch.Tensor,
    # [N, 1 + k] int64, out
    out_ids: torch.Tensor,
    # [N, 1 + k] float32, out
    out_logprobs: torch.Tensor,
    # [N] int64, out
    out_ranks: torch.Tensor,
) -> None:
    """Write ids and log-probabilities: column 0 the sampled token, then the k most likely, best first.

    Ties are ranked by id.  The rank of the sampled token is the number of logits at or above its own
    (1 = most likely).  A row without a token, with NaN, or whose maximum is not
    finite gets ids -1, NaN and rank 0.
    """
    num_rows, vocab = _check(logits, out_ids)
    if num_rows == 0:
        return
    if out_ids.shape[1] - 1 > _MAX_SEARCHED:
        best = logits.sort(dim=1, descending=True, stable=True).indices[:, : out_ids.shape[1] - 1]
        token_logprobs_triton(logits, sampled, best, out_ids, out_logprobs, out_ranks)
        return
    scratch = torch.empty(num_rows, 3, _BLOCK, dtype=accumulator_dtype(logits.dtype), device=logits.device)
    _topk_logprobs_kernel[(num_rows,)](
        out_ids,
        out_ids.stride(0),
        out_logprobs,
        out_logprobs.stride(0),
        out_ranks,
        logits,
        logits.stride(0),
        sampled,
        sampled.stride(0),
        scratch,
        vocab,
        out_ids.shape[1] - 1,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )


def topk_logprobs_torch(
    # [N, V] any float dtype, any row stride
    logits: torch.Tensor,
    # [N] int64, -1 = no token
    sampled: torch.Tensor,
    # [N, 1 + k] int64, out
    out_ids: torch.Tensor,
    # [N, 1 + k] float32, out
    out_logprobs: torch.Tensor,
    # [N] int64, out
    out_ranks: torch.Tensor,
) -> None:
    """Torch reference of `topk_logprobs`."""
    _check(logits, out_ids)
    logits = logits.to(accumulator_dtype(logits.dtype))
    num_best = out_ids.shape[1] - 1
    log_mass = logits.logsumexp(dim=1, keepdim=True)
    chosen = logits.gather(1, sampled.clamp(min=0).unsqueeze(1))
    values, ids = chosen, sampled.unsqueeze(1)
    if num_best > 0:
        best, best_ids = logits.sort(dim=1, descending=True, stable=True)
        values = torch.cat([values, best[:, :num_best]], dim=1)
        ids = torch.cat([ids, best_ids[:, :num_best]], dim=1)
    invalid = (sampled < 0) | ~log_mass.isfinite().squeeze(1)
    out_ids.copy_(ids.masked_fill(invalid.unsqueeze(1), -1))
    out_logprobs.copy_((values - log_mass).masked_fill(invalid.unsqueeze(1), float("nan")))
    out_ranks.copy_((logits >= chosen).sum(dim=1).masked_fill(invalid, 0))


topk_logprobs = dispatch(topk_logprobs_triton, topk_logprobs_torch)


def _check(logits: torch.Tensor, out_ids: torch.Tensor) -> tuple[int, int]:
    num_rows, vocab = logits.shape
    assert logits.stride(1) == 1, f"logits have inner stride {logits.stride(1)}: their rows must be contiguous"
    assert 1 <= out_ids.shape[1] <= vocab + 1, f"{out_ids.shape[1] - 1} logprobs of {vocab} tokens: give 0 <= k <= V"
    return num_rows, vocab


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    return [
        AotCase(
            kernel=_topk_logprobs_kernel,
            signature={
                "out_ids_ptr": "*i64",
                "out_ids_stride": "i32",
                "out_logprobs_ptr": "*fp32",
                "out_logprobs_stride": "i32",
                "out_ranks_ptr": "*i64",
                "logits_ptr": f"*{dtype}",
                "logits_stride": "i32",
                "sampled_ptr": "*i64",
                "sampled_stride": "i32",
                "scratch_ptr": "*fp64" if dtype == "fp64" else "*fp32",
                "vocab": "i32",
                "num_best": "i32",
            },
            constexprs={"BLOCK": _BLOCK},
            num_warps=_NUM_WARPS,
        )
        for dtype in ("bf16", "fp32", "fp64")
    ]
