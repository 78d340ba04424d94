"""What the benchmark of speculation counts."""

from __future__ import annotations

from typing import Literal

import pytest

from mrv2.bench.speculation import headline, loaded_methods, make_record, measure_speculation, report
from mrv2.config import EngineConfig, Knobs
from mrv2.engine.core import EngineCore
from mrv2.errors import ConfigError

NUM_TOKENS = 17


@pytest.mark.parametrize("graphs", ["model", "step"])
def test_a_perfect_drafter_brings_one_token_more_than_its_drafts(graphs: Literal["model", "step"]) -> None:
    core = EngineCore(
        EngineConfig(
            model="tiny-llama",
            device="host",
            dtype="float64",
            max_model_len=64,
            max_num_seqs=3,
            num_gpu_blocks=40,
            max_num_batched_tokens=64,
            max_num_spec_tokens=3,
            speculators=("draft_model=tiny-llama", "eagle3"),
            knobs=Knobs(cuda_graphs=graphs),
        )
    )
    prompts = [[5 * i + j for j in range(7)] for i in range(2)]
    methods = loaded_methods(core)
    assert methods == ["ngram", "draft_model", "eagle3"]
    outcomes = measure_speculation(core, prompts, methods, (1, 3), num_tokens=NUM_TOKENS, repetitions=1)
    found = {(each.method, each.batch_size): each for each in outcomes}
    assert len(outcomes) == 2 * (1 + len(methods))
    assert core.knobs.spec_method == "off"
    for (method, batch_size), each in found.items():
        assert each.num_equal == (2 if batch_size == 1 else 3)
        assert 1.0 <= each.tau <= 4.0 and each.tokens_per_second > 0 and each.tpot_ms > 0
        assert each.step_ms is not None and each.step_ratio is not None and each.step_ms > 0
        # the prompt's step is never replayed whole, nor are all the last ones
        assert (0.4 < each.whole_steps < 1.0) if graphs == "step" else each.whole_steps == 0.0
        # one graph has one time
        assert each.draft_ms is None if graphs == "step" else (each.draft_ms == 0.0) == (method == "off")
        assert (each.tau > 1.0) == bool(sum(each.acceptance))
    for batch_size in (1, 3):
        assert found["draft_model", batch_size].tau == pytest.approx(4.0)
        assert found["draft_model", batch_size].acceptance == [1.0] * 3
        assert found["off", batch_size].step_ratio == 1.0
        assert found["off", batch_size].verify_ratio == (None if graphs == "step" else 1.0)
    record = make_record(core, outcomes, NUM_TOKENS)
    text = report(record)
    assert f"cuda_graphs={graphs}" in text and "whole steps" in text
    assert all(method in text for method in methods) and headline(record)["tau_and_tok_s"]["draft_model@3"][0] == 4.0
    with pytest.raises(ConfigError, match="off, ngram, draft_model, eagle3"):
        loaded_methods(core, ["mtp"])
    core.shutdown()
