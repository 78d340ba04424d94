"""The number of drafts follows what is accepted, and says what it saw."""

from __future__ import annotations

import pytest

from mrv2 import LLM
from mrv2.config import Knobs
from mrv2.engine.adaptive_drafts import AdaptiveDrafts
from mrv2.engine.messages import DraftCounts
from mrv2.errors import ConfigError
from mrv2.options import build_config
from mrv2.sampling_params import SamplingParams
from schedule_cases import KnowingSpeculator
from serving import Collector, alone, make_core, random_prompt

K = 4


def settle(adaptive: AdaptiveDrafts, shares: list[float], *, count: int = 400) -> None:
    """Let drafts be accepted at fixed shares, spread evenly."""
    for step in range(count):
        accepted = 0
        while accepted < len(shares) and (step * 0.618 + accepted * 0.37) % 1.0 < shares[accepted]:
            accepted += 1
        adaptive.observe(len(shares), accepted)


def test_the_choice_brings_the_most_tokens_for_its_cost() -> None:
    for shares in ([0.9] * K, [0.5] * K, [0.9, 0.1, 0.1, 0.1], [0.02] * K):
        for cost in (0.0, 0.05, 0.2, 0.9):
            adaptive = AdaptiveDrafts(cost)
            adaptive.shares = list(shares)
            tokens, ratios = 1.0, [1.0]
            survival = 1.0
            for k, share in enumerate(shares, 1):
                survival *= share
                tokens += survival
                ratios.append(tokens / (1 + cost * k))
            assert ratios[adaptive.best(K)] == pytest.approx(max(ratios))


def test_refused_drafts_stop_and_accepted_ones_return() -> None:
    adaptive = AdaptiveDrafts(0.08)
    assert adaptive.best(K) == K, "nothing is known yet"
    settle(adaptive, [0.0] * K)
    choices = [adaptive.choose(K) for _ in range(320)]
    assert set(choices) == {0, K} and 0 < choices.count(K) <= 10
    settle(adaptive, [1.0] * K)
    assert adaptive.best(K) == K


def test_shares_are_those_that_were_seen() -> None:
    adaptive = AdaptiveDrafts(0.08)
    settle(adaptive, [0.8, 0.5], count=2000)
    assert adaptive.shares[0] == pytest.approx(0.8, abs=0.15) and 0 <= adaptive.shares[1] <= 1


def core_with(speculator: object, **options: object):
    knobs = Knobs(spec_method="ngram", num_spec_tokens=K, adaptive_drafts=True, queue_depth=2)
    core = make_core(max_num_spec_tokens=K, knobs=knobs, **options)  # type: ignore[arg-type]
    core.executor.runner.drafting.speculators["ngram"] = speculator  # type: ignore[attr-defined]
    return core


class Sevens:
    """Drafts what is hardly ever said, until it is told to know better."""

    def __init__(self) -> None:
        self.knowing: KnowingSpeculator | None = None
        self.calls = 0

    def propose(self, state, idx_mapping, *args) -> None:
        self.calls += 1
        if self.knowing is not None:
            self.knowing.propose(state, idx_mapping, *args)
        else:
            state.draft_tokens[idx_mapping.long()] = 7


def test_an_engine_stops_drafting_when_it_loses_and_begins_again_when_it_wins() -> None:
    prompts = [random_prompt(70 + i, 8) for i in range(4)]
    whole = [alone(tuple(p), 0.0, 0, 140) for p in prompts]
    drafter = Sevens()
    core = core_with(drafter)
    collector = Collector(core)
    for i, prompt in enumerate(prompts):
        collector.submit(f"r{i}", prompt, SamplingParams(temperature=0.0, max_tokens=140, ignore_eos=True))
    for _ in range(40):
        collector.step()
    calls, drafted = drafter.calls, sum(core.scheduler.stats.num_drafted)
    for _ in range(28):
        collector.step()
    assert drafter.calls - calls <= 2, "drafts were made all the same"
    assert sum(core.scheduler.stats.num_drafted) - drafted <= 4 * K
    knowing = KnowingSpeculator(0)
    knowing.sequences = [p + w for p, w in zip(prompts, whole, strict=True)]
    drafter.knowing = knowing
    # a probe finds out
    for _ in range(40):
        collector.step()
    served = collector.run()
    assert [served[f"r{i}"].token_ids for i in range(4)] == whole
    assert sum(core.scheduler.stats.num_accepted) > 50
    core.shutdown()


def test_counts_add_up_by_request_and_overall() -> None:
    prompts = [random_prompt(80 + i, 8) for i in range(3)]
    whole = [alone(tuple(p), 0.0, 0, 30) for p in prompts]
    knowing = KnowingSpeculator(4)
    knowing.sequences = [p + w for p, w in zip(prompts, whole, strict=True)]
    core = core_with(knowing)
    collector = Collector(core)
    for i, prompt in enumerate(prompts):
        collector.submit(f"r{i}", prompt, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    served = collector.run()
    total = DraftCounts()
    for mine in served.values():
        last = mine.outputs[-1].drafts
        assert last is not None and all(output.drafts is None for output in mine.outputs[:-1])
        total.merge(last)
    snapshot = core.snapshot()
    core.shutdown()
    assert (total.num_drafted, total.num_accepted) == (snapshot.num_drafted, snapshot.num_accepted)
    assert total.num_wasted == sum(total.num_drafted) - sum(total.num_accepted) > 0
    assert (
        total.mean_accepted_length == snapshot.mean_accepted_length and 1 < (total.mean_accepted_length or 0) <= 1 + K
    )
    # the tokens of a request are its verifications, the accepted drafts, and its first token
    for mine in served.values():
        counts = mine.outputs[-1].drafts
        assert counts is not None and counts.num_drafted[0] + sum(counts.num_accepted) <= 30 + K


def test_the_front_end_tells_them_too() -> None:
    llm = LLM("tiny-llama", device="host", max_model_len=128, spec_method="ngram", num_spec_tokens=2, ngram_min=1)
    params = SamplingParams(temperature=0.3, seed=1, max_tokens=40, ignore_eos=True, n=2)
    output = llm.generate([{"prompt_token_ids": [5, 6, 7] * 4}], params)[0]
    assert output.metrics is not None and output.metrics.drafts.num_drafted[0] > 0
    assert len(output.metrics.drafts.acceptance) == 2
    llm.close()


def test_a_cost_is_a_share() -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        build_config("tiny-llama", draft_cost=1.5)
