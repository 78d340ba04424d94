"""Products of warp groups, compiled: against float64, whole, gated, in parts and of parts; and as kernels that overlap.

A kernel that starts early may neither read what its predecessor has not written, nor let its successor believe that all
before it have ended.  A predecessor that writes late, after it let others start, shows both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle

import pytest
import torch

from mrv2_kernels._triton import cdiv, tl, triton
from mrv2_kernels.attention.order import longest_first
from mrv2_kernels.attention.paged import paged_attention
from mrv2_kernels.gemm import LinearPlan, add_partials, linear, linear_of_sums, linear_parts, why_not
from mrv2_kernels.gemm.pdl import gdc_launch_dependents, gdc_wait, has_pdl
from mrv2_kernels.inputs.commit import commit_decode
from mrv2_kernels.inputs.decode import prepare_decode_inputs
from mrv2_kernels.layers import embed_norm, rms_norm
from paged_cases import paged_case

pytestmark = pytest.mark.gpu

ROWS = (1, 5, 8, 16, 17, 32, 33, 64, 100, 128, 200, 256)
# Qwen3-0.6B's products; outputs that are no multiple of 64, inputs that are none of a block, fewer of both than one
SHAPES = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (80, 272), (144, 1040), (48, 64))
PLANS = (
    LinearPlan("warpgroup", 8, 64, stages=16),
    LinearPlan("warpgroup", 8, 64, splits=2, stages=16),
    LinearPlan("warpgroup", 8, 64, splits=6, stages=16, held=4),
    # more than the block that one of the splits has
    LinearPlan("warpgroup", 8, 64, stages=16, held=6),
    LinearPlan("warpgroup", 16, 64, num_warps=8, stages=16, held=2),
    LinearPlan("warpgroup", 16, 64, splits=4, stages=2),
    LinearPlan("warpgroup", 16, 64, num_warps=8, stages=2, release_late=True),
    LinearPlan("warpgroup", 32, 64, splits=8, stages=3),
    LinearPlan("warpgroup", 64, 64, stages=16, release_late=True),
    LinearPlan("warpgroup", 64, 64, splits=3, num_warps=8, ahead=False),
    LinearPlan("warpgroup", 128, 64, splits=4, stages=16),
    LinearPlan("warpgroup", 256, 64, stages=16),
    LinearPlan("warpgroup", 256, 64, splits=4, num_warps=8, stages=3),
)
RINGS = (
    LinearPlan("ring", 8, 64, stages=16),
    LinearPlan("ring", 16, 64, stages=5),
    LinearPlan("ring", 32, 64, stages=16, ahead=False),
    LinearPlan("ring", 64, 64, stages=16),
    LinearPlan("ring", 8, 128, num_warps=8, stages=16),
)
NORMED = LinearPlan("warpgroup", 8, 64, stages=16, normed=True)
HELD = LinearPlan("warpgroup", 8, 64, stages=16, normed=True, held=6)
EPS = 1e-6
# how long a predecessor spins
LATE_NS = 200_000


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda")


def _weight(num_outputs: int, num_inputs: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (_random(num_outputs, num_inputs) / num_inputs**0.5).to(dtype)


# every second row of a wider tensor, rows of very unequal sizes: none may hide behind the others
def _rows(num_rows: int, num_inputs: int, dtype: torch.dtype) -> torch.Tensor:
    sizes = torch.logspace(-2, 1, 2 * num_rows, device="cuda")[:, None]
    return (_random(2 * num_rows, num_inputs + 16) * sizes).to(dtype)[::2, :num_inputs]


def _assert_rows_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error = (actual.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert (error <= tolerance).all(), f"relative errors of rows {error.tolist()}"


def _guarded(*shape: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an output full of NaN, and a larger tensor around it that nobody may write to."""
    size = torch.Size(shape).numel()
    around = torch.full((size + 2 * 4096,), torch.nan, dtype=dtype, device="cuda")
    return around[4096:-4096].view(shape), around


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.label)
@pytest.mark.parametrize(
    "num_outputs, num_inputs, dtype", [*((*shape, torch.bfloat16) for shape in SHAPES), (144, 1040, torch.float16)]
)
def test_product(num_outputs: int, num_inputs: int, plan: LinearPlan, dtype: torch.dtype) -> None:
    if (reason := why_not(plan, 1, num_outputs, num_inputs, dtype)) is not None:
        pytest.skip(reason)
    torch.manual_seed(0)
    weight = _weight(num_outputs, num_inputs, dtype)
    shape, kept = ((plan.splits,), torch.float32) if plan.splits > 1 else ((), dtype)
    for num_rows in ROWS:
        x = _rows(num_rows, num_inputs, dtype)
        expected = x.double() @ weight.double().T
        out, around = _guarded(*shape, num_rows, num_outputs, dtype=kept)
        assert linear_parts(x, weight, plan, out=out) is out
        assert torch.isnan(around[:4096]).all() and torch.isnan(around[-4096:]).all(), "writes beyond its output"
        # sums have not been rounded
        total = out.double() if plan.splits == 1 else out.double().sum(0)
        _assert_rows_close(total, expected, 5e-3 if plan.splits == 1 else 1e-4)
        assert torch.equal(linear_parts(x, weight, plan), out), "two runs differ"
        if plan.splits == 1:
            assert torch.equal(linear(x, weight, plan), out)
        else:
            assert add_partials(out, dtype).dtype == dtype


@pytest.mark.parametrize("plan", [each for each in PLANS if each.held], ids=lambda plan: plan.label)
@pytest.mark.parametrize("gated", [False, True])
def test_held_weights_leave_the_result_as_it_is(gated: bool, plan: LinearPlan) -> None:
    if gated and plan.splits > 1:
        pytest.skip("a gate takes whole sums")
    torch.manual_seed(0)
    num_inputs = 512 * max(2, plan.splits)
    weight = _weight(6144, num_inputs)
    for num_rows in (1, 8, 16):
        x = _rows(num_rows, num_inputs, torch.bfloat16)
        from_memory = linear_parts(x, weight, replace(plan, held=0), gated=gated)
        assert torch.equal(linear_parts(x, weight, plan, gated=gated), from_memory)


@pytest.mark.parametrize("plan", RINGS, ids=lambda plan: plan.label)
@pytest.mark.parametrize(
    "num_outputs, num_inputs, dtype",
    [*((*shape, torch.bfloat16) for shape in (*SHAPES, (49152, 576), (151936, 1024))), (144, 1040, torch.float16)],
)
def test_product_through_a_ring(num_outputs: int, num_inputs: int, plan: LinearPlan, dtype: torch.dtype) -> None:
    if (reason := why_not(plan, 1, num_outputs, num_inputs, dtype)) is not None:
        pytest.skip(reason)
    torch.manual_seed(0)
    weight = _weight(num_outputs, num_inputs, dtype)
    x = _rows(plan.block_m, num_inputs, dtype)
    for num_rows in (1, plan.block_m - 3, plan.block_m):
        expected = x[:num_rows].double() @ weight.double().T
        out, around = _guarded(num_rows, num_outputs, dtype=dtype)
        assert linear(x[:num_rows], weight, plan, out=out) is out
        assert torch.isnan(around[:4096]).all() and torch.isnan(around[-4096:]).all(), "writes beyond its output"
        _assert_rows_close(out, expected, 5e-3)
        whole = linear(x, weight, plan)
        assert torch.equal(whole[:num_rows], out), "a row depends on how many there are"
        assert torch.equal(linear(x[:1], weight, RINGS[0]), out[:1]), "a row depends on the plan"


@pytest.mark.parametrize("plan", [each for each in PLANS if each.splits == 1], ids=lambda plan: plan.label)
@pytest.mark.parametrize(
    "num_outputs, num_inputs, dtype",
    [(3072, 1024, torch.bfloat16), (80, 272, torch.bfloat16), (48, 64, torch.bfloat16), (80, 272, torch.float16)],
)
def test_gated_product(num_outputs: int, num_inputs: int, plan: LinearPlan, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = _weight(2 * num_outputs, num_inputs, dtype)
    for num_rows in ROWS:
        x = _rows(num_rows, num_inputs, dtype)
        gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
        out, around = _guarded(num_rows, num_outputs, dtype=dtype)
        linear_parts(x, weight, plan, gated=True, out=out)
        assert torch.isnan(around[:4096]).all() and torch.isnan(around[-4096:]).all(), "writes beyond its output"
        _assert_rows_close(out, gate * gate.sigmoid() * up, 1e-2)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    "num_outputs, num_inputs, num_sums, dtype",
    [
        (4096, 1024, 2, torch.bfloat16),
        (4096, 1024, 8, torch.bfloat16),
        (80, 256, 3, torch.bfloat16),
        # less than a block
        (48, 64, 2, torch.float16),
    ],
)
def test_product_of_the_norm_of_sums(
    num_outputs: int, num_inputs: int, num_sums: int, gated: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight = _weight(num_outputs * (2 if gated else 1), num_inputs, dtype)
    norm = (torch.rand(num_inputs, device="cuda") + 0.5).to(dtype)
    for num_rows in (1, 2, 3, 5, 8):
        sizes = torch.logspace(-2, 1, num_rows, device="cuda")[:, None]
        sums, residual = _random(num_sums, num_rows, num_inputs) * sizes, _random(num_rows, num_inputs).to(dtype)
        kept = sums.clone(), residual.clone()
        out, stream = linear_of_sums(sums, residual, norm, EPS, weight, NORMED, gated=gated)
        normed, summed = rms_norm(sums, norm, EPS, residual)
        assert torch.equal(stream, summed), "the stream has the bits of the norm by itself"
        expected = normed.double() @ weight.double().T
        if gated:
            gate, up = expected.chunk(2, dim=1)
            expected = gate * gate.sigmoid() * up
        _assert_rows_close(out, expected, 1e-2)
        assert torch.equal(sums, kept[0]) and torch.equal(residual, kept[1])
        again = linear_of_sums(sums, residual, norm, EPS, weight, NORMED, gated=gated)
        held = linear_of_sums(sums, residual, norm, EPS, weight, HELD, gated=gated)
        for other in (again, held):
            assert torch.equal(other[0], out) and torch.equal(other[1], stream)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows, hidden, num_sums", [(1, 576, 8), (33, 1024, 3), (300, 4096, 2)])
def test_norm_of_partial_sums(rows: int, hidden: int, num_sums: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # of falling sizes: the order of additions shows in the bits
    sums = _random(num_sums, rows, hidden) * torch.logspace(1, -3, num_sums, device="cuda")[:, None, None]
    residual, weight = _random(rows, hidden).to(dtype), _random(hidden).to(dtype)
    x = sums[0]
    for each in sums[1:]:
        x = x + each
    x = x.to(dtype)
    out, summed = rms_norm(sums, weight, EPS, residual)
    assert out.dtype == summed.dtype == dtype
    assert torch.equal(summed, x + residual), "rounded as the product would have been, then as the addition"
    alone = rms_norm(x, weight, EPS, residual)
    assert torch.equal(out, alone[0]) and torch.equal(rms_norm(sums, weight, EPS), rms_norm(x, weight, EPS))


@triton.jit
def _late_copy_kernel(source_ptr, out_ptr, num, LATE_NS: tl.constexpr, BLOCK: tl.constexpr):
    """Copy, but first let the successor start, wait for the predecessors, and spin."""
    gdc_launch_dependents()
    gdc_wait()
    start = tl.extra.cuda.globaltimer()
    now = start
    while now - start < LATE_NS:
        now = tl.extra.cuda.globaltimer()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(source_ptr + at, mask=at < num), mask=at < num)


@triton.jit
def _hasty_copy_kernel(source_ptr, out_ptr, num, BLOCK: tl.constexpr):
    """Copy without waiting for anybody."""
    gdc_launch_dependents()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(source_ptr + at, mask=at < num), mask=at < num)


def _late_copy(source: torch.Tensor, out: torch.Tensor, *, late_ns: int = LATE_NS) -> None:
    assert source.is_contiguous() and out.is_contiguous() and source.dtype == out.dtype
    # few programs: all of them run at once, beside those of the successor
    block = 4096
    grid = (cdiv(source.numel(), block),)
    _late_copy_kernel[grid](source, out, source.numel(), LATE_NS=late_ns, BLOCK=block, launch_pdl=True)


def _needs_pdl() -> None:
    if not has_pdl(torch.empty(1, device="cuda")):
        pytest.skip("needs compute capability 9.0")


def test_a_kernel_that_does_not_wait_overtakes_a_late_one() -> None:
    """So the tests below can fail."""
    _needs_pdl()
    source, target = _random(8, 1024), torch.empty(8, 1024, device="cuda")
    stale = 0
    for _ in range(20):
        target.fill_(torch.nan)
        out = torch.empty_like(target)
        torch.cuda.synchronize()
        _late_copy(source, target)
        _hasty_copy_kernel[(2,)](target, out, target.numel(), BLOCK=4096, launch_pdl=True)
        torch.cuda.synchronize()
        stale += int(torch.isnan(out).any())
        assert torch.equal(target, source)
    assert stale


def test_nothing_behind_a_lookup_begins_before_what_is_in_front_of_it_has_ended() -> None:
    """Attention relies on it: it reads before its own wait what a step's preparation wrote."""
    _needs_pdl()
    source, table = _random(8, 1024), _weight(64, 1024)
    norm, ids = torch.ones(1024, device="cuda").bfloat16(), torch.arange(2, dtype=torch.int32, device="cuda")
    for between in (lambda: None, lambda: rms_norm(table, norm, EPS)):
        for _ in range(20):
            target = torch.full_like(source, torch.nan)
            out = torch.empty_like(target)
            torch.cuda.synchronize()
            _late_copy(source, target)
            embed_norm(ids, table, norm, EPS)
            between()
            _hasty_copy_kernel[(2,)](target, out, target.numel(), BLOCK=4096, launch_pdl=True)
            torch.cuda.synchronize()
            assert torch.equal(out, source)


class Kernel:
    """A kernel under test: tensors that it reads, by name, and a call that returns all that it writes."""

    def __init__(self, call: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]], **reads: torch.Tensor) -> None:
        self.call, self.reads = call, reads

    def outputs(self, **other: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = self.call(**self.reads | other)
        return found if isinstance(found, tuple) else (found,)


def _kernels(num_rows: int) -> dict[str, Kernel]:
    """Return the kernels of a step that start ahead, and whose reads are contiguous and of one size class."""
    return _layer_kernels(num_rows) | _edge_kernels(num_rows) | _attention_kernels(num_rows)


def _attention_kernels(num_rows: int) -> dict[str, Kernel]:
    """Attention of decodes beside a chunk of a prompt, whose context is shared or not; its lengths are there before."""
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    case = paged_case(
        [1] * num_rows + [40], [33] * num_rows + [1100], **heads, dtype=torch.bfloat16, device="cuda", padding=2
    )

    def attention(num_splits: int) -> Callable[..., torch.Tensor]:
        def call(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
            late = replace(case, q=q, k_cache=k_cache, v_cache=v_cache)
            return late.attend(partial(paged_attention, pdl=True), num_splits=num_splits)

        return call

    # what no query sees is NaN, which a comparison would not find equal
    caches = {"k_cache": case.k_cache.nan_to_num(), "v_cache": case.v_cache.nan_to_num()}
    return {
        f"attention of {num_splits} splits": Kernel(attention(num_splits), q=case.q.contiguous(), **caches)
        for num_splits in (1, 4)
    }


def _edge_kernels(num_rows: int) -> dict[str, Kernel]:
    """What stands in front of the layers and behind them; whatever is an index is 0 until it has come."""
    torch.manual_seed(num_rows)
    table, norm = _weight(4096, 1024), (torch.rand(1024, device="cuda") + 0.5).bfloat16()
    ids = torch.randint(1, 4096, (num_rows,), dtype=torch.int32, device="cuda")
    rows = torch.randperm(num_rows, device="cuda").int()
    num_reqs = torch.tensor([num_rows], dtype=torch.int32, device="cuda")
    computed = torch.randint(1, 60, (num_rows,), dtype=torch.int32, device="cuda")
    last = torch.randint(1, 4096, (num_rows,), device="cuda")
    blocks = torch.randint(1, 99, (num_rows, 4), dtype=torch.int32, device="cuda")
    num_blocks = computed // 16 + 1
    inputs = [torch.empty(num_rows, dtype=torch.int32, device="cuda") for _ in range(4)]
    inputs.append(torch.empty_like(blocks))
    outputs, slot = torch.zeros(2, num_rows, dtype=torch.int64, device="cuda"), torch.ones_like(num_reqs)
    lengths, taken, history = computed.clone(), torch.zeros_like(last), torch.zeros(num_rows, 64, dtype=torch.int32)
    history = history.cuda()

    def prepare(computed: torch.Tensor, last: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        prepare_decode_inputs(*inputs, rows, computed, last, blocks, num_blocks, num_reqs, block_size=16)
        return tuple(each.clone() for each in inputs)

    def commit(sampled: torch.Tensor) -> tuple[torch.Tensor, ...]:
        commit_decode(outputs, slot, lengths, lengths, taken, history, rows, num_reqs, sampled)
        return outputs.clone(), taken.clone()

    plan = LinearPlan("ring", max(8, triton.next_power_of_2(num_rows)), 64, stages=16)
    return {
        "lookup": Kernel(lambda ids: embed_norm(ids, table, norm, EPS), ids=ids),
        "inputs": Kernel(prepare, computed=computed, last=last, blocks=blocks),
        "order": Kernel(lambda lengths: longest_first(lengths), lengths=computed),
        "logits": Kernel(lambda x: linear(x, table, plan), x=_random(num_rows, 1024).bfloat16()),
        "commit": Kernel(commit, sampled=last),
    }


def _layer_kernels(num_rows: int) -> dict[str, Kernel]:
    torch.manual_seed(num_rows)
    weight, gate_up = _weight(1024, 1024), _weight(2048, 1024)
    norm = (torch.rand(1024, device="cuda") + 0.5).bfloat16()
    x, residual = _random(num_rows, 1024).bfloat16(), _random(num_rows, 1024).bfloat16()
    sums = _random(4, num_rows, 1024)
    block_m = min(64, max(8, triton.next_power_of_2(num_rows)))
    plan = LinearPlan("warpgroup", block_m, 64, stages=16)
    late, split = (
        LinearPlan("warpgroup", block_m, 64, stages=2, release_late=True),
        LinearPlan("warpgroup", block_m, 64, 4),
    )
    found = {
        "product": Kernel(lambda x: linear_parts(x, weight, plan), x=x),
        "product that releases late": Kernel(lambda x: linear_parts(x, weight, late), x=x),
        "gated product": Kernel(lambda x: linear_parts(x, gate_up, plan, gated=True), x=x),
        "product in parts": Kernel(lambda x: linear_parts(x, weight, split), x=x),
        "norm of sums": Kernel(lambda x, residual: rms_norm(x, norm, EPS, residual), x=sums, residual=residual),
    }
    if num_rows <= NORMED.block_m:
        found["product of sums"] = Kernel(
            lambda x, residual: linear_of_sums(x, residual, norm, EPS, weight, NORMED), x=sums, residual=residual
        )
        found["gated product of sums"] = Kernel(
            lambda x, residual: linear_of_sums(x, residual, norm, EPS, gate_up, NORMED, gated=True),
            x=sums,
            residual=residual,
        )
    return found


@pytest.mark.parametrize("num_rows", [1, 8, 33])
def test_no_kernel_reads_what_its_predecessor_has_yet_to_write(num_rows: int) -> None:
    _needs_pdl()
    for name, kernel in _kernels(num_rows).items():
        expected = kernel.outputs()
        for read, source in kernel.reads.items():
            for _ in range(3):
                target = torch.full_like(source, torch.nan if source.is_floating_point() else 0)
                torch.cuda.synchronize()
                _late_copy(source, target)
                found = kernel.outputs(**{read: target})
                torch.cuda.synchronize()
                assert torch.equal(target, source)
                for a, b in zip(found, expected, strict=True):
                    assert torch.equal(a, b), f"{name}: {read}"


@pytest.mark.parametrize("num_rows", [1, 8, 33])
def test_no_kernel_ends_before_its_predecessor(num_rows: int) -> None:
    """Else the one behind it, which waits for it alone, would overwrite what the one before it still reads."""
    _needs_pdl()
    source = _random(8, 1024)
    nothing = torch.full_like(source, torch.nan)
    for name, kernel in _kernels(num_rows).items():
        expected = kernel.outputs()
        for _ in range(3):
            read, target = source.clone(), torch.empty_like(source)
            torch.cuda.synchronize()
            _late_copy(read, target)
            found = kernel.outputs()
            _late_copy(nothing, read, late_ns=0)
            torch.cuda.synchronize()
            assert torch.equal(target, source), name
            assert torch.isnan(read).all()
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a, b), name


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("num_rows", [1, 8, 17, 64, 200])
def test_a_chain_of_layers_in_parts_is_the_same_one_by_one_ahead_late_and_replayed(num_rows: int, normed: bool) -> None:
    """Ten layers without attention: products, gate and norms read what the one before wrote, in memory that the
    allocator hands round; some launches in between are late.
    """
    if normed and num_rows > NORMED.block_m:
        pytest.skip("a program makes eight rows of a norm at most")
    torch.manual_seed(0)
    block_m = min(64, max(8, triton.next_power_of_2(num_rows)))
    whole = NORMED if normed else LinearPlan("warpgroup", block_m, 64, stages=16)
    split = LinearPlan("warpgroup", block_m, 64, splits=4, stages=16)
    norm = (torch.rand(1024, device="cuda") + 0.5).bfloat16()
    layers = [[_weight(n, k) for n, k in ((2048, 1024), (1024, 2048), (6144, 1024), (1024, 3072))] for _ in range(10)]
    start = _random(num_rows, 1024).bfloat16()
    stray = _random(8, 1024), torch.empty(8, 1024, device="cuda")
    is_late = has_pdl(start)

    def chain(between: Callable[[], object]) -> tuple[torch.Tensor, torch.Tensor]:
        def of_sum(
            sums: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, gated: bool = False
        ) -> tuple[torch.Tensor, torch.Tensor]:
            between()
            if normed:
                return linear_of_sums(sums, residual, norm, EPS, weight, whole, gated=gated)
            x, residual = rms_norm(sums, norm, EPS, residual)
            between()
            return linear_parts(x, weight, whole, gated=gated), residual

        x, residual = rms_norm(start, norm, EPS), start
        between()
        qkv = linear_parts(x, layers[0][0], whole)
        for index, (_, o, gate_up, down) in enumerate(layers):
            between()
            sums = linear_parts(qkv, o, split)
            hidden, residual = of_sum(sums, residual, gate_up, gated=True)
            between()
            sums = linear_parts(hidden, down, split)
            if index + 1 < len(layers):
                qkv, residual = of_sum(sums, residual, layers[index + 1][0])
        between()
        return rms_norm(sums, norm, EPS, residual)

    expected = chain(torch.cuda.synchronize)
    assert all(torch.isfinite(each).all() and each.any() for each in expected)

    def check(found: tuple[torch.Tensor, torch.Tensor], how: str) -> None:
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), how

    for _ in range(3):
        check(chain(lambda: None), "one behind the other")
    if is_late:
        for phase in range(7):
            turns = cycle(index == phase for index in range(7))
            check(
                chain(lambda turns=turns: _late_copy(*stray, late_ns=20_000) if next(turns) else None), f"{phase} of 7"
            )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(lambda: None)
    for _ in range(3):
        for each in captured:
            each.fill_(torch.nan)
        for _ in range(4):
            graph.replay()
        check(captured, "replayed")
