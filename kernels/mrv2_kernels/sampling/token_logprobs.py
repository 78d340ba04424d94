"""Log-probabilities of given tokens, without a [N, V] log-softmax: ``x_i - max - log(sum_j exp(x_j - max))``.

Legend: N logits rows, V vocabulary, m given tokens a row.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._numerics import accumulator_dtype
from mrv2_kernels._triton import tl, triton
from mrv2_kernels.aot_case import AotCase

_BLOCK = 4096
_NUM_WARPS = 16


@triton.jit(do_not_specialize=["num_tokens"])
def _token_logprobs_kernel(
    out_ids_ptr,
    out_ids_stride,
    out_logprobs_ptr,
    out_logprobs_stride,
    out_ranks_ptr,
    logits_ptr,
    logits_stride,
    chosen_ptr,
    chosen_stride,
    tokens_ptr,
    tokens_stride,
    vocab,
    num_tokens,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    ids_ptr = out_ids_ptr + row * out_ids_stride
    logprobs_ptr = out_logprobs_ptr + row * out_logprobs_stride
    lane = tl.arange(0, BLOCK)
    chosen = tl.load(chosen_ptr + row * chosen_stride)
    lane_max = tl.full([BLOCK], float("-inf"), ACC)
    for base in range(0, vocab, BLOCK):
        logits = tl.load(row_ptr + base + lane, mask=base + lane < vocab, other=float("-inf")).to(ACC)
        lane_max = tl.maximum(lane_max, logits, propagate_nan=tl.PropagateNan.ALL)
    has_nan = tl.max((lane_max != lane_max).to(tl.int32), axis=0) > 0
    top = tl.max(lane_max, axis=0)
    is_valid = (chosen >= 0) & (has_nan == 0) & (tl.abs(top) < float("inf"))
    own = tl.load(row_ptr + tl.maximum(chosen, 0)).to(ACC)
    lane_mass = tl.zeros([BLOCK], ACC)
    lane_rank = tl.zeros([BLOCK], tl.int32)
    for base in range(0, vocab, BLOCK):
        logits = tl.load(row_ptr + base + lane, mask=base + lane < vocab, other=float("-inf")).to(ACC)
        lane_mass += tl.exp(logits - top)
        lane_rank += ((logits >= own) & (base + lane < vocab)).to(tl.int32)
    log_mass = tl.log(tl.sum(lane_mass, axis=0))
    tl.store(out_ranks_ptr + row, tl.where(is_valid, tl.sum(lane_rank, axis=0), 0).to(tl.int64))
    tl.store(ids_ptr, tl.where(is_valid, chosen, -1))
    tl.store(logprobs_ptr, tl.where(is_valid, own - top - log_mass, float("nan")).to(tl.float32))
    for base in range(0, num_tokens, BLOCK):
        mask = base + lane < num_tokens
        token = tl.load(tokens_ptr + row * tokens_stride + base + lane, mask=mask, other=0).to(tl.int64)
        logprob = tl.load(row_ptr + token, mask=mask, other=0.0).to(ACC) - top - log_mass
        tl.store(ids_ptr + 1 + base + lane, tl.where(is_valid, token, -1), mask=mask)
        tl.store(logprobs_ptr + 1 + base + lane, tl.where(is_valid, logprob, float("nan")).to(tl.float32), mask=mask)


def token_logprobs_triton(
    # [N, V] any float dtype, any row stride
    logits: torch.Tensor,
    # [N] int64, -1 = no token
    chosen: torch.Tensor,
    # [N, m] or, the same for all rows, [m]; int32 or int64
    tokens: torch.Tensor,
    # [N, 1 + m] int64, out
    out_ids: torch.Tensor,
    # [N, 1 + m] float32, out
    out_logprobs: torch.Tensor,
    # [N] int64, out
    out_ranks: torch.Tensor,
) -> None:
    """Write ids and log-probabilities: column 0 the chosen token, then the given ones in their order.

    The rank of the chosen token is the number of logits at or above its own (1 = most likely).  A row
    without a token, with NaN, or whose maximum is not finite gets ids -1, NaN and rank 0.
    """
    num_rows, vocab = _check(logits, tokens, out_ids)
    if num_rows == 0:
        return
    _token_logprobs_kernel[(num_rows,)](
        out_ids,
        out_ids.stride(0),
        out_logprobs,
        out_logprobs.stride(0),
        out_ranks,
        logits,
        logits.stride(0),
        chosen,
        chosen.stride(0),
        tokens,
        tokens.stride(0) if tokens.dim() == 2 else 0,
        vocab,
        tokens.shape[-1],
        ACC=tl.float64 if logits.dtype == torch.float64 else tl.float32,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )


def token_logprobs_torch(
    # [N, V] any float dtype, any row stride
    logits: torch.Tensor,
    # [N] int64, -1 = no token
    chosen: torch.Tensor,
    # [N, m] or, the same for all rows, [m]; int32 or int64
    tokens: torch.Tensor,
    # [N, 1 + m] int64, out
    out_ids: torch.Tensor,
    # [N, 1 + m] float32, out
    out_logprobs: torch.Tensor,
    # [N] int64, out
    out_ranks: torch.Tensor,
) -> None:
    """Torch reference of `token_logprobs`."""
    num_rows, _ = _check(logits, tokens, out_ids)
    logits = logits.to(accumulator_dtype(logits.dtype))
    ids = torch.cat([chosen.unsqueeze(1), tokens.long().expand(num_rows, tokens.shape[-1])], dim=1)
    log_mass = logits.logsumexp(dim=1, keepdim=True)
    values = logits.gather(1, ids.clamp(min=0))
    invalid = (chosen < 0) | ~log_mass.isfinite().squeeze(1)
    out_ids.copy_(ids.masked_fill(invalid.unsqueeze(1), -1))
    out_logprobs.copy_((values - log_mass).masked_fill(invalid.unsqueeze(1), float("nan")))
    out_ranks.copy_((logits >= values[:, :1]).sum(dim=1).masked_fill(invalid, 0))


token_logprobs = dispatch(token_logprobs_triton, token_logprobs_torch)


def _check(logits: torch.Tensor, tokens: torch.Tensor, out_ids: torch.Tensor) -> tuple[int, int]:
    assert logits.stride(1) == 1, f"logits have inner stride {logits.stride(1)}: their rows must be contiguous"
    assert tokens.stride(-1) == 1, f"tokens have inner stride {tokens.stride(-1)}: their rows must be contiguous"
    assert out_ids.shape[1] == 1 + tokens.shape[-1], f"{tokens.shape[-1]} tokens, {out_ids.shape[1] - 1} columns"
    return logits.shape[0], logits.shape[1]


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    return [
        AotCase(
            kernel=_token_logprobs_kernel,
            signature={
                "out_ids_ptr": "*i64",
                "out_ids_stride": "i32",
                "out_logprobs_ptr": "*fp32",
                "out_logprobs_stride": "i32",
                "out_ranks_ptr": "*i64",
                "logits_ptr": f"*{dtype}",
                "logits_stride": "i32",
                "chosen_ptr": "*i64",
                "chosen_stride": "i32",
                "tokens_ptr": f"*{tokens}",
                "tokens_stride": "i32",
                "vocab": "i32",
                "num_tokens": "i32",
            },
            constexprs={"ACC": tl.float64 if dtype == "fp64" else tl.float32, "BLOCK": _BLOCK},
            num_warps=_NUM_WARPS,
        )
        for dtype, tokens in (("bf16", "i32"), ("bf16", "i64"), ("fp32", "i32"), ("fp64", "i64"))
    ]
