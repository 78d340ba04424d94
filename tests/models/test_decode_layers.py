"""A layer whose products take in what surrounds them, or leave sums to its norms, is the layer.

On the host's references in float64.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import mrv2_models.layers
from models.paged_harness import PagedHarness
from mrv2_kernels.gemm import LIBRARY, LinearPlan, ProductPicks
from mrv2_kernels.gemm.picks import Pick
from mrv2_models.causal_lm import CausalLM, DecoderLayer
from mrv2_models.drafters.head import DraftHead
from mrv2_models.drafters.loading import random_head
from mrv2_models.layers import Linear, Placement, RMSNorm, share_workspace
from mrv2_models.parallel import Shard
from mrv2_models.registry import load_model

GEMV = LinearPlan("gemv")
# of products whose sums somebody adds, and of others
PARTS, WHOLE = LinearPlan("warpgroup", 8, 64, splits=3), LinearPlan("warpgroup", 8, 64)
# of products that take in the norm which would add them
NORMED = replace(WHOLE, normed=True)
PROMPTS = {"a": list(range(3, 20)), "b": [7, 9, 11]}
STEPS = [PROMPTS, {"a": [5], "b": [6]}, {"a": [8]}, {"a": [1], "b": [2]}]


def products(model: CausalLM) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear)]


def logits(model: CausalLM) -> torch.Tensor:
    harness = PagedHarness(model)
    return torch.cat([each for tokens in STEPS for each in harness.step(tokens).values()])


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen3"])
def test_fused_layers_compute_what_separate_kernels_do(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(preset, load_format="dummy", dtype=torch.float64)
    expected = logits(model)
    for each in products(model):
        each.picks = ProductPicks((2,), (Pick(LIBRARY, GEMV),))
    right = mrv2_models.layers.silu_and_mul

    def for_prompts(x: torch.Tensor) -> torch.Tensor:
        assert x.shape[0] > 2, "a decode step of two rows has no activation kernel"
        return right(x)

    monkeypatch.setattr(mrv2_models.layers, "silu_and_mul", for_prompts)
    torch.testing.assert_close(logits(model), expected, rtol=1e-10, atol=1e-10)


# -> [2, H]
def drafted(head: DraftHead, target: CausalLM) -> torch.Tensor:
    """Return the head's hidden states of two requests' first tokens, behind made-up ones of its target."""
    harness, hidden = PagedHarness(target), target.config.hidden_size
    batch = harness.batch({"a": [5], "b": [6]})
    torch.manual_seed(0)
    tapped, final = (torch.randn(2, size, dtype=target.dtype) for size in (3 * hidden, hidden))
    attn = harness.state.prepare_attn(batch)
    return head(batch.input_ids, head.features(tapped, final), batch.positions, attn, harness.kv_caches[0])


def give_everywhere(model: nn.Module, pick: Pick) -> None:
    """Have all products of two rows computed so."""
    for each in model.modules():
        if isinstance(each, Linear):
            each.picks = ProductPicks((2,), (pick,))


def test_a_layer_that_drafts_may_fuse_too() -> None:
    target = load_model("tiny-qwen3", load_format="dummy", dtype=torch.float64)
    head = random_head("mtp", target)
    expected = drafted(head, target)
    give_everywhere(head, Pick(LIBRARY, GEMV))
    torch.testing.assert_close(drafted(head, target), expected, rtol=1e-10, atol=1e-10)


def give_parts(model: nn.Module, num_rows: int, *, whole: LinearPlan = WHOLE) -> int:
    """Have the products of decoder layers in parts up to a number of rows; return how many leave partial sums."""
    num_split = 0
    for layer in model.modules():
        if isinstance(layer, DecoderLayer):
            for each, plan in (
                (layer.attention.qkv, whole),
                (layer.attention.o, PARTS),
                (layer.mlp.gate_up, whole),
                (layer.mlp.down, PARTS),
            ):
                each.picks = ProductPicks((num_rows,), (Pick(LIBRARY, parts=plan),))
                num_split += plan is PARTS
    return num_split


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[torch.Size]]:
    """Shapes of the partial sums that norms add, and that products with a norm in them do."""
    shapes: dict[str, list[torch.Size]] = {"rms_norm": [], "linear_of_sums": []}

    def watch(name: str) -> None:
        right = getattr(mrv2_models.layers, name)

        def seen(x: torch.Tensor, *args: object, **kwargs: object) -> object:
            if x.dim() == 3:
                shapes[name].append(x.shape)
            return right(x, *args, **kwargs)

        monkeypatch.setattr(mrv2_models.layers, name, seen)

    for name in shapes:
        watch(name)
    return shapes


@pytest.mark.parametrize("whole", [WHOLE, NORMED], ids=lambda plan: plan.label)
@pytest.mark.parametrize("num_rows", [2, 64])
@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen3"])
def test_layers_in_parts_compute_what_separate_kernels_do(
    preset: str,
    num_rows: int,
    whole: LinearPlan,
    added: dict[str, list[torch.Size]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load_model(preset, load_format="dummy", dtype=torch.float64)
    expected = logits(model)
    num_split = give_parts(model, num_rows, whole=whole)
    right = mrv2_models.layers.silu_and_mul

    def for_prompts(x: torch.Tensor) -> torch.Tensor:
        assert x.shape[0] > num_rows, "a gated product in parts has no activation kernel"
        return right(x)

    monkeypatch.setattr(mrv2_models.layers, "silu_and_mul", for_prompts)
    torch.testing.assert_close(logits(model), expected, rtol=1e-10, atol=1e-10)
    sizes = [rows for rows in (sum(map(len, tokens.values())) for tokens in STEPS) if rows <= num_rows]
    # the model's last norm stands alone
    by_norms = num_split if whole is WHOLE else 1
    for name, count in (("rms_norm", by_norms), ("linear_of_sums", num_split - by_norms)):
        assert added[name] == [(3, rows, model.config.hidden_size) for rows in sizes for _ in range(count)], name


def test_partial_sums_go_only_to_who_adds_them(added: dict[str, list[torch.Size]]) -> None:
    """Rotation, attention and activation read whole sums, whatever a table says of the product before them."""
    model = load_model("tiny-qwen3", load_format="dummy", dtype=torch.float64)
    expected = logits(model)
    give_parts(model, 64, whole=PARTS)
    torch.testing.assert_close(logits(model), expected, rtol=1e-10, atol=1e-10)
    assert added["rms_norm"] and all(shape[-1] == model.config.hidden_size for shape in added["rms_norm"])


@pytest.mark.parametrize("whole", [WHOLE, NORMED], ids=lambda plan: plan.label)
@pytest.mark.parametrize("index", range(4))
def test_a_layer_may_be_in_parts_in_part(index: int, whole: LinearPlan) -> None:
    """Where a product leaves no sums, the one behind it takes in no norm."""
    model = load_model("tiny-qwen3", load_format="dummy", dtype=torch.float64)
    expected = logits(model)
    give_parts(model, 64, whole=whole)
    for each in products(model)[index::4]:
        each.picks = ProductPicks()
    torch.testing.assert_close(logits(model), expected, rtol=1e-10, atol=1e-10)


def test_a_layer_that_fuses_reads_no_parts(added: dict[str, list[torch.Size]]) -> None:
    """Were both in a table, a layer would be fused, as `DecoderLayer` asks that first."""
    model = load_model("tiny-qwen3", load_format="dummy", dtype=torch.float64)
    expected = logits(model)
    for each in products(model):
        each.picks = ProductPicks((64,), (Pick(LIBRARY, GEMV, PARTS),))
    torch.testing.assert_close(logits(model), expected, rtol=1e-10, atol=1e-10)
    assert not any(added.values())


@pytest.mark.parametrize("whole", [WHOLE, NORMED], ids=lambda plan: plan.label)
def test_what_is_tapped_is_whole(whole: LinearPlan, added: dict[str, list[torch.Size]]) -> None:
    """A drafter sees the residual stream after any layer, the first and the last, the same one twice."""
    model = load_model("tiny-qwen3", load_format="dummy", dtype=torch.float64)
    last = model.config.num_hidden_layers
    model.aux_layer_ids = (0, 1, last, 1)
    results = []
    for in_parts in (False, True):
        if in_parts:
            give_parts(model, 64, whole=whole)
        harness = PagedHarness(model)
        batch = harness.batch(PROMPTS)
        num_rows = sum(map(len, PROMPTS.values()))
        taps = torch.full((num_rows, 4 * model.config.hidden_size), torch.nan, dtype=torch.float64)
        inputs, attn = harness.state.prepare_inputs(batch), harness.state.prepare_attn(batch)
        hidden = model(**inputs, attn=attn, kv_caches=harness.kv_caches, aux_hidden=taps)
        results.append((hidden, taps))
    assert added["rms_norm"]
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-10)
    first, after_one, _, again = results[1][1].chunk(4, dim=1)
    assert torch.equal(after_one, again) and not torch.equal(first, after_one)


@pytest.mark.parametrize("whole", [WHOLE, NORMED], ids=lambda plan: plan.label)
def test_a_layer_that_drafts_may_be_in_parts_too(whole: LinearPlan, added: dict[str, list[torch.Size]]) -> None:
    target = load_model("tiny-qwen3", load_format="dummy", dtype=torch.float64)
    head = random_head("mtp", target)
    expected = drafted(head, target)
    assert not any(added.values()) and give_parts(head, 64, whole=whole) == 2
    found = drafted(head, target)
    # down's sums have no norm behind them in this head
    assert sum(map(len, added.values())) == 1 and found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_a_head_whose_layer_adds_by_itself_gets_whole_tensors() -> None:
    """What its MLP returns has no norm behind it: the addition would take partial sums for more rows."""
    target = load_model("tiny-qwen3", load_format="dummy", dtype=torch.float64)
    head = random_head("eagle3", target)
    expected = drafted(head, target)
    give_everywhere(head, Pick(LIBRARY, parts=PARTS))
    found = drafted(head, target)
    assert found.shape == expected.shape == (2, target.config.hidden_size)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("plan", [WHOLE, PARTS, NORMED], ids=lambda plan: plan.label)
def test_a_product_of_eight_bit_weights_is_scaled_whatever_a_table_says(plan: LinearPlan) -> None:
    torch.manual_seed(0)
    place = Placement(torch.float32, torch.device("cpu"), quantization="fp8")
    product, norm = Linear(48, {"o": (32, 1)}, split="row", bias=False, place=place), RMSNorm(48, 1e-6, place)
    norm.weight.fill_(1.0)
    for source in product.weight_sources("a"):
        source.store(torch.randn(source.shape) * torch.logspace(-1, 1, 32)[:, None])
    x, sums = torch.randn(5, 48), torch.randn(3, 5, 48)
    expected = product(x, partial=True), product.of_sum(sums, x, norm)
    product.picks = ProductPicks((8,), (Pick(LIBRARY, parts=plan),))
    assert torch.equal(product(x, partial=True), expected[0])
    assert all(torch.equal(a, b) for a, b in zip(product.of_sum(sums, x, norm), expected[1], strict=True))
    assert product.scale is not None
    torch.testing.assert_close(expected[0], x @ (product.weight.float() * product.scale[:, None]).T, rtol=0, atol=1e-3)


@pytest.mark.parametrize("plan", [WHOLE, PARTS, NORMED], ids=lambda plan: plan.label)
def test_a_ranks_share_of_the_inputs_is_added_to_the_others_whatever_a_table_says(
    plan: LinearPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Placement(torch.float64, torch.device("cpu"), Shard(1, 2))
    product, norm = Linear(96, {"o": (32, 1)}, split="row", bias=False, place=place), RMSNorm(48, 1e-6, place)
    product.weight.normal_()
    norm.weight.fill_(1.0)
    product.picks = ProductPicks((8,), (Pick(LIBRARY, parts=plan),))
    # both ranks hold the same here
    monkeypatch.setattr(mrv2_models.layers, "all_reduce", lambda x, _: x.mul_(2))
    x, sums = torch.randn(5, 48).double(), torch.randn(3, 5, 48).double()
    torch.testing.assert_close(product(x, partial=True), 2 * x @ product.weight.T)
    normed, summed = norm.add(sums, x)
    found = product.of_sum(sums, x, norm)
    torch.testing.assert_close(found, (2 * normed @ product.weight.T, summed))


@pytest.mark.parametrize("gated", [False, True])
def test_a_product_with_a_bias_leaves_no_parts(gated: bool) -> None:
    torch.manual_seed(0)
    place = Placement(torch.float64, torch.device("cpu"))
    product = Linear(48, {"gate": (32, 1), "up": (32, 1)}, split="column", bias=True, place=place)
    assert product.bias is not None
    product.weight.normal_()
    product.bias.normal_()
    x = torch.randn(5, 48, dtype=torch.float64)
    expected = product(x, gated=gated, partial=not gated)
    product.picks = ProductPicks((8,), (Pick(LIBRARY, parts=WHOLE if gated else PARTS),))
    assert torch.equal(product(x, gated=gated, partial=not gated), expected)
    out = x @ product.weight.T + product.bias
    gate, up = out.chunk(2, dim=1)
    torch.testing.assert_close(expected, gate * gate.sigmoid() * up if gated else out)


@pytest.mark.parametrize("index", range(4))
def test_a_layer_fuses_as_a_whole_or_not_at_all(index: int) -> None:
    model = load_model("tiny-qwen3", load_format="dummy", dtype=torch.float64)
    expected = logits(model)
    for at, each in enumerate(products(model)):
        each.picks = ProductPicks((2,), (Pick(LIBRARY, None if at % 4 == index else GEMV),))
    torch.testing.assert_close(logits(model), expected, rtol=1e-10, atol=1e-10)


def test_the_host_fuses_nothing() -> None:
    model = load_model("tiny-qwen3", load_format="dummy", dtype=torch.bfloat16)
    assert all(each.picks.at(m) == Pick() for each in products(model) for m in (1, 2, 8))


def test_one_workspace_suits_every_product_that_splits() -> None:
    model = load_model("tiny-qwen3", load_format="dummy")
    share_workspace(model)
    assert all(each.workspace is None for each in products(model))
    plan = LinearPlan("streamed", splits=3)
    for at, each in enumerate(products(model)):
        each.picks = ProductPicks((4, 8), (Pick(plan), Pick(replace(plan, splits=1 + at % 2))))
    share_workspace(model)
    assert len({id(each.workspace) for each in products(model)}) == 1
    for each in products(model):
        assert each.workspace is not None
        for num_rows, pick in zip(each.picks.num_rows, each.picks.picks, strict=True):
            each.workspace.require(pick.plan, num_rows, each.weight.shape[0])
        assert not each.workspace.counters.any()
