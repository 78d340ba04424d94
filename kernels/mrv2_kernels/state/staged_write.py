"""Apply ragged row writes that the host staged: one launch for any number of writes."""

from __future__ import annotations

import torch

from mrv2_kernels._dispatch import dispatch
from mrv2_kernels._triton import cdiv, tl, triton
from mrv2_kernels.aot_case import AotCase

_BLOCK = 1024


@triton.jit(do_not_specialize=["row_len"])
def _staged_write_kernel(
    dst_ptr,
    row_stride,
    row_len,
    rows_ptr,
    starts_ptr,
    cu_lens_ptr,
    contents_ptr,
    BLOCK: tl.constexpr,
):
    write = tl.program_id(0)
    row = tl.load(rows_ptr + write).to(tl.int64)
    start = tl.load(starts_ptr + write)
    first = tl.load(cu_lens_ptr + write)
    length = tl.load(cu_lens_ptr + write + 1) - first
    for base in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
        offset = base + tl.arange(0, BLOCK)
        mask = offset < length
        values = tl.load(contents_ptr + first + offset, mask=mask)
        tl.store(dst_ptr + row * row_stride + start + offset, values, mask=mask & (start + offset < row_len))


def apply_staged_writes_triton(
    # [R] or [R, W], any dtype
    dst: torch.Tensor,
    # [n] int32
    rows: torch.Tensor,
    # [n] int32
    starts: torch.Tensor,
    # [n + 1] int32
    cu_lens: torch.Tensor,
    # [>= cu_lens[n]], dtype of dst
    contents: torch.Tensor,
    *,
    max_len: int,
) -> None:
    """Write ``dst[rows[i], starts[i] + j] = contents[cu_lens[i] + j]`` for every write i.

    Entries past the end of a row are dropped; a one-dimensional `dst` has rows of one entry.
    Writes of one call must not overlap.  `max_len` (entries of the longest write) only sizes the grid.
    """
    num_writes = rows.shape[0]
    if num_writes == 0:
        return
    _check(dst, contents)
    row_len = dst.shape[1] if dst.dim() == 2 else 1
    _staged_write_kernel[(num_writes, max(1, cdiv(max_len, _BLOCK)))](
        dst, dst.stride(0), row_len, rows, starts, cu_lens, contents, BLOCK=_BLOCK
    )


def apply_staged_writes_torch(
    # [R] or [R, W], any dtype
    dst: torch.Tensor,
    # [n] int32
    rows: torch.Tensor,
    # [n] int32
    starts: torch.Tensor,
    # [n + 1] int32
    cu_lens: torch.Tensor,
    # [>= cu_lens[n]], dtype of dst
    contents: torch.Tensor,
    *,
    max_len: int,
) -> None:
    """Torch reference of `apply_staged_writes`."""
    num_writes = rows.shape[0]
    if num_writes == 0:
        return
    _check(dst, contents)
    table = dst if dst.dim() == 2 else dst.unsqueeze(1)
    cu_lens = cu_lens[: num_writes + 1].long()
    write = torch.repeat_interleave(torch.arange(num_writes, device=dst.device), cu_lens.diff())
    source = torch.arange(write.shape[0], device=dst.device) + cu_lens[0]
    column = starts[write] + source - cu_lens[write]
    inside = column < table.shape[1]
    table[rows[write][inside].long(), column[inside]] = contents[source[inside]]


def _check(dst: torch.Tensor, contents: torch.Tensor) -> None:
    assert dst.dim() in (1, 2), f"dst has {dst.dim()} dimensions: staged writes need [R] or [R, W]"
    assert dst.dim() == 1 or dst.stride(1) == 1, f"dst has inner stride {dst.stride(1)}: rows must be contiguous"
    assert contents.dtype == dst.dtype, f"contents are {contents.dtype}, dst is {dst.dtype}: give them one dtype"


apply_staged_writes = dispatch(apply_staged_writes_triton, apply_staged_writes_torch)


def apply_runs_torch(
    # [W], any dtype of 32 bits
    dst: torch.Tensor,
    num_runs: int,
    # int32: starts [n] | cu_lens [n + 1] | contents [cu_lens[n]]
    runs: torch.Tensor,
) -> None:
    """Write ``dst[starts[i] + j] = contents[cu_lens[i] + j]`` for each of the n runs, packed one behind the other."""
    n = num_runs
    starts, cu_lens, contents = runs[:n], runs[n : 2 * n + 1], runs[2 * n + 1 :]
    rows = torch.zeros_like(starts)
    apply_staged_writes_torch(dst.view(1, -1), rows, starts, cu_lens, contents, max_len=0)


def aot_cases() -> list[AotCase]:
    """Return the specialisations that are compiled ahead of time."""
    return [
        AotCase(
            kernel=_staged_write_kernel,
            signature={
                "dst_ptr": f"*{dtype}",
                "row_stride": "i32",
                "row_len": "i32",
                "rows_ptr": "*i32",
                "starts_ptr": "*i32",
                "cu_lens_ptr": "*i32",
                "contents_ptr": f"*{dtype}",
            },
            constexprs={"BLOCK": _BLOCK},
        )
        for dtype in ("i32", "i64", "fp32")
    ]
