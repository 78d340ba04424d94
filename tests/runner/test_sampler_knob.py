"""The knob `sampler` in a running engine: class T values give the same tokens, class D ones are as stateless."""

from __future__ import annotations

import pytest

from mrv2.config import Knobs
from mrv2.errors import ConfigError
from mrv2.sampling_params import SamplingParams
from serving import make_core, random_prompt, serve

PARAMS = [
    SamplingParams(temperature=0.8, seed=3, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=1.3, top_k=9, top_p=0.9, seed=4, max_tokens=7, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=1.0, min_p=0.05, seed=5, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.8, frequency_penalty=0.5, seed=6, max_tokens=9, ignore_eos=True),
]


def tokens_with(knobs: Knobs) -> list[list[int]]:
    requests = {f"r{i}": (random_prompt(i, 5 + 3 * i), params) for i, params in enumerate(PARAMS)}
    served = serve(make_core(knobs=knobs), requests)
    return [served[req_id].token_ids for req_id in requests]


def test_requests_get_the_same_tokens_from_each_variant_that_promises_it():
    expected = tokens_with(Knobs(runner="v1", async_scheduling=False))
    for variant in ("gumbel_fused", "gumbel_two_pass", "softmax_race"):
        assert tokens_with(Knobs(sampler=variant)) == expected, variant


@pytest.mark.parametrize("variant", ["gumbel_blocked", "torch_sort"])
def test_other_variants_do_not_depend_on_the_schedule(variant):
    tokens = tokens_with(Knobs(sampler=variant))
    assert tokens_with(Knobs(sampler=variant, async_scheduling=False)) == tokens
    assert not Knobs(sampler=variant).promises_tokens_of(Knobs())
    with pytest.raises(ConfigError, match="softmax_race"):
        Knobs(sampler=variant, runner="v1")
