"""Sampler features on a GPU: Triton kernels against their references, over odd vocabularies, strides and rows."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from mrv2 import SamplingParams
from mrv2.config import Knobs
from mrv2.runner.async_logprobs import LogprobTensors, PromptSegment, cut_into_chunks
from mrv2.runner.v2.sampling.logprobs import gather_prompt
from mrv2_kernels.sampling.bad_words import apply_bad_words, bad_words_row
from mrv2_kernels.sampling.logit_bias import apply_logit_bias, bias_words
from mrv2_kernels.sampling.logprobs import topk_logprobs
from mrv2_kernels.sampling.penalties import apply_penalties
from mrv2_kernels.sampling.thinking_budget import apply_thinking_budget, thinking_row
from mrv2_kernels.sampling.token_counts import update_token_counts
from mrv2_kernels.sampling.token_logprobs import token_logprobs
from serving import make_core, random_prompt, serve

pytestmark = pytest.mark.gpu

INF = float("inf")
VOCABS = [49152, 151936, 151937]
ROW_LEN = 8192
NUM_SLOTS = 8


class State:
    """Rows of long histories; a request has three logits rows, two drafts in flight; tensors on the host."""

    def __init__(self, vocab: int) -> None:
        gen = torch.Generator().manual_seed(vocab)

        def draw(high: int, *shape: int) -> torch.Tensor:
            return torch.randint(0, high, shape, generator=gen, dtype=torch.int32)

        # half of the tokens are few, so that they repeat
        common = torch.rand(NUM_SLOTS, ROW_LEN, generator=gen) < 0.5
        self.token_ids = torch.where(common, draw(50, NUM_SLOTS, ROW_LEN), draw(vocab, NUM_SLOTS, ROW_LEN))
        self.prompt_len = torch.tensor([1, 100, 4000, 8000, 17, 1024, 1, 6000], dtype=torch.int32)
        self.total_len = torch.tensor([1, 900, 8192, 8191, 18, 1025, 8000, 6000], dtype=torch.int32)
        self.penalties = torch.tensor([[1.2, 0.5, 0.1], [0, 0, 0], [0.7, 0, 0], [1, 0.3, 0]] * 2)
        self.slots = torch.arange(NUM_SLOTS, dtype=torch.int32).flip(0)
        self.logit_slots = self.slots.repeat_interleave(3)
        self.drafts = (
            torch.arange(3, dtype=torch.int32).repeat(NUM_SLOTS),
            torch.arange(3 * NUM_SLOTS, dtype=torch.int32),
            draw(50, 3 * NUM_SLOTS),
        )
        self.counts = torch.zeros(NUM_SLOTS, ROW_LEN, dtype=torch.int16)
        self.counted = torch.zeros(NUM_SLOTS, dtype=torch.int32)

    def logits(self, vocab: int, dtype: torch.dtype) -> torch.Tensor:
        gen = torch.Generator().manual_seed(1)
        buffer = torch.full((3 * NUM_SLOTS, vocab + 64 - vocab % 64), float("nan"), dtype=dtype)
        logits = buffer[:, :vocab]
        logits.copy_(3 * torch.randn(3 * NUM_SLOTS, vocab, generator=gen))
        logits[4, 1:] = -INF
        logits[5] = float("nan")
        return logits


def on_gpu(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [tensor.cuda() for tensor in tensors]


def strided_on_gpu(logits: torch.Tensor) -> torch.Tensor:
    rows, width = logits.shape[0], logits.stride(0)
    buffer = torch.full((rows, width), float("nan"), dtype=logits.dtype, device="cuda")
    buffer[:, : logits.shape[1]] = logits.cuda()
    return buffer[:, : logits.shape[1]]


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 0.3)])
def test_penalties(vocab, dtype, atol):
    state = State(vocab)
    expected, counted_on_host = state.logits(vocab, dtype).double(), state.counted.clone()
    logits = strided_on_gpu(state.logits(vocab, dtype))
    history = (state.token_ids, state.prompt_len, state.total_len, state.penalties)
    update_token_counts.torch(state.counts, counted_on_host, *history, state.slots, has_new=True)
    counts, counted = torch.zeros_like(state.counts, device="cuda"), state.counted.cuda()
    gpu_history = on_gpu(history)
    update_token_counts.triton(counts, counted, *gpu_history, state.slots.cuda(), has_new=True)
    assert torch.equal(counted.cpu(), counted_on_host)
    # one more token each, counted one by one
    for lengths in (state.total_len, gpu_history[2]):
        lengths += (lengths < ROW_LEN).int()
    update_token_counts.torch(state.counts, counted_on_host, *history, state.slots, has_new=False)
    update_token_counts.triton(counts, counted, *gpu_history, state.slots.cuda(), has_new=False)
    within = torch.arange(ROW_LEN) < state.total_len.unsqueeze(1)
    assert torch.equal(counts.cpu() * within, state.counts * within)
    apply_penalties.torch(
        expected, state.logit_slots, state.penalties, state.token_ids, state.counts, state.total_len, *state.drafts
    )
    apply_penalties.triton(
        logits,
        state.logit_slots.cuda(),
        gpu_history[3],
        gpu_history[0],
        counts,
        gpu_history[2],
        *on_gpu(state.drafts),
    )
    torch.testing.assert_close(
        logits.cpu().double(), expected, rtol=1e-2 if atol > 0.1 else 1e-6, atol=atol, equal_nan=True
    )


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_lists_bad_words_and_thinking(vocab, dtype):
    state = State(vocab)
    gen = torch.Generator().manual_seed(0)
    bias, words, markers = (torch.zeros(NUM_SLOTS, 4096, dtype=torch.int32) for _ in range(3))
    for slot in range(NUM_SLOTS):
        ids = torch.randperm(vocab, generator=gen)[:1024].tolist()
        allowed = ids if slot % 2 else []
        row = torch.from_numpy(bias_words(allowed, ids[::3], [0.5] * len(ids[::3]), ids[:128], 9000 * (slot % 3)))
        bias[slot, : len(row)] = row
        end = int(state.total_len[slot])
        tail = state.token_ids[slot, max(0, end - 3) : end].tolist()
        row = torch.from_numpy(bad_words_row([[7], [*tail, 8], [*tail[:2], 9], [vocab - 1]] * 30))
        words[slot, : len(row)] = row
        row = torch.from_numpy(thinking_row(slot, [3], [4, 5] if slot % 2 else [6]))
        markers[slot, : len(row)] = row
    expected = state.logits(vocab, dtype)
    logits = strided_on_gpu(expected)
    positions = state.total_len[state.logit_slots.long()] - 1 + state.drafts[0]
    history = (state.token_ids, state.prompt_len, state.total_len)
    apply_logit_bias.torch(expected, state.logit_slots, positions, bias)
    apply_bad_words.torch(expected, state.logit_slots, words, *history, *state.drafts, max_words=128)
    apply_thinking_budget.torch(expected, state.logit_slots, markers, *history, *state.drafts)
    slots, drafts, history = state.logit_slots.cuda(), on_gpu(state.drafts), on_gpu(history)
    apply_logit_bias.triton(logits, slots, positions.cuda(), bias.cuda())
    apply_bad_words.triton(logits, slots, words.cuda(), *history, *drafts, max_words=128)
    apply_thinking_budget.triton(logits, slots, markers.cuda(), *history, *drafts)
    torch.testing.assert_close(logits.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_logprobs_of_named_tokens_and_of_the_whole_vocabulary(vocab, dtype):
    logits = strided_on_gpu(State(vocab).logits(vocab, dtype)[:6])
    chosen = torch.tensor([0, vocab - 1, 5, 77, 0, 1], device="cuda")
    want = logits.double().log_softmax(dim=1)
    named = torch.arange(0, vocab, 1001, dtype=torch.int32, device="cuda")
    for tokens in (named, None):
        width = 1 + (vocab if tokens is None else len(tokens))
        ids = torch.empty(6, width, dtype=torch.int64, device="cuda")
        values, ranks = torch.empty(6, width, device="cuda"), torch.empty(6, dtype=torch.int64, device="cuda")
        if tokens is None:
            topk_logprobs.triton(logits, chosen, ids, values, ranks)
            assert torch.equal(ids[:5, 1:].sort(dim=1).values, torch.arange(vocab, device="cuda").expand(5, -1))
        else:
            token_logprobs.triton(logits, chosen, tokens, ids, values, ranks)
            assert torch.equal(ids[:5, 1:], named.long().expand(5, -1))
        assert torch.equal(ids[:5, 0], chosen[:5]) and ids[5].eq(-1).all()
        torch.testing.assert_close(values[:5].double(), want.gather(1, ids.clamp(min=0))[:5], rtol=0, atol=5e-5)
        assert values[5].isnan().all() and ranks[5] == 0


@pytest.mark.parametrize("mode", [dict(async_scheduling=False), dict(queue_depth=2), dict(runner="v1")])
def test_the_engine_serves_every_feature_at_once(mode):
    params = SamplingParams(
        temperature=0.8,
        seed=1,
        max_tokens=20,
        ignore_eos=True,
        frequency_penalty=0.8,
        repetition_penalty=1.2,
        logit_bias={5: 4.0},
        bad_words=[[5, 5], [7]],
        min_tokens=4,
        stop_token_ids=[9],
        logprobs=-1,
        prompt_logprobs=2,
    )
    requests = {f"r{i}": (random_prompt(i, 5 + 30 * i), params.replace(seed=i)) for i in range(5)}
    core = make_core(device="cuda", dtype="float32", max_logprobs=-1, knobs=Knobs(**mode))
    served = serve(core, requests)
    for name, (prompt, _) in requests.items():
        tokens = served[name].token_ids
        assert 7 not in tokens and (5, 5) not in pairwise(tokens)
        prompt_logprobs = served[name].outputs[0].prompt_logprobs
        assert prompt_logprobs is not None and prompt_logprobs.token_ids[:, 0].tolist() == prompt[1:]


class Head:
    """The last layer of a model, alone."""

    def __init__(self, hidden_size: int, vocab: int) -> None:
        self.weight = torch.randn(hidden_size, vocab, dtype=torch.bfloat16, device="cuda")

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.weight


def test_prompt_logprobs_of_32k_tokens_need_the_memory_of_one_chunk():
    num_tokens, vocab, num_best = 32_768, 151_936, 5
    head = Head(64, vocab)
    hidden = torch.randn(num_tokens, 64, dtype=torch.bfloat16, device="cuda")
    positions = torch.arange(num_tokens, dtype=torch.int32, device="cuda")
    query_start_loc = torch.tensor([0, num_tokens], dtype=torch.int32, device="cuda")
    row = torch.zeros(1, dtype=torch.int32, device="cuda")
    token_ids = torch.randint(0, vocab, (1, num_tokens), dtype=torch.int32, device="cuda")
    prompt_len = torch.tensor([num_tokens], dtype=torch.int32, device="cuda")
    chunks = []
    for chunk in cut_into_chunks([PromptSegment(0, 0, num_tokens - 1, 1, 1 + num_best)]):
        shape = (chunk.end - chunk.begin, chunk.width)
        ids = torch.empty(shape, dtype=torch.int64, device="cuda")
        out = LogprobTensors(ids, torch.empty(shape, device="cuda"), torch.empty_like(ids[:, 0]))
        chunks.append((chunk, out))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gather_prompt(head, hidden, positions, row, query_start_loc, token_ids, prompt_len, chunks)  # type: ignore[arg-type]
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    # two chunks of bfloat16 logits (one is freed while the next is made), and the scratch of the search
    assert peak < 2 * 1024 * vocab * 2 + 1024 * 3 * 4096 * 4 + (64 << 20), f"{peak / 2**20:.0f} MiB"
    for chunk, out in chunks:
        assert torch.equal(out.ids[:, 0], token_ids[0, chunk.begin + 1 : chunk.end + 1].long())
    chunk, out = chunks[3]
    want = head.compute_logits(hidden[chunk.begin : chunk.end]).double().log_softmax(dim=1).gather(1, out.ids)
    torch.testing.assert_close(out.logprobs.double(), want, rtol=0, atol=5e-5)
