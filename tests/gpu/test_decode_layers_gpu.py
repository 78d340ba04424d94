"""Decode steps with picked, fused and split products: against float64, against the library, replayed, and served.

The table's picks count for the GPU they were measured on; here they are those of an H200, whatever the GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from models.paged_harness import PagedHarness
from mrv2.config import Knobs
from mrv2.sampling_params import SamplingParams
from mrv2_kernels.gemm import LinearPlan, ProductPicks, picks_of, why_not
from mrv2_kernels.gemm.gemv import MAX_ROWS
from mrv2_kernels.gemm.pdl import has_pdl
from mrv2_kernels.gemm.picks import TABLE, Pick, read_picks
from mrv2_kernels.layers import rms_norm, silu_and_mul
from mrv2_models import layers
from mrv2_models.causal_lm import CausalLM
from mrv2_models.layers import Linear, share_workspace, whole
from mrv2_models.model_state import ForwardBatch
from mrv2_models.registry import load_model
from serving import Collector, make_core, random_prompt

pytestmark = pytest.mark.gpu

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# of the norm of the difference over the norm: one product rounds once; a random model's attention is sharp
PRODUCT_TOLERANCE, LOGITS_TOLERANCE = 5e-3, 8e-2
PICKS = read_picks(json.loads(TABLE.read_text()))["NVIDIA H200"]
HIDDEN = 1024
GEMV = LinearPlan("gemv", block_n=8)
SPLIT = LinearPlan("streamed", block_m=16, block_n=32, splits=2)
RESIDENT = LinearPlan("resident", block_m=16, block_n=16)
WARPGROUP = LinearPlan("warpgroup", block_n=64, stages=16)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error <= tolerance, f"relative error {error}"


def products(model: CausalLM) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear)]


def give_picks(model: CausalLM, of: Callable[[Linear], ProductPicks]) -> None:
    for each in products(model):
        each.picks = of(each)
    share_workspace(model)


def from_table(each: Linear) -> ProductPicks:
    return picks_of(PICKS, *each.weight.shape)


def alone(each: Linear) -> ProductPicks:
    """The table's picks of products alone."""
    found = from_table(each)
    return ProductPicks(found.num_rows, tuple(Pick(pick.plan) for pick in found.picks))


def part_plan(num_rows: int, *, split: bool, normed: bool = False) -> LinearPlan:
    """Return a plan for a product of Qwen3-0.6B, which leaves its sums in four parts if `split`."""
    block_m = next(size for size in (8, 16, 32, 64, 128) if size >= min(num_rows, 128))
    return replace(WARPGROUP, block_m=block_m, splits=4 if split else 1, normed=normed and not split and num_rows <= 8)


def in_parts(each: Linear) -> ProductPicks:
    """Every layer in parts: of o and down, whose outputs are the hidden size, in four."""
    split = each.weight.shape[0] == HIDDEN
    return ProductPicks(BUCKETS, tuple(Pick(parts=part_plan(rows, split=split)) for rows in BUCKETS))


def in_parts_and_normed(each: Linear) -> ProductPicks:
    """The same, where up to eight rows' norms are part of qkv and gate-up."""
    split = each.weight.shape[0] == HIDDEN
    return ProductPicks(BUCKETS, tuple(Pick(parts=part_plan(rows, split=split, normed=True)) for rows in BUCKETS))


@pytest.fixture(scope="module")
def qwen3() -> Iterator[CausalLM]:
    yield load_model("qwen3-0.6b", load_format="dummy", dtype="bfloat16", device="cuda", max_model_len=1024)
    torch.cuda.empty_cache()


def decode_batch(model: CausalLM, num_rows: int) -> tuple[PagedHarness, ForwardBatch]:
    """A step of one token each, behind prompts of unlike lengths that are already computed by the library."""
    give_picks(model, lambda _: ProductPicks())
    harness = PagedHarness(model, num_blocks=8 * num_rows + 8)
    harness.step({f"r{i}": random_prompt(i, 3 + i % 50, model.config.vocab_size) for i in range(num_rows)})
    return harness, harness.batch({f"r{i}": [11 + i] for i in range(num_rows)})


def forward(harness: PagedHarness, batch: ForwardBatch) -> torch.Tensor:
    """Return the logits of every row."""
    state = harness.state
    hidden = harness.model(**state.prepare_inputs(batch), attn=state.prepare_attn(batch), kv_caches=harness.kv_caches)
    return harness.model.compute_logits(hidden)


@pytest.mark.parametrize("num_rows", [*BUCKETS, 5, 100])
@pytest.mark.parametrize("shape", sorted({key[1:] for key in PICKS}))
def test_a_picked_product_is_the_product(shape: tuple[int, int], num_rows: int) -> None:
    """Alone, with its gate, and in parts."""
    torch.manual_seed(0)
    place = layers.Placement(torch.bfloat16, torch.device("cuda"))
    product = Linear(shape[1], {"part": (shape[0], 1)}, split="column", bias=False, place=place)
    product.weight.normal_(std=shape[1] ** -0.5)
    x = torch.randn(num_rows, shape[1], device="cuda").bfloat16()
    expected = x.double() @ product.weight.double().T
    gate, up = expected.chunk(2, dim=1)
    # an activation that stands alone reads a product that is rounded
    gated_tolerance = 2 * PRODUCT_TOLERANCE
    for of in (from_table, alone, in_parts):
        product.picks = of(product)
        assert_close(product(x), expected, PRODUCT_TOLERANCE)
        assert_close(whole(product(x, partial=True), x.dtype), expected, PRODUCT_TOLERANCE)
        if shape[0] != HIDDEN:
            assert_close(product(x, gated=True), gate * gate.sigmoid() * up, gated_tolerance)


@pytest.mark.parametrize("num_rows", BUCKETS)
def test_logits_with_picks_are_the_librarys_within_rounding(qwen3: CausalLM, num_rows: int) -> None:
    harness, batch = decode_batch(qwen3, num_rows)
    expected = forward(harness, batch)
    assert torch.isfinite(expected).all()
    for of in (from_table, alone, in_parts, in_parts_and_normed):
        give_picks(qwen3, of)
        assert_close(forward(harness, batch), expected, LOGITS_TOLERANCE)


@pytest.mark.parametrize(
    "plan, num_rows", [(GEMV, 1), (GEMV, 3), (GEMV, 4), (RESIDENT, 2), (RESIDENT, 8), (RESIDENT, 32)]
)
def test_a_fused_layer_is_the_layer(qwen3: CausalLM, plan: LinearPlan, num_rows: int) -> None:
    harness, batch = decode_batch(qwen3, num_rows)
    attn, layer = harness.state.prepare_attn(batch), qwen3.layers[0]
    torch.manual_seed(num_rows)
    x = torch.randn(num_rows, qwen3.config.hidden_size, device="cuda").bfloat16()
    added, residual = layer(x, None, batch.positions, attn, harness.kv_caches[0])
    for each in products(qwen3):
        each.picks = ProductPicks((num_rows,), (Pick(plan, plan),))
    fused, nothing = layer(x, None, batch.positions, attn, harness.kv_caches[0])
    assert nothing is None
    assert_close(fused, added.double() + residual.double(), 2e-2)


@pytest.mark.parametrize("num_rows", [1, 3, 8, 17, 64, 200])
@pytest.mark.parametrize("of", [in_parts, in_parts_and_normed], ids=lambda of: of.__name__)
def test_a_layer_in_parts_is_the_layer(qwen3: CausalLM, of: Callable[[Linear], ProductPicks], num_rows: int) -> None:
    harness, batch = decode_batch(qwen3, num_rows)
    attn = harness.state.prepare_attn(batch)
    torch.manual_seed(num_rows)
    start = torch.randn(num_rows, qwen3.config.hidden_size, device="cuda").bfloat16()

    def two_layers() -> tuple[torch.Tensor, torch.Tensor]:
        """The second one's sums, and the stream that they are to be added to."""
        x, residual = start, None
        for layer, kv_cache in zip(qwen3.layers[:2], harness.kv_caches, strict=False):
            x, residual = layer(x, residual, batch.positions, attn, kv_cache)
        assert residual is not None
        return x, residual

    expected, expected_stream = two_layers()
    give_picks(qwen3, of)
    found, stream = two_layers()
    assert found.shape == (4, num_rows, HIDDEN) and found.dtype == torch.float32 and expected.dim() == 2
    assert_close(stream, expected_stream, 3e-2)
    assert_close(whole(found, expected.dtype), expected, LOGITS_TOLERANCE)


@pytest.mark.parametrize("of", [from_table, in_parts, in_parts_and_normed], ids=lambda of: of.__name__)
@pytest.mark.parametrize("num_rows", BUCKETS)
def test_replays_back_to_back_are_the_kernels_one_by_one(
    qwen3: CausalLM, num_rows: int, of: Callable[[Linear], ProductPicks]
) -> None:
    """Launches start before those in front have ended; work on another stream stretches some of them at random."""
    if of is in_parts_and_normed and num_rows > 8:
        pytest.skip("the same plans as in_parts")
    harness, batch = decode_batch(qwen3, num_rows)
    give_picks(qwen3, of)
    expected = forward(harness, batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward(harness, batch)
    load, side = torch.randn(1024, 1024, device="cuda"), torch.cuda.Stream()
    for is_stretched in (False, True):
        for _ in range(5):
            captured.zero_()
            if is_stretched:
                with torch.cuda.stream(side):
                    for _ in range(40):
                        torch.mm(load, load)
            for _ in range(4):
                graph.replay()
            eager = forward(harness, batch)
            assert torch.equal(captured, expected) and torch.equal(eager, expected)


@pytest.mark.parametrize("rows, hidden", [(1, 1024), (64, 1024), (300, 576)])
def test_elementwise_kernels_that_overlap_are_the_kernels_one_by_one(rows: int, hidden: int) -> None:
    """Each reads what the one before wrote, in memory that the allocator hands round."""
    if not has_pdl(torch.empty(1, device="cuda")):
        pytest.skip("needs compute capability 9.0")
    torch.manual_seed(0)
    start, weight = torch.randn(rows, hidden, device="cuda").bfloat16(), torch.ones(hidden, device="cuda").bfloat16()
    results = []
    for one_by_one in (True, False, False):
        x = residual = start
        for _ in range(100):
            x, residual = rms_norm(x, weight, 1e-6, residual)
            if one_by_one:
                torch.cuda.synchronize()
            x = silu_and_mul(torch.cat((x, x), dim=1))
            x = silu_and_mul(x.repeat(1, 2))
            if one_by_one:
                torch.cuda.synchronize()
        results.append((x, residual))
    for found in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, results[0], strict=True))


def serve(knobs: Knobs) -> list[list[int]]:
    """Serve up to six requests that come and go, every product with a plan of ours."""
    core = make_core(max_num_seqs=6, knobs=knobs, device="cuda", dtype="bfloat16")
    collector = Collector(core)
    for i in range(6):
        params = SamplingParams(temperature=0.0, max_tokens=6 + 7 * i, ignore_eos=True)
        collector.submit(f"r{i}", random_prompt(i, 9 + 7 * i), params)
    served = collector.run()
    core.shutdown()
    return [served[f"r{i}"].token_ids for i in range(6)]


@pytest.mark.parametrize("form", ["alone", "fused", "parts"])
def test_every_level_and_both_runners_yield_the_same_tokens(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []

    def picks(_: object, num_outputs: int, num_inputs: int) -> ProductPicks:
        used.append(num_outputs)

        def suits(plan: LinearPlan) -> bool:
            # with a gate as well
            return all(why_not(plan, 8, n, num_inputs, torch.bfloat16) is None for n in (num_outputs, num_outputs // 2))

        plan = SPLIT if suits(SPLIT) else replace(SPLIT, splits=1)
        if form == "parts":
            # whatever asks for sums gets them where the inputs suffice for two parts
            found = [each for each in (replace(WARPGROUP, splits=2), WARPGROUP) if suits(each)]
            return ProductPicks((MAX_ROWS, 64), (Pick(GEMV, parts=found[0]), Pick(plan, parts=found[0])))
        many = Pick(plan, RESIDENT if form == "fused" and suits(RESIDENT) else None)
        return ProductPicks((MAX_ROWS, 64), (Pick(GEMV, GEMV), many))

    monkeypatch.setattr(layers, "picks_of", picks)
    want = serve(Knobs(cuda_graphs="off"))
    assert used
    for knobs in (Knobs(cuda_graphs="model"), Knobs(cuda_graphs="step"), Knobs(runner="v1", cuda_graphs="model")):
        assert serve(knobs) == want, knobs
