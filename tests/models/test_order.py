"""A forward pass of a large decode batch finds the order of its requests once, before anything starts ahead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import mrv2_models.attention
from models.paged_harness import PagedHarness
from mrv2_kernels.attention.order import longest_first
from mrv2_kernels.attention.plan import decode_choice, measured
from mrv2_models.attention import AttentionMetadata
from mrv2_models.causal_lm import CausalLM
from mrv2_models.kv_cache import LayerCache
from mrv2_models.registry import load_model

PROMPTS = {"a": [3, 4, 5], "b": list(range(3, 40)), "c": [7, 9]}
DECODES = {"a": [5], "b": [6], "c": [8]}


@pytest.fixture
def model() -> CausalLM:
    return load_model("tiny-qwen3", load_format="dummy", dtype="bfloat16")


@pytest.fixture
def ordered(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every batch of the model's heads is ordered, as large ones of larger heads are."""
    table = measured(torch.bfloat16)[64]
    for pairs, choice in list(table.items()):
        monkeypatch.setitem(table, pairs, replace(choice, ordered=True))
    decode_choice.cache_clear()
    assert decode_choice(3, model.config.num_key_value_heads, model.config.head_dim, torch.bfloat16).ordered
    yield
    monkeypatch.undo()
    decode_choice.cache_clear()


@pytest.fixture
def events(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What a forward pass does, in turn: finds an order, looks up embeddings, attends in an order."""
    seen: list[tuple[str, Any]] = []
    attend = mrv2_models.attention.fused_decode_attention

    def find(seq_lens: torch.Tensor) -> torch.Tensor:
        seen.append(("order", longest_first(seq_lens)))
        return seen[-1][1]

    def attend_seen(*args: Any, **options: Any) -> None:
        seen.append(("attend", options["order"]))
        attend(*args, **options)

    normed = model.embed.normed

    def embed_seen(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(("embed", None))
        return normed(*args)

    monkeypatch.setattr(mrv2_models.attention, "longest_first", find)
    monkeypatch.setattr(mrv2_models.attention, "fused_decode_attention", attend_seen)
    monkeypatch.setattr(model.embed, "normed", embed_seen)
    return seen


@pytest.mark.usefixtures("ordered")
def test_a_decode_step_finds_its_order_in_front_of_the_lookup(model: CausalLM, events: list[tuple[str, Any]]) -> None:
    harness = PagedHarness(model)
    harness.step(PROMPTS)
    assert [name for name, _ in events] == ["embed"]
    events.clear()
    harness.step(DECODES, pad_tokens=2, pad_requests=2)
    assert [name for name, _ in events] == ["order", "embed", *["attend"] * model.config.num_hidden_layers]
    order = events[0][1]
    assert order.tolist() == [1, 0, 2, 3, 4]
    assert all(seen is order for name, seen in events if name == "attend")


@pytest.mark.usefixtures("ordered")
def test_the_step_of_the_caller_stays_as_it_is(model: CausalLM, events: list[tuple[str, Any]]) -> None:
    """Its lengths may change before the next pass, which must not find the order of this one."""
    harness = PagedHarness(model)
    harness.step(PROMPTS)
    batch = harness.batch(DECODES)
    inputs, attn = harness.state.prepare_inputs(batch), harness.state.prepare_attn(batch)
    for lengths, order in (([4, 38, 3], [1, 0, 2]), ([1, 2, 3], [2, 1, 0])):
        attn.seq_lens.copy_(torch.tensor(lengths))
        events.clear()
        model(**inputs, attn=attn, kv_caches=harness.kv_caches)
        assert attn.order is None and events[0][1].tolist() == order


def test_small_batches_start_as_they_come(model: CausalLM, events: list[tuple[str, Any]]) -> None:
    harness = PagedHarness(model)
    harness.step(PROMPTS)
    harness.step(DECODES)
    attended = [order for name, order in events if name == "attend"]
    assert "order" not in {name for name, _ in events}
    assert attended == [None] * model.config.num_hidden_layers


def test_an_order_changes_no_logits(model: CausalLM, request: pytest.FixtureRequest) -> None:
    found = []
    for is_ordered in (False, True):
        if is_ordered:
            request.getfixturevalue("ordered")
        harness = PagedHarness(model)
        harness.step(PROMPTS)
        found.append(torch.cat([*harness.step(DECODES).values()]))
    assert torch.equal(*found)


def step_of(batch: int, **changes: Any) -> AttentionMetadata:
    zeros = torch.zeros(batch, dtype=torch.int32)
    step = AttentionMetadata(
        block_tables=zeros[:, None],
        query_start_loc=torch.arange(batch + 1, dtype=torch.int32),
        seq_lens=torch.arange(batch, dtype=torch.int32),
        slot_mapping=zeros,
        max_query_len=1,
        uniform_decode=True,
    )
    return replace(step, **changes)


def test_large_batches_of_the_heads_of_qwen3_have_an_order() -> None:
    caches: LayerCache = (torch.zeros(1, 16, 8, 128, dtype=torch.bfloat16),) * 2
    order = step_of(64).with_order(torch.bfloat16, caches[0]).order
    assert order is not None and order.tolist() == [*range(63, -1, -1)]
    for step in (step_of(32), step_of(64, uniform_decode=False), step_of(64, backend="sdpa")):
        assert step.with_order(torch.bfloat16, caches[0]) is step
    assert step_of(64).with_order(torch.bfloat16, caches[0].to(torch.float8_e4m3fn)).order is not None
    heads_of_64 = torch.zeros(1, 16, 3, 64, dtype=torch.bfloat16)
    assert step_of(300).with_order(torch.bfloat16, heads_of_64).order is None
