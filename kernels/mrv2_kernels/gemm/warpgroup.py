"""Product of 1 to 256 rows on tensor cores that read both operands from shared memory, alone or in parts of a layer:

    s = x                                       or, if `normed`, rms_norm(sum of partial sums + residual) * norm
    p = s @ weight.T                            or, if `gated`,  silu(s @ gate.T) * (s @ up.T), weight = [gate; up]
    out = p                                     or, with splits, the partial sums of p over each split of the inputs

A program owns 64 outputs over one split of the inputs.  It orders all its weights into shared memory with asynchronous
copies before it waits for the kernel that makes x (`mrv2_kernels.gemm.pdl`), and on Hopper puts the first `held`
blocks of them into registers as well, for there the instruction reads one operand faster.  Then it brings x: few rows
in one copy, more through a ring of `stages` blocks of inputs.  It computes the transpose, weight @ x.T: the
instruction of a warp group (wgmma on Hopper, tcgen05 on Blackwell) takes 64 outputs and as many rows as there are, so
that few rows waste nothing and each weight and each input is read from shared memory once.

Outputs without gate are at most 4,096 here, of 64 a program, which leaves half of an H200 idle; products of long rows
split them.  Partial sums stay in float32, one plane a split, and whoever reads the product adds them in their order:
the norm behind it (`mrv2_kernels.layers.rms_norm`), which reads its input anyway, so nothing counts arrivals.  A gated
program holds 32 rows of gate and 32 of up, and multiplies them at the end; on Hopper eight of gate lie beside eight of
up, so that a thread has both of an output.  There few rows are stored as the instruction leaves them, 16 adjacent bytes
at least, without a detour through shared memory.

Measured on an H200 by a script (traces/bench/h200-products-in-parts.json), the products of Qwen3-0.6B's 28 layers at 1,
8, 16, 32, 64, 128 and 256 rows, partial sums left unread: 291, 311, 319, 354, 411, 579 and 796 us, where reading the
weights takes 199.  With norms and activation 379, 411, 400, 446, 522, 702 and 944; products that take those in
(`gemm.resident`) 472, 476 and 735 at 8, 16 and 32, the library 774, 805, 938 and 1,029 from 32 on.

With attention in between, two splits of o and down beat eight at 1 and 8 rows (606 us a forward pass against 634 at 8),
and at 1 row so do products that take in the norm (491 against 510); from 4 rows on those lose.  A successor that starts
late: 12 % at 64 rows of mixed contexts, where workload d lost 3 % by it and so it is off, 5 % at 128 and 1 % at 256; a
loss at 32 rows and fewer.

The same passes with what came last (traces/bench/h200-forward-tuning-parts.json), at 1, 8, 32 and 64 rows of 384 tokens
of context: 505, 615, 914 and 1,414 us before; x in one copy and sums stored directly with three splits of down, 455 at
1 row, 896 and 1,348 at 32 and 64, with six 590 at 8; six and four held blocks of weights then 444 and 564.
Tried, no help: 128 outputs a program, weights through a ring as well and the rest of them ordered into the second
cache, at 32 to 256 rows, where x is read half as often (at best 0.5 % at 192 rows, 2 to 11 % more elsewhere); qkv in
two splits that attention adds (2 to 14 % more at 1 to 64 rows, at 128 the same); one copy of x at 32 rows (2 % more,
at 64 the same); sums stored directly at 128 to 256 rows (2 % more); a norm of one row that each warp computes whole
(505 against 458); more held blocks than fit (658 at 1 row).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mrv2_kernels._gluon import ampere, blackwell, block_barrier, gl, gluon, hopper
from mrv2_kernels._triton import cdiv, next_power_of_2
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.gemm._sources import normed_sums
from mrv2_kernels.gemm.pdl import gdc_launch_dependents, gdc_wait, has_pdl
from mrv2_kernels.gemm.plan import MAX_HELD, SHARED_BYTES, LinearPlan

# outputs of a program, which the instruction of a warp group fixes
BLOCK_N = 64
# rows up to which a product is stored as the instruction leaves it
_MOST_DIRECT = 64


# a count of rows must neither become a constant nor make variants
@gluon.jit(do_not_specialize=["num_rows"])
def _warpgroup_linear_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    residual_ptr,
    norm_ptr,
    stream_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    # 0 = x is rows as they are
    NUM_SUMS: gl.constexpr,
    ROWS: gl.constexpr,
    EPS: gl.constexpr,
    GATED: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    CHUNKS: gl.constexpr,
    STAGES: gl.constexpr,
    TENSOR_MEMORY: gl.constexpr,
    HELD: gl.constexpr,
    AT_ONCE: gl.constexpr,
    DIRECT: gl.constexpr,
    RELEASE_LATE: gl.constexpr,
    PDL: gl.constexpr,
):
    W: gl.constexpr = gl.num_warps()
    # rows of 128 bytes, as the instruction reads them
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    # eight threads copy such a row, 16 bytes each
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [W, 1], [1, 0])
    # outputs of a program
    WIDTH: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    # consecutive rows of gate, behind which as many of up stand
    RUN: gl.constexpr = 8 if DIRECT and GATED else WIDTH
    # of the sums on Hopper; a second warp group takes half of the rows
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, W // 4], instr_shape=[16, BLOCK_M // (W // 4), 16]
    )
    if PDL and not RELEASE_LATE:
        gdc_launch_dependents()
    tile = gl.program_id(0)
    split = gl.program_id(1)
    first_row = gl.program_id(2) * BLOCK_M
    DTYPE: gl.constexpr = weight_ptr.dtype.element_ty
    w_shared = gl.allocate_shared_memory(DTYPE, [CHUNKS, BLOCK_N, BLOCK_K], SHARED)
    if AT_ONCE:
        x_wide = gl.allocate_shared_memory(DTYPE, [BLOCK_M, CHUNKS * BLOCK_K], SHARED)
    else:
        x_shared = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_M, BLOCK_K], SHARED)
    i_n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPY))[:, None]
    i_m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, COPY))[:, None] + first_row
    k = gl.arange(0, BLOCK_K, gl.SliceLayout(0, COPY))[None, :] + split * (CHUNKS * BLOCK_K)
    # the output that a row of weights is for
    i_o = tile * WIDTH + (i_n // RUN // 2 * RUN + i_n % RUN if GATED else i_n)
    w_row = i_o.to(gl.int64) + (i_n // RUN % 2 * num_outputs if GATED else 0)
    w_ptrs = weight_ptr + w_row * num_inputs + k
    for c in gl.static_range(CHUNKS):
        # masked elements arrive as zeros
        mask = (i_o < num_outputs) & (k + c * BLOCK_K < num_inputs)
        ampere.async_copy.async_copy_global_to_shared(w_shared.index(c), w_ptrs + c * BLOCK_K, mask=mask)
    ampere.async_copy.commit_group()
    held = ()
    if HELD > 0:
        # every thread's copies have come
        ampere.async_copy.wait_group(0)
        block_barrier()
        for c in gl.static_range(HELD):
            held = held + (w_shared.index(c).load(gl.DotOperandLayout(0, ACC, 2)),)
    x_ptrs = x_ptr + i_m.to(gl.int64) * x_stride + k
    if NUM_SUMS == 0 and AT_ONCE:
        wide = gl.arange(0, CHUNKS * BLOCK_K, gl.SliceLayout(0, COPY))[None, :] + split * (CHUNKS * BLOCK_K)
        if PDL:
            gdc_wait()
        ampere.async_copy.async_copy_global_to_shared(
            x_wide, x_ptr + i_m.to(gl.int64) * x_stride + wide, mask=(i_m < num_rows) & (wide < num_inputs)
        )
        ampere.async_copy.commit_group()
    elif NUM_SUMS == 0:
        if PDL:
            gdc_wait()
        for c in gl.static_range(STAGES):
            mask = (i_m < num_rows) & (k + c * BLOCK_K < num_inputs)
            ampere.async_copy.async_copy_global_to_shared(x_shared.index(c), x_ptrs + c * BLOCK_K, mask=mask)
            ampere.async_copy.commit_group()
    else:
        x_wide.store(
            normed_sums(
                x_ptr,
                residual_ptr,
                norm_ptr,
                stream_ptr,
                num_rows,
                num_inputs,
                tile == 0,
                NUM_SUMS,
                EPS,
                ROWS,
                BLOCK_M,
                CHUNKS * BLOCK_K,
                PDL,
            )
        )
    if TENSOR_MEMORY:
        TMEM: gl.constexpr = blackwell.TensorMemoryLayout([BLOCK_N, BLOCK_M], col_stride=1)
        memory = blackwell.allocate_tensor_memory(gl.float32, [BLOCK_N, BLOCK_M], TMEM)
        done = gl.allocate_shared_memory(gl.int64, [1], hopper.mbarrier.MBarrierLayout())
        hopper.mbarrier.init(done, count=1)
    else:
        acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, ACC)
    for c in gl.static_range(CHUNKS):
        if not AT_ONCE:
            # one group of weights, then one a block of x; this iteration has not refilled yet
            ampere.async_copy.wait_group(min(CHUNKS, STAGES + max(c - 1, 0)) - c - 1)
            # copies wrote what tensor cores read another way
            hopper.fence_async_shared()
        elif c == 0:
            ampere.async_copy.wait_group(0)
            hopper.fence_async_shared()
            block_barrier()
        if AT_ONCE:
            x = x_wide.slice(c * BLOCK_K, BLOCK_K, dim=1).permute((1, 0))
        else:
            x = x_shared.index(c % STAGES).permute((1, 0))
        if TENSOR_MEMORY:
            # every thread's copies have come
            block_barrier()
            blackwell.tcgen05_mma(w_shared.index(c), x, memory, use_acc=c > 0)
            blackwell.tcgen05_commit(done)
        elif c < HELD:
            acc = hopper.warpgroup_mma(held[c], x, acc, is_async=True)
        else:
            acc = hopper.warpgroup_mma(w_shared.index(c), x, acc, is_async=True)
        if not AT_ONCE and c > 0 and c - 1 + STAGES < CHUNKS:
            # refill what the product before this one has read
            if TENSOR_MEMORY:
                hopper.mbarrier.wait(done, (c - 1) % 2)
            else:
                acc = hopper.warpgroup_mma_wait(1, deps=[acc])
            block_barrier()
            mask = (i_m < num_rows) & (k + (c - 1 + STAGES) * BLOCK_K < num_inputs)
            ampere.async_copy.async_copy_global_to_shared(
                x_shared.index((c - 1) % STAGES), x_ptrs + (c - 1 + STAGES) * BLOCK_K, mask=mask
            )
            ampere.async_copy.commit_group()
        elif TENSOR_MEMORY and c > 0:
            # no phase of the barrier may pass unseen
            hopper.mbarrier.wait(done, (c - 1) % 2)
    if PDL and RELEASE_LATE:
        gdc_launch_dependents()
    if TENSOR_MEMORY:
        hopper.mbarrier.wait(done, (CHUNKS - 1) % 2)
        hopper.mbarrier.invalidate(done)
        sums = memory.load(blackwell.get_tmem_reg_layout(gl.float32, [BLOCK_N, BLOCK_M], TMEM, W))
    else:
        sums = hopper.warpgroup_mma_wait(0, deps=[acc])
    if DIRECT:
        out = sums
        if GATED:
            pairs = gl.permute(gl.reshape(sums, [WIDTH // RUN, 2, RUN, BLOCK_M]), (0, 2, 3, 1))
            gate, up = gl.split(pairs)
            out = gl.reshape(gate / (1.0 + gl.exp(-gate)) * up, [WIDTH, BLOCK_M])
        OUT: gl.constexpr = out.type.layout
    elif GATED:
        # a thread holds gate and up of two outputs
        PAIRS: gl.constexpr = gl.BlockedLayout([2, 1, 2], [16, 2, 1], [1, W, 1], [2, 0, 1])
        OUT: gl.constexpr = gl.SliceLayout(2, PAIRS)
        pairs = gl.permute(gl.reshape(sums, [2, WIDTH, BLOCK_M]), (1, 2, 0))
        gate, up = gl.split(gl.convert_layout(pairs, PAIRS))
        out = gate / (1.0 + gl.exp(-gate)) * up
    else:
        # a thread stores 16 bytes of a row
        ITEMS: gl.constexpr = 128 // out_ptr.dtype.element_ty.primitive_bitwidth
        OUT: gl.constexpr = gl.BlockedLayout([ITEMS, 1], [BLOCK_N // ITEMS, ITEMS // 2], [1, W], [0, 1])
        out = gl.convert_layout(sums, OUT)
    n = gl.arange(0, WIDTH, gl.SliceLayout(1, OUT))[:, None] + tile * WIDTH
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, OUT))[None, :] + first_row
    out_ptrs = out_ptr + (split * num_rows + m).to(gl.int64) * num_outputs + n
    gl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=(m < num_rows) & (n < num_outputs))


def _comes_at_once(plan: LinearPlan, chunks: int, stages: int) -> bool:
    """Return whether x comes in one copy: few rows of a power of two of inputs, all in shared memory."""
    return plan.normed or (plan.block_m <= 16 and stages == chunks and chunks & (chunks - 1) == 0)


def _block_k(plan: LinearPlan) -> int:
    """Return the inputs of a block: of many rows, few."""
    return 128 if plan.block_m <= 128 else 64


def _blocks(plan: LinearPlan, num_inputs: int) -> tuple[int, int]:
    """Return how many blocks of inputs a program multiplies, and how many of x are in flight.

    The latter are as many as the plan says, the product has and the weights leave room for.
    """
    block_k = _block_k(plan)
    chunks = cdiv(num_inputs, plan.splits * block_k)
    room = (SHARED_BYTES // (2 * block_k) - chunks * plan.block_n) // plan.block_m
    return chunks, min(plan.stages, chunks, room)


def why_not_warpgroup(
    plan: LinearPlan, num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype
) -> str | None:
    """Return why a plan does not suit a shape, or None."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype}: only bfloat16 and float16"
    if num_inputs % 16 or num_outputs % 16:
        return f"{num_outputs} outputs of {num_inputs} inputs: both must be multiples of 16"
    groups = plan.num_warps // 4
    if plan.block_n != BLOCK_N or groups == 0 or not 8 <= plan.block_m // groups <= 256:
        return f"tile {plan.block_m} x {plan.block_n}: {BLOCK_N} outputs and 8 to 256 rows for each 4 warps"
    if plan.normed and (num_rows > plan.block_m or num_inputs != next_power_of_2(num_inputs)):
        return f"{num_rows} rows of {num_inputs}: norms of {plan.block_m} rows of a power of two at most"
    chunks, stages = _blocks(plan, num_inputs)
    if (plan.splits - 1) * chunks * _block_k(plan) >= num_inputs:
        return f"{num_inputs} inputs leave nothing to the last of {plan.splits} splits"
    if plan.stages < min(2, chunks):
        return f"{plan.stages} block of x in flight: one is multiplied while another comes, so 2 at least"
    if stages < min(2, chunks):
        return f"weights of {chunks * _block_k(plan)} inputs leave no shared memory for two blocks of x"
    if plan.held and plan.block_m > 16:
        return f"{plan.held} blocks of weights held beside the sums of {plan.block_m} rows: 16 rows at most"
    if plan.normed and stages < chunks:
        return f"{stages} of {chunks} blocks of x: a norm needs whole rows"
    return None


def warpgroup_linear(
    # [M, K], row stride free, a multiple of 16
    x: torch.Tensor,
    # [N, K]; [2 N, K] if gated
    weight: torch.Tensor,
    plan: LinearPlan,
    # [M, N], or [S, M, N] float32 of S > 1 splits
    out: torch.Tensor | None = None,
    *,
    gated: bool = False,
) -> torch.Tensor:
    """Return the product [M, N], or its partial sums [S, M, N] float32 if the plan has S > 1 splits; CUDA only.

    Raises `ValueError` for a shape that the plan does not suit, and for a gated product whose plan splits its inputs.
    """
    assert x.stride(1) == 1 and x.stride(0) % 16 == 0, f"rows must be contiguous and aligned, strides {x.stride()}"
    return _launch(x, weight, plan, out, gated, None)


def warpgroup_linear_of_sums(
    # [S', M, K] float32
    x: torch.Tensor,
    # [M, K]
    residual: torch.Tensor,
    # [K]
    norm: torch.Tensor,
    eps: float,
    # [N, K]; [2 N, K] if gated
    weight: torch.Tensor,
    plan: LinearPlan,
    *,
    gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the product [M, N] of the norm of s, and s [M, K]: the partial sums and the residual added; CUDA only.

    Raises `ValueError` for a plan that is not `LinearPlan.normed`, and for a shape that it does not suit.
    """
    assert x.is_contiguous() and residual.is_contiguous(), f"contiguous only, strides {x.stride()}, {residual.stride()}"
    around = _Around(residual, norm, torch.empty_like(residual), eps)
    return _launch(x, weight, plan, None, gated, around), around.stream


@dataclass(frozen=True)
class _Around:
    """What a product of partial sums takes in and gives out besides."""

    # [M, K]
    residual: torch.Tensor
    # [K]
    norm: torch.Tensor
    # [M, K]
    stream: torch.Tensor
    eps: float


def _launch(
    # [M, K], or [S', M, K] float32
    x: torch.Tensor,
    weight: torch.Tensor,
    plan: LinearPlan,
    out: torch.Tensor | None,
    gated: bool,
    around: _Around | None,
) -> torch.Tensor:
    num_rows, num_inputs, num_outputs = x.shape[-2], weight.shape[1], weight.shape[0] // (2 if gated else 1)
    reason = why_not_warpgroup(plan, num_rows, num_outputs, num_inputs, weight.dtype)
    if plan.splits > 1 and gated:
        reason = "a gate takes whole sums"
    if around is not None and not plan.normed:
        reason = "takes in no norm"
    if reason is not None:
        raise ValueError(f"{plan.label}: {reason}")
    assert weight.is_contiguous(), f"weights must be contiguous, strides {weight.stride()}"
    if out is None:
        partial = plan.splits > 1
        shape = (plan.splits, num_rows, num_outputs) if partial else (num_rows, num_outputs)
        out = weight.new_empty(shape, dtype=torch.float32 if partial else None)
    if num_rows == 0:
        return out
    # Blackwell's tensor cores keep their sums in a memory of their own
    tensor_memory = torch.cuda.get_device_capability(x.device) >= (10, 0)
    pdl = plan.ahead and has_pdl(x)
    width = plan.block_n // (2 if gated else 1)
    chunks, stages = _blocks(plan, num_inputs)
    _warpgroup_linear_kernel[(cdiv(num_outputs, width), plan.splits, cdiv(num_rows, plan.block_m))](
        x,
        weight,
        out,
        weight if around is None else around.residual,
        weight if around is None else around.norm,
        weight if around is None else around.stream,
        num_rows,
        num_outputs,
        num_inputs,
        x.stride(-2),
        NUM_SUMS=0 if around is None else x.shape[0],
        ROWS=1 if around is None else next_power_of_2(num_rows),
        EPS=0.0 if around is None else around.eps,
        GATED=gated,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_K=_block_k(plan),
        CHUNKS=chunks,
        STAGES=stages,
        TENSOR_MEMORY=tensor_memory,
        HELD=0 if tensor_memory else min(plan.held, chunks),
        AT_ONCE=_comes_at_once(plan, chunks, stages),
        DIRECT=plan.block_m <= _MOST_DIRECT and not tensor_memory,
        RELEASE_LATE=plan.release_late,
        PDL=pdl,
        num_warps=plan.num_warps,
        launch_pdl=pdl,
    )
    return out


def aot_cases() -> list[AotCase]:
    """Return representative signatures: whole inputs through a ring of x, with a gate, split ones, two warp groups."""
    names = ("x_ptr", "weight_ptr", "out_ptr", "residual_ptr", "norm_ptr", "stream_ptr")
    pointers = dict.fromkeys(names, "*bf16")
    sizes = dict.fromkeys(("num_rows", "num_outputs", "num_inputs", "x_stride"), "i32")
    signature = pointers | sizes
    constants: dict[str, object] = {
        "NUM_SUMS": 0,
        "ROWS": 1,
        "EPS": 0.0,
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": 128,
        "PDL": True,
    }
    whole: dict[str, object] = constants | {
        "GATED": False,
        "RELEASE_LATE": False,
        "BLOCK_M": 64,
        "CHUNKS": 8,
        "STAGES": 5,
        "HELD": 0,
        "AT_ONCE": False,
        "DIRECT": True,
    }
    few: dict[str, object] = {"GATED": True, "BLOCK_M": 8, "STAGES": 8, "HELD": 4, "AT_ONCE": True}
    split: dict[str, object] = {"CHUNKS": 4, "STAGES": 4, "DIRECT": False, "RELEASE_LATE": True}
    many: dict[str, object] = {"BLOCK_M": 256, "BLOCK_K": 64, "CHUNKS": 16, "STAGES": 3, "GATED": True, "DIRECT": False}
    aligned = frozenset(signature) - {"num_rows"}
    shapes: tuple[tuple[dict[str, str], dict[str, object], int], ...] = (
        ({}, {}, 4),
        ({}, few, 4),
        ({"x_ptr": "*fp32"}, few | {"NUM_SUMS": 8, "ROWS": 1, "EPS": 1e-6, "HELD": MAX_HELD}, 4),
        ({"x_ptr": "*fp32"}, few | {"NUM_SUMS": 2, "ROWS": 8, "EPS": 1e-6, "HELD": 0}, 4),
        ({"out_ptr": "*fp32"}, split, 4),
        ({"out_ptr": "*fp32"}, few | {"GATED": False, "CHUNKS": 4}, 4),
        ({}, many, 8),
    )
    on_hopper = {"TENSOR_MEMORY": False}
    return [
        AotCase(
            _warpgroup_linear_kernel,
            signature | types,
            whole | shape | ({"TENSOR_MEMORY": True, "HELD": 0, "DIRECT": False} if tensor_memory else on_hopper),
            num_warps=num_warps,
            aligned=aligned,
            archs=archs,
            # the sums of 256 rows leave few registers
            may_spill=False,
        )
        for tensor_memory, archs in ((False, (90,)), (True, (100, 103)))
        for types, shape, num_warps in shapes
    ]
