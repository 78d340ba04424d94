"""Product of few rows that streams its weights through L2:  out = x @ weight.T.

A program asks for its whole strip of weights to be brought into L2 before it waits for the kernel that makes x
(`mrv2_kernels.gemm.pdl`), then runs a pipelined loop over blocks of inputs.  Against `gemm.resident` the weights
take one more hop after the wait, but a program needs little shared memory and any dtype and shape will do.

Measured on an H200 (traces/bench/h200-gemms-plans.json), all four products of Qwen3-0.6B's 28 layers: 825 us at 8
rows, 917 at 32 and 726 at 64, where the library takes 630, 658 and 677, and `gemm.warpgroup`, measured since, 311, 354
and 411. It is picked nowhere: L2 does not hide the hop.

Weights may be 8-bit floats with a scale for each output (`gemm.fp8`): half the traffic, converted in registers
(`gemm.unpack`).  The variant ``turned`` computes the transpose, weight @ x.T: from compute capability 9.0 on, tensor
cores take the first operand from registers, where converted weights are, and only the second from shared memory.

Splits of the inputs write partial sums to a workspace; the last program of a tile to arrive adds them in their order.
"""

from __future__ import annotations

import torch

from mrv2_kernels._triton import cdiv, tl, triton
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.gemm.pdl import gdc_launch_dependents, gdc_wait, has_pdl
from mrv2_kernels.gemm.plan import LinearPlan, LinearWorkspace
from mrv2_kernels.gemm.unpack import E4M3_TO_BF16, unpacks

BLOCK_K = 128


# a count of rows must neither become a constant nor make variants
@triton.jit(do_not_specialize=["num_rows"])
def _streamed_linear_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    partials_ptr,
    counters_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_INPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    SEGMENTS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    UNPACK: tl.constexpr,
    TURNED: tl.constexpr,
    PDL: tl.constexpr,
):
    ACC: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    if PDL:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    split = tl.program_id(1)
    first = split * SPLIT_INPUTS
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    w_rows = weight_ptr + n.to(tl.int64)[:, None] * num_inputs
    if PDL:
        if SEGMENTS > 0:
            SEGMENT: tl.constexpr = SPLIT_INPUTS // SEGMENTS
            # the last segment of the last split ends at the last input, whatever it covers twice
            starts = tl.minimum(first + tl.arange(0, SEGMENTS) * SEGMENT, num_inputs - SEGMENT)
            rows = tl.minimum(n, num_outputs - 1).to(tl.int64)[:, None] * num_inputs
            ITEM_BYTES: tl.constexpr = weight_ptr.dtype.element_ty.primitive_bitwidth // 8
            num_bytes = tl.full((BLOCK_N, SEGMENTS), SEGMENT * ITEM_BYTES, tl.int32)
            tl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
                "=r,l,r",
                [(weight_ptr + rows + starts[None, :]).to(tl.int64), num_bytes],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        gdc_wait()
    if TURNED:
        acc = tl.zeros((BLOCK_N, BLOCK_M), ACC)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    x_rows = x_ptr + m.to(tl.int64)[:, None] * x_stride
    last = tl.minimum(first + SPLIT_INPUTS, num_inputs)
    for start in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_rows + k[None, :], mask=(m < num_rows)[:, None] & (k < last)[None, :], other=0.0)
        w = tl.load(w_rows + k[None, :], mask=(n < num_outputs)[:, None] & (k < last)[None, :], other=0.0)
        if UNPACK:
            w = tl.inline_asm_elementwise(E4M3_TO_BF16, "=r,=r,r", [w], dtype=tl.bfloat16, is_pure=True, pack=4)
        else:
            w = w.to(x.dtype)
        if TURNED:
            acc = tl.dot(w, x.T, acc, input_precision="ieee", out_dtype=ACC)
        else:
            acc = tl.dot(x, w.T, acc, input_precision="ieee", out_dtype=ACC)
    if TURNED:
        acc = acc.T
    if HAS_SCALE:
        acc = acc * tl.load(scale_ptr + n, mask=n < num_outputs, other=0.0).to(ACC)[None, :]
    mask = (m < num_rows)[:, None] & (n < num_outputs)[None, :]
    offsets = m.to(tl.int64)[:, None] * num_outputs + n[None, :]
    if SPLITS == 1:
        tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        size = num_rows.to(tl.int64) * num_outputs
        tl.store(partials_ptr + split * size + offsets, acc.to(tl.float32), mask=mask)
        # all partial sums of this program are stored before it counts
        tl.debug_barrier()
        counter_ptr = counters_ptr + tl.program_id(2) * tl.num_programs(0) + tile
        if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.load(partials_ptr + offsets, mask=mask, other=0.0, cache_modifier=".cg")
            for s in tl.static_range(1, SPLITS):
                total += tl.load(partials_ptr + s * size + offsets, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=mask)
            tl.store(counter_ptr, 0)


def split_inputs(plan: LinearPlan, num_inputs: int) -> int:
    """Return the inputs of a split, a multiple of the loop's block."""
    return cdiv(cdiv(num_inputs, plan.splits), BLOCK_K) * BLOCK_K


def why_not_streamed(plan: LinearPlan, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> str | None:
    """Return why a plan does not suit a shape, or None."""
    if num_inputs % 16 or num_outputs % 16:
        return f"{num_outputs} outputs of {num_inputs} inputs: both must be multiples of 16"
    if plan.block_m < 16 or plan.block_n < 16:
        return f"tile {plan.block_m} x {plan.block_n}: at least 16 x 16"
    if (plan.splits - 1) * split_inputs(plan, num_inputs) >= num_inputs:
        return f"{num_inputs} inputs leave nothing to the last of {plan.splits} splits"
    if plan.splits > 1 and dtype == torch.float64:
        return "float64: partial sums are float32"
    return None


def streamed_linear(
    # [M, K], row stride free
    x: torch.Tensor,
    # [N, K]
    weight: torch.Tensor,
    plan: LinearPlan,
    workspace: LinearWorkspace | None = None,
    # [M, N]
    out: torch.Tensor | None = None,
    # [N] float32: of 8-bit weights
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x @ weight.T [M, N].

    Raises `ValueError` for a shape that the plan does not suit, or a missing or too small workspace.
    """
    (num_rows, num_inputs), num_outputs = x.shape, weight.shape[0]
    reason = why_not_streamed(plan, num_outputs, num_inputs, x.dtype)
    if reason is not None:
        raise ValueError(f"{plan.label}: {reason}")
    assert x.stride(1) == 1, f"rows must be contiguous, strides {x.stride()}"
    assert weight.is_contiguous(), f"weights must be contiguous, strides {weight.stride()}"
    out = x.new_empty((num_rows, num_outputs)) if out is None else out
    if num_rows == 0:
        return out
    if plan.splits > 1:
        if workspace is None:
            raise ValueError(f"{plan.label} adds partial sums: it needs a workspace")
        workspace.require(plan, num_rows, num_outputs)
    share, pdl = split_inputs(plan, num_inputs), plan.ahead and has_pdl(x)
    # one prefetch a thread
    segments = max(1, 32 * plan.num_warps // plan.block_n)
    if share % (segments * 16) or share // segments > num_inputs:
        segments = 0
    _streamed_linear_kernel[(cdiv(num_outputs, plan.block_n), plan.splits, cdiv(num_rows, plan.block_m))](
        x,
        weight,
        x if scale is None else scale,
        out,
        out if workspace is None else workspace.partials,
        out if workspace is None else workspace.counters,
        num_rows,
        num_outputs,
        num_inputs,
        x.stride(0),
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_K=BLOCK_K,
        SPLIT_INPUTS=share,
        SPLITS=plan.splits,
        STAGES=plan.stages,
        SEGMENTS=segments,
        HAS_SCALE=scale is not None,
        UNPACK=unpacks(x, weight.dtype),
        TURNED=plan.variant == "turned",
        PDL=pdl,
        num_warps=plan.num_warps,
        launch_pdl=pdl,
    )
    return out


def aot_cases() -> list[AotCase]:
    """Return representative signatures: whole inputs, split ones, and 8-bit weights."""
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), "*bf16")
    others = {"scale_ptr": "*fp32", "partials_ptr": "*fp32", "counters_ptr": "*i32"}
    sizes = dict.fromkeys(("num_rows", "num_outputs", "num_inputs", "x_stride"), "i32")
    constants: dict[str, object] = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": BLOCK_K, "STAGES": 4, "PDL": True}
    constants |= {"UNPACK": False, "TURNED": False}
    turned: dict[str, object] = {"SPLITS": 1, "SEGMENTS": 2, "HAS_SCALE": True, "UNPACK": True, "TURNED": True}
    shapes: list[dict[str, object]] = [
        {"SPLIT_INPUTS": 1024, "SPLITS": 1, "SEGMENTS": 4, "HAS_SCALE": False},
        {"SPLIT_INPUTS": 768, "SPLITS": 4, "SEGMENTS": 0, "HAS_SCALE": False},
        {"SPLIT_INPUTS": 1024, "SPLITS": 1, "SEGMENTS": 4, "HAS_SCALE": True, "BLOCK_M": 64, "BLOCK_N": 64},
        *({**turned, "SPLIT_INPUTS": 1024, "BLOCK_M": m, "BLOCK_N": 64} for m in (64, 128)),
    ]
    signature = pointers | others | sizes
    aligned = frozenset(signature) - {"num_rows"}
    return [
        AotCase(
            _streamed_linear_kernel,
            signature | ({"weight_ptr": "*fp8e4nv"} if shape["HAS_SCALE"] else {}),
            constants | shape,
            aligned=aligned,
        )
        for shape in shapes
    ]
