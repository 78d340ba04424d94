"""Structured output on a GPU: the kernel, and the engine with masks on their own stream."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("xgrammar", reason="structured outputs need xgrammar")
pytest.importorskip("jsonschema", reason="the outputs are judged by jsonschema")

from grammar.serving import mixed_params, mixed_prompt, submit, text_of, toy_core
from guarded import violations
from mrv2.config import Knobs
from mrv2.instrument import sync_allowed, sync_guard
from mrv2_kernels.sampling.bitmask import apply_bitmask
from mrv2_kernels.spec.chain import draft_from_chains
from serving import Collector

pytestmark = pytest.mark.gpu

GPU = {"device": "cuda", "dtype": "float32"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [49_152, 151_936, 151_937])
@pytest.mark.parametrize("num_rows, num_masks", [(1, 1), (7, 3), (512, 256)])
def test_mask_twins_agree(vocab: int, num_rows: int, num_masks: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(vocab + num_rows)
    buffer = torch.randn(num_rows, vocab + 7, device="cuda", generator=generator).to(dtype)
    words = -(-vocab // 32)
    bits = torch.randint(-(2**31), 2**31, (num_masks, words), device="cuda", generator=generator).to(torch.int32)
    rows = torch.randperm(num_rows, device="cuda", generator=generator)[:num_masks].to(torch.int32)
    expected = buffer.clone()
    apply_bitmask.torch(expected[:, :vocab], bits, rows)  # type: ignore[attr-defined]
    apply_bitmask(buffer[:, :vocab], bits, rows)
    assert torch.equal(buffer, expected)


@pytest.mark.parametrize("graphs", ["off", "model"])
@pytest.mark.parametrize("runner", ["v2", "v1"])
def test_constrained_outputs_validate(runner: str, graphs: str, tmp_path: Path) -> None:
    knobs = Knobs(runner=runner, cuda_graphs=graphs)  # type: ignore[arg-type]
    core = toy_core(tmp_path, max_num_seqs=8, num_gpu_blocks=128, knobs=knobs, **GPU)
    collector = Collector(core)
    for index in range(40):
        submit(collector, f"r{index}", mixed_prompt(index), mixed_params(index)[0])
    served = collector.run()
    for index in range(1, 40, 2):
        constraint = mixed_params(index)[1]
        assert constraint is not None
        assert served[f"r{index}"].finish_reason == "stop"
        assert constraint.accepts(text_of(served[f"r{index}"].token_ids))
    core.shutdown()


@pytest.mark.parametrize("depth", [2, 4])
def test_steps_with_masks_wait_for_outputs_only_and_pin_nothing(depth: int, tmp_path: Path) -> None:
    core = toy_core(tmp_path, max_num_seqs=6, num_gpu_blocks=18, knobs=Knobs(queue_depth=depth), **GPU)
    collector, index = Collector(core), 0

    def feed() -> None:
        nonlocal index
        submit(collector, f"r{index}", mixed_prompt(index), mixed_params(index)[0])
        index += 1

    for _ in range(30):
        feed()
    collector.run()
    first = core.scheduler.step
    with sync_guard(core.device, mode="error") as guard:
        while core.scheduler.step - first < 200:
            if len(core.scheduler.waiting) < 3:
                feed()
            collector.step()
        with sync_allowed("end of the test"):
            core.drain()
    assert not violations(guard)
    assert set(guard.waits) == {"output"}
    core.shutdown()


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("num_chains", "k_max"), [(1, 1), (33, 4), (256, 8)])
def test_chain_twins_agree(num_chains: int, k_max: int, keep: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(num_chains)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, device="cuda", generator=generator).to(torch.int32)

    rows = num_chains + 5
    token_ids, total_len = draw(0, 2, rows, 64), draw(20, 40, rows)
    idx_mapping = torch.randperm(rows, device="cuda", generator=generator).to(torch.int32)
    batch_rows = torch.randperm(num_chains, device="cuda", generator=generator).to(torch.int32)
    starts = total_len[idx_mapping[batch_rows.long()].long()] - draw(-1, 4, num_chains)
    lengths, chains = draw(0, 2 * k_max + 2, num_chains), draw(0, 2, num_chains, 2 * k_max + 1)
    drafts = draw(0, 2, rows, k_max).long()
    expected = drafts.clone()
    inputs = (batch_rows, starts, lengths, chains, idx_mapping, token_ids, total_len)
    draft_from_chains.torch(expected, *inputs, num_draft_tokens=k_max, keep_others=keep)  # type: ignore[attr-defined]
    draft_from_chains(drafts, *inputs, num_draft_tokens=k_max, keep_others=keep)
    assert torch.equal(drafts, expected)


@pytest.mark.parametrize("graphs", ["off", "model", "step"])
@pytest.mark.parametrize("method", ["off", "ngram"])
def test_grammar_drafts_keep_tokens_and_wait_for_outputs_and_drafts_only(
    method: str, graphs: str, tmp_path: Path
) -> None:
    prompts = [mixed_prompt(index) for index in range(12)]

    def serve(tag: str) -> list[list[int]]:
        collector = Collector(core)
        for index, prompt in enumerate(prompts):
            submit(collector, f"{tag}{index}", prompt, mixed_params(index)[0])
        served = collector.run()
        return [served[f"{tag}{index}"].token_ids for index in range(len(prompts))]

    core = toy_core(tmp_path, max_num_seqs=6, max_num_spec_tokens=4, ngram_min=1, **GPU)
    want = serve("plain")
    core.set_knobs(grammar_drafts=True, num_spec_tokens=4, spec_method=method, cuda_graphs=graphs)
    assert serve("warm") == want
    with sync_guard(core.device, mode="error") as guard:
        assert serve("guarded") == want
    assert set(guard.waits) == {"output", "drafts"}
    assert core.snapshot().num_forced_accepted > 0
    core.shutdown()
