"""The forward on a GPU: the CPU's numbers, no host waits, and the same under graph replay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from models.paged_harness import PagedHarness
from mrv2_models.causal_lm import CausalLM
from mrv2_models.model_state import ForwardBatch
from mrv2_models.registry import load_model

pytestmark = pytest.mark.gpu

PROMPTS = {"a": list(range(3, 60)), "b": list(range(100, 117)), "c": [5]}
# of the norm of the difference over the norm of the logits; on the CPU the same arithmetic errs by up to 2e-6,
# 4e-2 and 4e-3: the random attention is sharp
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 8e-2, torch.float16: 1e-2}


@contextmanager
def no_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def forward(harness: PagedHarness, batch: ForwardBatch) -> torch.Tensor:
    """Return the logits of every row of the padded step, [T_pad, V]."""
    state = harness.state
    hidden = harness.model(**state.prepare_inputs(batch), attn=state.prepare_attn(batch), kv_caches=harness.kv_caches)
    return harness.model.compute_logits(hidden)


def pair(preset: str, dtype: torch.dtype) -> tuple[CausalLM, CausalLM]:
    """The same random weights on the GPU in `dtype` and on the CPU in float64."""
    return (
        load_model(preset, load_format="dummy", dtype=dtype, device="cuda"),
        load_model(preset, load_format="dummy", dtype=torch.float64),
    )


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen3"])
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_prefill_and_decode_equal_the_cpu(preset: str, dtype: torch.dtype) -> None:
    harnesses = [PagedHarness(model) for model in pair(preset, dtype)]
    steps = [PROMPTS, {"a": [9], "b": list(range(40)), "c": [7]}, {"a": [1], "b": [2], "c": [3]}]
    for tokens in steps:
        gpu, cpu = (harness.step(tokens, pad_tokens=1, pad_requests=1) for harness in harnesses)
        expected = torch.cat(list(cpu.values()))
        error = torch.cat([gpu[req_id] for req_id in cpu]).double().cpu() - expected
        assert error.norm() <= TOLERANCES[dtype] * expected.norm()


@pytest.mark.parametrize("backend", ["triton", "sdpa"])
def test_a_forward_never_waits_for_the_gpu(backend: str) -> None:
    model = load_model("tiny-qwen3", load_format="dummy", dtype="bfloat16", device="cuda")
    harness = PagedHarness(model, backend=backend)
    harness.step(PROMPTS)
    harness.step({"a": [9], "b": [4], "c": [7]})
    batches = [harness.batch({"a": [9], "b": list(range(20)), "c": [7]}), harness.batch({"a": [9], "b": [4], "c": [7]})]
    for batch in batches:
        with no_sync():
            forward(harness, batch)


@pytest.mark.parametrize("tokens", [{"a": [9], "b": [4], "c": [7]}, {"a": [9], "b": list(range(20)), "c": [7]}])
def test_a_captured_forward_replays_to_the_eager_result(tokens: dict[str, list[int]]) -> None:
    model = load_model("tiny-llama", load_format="dummy", dtype="bfloat16", device="cuda")
    harness = PagedHarness(model)
    harness.step(PROMPTS)
    batch = harness.batch(tokens, 2, 2)
    num_tokens = sum(map(len, tokens.values()))
    eager = forward(harness, batch)[:num_tokens]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward(harness, batch)
    captured.zero_()
    graph.replay()
    torch.testing.assert_close(captured[:num_tokens], eager, atol=0.0, rtol=0.0)
