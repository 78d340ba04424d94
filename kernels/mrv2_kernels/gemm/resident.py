"""Product of few rows with weights that wait in shared memory, alone or with what surrounds it in a layer:

    s = x                                       or, with `norm`,      rms_norm(x) * norm
    p = s @ weight.T                            or, if `gated`,       silu(s @ gate.T) * (s @ up.T), weight = [gate; up]
    out = p                                     or, with `residual`,  p + residual

A program owns `BLOCK_N` outputs over one split of the inputs.  It orders all its weights into shared memory at once
with asynchronous copies, before it waits for the kernel that makes x (`mrv2_kernels.gemm.pdl`); then it brings x
through a ring of `STAGES` blocks.  So most of the memory traffic of a product passes under the product before it,
and from the predecessor's end to this one's lie a read of x from L2, the multiplication and a store.

Warps share out the inputs, not the outputs: warp w multiplies the columns k of every chunk with
``k // KW % num_warps == w`` as one batch of a batched product (mma.sync m16n8k16), so that each weight passes from
shared memory to registers once; the warps' sums are added at the end.  Splits of the inputs write partial sums to a
workspace; the last program of a tile to arrive adds them in their order, so results do not depend on who is last.

The norm multiplies x by its weights on the way from shared memory to the tensor cores, and rounds there; each program
adds up its rows' squares meanwhile, and the product is divided by their root at the end.  A gated product keeps rows
of gate and up in turns, so that a thread holds both of an output.

Weights may be 8-bit floats with a scale for each output (`gemm.fp8`): they wait as such and are converted in registers
(`gemm.unpack`).  There a thread holds four weights of a row in one word, so the columns of a chunk are multiplied in
another order than 16-bit ones.

Measured on an H200 (traces/bench/h200-gemms-plans.json), all four products of Qwen3-0.6B's 28 layers: 421 us at 8 rows
(562 without starting ahead; the library 630), 433 at 16, 635 at 32 and 1,014 at 64 (the library 658 and 677): x, which
each program reads anew, outweighs what is gained. With kernels for norms, activation and additions between them 498 us
at 8 rows, 521 at 16, 708 at 32; taking those in 466, 470, 684, and 1,343 against 794 at 64. Layers of 16-bit weights
are faster by `gemm.warpgroup` at every number of rows that was measured.
"""

from __future__ import annotations

import torch

from mrv2_kernels._gluon import ampere, block_barrier, gl, gluon
from mrv2_kernels._triton import cdiv
from mrv2_kernels.aot_case import AotCase
from mrv2_kernels.gemm.pdl import gdc_launch_dependents, gdc_wait, has_pdl
from mrv2_kernels.gemm.plan import LinearPlan, LinearWorkspace
from mrv2_kernels.gemm.unpack import E4M3_TO_BF16, unpacks

# columns of a warp's share of a chunk: rows of 128 bytes
KW = 64
# what a program may have on Hopper and Blackwell, less what the sum over warps and the compiler take
_SHARED_BYTES = 224 << 10


@gluon.jit
def _unpacked(weight, DTYPE: gl.constexpr, UNPACK: gl.constexpr):
    """Weights as the tensor cores take them."""
    if UNPACK:
        return gl.inline_asm_elementwise(E4M3_TO_BF16, "=r,=r,r", [weight], dtype=gl.bfloat16, is_pure=True, pack=4)
    else:
        return weight.to(DTYPE)


# a count of rows must neither become a constant nor make variants
@gluon.jit(do_not_specialize=["num_rows"])
def _resident_linear_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    partials_ptr,
    counters_ptr,
    norm_ptr,
    residual_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    residual_stride,
    EPS: gl.constexpr,
    HAS_NORM: gl.constexpr,
    GATED: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    KW: gl.constexpr,
    CHUNKS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    HAS_SCALE: gl.constexpr,
    UNPACK: gl.constexpr,
    EARLY: gl.constexpr,
    PDL: gl.constexpr,
):
    W: gl.constexpr = gl.num_warps()
    # 8-bit weights: a thread's four of a row are one word, and four of x two, free of bank conflicts
    K_WIDTH: gl.constexpr = 4 if HAS_SCALE else 2
    X_SHARED: gl.constexpr = gl.SwizzledSharedLayout(16 if HAS_SCALE else 8, 1, 4 if HAS_SCALE else 8, [2, 1, 0])
    W_SHARED: gl.constexpr = gl.SwizzledSharedLayout(16, 2, 4, [2, 1, 0]) if HAS_SCALE else X_SHARED
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    # eight threads copy a row of 128 bytes, 16 bytes each
    COPY: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 4, 8], [W, 1, 1], [2, 1, 0])
    # four one of 64 bytes
    W_COPY: gl.constexpr = gl.BlockedLayout([1, 1, 16], [1, 8, 4], [W, 1, 1], [2, 1, 0]) if HAS_SCALE else COPY
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[W, 1, 1], instr_shape=[1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, K_WIDTH)
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, K_WIDTH)
    OUT: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [W, 1], [1, 0])
    # a warp's row of the norm's weights
    NORM: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [W, 1], [1, 0])
    # outputs of a program
    WIDTH: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    if PDL:
        gdc_launch_dependents()
    tile = gl.program_id(0)
    split = gl.program_id(1)
    first_row = gl.program_id(2) * BLOCK_M
    # [chunk, warp, row, column]
    w_shared = gl.allocate_shared_memory(weight_ptr.dtype.element_ty, [CHUNKS, W, BLOCK_N, KW], W_SHARED)
    x_shared = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES, W, BLOCK_M, KW], X_SHARED)
    i_w = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, W_COPY)))[:, None, None]
    i_k = gl.arange(0, KW, gl.SliceLayout(0, gl.SliceLayout(1, W_COPY)))[None, None, :]
    i_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, W_COPY)))[None, :, None]
    # the output that a row of weights is for
    i_o = tile * WIDTH + (i_n // 2 if GATED else i_n)
    w_k = split * (CHUNKS * W * KW) + i_w * KW + i_k
    w_row = i_o.to(gl.int64)
    if GATED:
        w_row += (i_n % 2) * num_outputs
    w_ptrs = weight_ptr + w_row * num_inputs + w_k
    for c in gl.static_range(CHUNKS):
        # masked elements arrive as zeros
        mask = (i_o < num_outputs) & (w_k + c * W * KW < num_inputs)
        ampere.async_copy.async_copy_global_to_shared(w_shared.index(c), w_ptrs + c * W * KW, mask=mask)
        ampere.async_copy.commit_group()
    if HAS_NORM:
        norm_shared = gl.allocate_shared_memory(norm_ptr.dtype.element_ty, [CHUNKS, W, KW], FLAT)
        n_k = (
            gl.arange(0, W, gl.SliceLayout(1, NORM))[:, None] * KW + gl.arange(0, KW, gl.SliceLayout(0, NORM))[None, :]
        )
        for c in gl.static_range(CHUNKS):
            n_mask = n_k + c * W * KW < num_inputs
            norm_shared.index(c).store(gl.load(norm_ptr + n_k + c * W * KW, mask=n_mask, other=0.0))
        squares = gl.zeros([W, BLOCK_M, KW], gl.float32, A)
    o_m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, OUT))[:, None] + first_row
    o_n = gl.arange(0, WIDTH, gl.SliceLayout(0, OUT))[None, :] + tile * WIDTH
    o_mask = (o_m < num_rows) & (o_n < num_outputs)
    x_w = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, COPY)))[:, None, None]
    x_k = gl.arange(0, KW, gl.SliceLayout(0, gl.SliceLayout(1, COPY)))[None, None, :]
    i_m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(2, COPY)))[None, :, None] + first_row
    k = split * (CHUNKS * W * KW) + x_w * KW + x_k
    if EARLY:
        # into registers while the predecessor runs
        ampere.async_copy.wait_group(0)
        early = ()
        for c in gl.static_range(CHUNKS):
            early += (_unpacked(w_shared.index(c).permute((0, 2, 1)).load(B), x_ptr.dtype.element_ty, UNPACK),)
    if PDL:
        gdc_wait()
    x_ptrs = x_ptr + i_m.to(gl.int64) * x_stride + k
    for c in gl.static_range(STAGES):
        mask = (i_m < num_rows) & (k + c * W * KW < num_inputs)
        ampere.async_copy.async_copy_global_to_shared(x_shared.index(c), x_ptrs + c * W * KW, mask=mask)
        ampere.async_copy.commit_group()
    if HAS_RESIDUAL:
        # on its way while the product is computed
        residual = gl.load(residual_ptr + o_m.to(gl.int64) * residual_stride + o_n, mask=o_mask, other=0.0)
    acc = gl.zeros([W, BLOCK_M, BLOCK_N], gl.float32, ACC)
    for c in gl.static_range(CHUNKS):
        ampere.async_copy.wait_group(STAGES - 1 if c + STAGES <= CHUNKS else CHUNKS - 1 - c)
        a = x_shared.index(c % STAGES).load(A)
        if EARLY:
            b = early[c]
        else:
            b = _unpacked(w_shared.index(c).permute((0, 2, 1)).load(B), x_ptr.dtype.element_ty, UNPACK)
        if HAS_NORM:
            wide = a.to(gl.float32)
            squares += wide * wide
            scale = gl.expand_dims(norm_shared.index(c).load(gl.SliceLayout(1, A)), 1)
            a = (wide * scale.to(gl.float32)).to(x_ptr.dtype.element_ty)
        acc = ampere.mma_v2(a, b, acc)
        if c + STAGES < CHUNKS:
            mask = (i_m < num_rows) & (k + (c + STAGES) * W * KW < num_inputs)
            ampere.async_copy.async_copy_global_to_shared(
                x_shared.index(c % STAGES), x_ptrs + (c + STAGES) * W * KW, mask=mask
            )
            ampere.async_copy.commit_group()
    out = gl.convert_layout(gl.sum(acc, axis=0), OUT)
    if HAS_SCALE:
        s_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, OUT))[None, :]
        s_o = tile * WIDTH + (s_n // 2 if GATED else s_n)
        s_row = s_o + (s_n % 2) * num_outputs if GATED else s_o
        out = out * gl.load(scale_ptr + s_row, mask=s_o < num_outputs, other=0.0)
    if HAS_NORM:
        mean = gl.sum(gl.sum(squares, axis=2), axis=0) / num_inputs
        out = out / gl.convert_layout(gl.sqrt(mean + EPS), gl.SliceLayout(1, OUT))[:, None]
    if GATED:
        gate, up = gl.split(gl.reshape(out, [BLOCK_M, WIDTH, 2]))
        out = gl.convert_layout(gate / (1.0 + gl.exp(-gate)) * up, OUT)
    if HAS_RESIDUAL:
        out += residual.to(gl.float32)
    offsets = o_m.to(gl.int64) * num_outputs + o_n
    if SPLITS == 1:
        gl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=o_mask)
    else:
        size = num_rows.to(gl.int64) * num_outputs
        gl.store(partials_ptr + split * size + offsets, out, mask=o_mask)
        # all warps' sums are stored before one of them counts
        block_barrier()
        counter_ptr = counters_ptr + gl.program_id(2) * gl.num_programs(0) + tile
        arrived = gl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            total = gl.load(partials_ptr + offsets, mask=o_mask, other=0.0, cache_modifier=".cg")
            for s in gl.static_range(1, SPLITS):
                total += gl.load(partials_ptr + s * size + offsets, mask=o_mask, other=0.0, cache_modifier=".cg")
            gl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=o_mask)
            gl.store(counter_ptr, 0)


def num_chunks(plan: LinearPlan, num_inputs: int) -> int:
    """Return how many chunks of `num_warps` x 64 columns a program multiplies."""
    return cdiv(num_inputs, plan.splits * plan.num_warps * KW)


def shared_bytes(plan: LinearPlan, num_inputs: int, weight_bytes: int = 2) -> int:
    """Return the shared memory of a program in bytes, at 2 bytes an input and `weight_bytes` a weight."""
    chunks = num_chunks(plan, num_inputs)
    row = plan.num_warps * KW
    return row * (weight_bytes * chunks * plan.block_n + 2 * min(plan.stages, chunks) * plan.block_m)


def why_not_resident(
    plan: LinearPlan, num_outputs: int, num_inputs: int, dtype: torch.dtype, weight_bytes: int = 2
) -> str | None:
    """Return why a plan does not suit a shape with weights of so many bytes, or None."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype}: only bfloat16 and float16"
    if num_inputs % 16 or num_outputs % 16:
        return f"{num_outputs} outputs of {num_inputs} inputs: both must be multiples of 16"
    if plan.block_m < 16 or plan.block_n < 8:
        return f"tile {plan.block_m} x {plan.block_n}: at least 16 x 8"
    if (plan.splits - 1) * num_chunks(plan, num_inputs) * plan.num_warps * KW >= num_inputs:
        return f"{num_inputs} inputs leave nothing to the last of {plan.splits} splits"
    # the sum over warps reuses the space; two bytes an input for the weights of a norm
    sums = 4 * plan.num_warps * plan.block_m * plan.block_n
    wanted = 2 * num_inputs + max(shared_bytes(plan, num_inputs, weight_bytes), sums)
    return None if wanted <= _SHARED_BYTES else f"{wanted >> 10} KiB of shared memory: {_SHARED_BYTES >> 10} at most"


def resident_linear(
    # [M, K], row stride free, a multiple of 16
    x: torch.Tensor,
    # [N, K]; [2 N, K] if gated
    weight: torch.Tensor,
    plan: LinearPlan,
    workspace: LinearWorkspace | None = None,
    # [M, N]
    out: torch.Tensor | None = None,
    # [N] float32: of 8-bit weights
    scale: torch.Tensor | None = None,
    *,
    # [K]
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    # [M, N], row stride free; may be `out`
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the product [M, N] with what surrounds it; CUDA only.

    Raises `ValueError` for a shape that the plan does not suit, a missing or too small workspace, and for a plan that
    splits the inputs of more than a bare product.
    """
    (num_rows, num_inputs), num_outputs = x.shape, weight.shape[0] // (2 if gated else 1)
    reason = why_not_resident(plan, num_outputs, num_inputs, x.dtype, weight.element_size())
    if plan.splits > 1 and (norm is not None or gated or residual is not None):
        reason = "partial sums leave no room for norm, gate or residual"
    if reason is not None:
        raise ValueError(f"{plan.label}: {reason}")
    assert x.stride(1) == 1 and x.stride(0) % 16 == 0, f"rows must be contiguous and aligned, strides {x.stride()}"
    assert weight.is_contiguous(), f"weights must be contiguous, strides {weight.stride()}"
    assert residual is None or residual.stride(1) == 1, "rows of the residual must be contiguous"
    out = x.new_empty((num_rows, num_outputs)) if out is None else out
    if num_rows == 0:
        return out
    if plan.splits > 1:
        if workspace is None:
            raise ValueError(f"{plan.label} adds partial sums: it needs a workspace")
        workspace.require(plan, num_rows, num_outputs)
    chunks, pdl = num_chunks(plan, num_inputs), plan.ahead and has_pdl(x)
    width = plan.block_n // (2 if gated else 1)
    _resident_linear_kernel[(cdiv(num_outputs, width), plan.splits, cdiv(num_rows, plan.block_m))](
        x,
        weight,
        x if scale is None else scale,
        out,
        out if workspace is None else workspace.partials,
        out if workspace is None else workspace.counters,
        x if norm is None else norm,
        x if residual is None else residual,
        num_rows,
        num_outputs,
        num_inputs,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        EPS=eps,
        HAS_NORM=norm is not None,
        GATED=gated,
        HAS_RESIDUAL=residual is not None,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        KW=KW,
        CHUNKS=chunks,
        STAGES=min(plan.stages, chunks),
        SPLITS=plan.splits,
        HAS_SCALE=scale is not None,
        UNPACK=unpacks(x, weight.dtype),
        EARLY=plan.early,
        PDL=pdl,
        num_warps=plan.num_warps,
        launch_pdl=pdl,
    )
    return out


def aot_cases() -> list[AotCase]:
    """Return representative signatures: whole inputs, split ones, with what surrounds them, and 8-bit weights."""
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr", "norm_ptr", "residual_ptr"), "*bf16")
    others = {"scale_ptr": "*fp32", "partials_ptr": "*fp32", "counters_ptr": "*i32"}
    sizes = dict.fromkeys(("num_rows", "num_outputs", "num_inputs", "x_stride", "residual_stride"), "i32")
    constants: dict[str, object] = {"KW": KW, "EPS": 1e-6, "PDL": True}
    flags = ("HAS_NORM", "GATED", "HAS_RESIDUAL", "HAS_SCALE", "UNPACK", "EARLY")
    bare: dict[str, object] = dict.fromkeys(flags, False)
    whole: dict[str, object] = {"BLOCK_M": 16, "BLOCK_N": 32, "CHUNKS": 4, "STAGES": 4, "SPLITS": 1}
    shapes: list[dict[str, object]] = [
        bare | whole,
        bare | {"BLOCK_M": 64, "BLOCK_N": 32, "CHUNKS": 3, "STAGES": 2, "SPLITS": 4},
        bare | whole | {"HAS_NORM": True, "GATED": True, "BLOCK_M": 32},
        bare | whole | {"HAS_RESIDUAL": True, "BLOCK_N": 8},
        bare | whole | {"HAS_SCALE": True, "BLOCK_N": 16},
        bare | whole | {"HAS_SCALE": True, "UNPACK": True, "HAS_NORM": True, "GATED": True},
        bare | whole | {"HAS_SCALE": True, "UNPACK": True, "EARLY": True, "BLOCK_N": 16},
    ]
    signature = pointers | others | sizes
    aligned = frozenset(signature) - {"num_rows"}
    return [
        AotCase(
            _resident_linear_kernel,
            signature | ({"weight_ptr": "*fp8e4nv"} if shape["HAS_SCALE"] else {}),
            constants | shape,
            aligned=aligned,
        )
        for shape in shapes
    ]
