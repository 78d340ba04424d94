"""Log-probabilities through the engine: sampled tokens, named tokens, whole rows, prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mrv2 import LLM, SamplingParams
from mrv2.config import Knobs
from mrv2.device import make_device
from mrv2.errors import RequestError
from mrv2.instrument import sync_guard
from mrv2.runner import async_logprobs
from mrv2.runner.async_logprobs import PromptSegment, cut_into_chunks
from sampler.cases import MODES, VOCAB
from serving import Collector, Served, make_core, random_prompt, serve


def run(
    mode: str, params: SamplingParams, prompts: list[list[int]], max_logits_rows: int | None = None, **options: Any
) -> list[Served]:
    device = make_device("host", poison=True, random_delay_s=0.0005)
    core = make_core(device, knobs=MODES[mode], max_logprobs=-1, **options)
    if max_logits_rows is not None:
        compute = core.executor.model.compute_logits

        def checked(hidden: torch.Tensor) -> torch.Tensor:
            assert len(hidden) <= max_logits_rows, f"{len(hidden)} rows of logits at once"
            return compute(hidden)

        core.executor.model.compute_logits = checked
    return list(serve(core, {f"r{i}": (prompt, params) for i, prompt in enumerate(prompts)}).values())


def reference(tokens: list[int]) -> torch.Tensor:
    """Log-softmax of every row of the whole sequence's logits, in float64, row t for the token at t + 1."""
    core = make_core(max_num_seqs=1, max_num_batched_tokens=160, max_logprobs=-1, enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=-1)
    prompt = serve(core, {"r": (tokens, params)})["r"].outputs[0].prompt_logprobs
    assert prompt is not None
    rows = torch.zeros(len(tokens) - 1, VOCAB)
    return rows.scatter_(1, torch.from_numpy(prompt.token_ids), torch.from_numpy(prompt.logprobs))


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_tokens_named_tokens_and_the_whole_vocabulary_agree(mode: str) -> None:
    prompt, base = random_prompt(4, 21), SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    (top,) = run(mode, base.replace(logprobs=3), [prompt])
    (whole,) = run(mode, base.replace(logprobs=-1), [prompt])
    (named,) = run(mode, base.replace(logprob_token_ids=[7, 300, 12]), [prompt])
    rows = reference(prompt + top.token_ids)[len(prompt) - 1 :]
    for index, outputs in enumerate(zip(top.outputs, whole.outputs, named.outputs, strict=True)):
        few, full, chosen = (output.logprobs[0] for output in outputs if output.logprobs)
        token = top.token_ids[index]
        assert few.token_ids[0] == full.token_ids[0] == chosen.token_ids[0] == token
        # greedy: the sampled token is the most likely
        assert few.sampled_rank == full.sampled_rank == chosen.sampled_rank == 1
        assert few.token_ids[1:] == full.token_ids[1:4] and chosen.token_ids[1:] == [7, 300, 12]
        assert sorted(full.token_ids[1:]) == list(range(VOCAB))
        for row in (few, full, chosen):
            np.testing.assert_allclose(row.logprobs, rows[index, row.token_ids], atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_logprobs", [0, 2])
@pytest.mark.parametrize("chunk_rows", [1024, 5])
def test_prompt_logprobs_over_chunks_neighbours_and_cuts(
    mode: str, num_logprobs: int, chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_logprobs.cut_into_chunks, "__kwdefaults__", {"max_rows": chunk_rows})
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=num_logprobs)
    # the second prompt repeats the first one's prefix: it must not hit the cache
    prompts = [random_prompt(1, 70), random_prompt(1, 70)[:48], random_prompt(2, 9), [5], random_prompt(3, 33)]
    # V1 has no chunks
    most = chunk_rows if mode.startswith("v2") else None
    answers = run(mode, params, prompts, most, max_num_batched_tokens=32)
    for prompt, served in zip(prompts, answers, strict=True):
        first, *later = served.outputs
        got = first.prompt_logprobs
        assert got is not None and all(output.prompt_logprobs is None for output in later)
        assert first.num_cached_tokens == 0
        assert len(got.ranks) == len(prompt) - 1
        if len(prompt) == 1:
            continue
        rows = reference(prompt)
        assert got.token_ids.shape == (len(prompt) - 1, 1 + num_logprobs)
        assert got.token_ids[:, 0].tolist() == prompt[1:], "the prompt's own token comes first"
        np.testing.assert_allclose(got.logprobs, rows.gather(1, torch.from_numpy(got.token_ids)), atol=1e-5)
        own = rows.gather(1, torch.tensor(prompt[1:]).unsqueeze(1))
        assert got.ranks.tolist() == (rows >= own).sum(dim=1).tolist()
        assert got.token_ids[:, 1:].tolist() == rows.topk(num_logprobs, dim=1).indices.tolist()


@pytest.mark.parametrize("mode", MODES)
def test_prompt_logprobs_survive_preemption_in_the_middle_of_the_prompt(mode: str) -> None:
    """70 tokens in chunks of 32, preempted after the second: nothing is lost, the last row neither."""
    core = make_core(make_device("host", poison=True), knobs=MODES[mode], max_num_batched_tokens=32, max_num_seqs=2)
    collector = Collector(core)
    prompt = random_prompt(1, 70)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=1)
    collector.submit("r", prompt, params)
    while core.scheduler.requests["r"].num_computed < 64:
        collector.step()
    core.scheduler._preempt(core.scheduler.requests["r"])
    served = collector.run()["r"]
    core.shutdown()
    assert core.scheduler.stats.num_preemptions == 1
    got = served.outputs[0].prompt_logprobs
    assert got is not None and got.token_ids[:, 0].tolist() == prompt[1:]
    rows = reference(prompt)
    np.testing.assert_allclose(got.logprobs, rows.gather(1, torch.from_numpy(got.token_ids)), atol=1e-5)


def test_prompt_logprobs_go_on_when_the_runner_is_exchanged_in_mid_prompt() -> None:
    core = make_core(max_num_batched_tokens=16)
    collector = Collector(core)
    prompt = random_prompt(1, 90)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    collector.submit("r", prompt, params)
    for runner in ("v1", "v2", "v1"):
        collector.step()
        core.set_knobs(runner=runner)
    got = collector.run()["r"].outputs[0].prompt_logprobs
    core.shutdown()
    assert got is not None and got.token_ids[:, 0].tolist() == prompt[1:]


def test_chunks_cover_every_segment_once_and_stay_within_their_rows() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        segments, begin = [], 0
        for row in range(6):
            begin += int(rng.integers(0, 20))
            count = int(rng.integers(1, 70))
            segments.append(PromptSegment(row, begin, count, int(rng.integers(1, 9)), 1 + int(rng.integers(0, 4))))
            begin += count
        chunks = cut_into_chunks(segments, max_rows=16)
        assert all(0 < chunk.end - chunk.begin <= 16 for chunk in chunks)
        for segment in segments:
            pieces = [(c, p) for c in chunks for p in c.pieces if p.batch_row == segment.batch_row]
            tokens = [c.begin + p.offset + i for c, p in pieces for i in range(p.count)]
            places = [p.start + i for _, p in pieces for i in range(p.count)]
            assert tokens == list(range(segment.begin, segment.begin + segment.count))
            assert places == list(range(segment.start, segment.start + segment.count))
            assert all(p.width == segment.width <= c.width for c, p in pieces)


def test_no_pinned_memory_is_made_and_nothing_waited_for_once_all_shapes_were_seen() -> None:
    core = make_core(max_num_seqs=4, max_logprobs=-1, knobs=Knobs(queue_depth=2))
    collector = Collector(core)
    base = SamplingParams(temperature=1.0, seed=1, max_tokens=6, ignore_eos=True)
    kinds = [
        base.replace(logprobs=-1, prompt_logprobs=2),
        base.replace(logprob_token_ids=[3, 4], frequency_penalty=1.0, bad_words=[[4, 5]]),
        base.replace(prompt_logprobs=0, logit_bias={3: 2.0}, min_tokens=3, stop_token_ids=[8]),
        base.replace(thinking_token_budget=2, thinking_start=[1], thinking_end=[2, 3], logprobs=2),
    ]

    def feed(first: int) -> None:
        for index in range(first, first + 8):
            collector.submit(f"r{index}", random_prompt(index % 5, 3 + (13 * index) % 60), kinds[index % 4])

    feed(0)
    collector.run()
    with sync_guard(core.device, mode="error") as guard:
        feed(8)
        while core.scheduler.requests:
            collector.step()
        core.drain()
    assert not guard.violations and set(guard.waits) == {"output"}
    collector.run()
    core.shutdown()


def test_the_limit_is_the_engine_s() -> None:
    core = make_core()
    collector = Collector(core)
    with pytest.raises(RequestError, match=r"logprobs=21 asks for 21 .* gives 0 to 20.*max_logprobs"):
        collector.submit("r", [1], SamplingParams(logprobs=21))
    with pytest.raises(RequestError, match="prompt_logprobs=-1 asks for 512"):
        collector.submit("r", [1], SamplingParams(prompt_logprobs=-1))
    core.shutdown()


def test_results_look_as_in_vllm() -> None:
    options: dict[str, Any] = dict(dtype="float32", max_model_len=64, max_num_seqs=2, max_num_batched_tokens=64)
    with LLM("tiny-llama", device="host", num_gpu_blocks=16, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=1, logprobs=1)
        (output,) = llm.generate([{"prompt_token_ids": [7, 300, 12]}], params, use_tqdm=False)
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 3
        assert output.prompt_logprobs[0] is None
        for token, row in zip([300, 12], output.prompt_logprobs[1:], strict=True):
            assert row is not None and next(iter(row)) == token and row[token].rank is not None
            assert 1 in [entry.rank for entry in row.values()]
        (several,) = llm.generate(
            [{"prompt_token_ids": [7, 300]}],
            SamplingParams(n=2, temperature=1.0, max_tokens=2, prompt_logprobs=0, logprob_token_ids=[5]),
            use_tqdm=False,
        )
        assert several.prompt_logprobs is not None and len(several.prompt_logprobs) == 2
        rows = several.outputs[1].logprobs
        assert rows is not None and 5 in rows[0]
