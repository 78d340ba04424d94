"""The default model state adds nothing to a dense decoder, and attention says what it needs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from models.paged_harness import PagedHarness
from mrv2_models.model_state import DefaultModelState, resolve_model_state
from mrv2_models.registry import load_model


@pytest.fixture
def harness() -> PagedHarness:
    return PagedHarness(load_model("tiny-llama", load_format="dummy"))


def test_the_hooks_of_a_dense_model_are_neutral(harness: PagedHarness) -> None:
    state = harness.state
    assert type(state) is DefaultModelState
    assert state.graph_support == "mixed"
    assert state.custom_sampler() is None
    state.add_request(0, np.arange(5, dtype=np.int32), 0)
    state.apply_staged_writes()
    batch = harness.batch({"a": [1, 2, 3]})
    assert state.get_mm_embeddings(batch) is None
    state.preprocess_state(batch)
    state.postprocess_state(batch, torch.ones(1, dtype=torch.int32))
    state.remove_request(0)
    assert state.prepare_inputs(batch) == state.prepare_dummy_inputs(batch)


def test_tensors_are_handed_on_without_a_copy(harness: PagedHarness) -> None:
    batch = harness.batch({"a": [1, 2, 3]})
    attn = harness.state.prepare_attn(batch)
    assert attn.block_tables is batch.block_tables[0]
    assert attn.slot_mapping is batch.slot_mappings[0]
    assert attn.seq_lens is batch.seq_lens


def test_more_than_one_group_is_refused(harness: PagedHarness) -> None:
    state = resolve_model_state(harness.model)
    with pytest.raises(AssertionError, match="needs one KV cache group over 2 layers, got 2 groups"):
        state.initialize_kv_cache([None, None], harness.kv_caches)  # type: ignore[list-item]  # only counted


def test_sdpa_without_host_lengths_is_refused(harness: PagedHarness) -> None:
    harness.backend = "sdpa"
    batch = harness.batch({"a": [1, 2, 3]})
    batch.max_seq_lens_np = None
    with pytest.raises(ValueError, match="'sdpa' needs query_start_loc_np and max_seq_lens_np"):
        harness.model(
            **harness.state.prepare_inputs(batch), attn=harness.state.prepare_attn(batch), kv_caches=harness.kv_caches
        )


def test_sdpa_takes_upper_bounds_of_the_lengths(harness: PagedHarness) -> None:
    expected = harness.step({"a": list(range(40))})["a"]
    harness.backend = "sdpa"
    batch = harness.batch({"b": list(range(40))})
    assert batch.max_seq_lens_np is not None
    batch.max_seq_lens_np += 7
    hidden = harness.model(
        **harness.state.prepare_inputs(batch), attn=harness.state.prepare_attn(batch), kv_caches=harness.kv_caches
    )
    torch.testing.assert_close(harness.model.compute_logits(hidden), expected, atol=1e-4, rtol=0.0)


def test_random_models_do_not_repeat_one_token() -> None:
    for preset in ("tiny-llama", "tiny-qwen3"):
        harness = PagedHarness(load_model(preset, load_format="dummy"))
        logits = harness.step({"a": list(range(12))})["a"][-1]
        produced = []
        for _ in range(40):
            produced.append(int(logits.argmax()))
            logits = harness.step({"a": produced[-1:]})["a"][-1]
        assert len(set(produced)) > 10, f"{preset} only says {set(produced)}"
