"""Product of few rows and very many outputs: a model's logits,  out = x @ weight.T.

As many programs as there are multiprocessors stay until the last output.  Each owns every so many-th tile of `BLOCK_N`
outputs and brings its weights through one ring of `stages` blocks in shared memory, across the ends of tiles:

    order     |w 0|w 1| ... |w S-2|  wait, order x  |w S-1|w S| ...
    multiply                                        |  0  | 1 | ... | 7 |store| 8 | ...

The ring is filled before the program waits for the kernel that makes x (`mrv2_kernels.gemm.pdl`), so that reading
begins while the last layer still runs, and goes on while a tile is stored.  x is small and stays in shared memory.
A barrier a block says two things: every thread's copies of this block have come, and the product before has read its
own, so that the slot may be filled anew.

It computes the transpose, weight @ x.T, as `gemm.warpgroup` does: a warp group's instruction takes 64 outputs and as
many rows as there are.  Each output is the same sum in the same order whatever the number of rows.

Measured on an H200 by a script (traces/bench/h200-logits.json), 151,936 logits of 1,024 inputs and a greedy draw behind
layers that start ahead, at 1, 8, 32 and 64 rows: 72.8, 76.6, 82.4 and 87.3 us with 8 blocks in flight, 79.7, 82.5, 85.5
and 92.9 by the library, with the same bits; reading the weights takes 70.4.  Tried, no help: 16 blocks (the same), 6
(94.8 at 1 row), 128 outputs a tile (the same), to start late (75.8 at 1 row), `gemm.warpgroup` (74.6, but 104.1 at 64),
`gemm.streamed` (87.8) and `gemm.gemv` (75.6, with other bits).
"""

from __future__ import annotations

from functools import cache

import torch

from mrv2_kernels._gluon import ampere, blackwell, block_barrier, gl, gluon, hopper
from mrv2_kernels._triton import cdiv
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.gemm.pdl import gdc_launch_dependents, gdc_wait, has_pdl
from mrv2_kernels.gemm.plan import SHARED_BYTES, LinearPlan

# inputs of a block
BLOCK_K = 128
# fewer hide no latency, and the assembler of CUDA 12.8 dies of them, as it does of more blocks of inputs
_MIN_STAGES, _MAX_CHUNKS = 5, 8


@gluon.jit
def _order_block(slot, row_ptrs, n, k, num_outputs, num_inputs, FIRST_K: gl.constexpr):
    """Have a block of weights brought into a slot of the ring; what is not there arrives as zeros."""
    mask = (n < num_outputs) & (k + FIRST_K < num_inputs)
    ampere.async_copy.async_copy_global_to_shared(slot, row_ptrs + FIRST_K, mask=mask)
    ampere.async_copy.commit_group()


# a count of rows must neither become a constant nor make variants
@gluon.jit(do_not_specialize=["num_rows"])
def _ring_linear_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    CHUNKS: gl.constexpr,
    STAGES: gl.constexpr,
    TENSOR_MEMORY: gl.constexpr,
    PDL: gl.constexpr,
):
    W: gl.constexpr = gl.num_warps()
    # rows of 128 bytes, as the instruction reads them
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    # eight threads copy such a row, 16 bytes each
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [W, 1], [1, 0])
    DTYPE: gl.constexpr = weight_ptr.dtype.element_ty
    if PDL:
        gdc_launch_dependents()
    first_tile = gl.program_id(0)
    num_programs = gl.num_programs(0)
    num_tiles = (num_outputs + BLOCK_N - 1) // BLOCK_N
    ring = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_K], SHARED)
    x_shared = gl.allocate_shared_memory(DTYPE, [CHUNKS, BLOCK_M, BLOCK_K], SHARED)
    i_n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPY))[:, None]
    i_m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, COPY))[:, None]
    k = gl.arange(0, BLOCK_K, gl.SliceLayout(0, COPY))[None, :]
    w_ptrs = weight_ptr + i_n.to(gl.int64) * num_inputs + k
    tile_stride = num_inputs.to(gl.int64) * BLOCK_N
    # block i is chunk i % CHUNKS of this program's tile i // CHUNKS
    for i in gl.static_range(STAGES - 1):
        at = first_tile + i // CHUNKS * num_programs
        row_ptrs, n = w_ptrs + at * tile_stride, at * BLOCK_N + i_n
        _order_block(ring.index(i), row_ptrs, n, k, num_outputs, num_inputs, i % CHUNKS * BLOCK_K)
    if PDL:
        gdc_wait()
    x_ptrs = x_ptr + i_m.to(gl.int64) * x_stride + k
    for c in gl.static_range(CHUNKS):
        mask = (i_m < num_rows) & (k + c * BLOCK_K < num_inputs)
        ampere.async_copy.async_copy_global_to_shared(x_shared.index(c), x_ptrs + c * BLOCK_K, mask=mask)
    ampere.async_copy.commit_group()
    ampere.async_copy.wait_group(0)
    if TENSOR_MEMORY:
        TMEM: gl.constexpr = blackwell.TensorMemoryLayout([BLOCK_N, BLOCK_M], col_stride=1)
        memory = blackwell.allocate_tensor_memory(gl.float32, [BLOCK_N, BLOCK_M], TMEM)
        done = gl.allocate_shared_memory(gl.int64, [1], hopper.mbarrier.MBarrierLayout())
        hopper.mbarrier.init(done, count=1)
    # a thread stores 16 bytes of a row
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [BLOCK_N // 8, 256 // BLOCK_N], [1, W], [0, 1])
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, BLOCK_M, 16])
    # blocks that are multiplied
    num_done = first_tile * 0
    for tile in range(first_tile, num_tiles, num_programs):
        if not TENSOR_MEMORY:
            acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, ACC)
        for c in gl.static_range(CHUNKS):
            # of the blocks that were ordered all but the last STAGES - 2 have come, this one among them
            ampere.async_copy.wait_group(STAGES - 2)
            # copies wrote what tensor cores read another way
            hopper.fence_async_shared()
            # the product before this one has read its block
            if TENSOR_MEMORY:
                # at once before the first
                hopper.mbarrier.wait(done, (num_done + 1) % 2)
            elif c > 0:
                acc = hopper.warpgroup_mma_wait(0, deps=[acc])
            block_barrier()
            x = x_shared.index(c).permute((1, 0))
            if TENSOR_MEMORY:
                blackwell.tcgen05_mma(ring.index(num_done % STAGES), x, memory, use_acc=c > 0)
                blackwell.tcgen05_commit(done)
            else:
                acc = hopper.warpgroup_mma(ring.index(num_done % STAGES), x, acc, is_async=True)
            ahead = tile + (c + STAGES - 1) // CHUNKS * num_programs
            _order_block(
                ring.index((num_done + STAGES - 1) % STAGES),
                w_ptrs + ahead * tile_stride,
                ahead * BLOCK_N + i_n,
                k,
                num_outputs,
                num_inputs,
                (c + STAGES - 1) % CHUNKS * BLOCK_K,
            )
            num_done += 1
        if TENSOR_MEMORY:
            hopper.mbarrier.wait(done, (num_done - 1) % 2)
            sums = memory.load(blackwell.get_tmem_reg_layout(gl.float32, [BLOCK_N, BLOCK_M], TMEM, W))
        else:
            sums = hopper.warpgroup_mma_wait(0, deps=[acc])
        o_n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, OUT))[:, None] + tile * BLOCK_N
        o_m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, OUT))[None, :]
        out = gl.convert_layout(sums.to(out_ptr.dtype.element_ty), OUT)
        out_ptrs = out_ptr + o_m.to(gl.int64) * num_outputs + o_n
        gl.store(out_ptrs, out, mask=(o_m < num_rows) & (o_n < num_outputs))
    # no copy is on its way when the program ends
    ampere.async_copy.wait_group(0)
    if TENSOR_MEMORY:
        hopper.mbarrier.invalidate(done)


def ring_stages(plan: LinearPlan, num_inputs: int) -> int:
    """Return the blocks of weights in flight: as many as the plan says and x leaves room for."""
    x_bytes = 2 * plan.block_m * cdiv(num_inputs, BLOCK_K) * BLOCK_K
    # a tile's outputs pass through shared memory too
    room = SHARED_BYTES - x_bytes - 2 * plan.block_m * plan.block_n
    return min(plan.stages, room // (2 * plan.block_n * BLOCK_K))


def why_not_ring(
    plan: LinearPlan, num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, weight_bytes: int = 2
) -> str | None:
    """Return why a plan does not suit a shape with weights of so many bytes, or None."""
    if dtype not in (torch.bfloat16, torch.float16) or weight_bytes != 2:
        return f"{dtype}, weights of {weight_bytes} bytes: only bfloat16 and float16"
    if num_inputs % 16 or num_outputs % 16:
        return f"{num_outputs} outputs of {num_inputs} inputs: both must be multiples of 16"
    if plan.block_n not in (64, 128) or plan.num_warps != plan.block_n // 16 or not 8 <= plan.block_m <= 256:
        return f"tile {plan.block_m} x {plan.block_n} by {plan.num_warps} warps: 64 x 4 or 128 x 8, of 8 to 256 rows"
    if plan.splits > 1:
        return f"{plan.splits} splits: whole sums only"
    if num_rows > plan.block_m:
        return f"{num_rows} rows: {plan.block_m} at most"
    if num_inputs > _MAX_CHUNKS * BLOCK_K:
        return f"{num_inputs} inputs: {_MAX_CHUNKS * BLOCK_K} at most"
    if ring_stages(plan, num_inputs) < _MIN_STAGES:
        return (
            f"{plan.stages} blocks beside {plan.block_m} rows of {num_inputs} inputs: a ring has {_MIN_STAGES} at least"
        )
    return None


@cache
def _num_programs(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def ring_linear(
    # [M, K], row stride free, a multiple of 16
    x: torch.Tensor,
    # [N, K]
    weight: torch.Tensor,
    plan: LinearPlan,
    # [M, N]
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the product [M, N]; CUDA only.

    Raises `ValueError` for a shape that the plan does not suit.
    """
    (num_rows, num_inputs), num_outputs = x.shape, weight.shape[0]
    reason = why_not_ring(plan, num_rows, num_outputs, num_inputs, x.dtype, weight.element_size())
    if reason is not None:
        raise ValueError(f"{plan.label}: {reason}")
    assert x.stride(1) == 1 and x.stride(0) % 16 == 0, f"rows must be contiguous and aligned, strides {x.stride()}"
    assert weight.is_contiguous(), f"weights must be contiguous, strides {weight.stride()}"
    out = x.new_empty((num_rows, num_outputs)) if out is None else out
    if num_rows == 0:
        return out
    pdl = plan.ahead and has_pdl(x)
    _ring_linear_kernel[(min(cdiv(num_outputs, plan.block_n), _num_programs(x.device.index or 0)),)](
        x,
        weight,
        out,
        num_rows,
        num_outputs,
        num_inputs,
        x.stride(0),
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_K=BLOCK_K,
        CHUNKS=cdiv(num_inputs, BLOCK_K),
        STAGES=ring_stages(plan, num_inputs),
        # Blackwell's tensor cores keep their sums in a memory of their own
        TENSOR_MEMORY=torch.cuda.get_device_capability(x.device) >= (10, 0),
        PDL=pdl,
        num_warps=plan.num_warps,
        launch_pdl=pdl,
    )
    return out


def aot_cases() -> list[AotCase]:
    """Return the extremes of rows, for one warp group and for two."""
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), "*bf16")
    sizes = dict.fromkeys(("num_rows", "num_outputs", "num_inputs", "x_stride"), "i32")
    signature: dict[str, str] = {**pointers, **sizes}
    constants: dict[str, object] = {"BLOCK_K": BLOCK_K, "CHUNKS": 8, "PDL": True}
    plans = [
        LinearPlan("ring", block_m, block_n, num_warps=block_n // 16, stages=16)
        for block_m, block_n in ((8, 64), (8, 128), (32, 64), (64, 64))
    ]
    return [
        AotCase(
            _ring_linear_kernel,
            signature,
            constants
            | {
                "BLOCK_M": plan.block_m,
                "BLOCK_N": plan.block_n,
                "STAGES": ring_stages(plan, 8 * BLOCK_K),
                "TENSOR_MEMORY": tensor_memory,
            },
            num_warps=plan.num_warps,
            aligned=frozenset(signature) - {"num_rows"},
            archs=archs,
            may_spill=False,
        )
        for tensor_memory, archs in ((False, (90,)), (True, (100, 103)))
        for plan in plans
    ]
