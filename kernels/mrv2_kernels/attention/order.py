"""The order in which a large decode batch starts its requests: the longest context first.

A program of the fused decode launch (`fused_decode`) walks one whole context of one KV head where nothing is split.
Contexts of unlike lengths then end one by one, and a long one that starts late runs on beside idle multiprocessors.
With an order the heads of a request start side by side and its requests from the longest context to the shortest, so
that the short ones fill what the long ones leave.

Measured on an H200 by a script (traces/bench/h200-attention-mixed.json), decode attention of one layer of Qwen3-0.6B (8
KV heads of 128) with the plans in force, contexts of 100 to 2,048 tokens as workload e mixes them, in microseconds:

    requests           256  192  128   96   64   40
    as they come       191  198  149  130  102   86
    longest first      167  162  144  125  102   76

That is 424 ms of the 5.31 s of workload e; contexts of one length change by -0.1 % (64 requests of 384 tokens) and
-0.5 % (256 of 160).  Both halves are needed: sorted contexts alone gain 71 ms, heads side by side alone, measured with
tiles of 32 keys, 51 ms.  Choices from 512 pairs of a request and a KV head on are ordered; 40 requests are nearer to
the choice of 256 pairs, which is not, since nobody measured what it does to 32 contexts of one length.

Tried, no help: splits of 256 to 1,024 keys and register caps, for 64 to 256 mixed requests.  2 splits of 512 keys gain
206 ms, and 4 of 256 keys in tiles of 16 with 1 warp, 2 stages and 128 registers 210 ms, but 64 contexts of one length
then take 4 % and 4.8 % longer.

Legend: B_pad = requests with padding.
"""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import cdiv, tl, triton
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.gemm.pdl import gdc_launch_dependents, gdc_wait, has_pdl

# rows that one program places, and rows that it compares them with at a time
_ROWS, _BLOCK = 4, 256


@triton.jit(do_not_specialize=["num_rows"])
def _longest_first_kernel(
    order_ptr,
    seq_lens_ptr,
    num_rows,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_batch = rows < num_rows
    own = tl.load(seq_lens_ptr + rows, mask=in_batch, other=0)[:, None]
    rank = tl.zeros([ROWS], tl.int32)
    for first in range(0, num_rows, BLOCK):
        others = first + tl.arange(0, BLOCK)
        # what is not there is shorter than padding
        theirs = tl.load(seq_lens_ptr + others, mask=others < num_rows, other=-1)[None, :]
        is_before = (theirs > own) | ((theirs == own) & (others[None, :] < rows[:, None]))
        rank += tl.sum(is_before.to(tl.int32), axis=1)
    tl.store(order_ptr + rank, rows, mask=in_batch)


def longest_first_triton(
    # [B_pad] int32, tokens; 0 = padding
    seq_lens: torch.Tensor,
) -> torch.Tensor:
    """Return the rows ``[B_pad]`` int32 from the longest context to the shortest; ties by row, padding last.

    A row's place is how many are longer, or as long and in front of it: B_pad^2 comparisons in one small launch.
    Raises `ValueError` for lengths that are not int32 or not adjacent.
    """
    _check_lengths(seq_lens)
    order = torch.empty_like(seq_lens)
    num_rows = seq_lens.shape[0]
    if num_rows > 0:
        pdl = has_pdl(seq_lens)
        _longest_first_kernel[(cdiv(num_rows, _ROWS),)](
            order, seq_lens, num_rows, ROWS=_ROWS, BLOCK=_BLOCK, PDL=pdl, num_warps=1, launch_pdl=pdl
        )
    return order


def longest_first_torch(
    # [B_pad] int32
    seq_lens: torch.Tensor,
) -> torch.Tensor:
    """Torch reference of `longest_first`."""
    _check_lengths(seq_lens)
    return seq_lens.argsort(descending=True, stable=True).int()


longest_first = dispatch(longest_first_triton, longest_first_torch)


def _check_lengths(seq_lens: torch.Tensor) -> None:
    if seq_lens.dtype != torch.int32 or seq_lens.dim() != 1 or not seq_lens.is_contiguous():
        raise ValueError(
            f"longest_first: seq_lens must be contiguous int32 [B_pad], got {seq_lens.dtype} {tuple(seq_lens.shape)} "
            f"with strides {seq_lens.stride()}"
        )


def check_order(op: str, order: torch.Tensor | None, batch: int) -> None:
    """Raise `ValueError` where `order` cannot be one of `batch` requests; whether each is there once is not read."""
    if order is not None and (order.dtype != torch.int32 or order.shape != (batch,) or not order.is_contiguous()):
        raise ValueError(
            f"{op}: order must be contiguous int32 [{batch}], each row once (take it from longest_first), "
            f"got {order.dtype} {tuple(order.shape)} with strides {order.stride()}"
        )


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    signature = {"order_ptr": "*i32", "seq_lens_ptr": "*i32", "num_rows": "i32"}
    return [AotCase(_longest_first_kernel, signature, {"ROWS": _ROWS, "BLOCK": _BLOCK, "PDL": True}, num_warps=1)]
