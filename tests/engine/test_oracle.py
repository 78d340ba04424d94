"""The engine against a plain loop: the whole sequence through the model for every token, then one draw."""

from __future__ import annotations

import pytest
import torch

from mrv2.sampling_params import SamplingParams
from mrv2_kernels.sampling.gumbel import gumbel_noise_torch
from mrv2_models.attention import AttentionMetadata
from mrv2_models.registry import load_model
from serving import make_core, random_prompt, serve


def plain_loop(model_name: str, prompt: list[int], temperature: float, seed: int, num_tokens: int) -> list[int]:
    """Recompute everything for each token: no cache is kept, no batch, no engine."""
    model = load_model(model_name, dtype=torch.float64, load_format="dummy", max_model_len=160)
    tokens = list(prompt)
    for _ in range(num_tokens):
        length = len(tokens)
        num_blocks = -(-length // 16)
        shapes = [(num_blocks + 1, 16, spec.num_kv_heads, spec.head_dim) for spec in model.kv_cache_specs(16)]
        caches = [(torch.full(s, float("nan"), dtype=torch.float64), torch.empty(s).double()) for s in shapes]
        attn = AttentionMetadata(
            block_tables=torch.arange(1, num_blocks + 1, dtype=torch.int32).view(1, -1),
            query_start_loc=torch.tensor([0, length], dtype=torch.int32),
            seq_lens=torch.tensor([length], dtype=torch.int32),
            slot_mapping=torch.arange(16, 16 + length, dtype=torch.int32),
            max_query_len=length,
            uniform_decode=False,
        )
        ids, positions = torch.tensor(tokens, dtype=torch.int32), torch.arange(length, dtype=torch.int32)
        logits = model.compute_logits(model(ids, positions, attn, caches)[-1:])
        if temperature:
            noise = gumbel_noise_torch(
                torch.tensor([seed]), torch.tensor([length - 1], dtype=torch.int32), logits.shape[1], torch.float64
            )
            logits = logits / temperature + noise
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_engine_yields_what_a_plain_loop_yields(model: str, temperature: float) -> None:
    prompts = [random_prompt(seed, length) for seed, length in ((1, 5), (2, 16), (3, 37))]
    served = serve(
        make_core(model=model, max_num_batched_tokens=32),
        {
            f"r{i}": (p, SamplingParams(temperature=temperature, seed=7, max_tokens=12, ignore_eos=True))
            for i, p in enumerate(prompts)
        },
    )
    for i, prompt in enumerate(prompts):
        assert served[f"r{i}"].token_ids == plain_loop(model, prompt, temperature, 7, 12)
