"""Product of up to 64 rows by Hopper's warpgroup instructions, weights waiting in shared memory:  out = x @ weight.T.

As `gemm.resident`: a program owns `BLOCK_N` outputs over one split of the inputs and orders all its weights into
shared memory before it waits for the kernel that makes x (`mrv2_kernels.gemm.pdl`).  But both operands stay in shared
memory (wgmma m64nNk16), where a warp of `gemm.resident` would need x and the weights in registers:

    rows of x      | 64, absent ones as zeros, which cost no traffic
    columns        | blocks of 128; x comes through a ring of `STAGES` of them
    block c        | arrive, multiply (asynchronous); when c - 1 is done its place takes block c - 1 + STAGES

What bounds it is x, which each program reads anew from L2: N / BLOCK_N times M x K elements in all, against
2 x splits x M x N partial sums.  Compute capability 9 only; other GPUs have no such instruction.
"""

from __future__ import annotations

import torch

from mrv2_kernels._gluon import ampere, block_barrier, gl, gluon, hopper
from mrv2_kernels._triton import cdiv
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.gemm.pdl import gdc_launch_dependents, gdc_wait
from mrv2_kernels.gemm.plan import LinearPlan, LinearWorkspace

BLOCK_K = 128
ROWS = 64
# what a program may have on Hopper, less what the compiler takes
_SHARED_BYTES = 224 << 10


# a count of rows must neither become a constant nor make variants
@gluon.jit(do_not_specialize=["num_rows"])
def _warpgroup_linear_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    partials_ptr,
    counters_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    CHUNKS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    PDL: gl.constexpr,
):
    W: gl.constexpr = gl.num_warps()
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    # sixteen threads copy a row of 256 bytes, 16 bytes each
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [W, 1], [1, 0])
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [W, 1], [1, 0])
    if PDL:
        gdc_launch_dependents()
    tile = gl.program_id(0)
    split = gl.program_id(1)
    w_shared = gl.allocate_shared_memory(weight_ptr.dtype.element_ty, [CHUNKS, BLOCK_N, BLOCK_K], SHARED)
    x_shared = gl.allocate_shared_memory(weight_ptr.dtype.element_ty, [STAGES, ROWS, BLOCK_K], SHARED)
    k = split * (CHUNKS * BLOCK_K) + gl.arange(0, BLOCK_K, gl.SliceLayout(0, COPY))[None, :]
    i_n = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPY))[:, None]
    i_m = gl.arange(0, ROWS, gl.SliceLayout(1, COPY))[:, None]
    w_ptrs = weight_ptr + i_n.to(gl.int64) * num_inputs + k
    for c in gl.static_range(CHUNKS):
        # masked elements arrive as zeros
        mask = (i_n < num_outputs) & (k + c * BLOCK_K < num_inputs)
        ampere.async_copy.async_copy_global_to_shared(w_shared.index(c), w_ptrs + c * BLOCK_K, mask=mask)
        ampere.async_copy.commit_group()
    if PDL:
        gdc_wait()
    x_ptrs = x_ptr + i_m.to(gl.int64) * x_stride + k
    for c in gl.static_range(STAGES):
        mask = (i_m < num_rows) & (k + c * BLOCK_K < num_inputs)
        ampere.async_copy.async_copy_global_to_shared(x_shared.index(c), x_ptrs + c * BLOCK_K, mask=mask)
        ampere.async_copy.commit_group()
    acc = gl.zeros([ROWS, BLOCK_N], gl.float32, ACC)
    for c in gl.static_range(CHUNKS):
        # of the blocks ordered so far, those behind c may be on their way
        if c == 0:
            ampere.async_copy.wait_group(STAGES - 1)
        else:
            ampere.async_copy.wait_group(min(CHUNKS - 1 - c, STAGES - 2))
        # all threads' copies have arrived, and are seen by the instruction's own path to shared memory
        hopper.fence_async_shared()
        block_barrier()
        acc = hopper.warpgroup_mma(x_shared.index(c % STAGES), w_shared.index(c).permute((1, 0)), acc, is_async=True)
        if c > 0 and c - 1 + STAGES < CHUNKS:
            acc = hopper.warpgroup_mma_wait(1, deps=[acc])
            # all warps have read block c - 1
            block_barrier()
            mask = (i_m < num_rows) & (k + (c - 1 + STAGES) * BLOCK_K < num_inputs)
            ampere.async_copy.async_copy_global_to_shared(
                x_shared.index((c - 1) % STAGES), x_ptrs + (c - 1 + STAGES) * BLOCK_K, mask=mask
            )
            ampere.async_copy.commit_group()
    acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    out = gl.convert_layout(acc, OUT)
    o_m = gl.arange(0, ROWS, gl.SliceLayout(1, OUT))[:, None]
    o_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, OUT))[None, :] + tile * BLOCK_N
    o_mask = (o_m < num_rows) & (o_n < num_outputs)
    offsets = o_m.to(gl.int64) * num_outputs + o_n
    if SPLITS == 1:
        gl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=o_mask)
    else:
        size = num_rows.to(gl.int64) * num_outputs
        gl.store(partials_ptr + split * size + offsets, out, mask=o_mask)
        # all warps' sums are stored before one of them counts
        block_barrier()
        arrived = gl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            total = gl.load(partials_ptr + offsets, mask=o_mask, other=0.0, cache_modifier=".cg")
            for s in gl.static_range(1, SPLITS):
                total += gl.load(partials_ptr + s * size + offsets, mask=o_mask, other=0.0, cache_modifier=".cg")
            gl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=o_mask)
            gl.store(counters_ptr + tile, 0)


def num_chunks(plan: LinearPlan, num_inputs: int) -> int:
    """Return how many blocks of inputs a program multiplies."""
    return cdiv(num_inputs, plan.splits * BLOCK_K)


def why_not_warpgroup(
    plan: LinearPlan, num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype
) -> str | None:
    """Return why a plan does not suit a shape, or None."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype}: only bfloat16 and float16"
    if num_rows > ROWS:
        return f"{num_rows} rows, at most {ROWS}"
    if num_inputs % 16 or num_outputs % 16:
        return f"{num_outputs} outputs of {num_inputs} inputs: both must be multiples of 16"
    if plan.block_m != ROWS or not 16 <= plan.block_n <= 128 or plan.num_warps != 4:
        return f"{plan.label}: tiles are of {ROWS} rows and 16 to 128 outputs, by 4 warps"
    chunks = num_chunks(plan, num_inputs)
    if (plan.splits - 1) * chunks * BLOCK_K >= num_inputs:
        return f"{num_inputs} inputs leave nothing to the last of {plan.splits} splits"
    if min(plan.stages, chunks) < min(2, chunks):
        return f"{plan.stages} stage for {chunks} blocks of inputs: at least 2"
    wanted = 2 * BLOCK_K * (chunks * plan.block_n + min(plan.stages, chunks) * ROWS)
    return None if wanted <= _SHARED_BYTES else f"{wanted >> 10} KiB of shared memory: {_SHARED_BYTES >> 10} at most"


def warpgroup_linear(
    # [M, K], row stride free, a multiple of 16
    x: torch.Tensor,
    # [N, K]
    weight: torch.Tensor,
    plan: LinearPlan,
    workspace: LinearWorkspace | None = None,
    # [M, N]
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x @ weight.T [M, N]; compute capability 9 only.

    Raises `ValueError` for a shape or GPU that the plan does not suit, or a missing or too small workspace.
    """
    (num_rows, num_inputs), num_outputs = x.shape, weight.shape[0]
    reason = why_not_warpgroup(plan, num_rows, num_outputs, num_inputs, x.dtype)
    if reason is None and torch.cuda.get_device_capability(x.device)[0] != 9:
        reason = f"{torch.cuda.get_device_name(x.device)} is not of compute capability 9; take another variant"
    if reason is not None:
        raise ValueError(f"{plan.label}: {reason}")
    assert x.stride(1) == 1 and x.stride(0) % 16 == 0, f"rows must be contiguous and aligned, strides {x.stride()}"
    assert weight.is_contiguous(), f"weights must be contiguous, strides {weight.stride()}"
    out = x.new_empty((num_rows, num_outputs)) if out is None else out
    if num_rows == 0:
        return out
    if plan.splits > 1:
        if workspace is None:
            raise ValueError(f"{plan.label} adds partial sums: it needs a workspace")
        workspace.require(plan, num_rows, num_outputs)
    chunks = num_chunks(plan, num_inputs)
    _warpgroup_linear_kernel[(cdiv(num_outputs, plan.block_n), plan.splits)](
        x,
        weight,
        out,
        out if workspace is None else workspace.partials,
        out if workspace is None else workspace.counters,
        num_rows,
        num_outputs,
        num_inputs,
        x.stride(0),
        ROWS=ROWS,
        BLOCK_N=plan.block_n,
        BLOCK_K=BLOCK_K,
        CHUNKS=chunks,
        STAGES=min(plan.stages, chunks),
        SPLITS=plan.splits,
        PDL=plan.ahead,
        num_warps=plan.num_warps,
        launch_pdl=plan.ahead,
    )
    return out


def aot_cases() -> list[AotCase]:
    """Return representative signatures: whole inputs all at once, through a ring, and split ones."""
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), "*bf16")
    workspace = {"partials_ptr": "*fp32", "counters_ptr": "*i32"}
    sizes = dict.fromkeys(("num_rows", "num_outputs", "num_inputs", "x_stride"), "i32")
    constants: dict[str, object] = {"ROWS": ROWS, "BLOCK_K": BLOCK_K, "PDL": True}
    shapes: list[dict[str, object]] = [
        {"BLOCK_N": 32, "CHUNKS": 8, "STAGES": 8, "SPLITS": 1},
        {"BLOCK_N": 64, "CHUNKS": 8, "STAGES": 5, "SPLITS": 1},
        {"BLOCK_N": 32, "CHUNKS": 6, "STAGES": 6, "SPLITS": 4},
    ]
    signature = pointers | workspace | sizes
    aligned = frozenset(signature) - {"num_rows"}
    return [
        AotCase(_warpgroup_linear_kernel, signature, constants | shape, aligned=aligned, archs=(90,))
        for shape in shapes
    ]
