"""The cost card against numbers worked out by hand, and its steps against the engine's own."""

from __future__ import annotations

import pytest
import torch

from bench.small_engine import small_core
from mrv2.bench.roofline import CostCard, ModelCost, plan_steps
from mrv2.bench.serving import serve
from mrv2.bench.workloads import BenchRequest, Workload, make_workload
from mrv2_models.config import ModelConfig

QWEN = ModelConfig.from_preset("qwen3-0.6b")
COST = ModelCost.of(QWEN, torch.bfloat16)


def workload(*lengths: tuple[int, int]) -> Workload:
    return Workload("hand", "", tuple(BenchRequest((1,) * n, out) for n, out in lengths), 0.0)


def test_qwen_costs() -> None:
    """28 layers of 1024 hidden, 3072 intermediate, 16 query and 8 KV heads of 128, tied head of 151,936 rows."""
    attention = 1024 * (2048 + 1024 + 1024) + 2048 * 1024
    norms = 2 * 1024 + 2 * 128
    layers = 28 * (attention + 3 * 1024 * 3072 + norms) + 1024
    assert COST.weight_bytes == 2 * (layers + 151_936 * 1024)
    assert COST.weight_bytes / 1e9 == pytest.approx(1.19, abs=0.005)
    assert COST.kv_bytes_per_token == 114_688 == 2 * 28 * 8 * 128 * 2
    assert COST.flops_per_token == 2 * layers
    assert COST.flops_per_logits_row == 2 * 151_936 * 1024
    # q.k and p.v, 2 FLOPs each for every element of 16 heads of 128
    assert COST.flops_per_attended_pair == 28 * 2 * 2 * 16 * 128


def test_untied_models_do_not_read_their_input_embedding() -> None:
    config = ModelConfig.from_preset("tiny-qwen3")
    assert not config.tie_word_embeddings
    unread = config.vocab_size * config.hidden_size
    assert ModelCost.of(config, torch.float32).weight_bytes == 4 * (config.num_parameters - unread)


def test_steps_of_one_request() -> None:
    """10 tokens in, 3 out: one prefill step, two decode steps."""
    steps = plan_steps(workload((10, 3)), max_num_seqs=4, max_num_batched_tokens=100)
    assert [(s.num_prefill_tokens, s.num_decode_tokens) for s in steps] == [(10, 0), (0, 1), (0, 1)]
    assert [s.num_context_tokens for s in steps] == [10, 11, 12]
    assert [s.num_attended_pairs for s in steps] == [55, 11, 12]
    assert [s.num_logits_rows for s in steps] == [1, 1, 1]


def test_steps_with_chunks_and_few_rows() -> None:
    """A budget of 8 tokens cuts the first prompt; the third request waits for a row."""
    steps = plan_steps(workload((10, 2), (4, 1), (3, 1)), max_num_seqs=2, max_num_batched_tokens=8)
    assert [(s.num_prefill_tokens, s.num_decode_tokens) for s in steps] == [(8, 0), (6, 0), (3, 1)]
    assert [s.num_logits_rows for s in steps] == [0, 2, 2]
    # the second chunk of two tokens sees ten: 9 + 10 pairs, and 1 + 2 + 3 + 4 of the other prompt
    assert steps[1].num_attended_pairs == 9 + 10 + 10


def test_card_of_one_request() -> None:
    card = CostCard.of(workload((10, 3)), COST, max_num_seqs=4, max_num_batched_tokens=100)
    assert card.weight_bytes == 3 * COST.weight_bytes
    assert card.kv_read_bytes == (10 + 11 + 12) * 114_688
    assert card.kv_written_bytes == 12 * 114_688
    assert card.flops == 12 * COST.flops_per_token + 3 * COST.flops_per_logits_row + 78 * COST.flops_per_attended_pair
    total = card.weight_bytes + card.kv_read_bytes + card.kv_written_bytes
    assert card.seconds(1e12) == pytest.approx(total / 1e12)
    assert card.tokens_per_second(1e12) == pytest.approx(3e12 / total)
    # with a slow multiplier every step is bound by its FLOPs
    assert card.seconds(1e12, 1e6) == pytest.approx(card.flops / 1e6)
    # and a fast one changes nothing
    assert card.seconds(1e12, 1e30) == pytest.approx(card.seconds(1e12))


def test_floor_of_the_mixed_workload() -> None:
    """1,023 decode steps read 13.85 TB of KV; 18 more steps hold the prompts in chunks of 8,192 tokens."""
    mixed = make_workload("e", vocab_size=QWEN.vocab_size)
    at_once = CostCard.of(mixed, COST, max_num_seqs=256, max_num_batched_tokens=1 << 20)
    decode = [step for step in at_once.steps if not step.num_prefill_tokens]
    assert len(decode) == 1023
    kv = sum(step.num_context_tokens for step in decode) * COST.kv_bytes_per_token
    assert kv / 1e12 == pytest.approx(13.85, abs=0.005)
    chunked = CostCard.of(mixed, COST, max_num_seqs=256, max_num_batched_tokens=8192)
    assert chunked.tokens_per_second(4.3e12) == pytest.approx(38_200, rel=0.01)
    assert chunked.tokens_per_second(4.3e12, 8e14) < chunked.tokens_per_second(4.3e12)


@pytest.mark.parametrize("name, scale", [("c", 16), ("e", 32)])
def test_plan_is_what_the_engine_runs(name: str, scale: int) -> None:
    small = make_workload(name, vocab_size=512, scale=scale)
    with small_core(small, max_num_batched_tokens=48, max_num_seqs=5) as core:
        core.set_knobs(async_scheduling=False)
        run = serve(core, small.engine_requests())
        assert run.num_preemptions == 0
        assert len(plan_steps(small, max_num_seqs=5, max_num_batched_tokens=48)) == run.num_steps
