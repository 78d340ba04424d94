"""The knob `verification` in the engine: what each kind promises, refusals, and changes while requests run."""

from __future__ import annotations

import numpy as np
import pytest

from mrv2.config import Knobs
from mrv2.errors import ConfigError
from mrv2.options import build_config
from mrv2.sampling_params import SamplingParams
from rejection_cases import chi_square_z
from schedule_cases import KnowingSpeculator
from serving import Collector, alone, make_core, random_prompt, serve

K = 3
BY_PROBABILITY = ("standard", "block")


def knobs(verification: str, **others: object) -> Knobs:
    fields = {"spec_method": "ngram", "num_spec_tokens": K, "verification": verification, **others}
    return Knobs(**fields)  # type: ignore[arg-type]


def knowing_core(verification: str, sequences: list[list[int]], *, seed: int = 0, **options: object):
    core = make_core(max_num_spec_tokens=K, knobs=knobs(verification), **options)
    knowing = KnowingSpeculator(seed)
    knowing.sequences = sequences
    core.executor.runner.drafting.speculators["ngram"] = knowing  # type: ignore[attr-defined]
    return core


@pytest.mark.parametrize("verification", BY_PROBABILITY)
def test_greedy_requests_say_what_they_say_without_drafts(verification: str) -> None:
    """Drafts of every kind of spoiling, beside a random request, with and without features."""
    prompts = [random_prompt(i, 9 + i) for i in range(4)]
    features = ({}, {"frequency_penalty": 0.7}, {"allowed_token_ids": list(range(30, 60))}, {"temperature": 1.0})
    requests = {
        f"r{i}": (p, SamplingParams(**{"temperature": 0.0, "seed": 1, "max_tokens": 20, "ignore_eos": True, **f}))
        for i, (p, f) in enumerate(zip(prompts, features, strict=True))
    }
    plain = serve(make_core(), requests)
    core = knowing_core(verification, [p + plain[f"r{i}"].token_ids for i, p in enumerate(prompts)])
    fast = serve(core, requests)
    assert sum(core.scheduler.stats.num_accepted) > 0
    for name in ("r0", "r1", "r2"):
        assert fast[name].token_ids == plain[name].token_ids, name
    assert len(fast["r3"].token_ids) == 20


@pytest.mark.parametrize("masks", ["plain", "truncated"])
@pytest.mark.parametrize("verification", BY_PROBABILITY)
def test_the_second_and_third_token_follow_the_target(verification: str, masks: str) -> None:
    """Many seeds of one prompt, drafts that are always the same two tokens, against the engine without drafts."""
    prompt, allowed = random_prompt(60, 12), [3, 50, 99, 200, 301, 400]
    extra = {"top_k": 4, "temperature": 1.3} if masks == "truncated" else {}

    def counts(core) -> np.ndarray:
        requests = {
            f"r{i}": (
                prompt,
                SamplingParams(
                    **{"temperature": 1.0, "seed": i, "max_tokens": 3, "ignore_eos": True, **extra},
                    allowed_token_ids=allowed,
                ),
            )
            for i in range(1500)
        }
        served = serve(core, requests)
        table = np.zeros((6, 6), dtype=np.int64)
        for s in served.values():
            table[allowed.index(s.token_ids[1]), allowed.index(s.token_ids[2])] += 1
        return table

    class Constant:
        def propose(self, state, idx_mapping, num_sampled, num_draft_tokens, max_len) -> None:
            state.draft_tokens[idx_mapping.long(), :2] = state.draft_tokens.new_tensor(allowed[:2])

    options = dict(max_num_seqs=64, max_num_batched_tokens=1024, num_gpu_blocks=200, debug_checks=False)
    plain = counts(make_core(knobs=Knobs(), **options))
    core = make_core(max_num_spec_tokens=2, knobs=knobs(verification, num_spec_tokens=2), **options)
    core.executor.runner.drafting.speculators["ngram"] = Constant()  # type: ignore[attr-defined]
    fast = counts(core)
    accepted, drafted = core.scheduler.stats.num_accepted, core.scheduler.stats.num_drafted
    assert 0 < accepted[0] < drafted[0]
    # two samples of one law: the usual two-sample chi-square, by way of the pooled estimate
    law = (plain + fast).flatten() / (plain + fast).sum()
    assert chi_square_z(fast.flatten(), law) < 4


def test_synthetic_acceptance_follows_its_rates_whatever_the_target_says() -> None:
    core = make_core(
        max_num_spec_tokens=K,
        benchmark=True,
        synthetic_acceptance=(1.0, 0.5, 0.0),
        knobs=knobs("synthetic"),
        max_num_seqs=16,
        max_num_batched_tokens=256,
    )

    class Sevens:
        def propose(self, state, idx_mapping, num_sampled, num_draft_tokens, max_len) -> None:
            state.draft_tokens[idx_mapping.long()] = 7

    core.executor.runner.drafting.speculators["ngram"] = Sevens()  # type: ignore[attr-defined]
    params = [SamplingParams(temperature=float(i % 2), seed=i, max_tokens=60, ignore_eos=True) for i in range(16)]
    serve(core, {f"r{i}": (random_prompt(i, 5), p) for i, p in enumerate(params)})
    drafted, accepted = core.scheduler.stats.num_drafted, core.scheduler.stats.num_accepted
    # drafts behind the end of the request are dropped, so that the last steps count less
    assert accepted[0] >= 0.95 * drafted[0] and accepted[2] == 0
    assert 0.4 < accepted[1] / accepted[0] < 0.6


def test_the_kind_changes_while_requests_run() -> None:
    prompts = [random_prompt(30 + i, 10) for i in range(3)]
    whole = [alone(tuple(p), 0.0, 0, 40) for p in prompts]
    core = knowing_core("token_exact", [p + w for p, w in zip(prompts, whole, strict=True)], seed=3)
    collector = Collector(core)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        collector.submit(f"r{i}", prompt, params)
    for verification in ("standard", "block", "token_exact", "block", "standard"):
        collector.step()
        collector.step()
        core.set_knobs(verification=verification)
    served = collector.run()
    core.shutdown()
    assert [served[f"r{i}"].token_ids for i in range(3)] == whole


def test_drafts_made_under_other_rules_are_not_verified() -> None:
    """A draft is verified in the step behind it, by the rules under which it was drawn, or never."""
    core = make_core(max_num_spec_tokens=K, ngram_min=1, knobs=knobs("token_exact"))
    collector = Collector(core)
    drafted: list[int] = []
    execute = core.executor.execute_model
    core.executor.execute_model = lambda s: (drafted.append(int(s.num_draft_tokens.sum())), execute(s))[1]
    collector.submit("r", [5, 6, 7] * 5, SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True))
    for change in ({"verification": "block"}, {"spec_method": "off"}, {"spec_method": "ngram"}, {"num_spec_tokens": 0}):
        for _ in range(3):
            collector.step()
        core.set_knobs(**change)
        at = len(drafted)
        while len(drafted) == at:
            collector.step()
        assert drafted[at] == 0, change
    core.set_knobs(num_spec_tokens=3)
    at = len(drafted)
    for _ in range(4):
        collector.step()
    assert drafted[at] == 0 and sum(drafted[at:]) > 0
    core.shutdown()


def test_warming_up_leaves_no_trace_but_compiled_kernels() -> None:
    core = make_core(max_num_spec_tokens=K, knobs=knobs("block"), ngram_min=1)
    ways: list[str] = []
    verify = core.executor.runner.speculation.submit  # type: ignore[attr-defined]

    def spy(stream, given, *args):
        ways.append(given.verification)
        return verify(stream, given, *args)

    core.executor.runner.speculation.submit = spy  # type: ignore[attr-defined]
    core._serve_dummies()
    assert set(ways) == {"token_exact", "standard", "block"}
    assert core.executor.knobs == core.knobs == knobs("block") and not core.has_unfinished
    core.shutdown()


class TestRefusals:
    def test_synthetic_without_benchmark(self) -> None:
        core = make_core(max_num_spec_tokens=K, knobs=Knobs())
        with pytest.raises(ConfigError, match="benchmark=True"):
            core.set_knobs(verification="synthetic")
        core.shutdown()

    def test_synthetic_needs_a_rate_for_every_draft(self) -> None:
        with pytest.raises(ConfigError, match="num_spec_tokens=3"):
            make_core(max_num_spec_tokens=K, benchmark=True, synthetic_acceptance=(0.5, 0.5), knobs=knobs("synthetic"))

    def test_rates_are_rates(self) -> None:
        with pytest.raises(ConfigError, match="between 0 and 1"):
            build_config("tiny-llama", benchmark=True, synthetic_acceptance=[0.5, 1.2])
        assert build_config("tiny-llama", synthetic_acceptance="0.5,0.25").synthetic_acceptance == (0.5, 0.25)
        with pytest.raises(ConfigError, match=r"0\.9,0\.8"):
            build_config("tiny-llama", synthetic_acceptance="half")

    def test_an_unknown_kind(self) -> None:
        with pytest.raises(ConfigError, match="'token_exact', 'standard', 'block', 'synthetic'"):
            Knobs(verification="greedy")  # type: ignore[arg-type]

    def test_only_exact_verification_promises_tokens(self) -> None:
        assert knobs("token_exact").promises_tokens_of(Knobs())
        assert not knobs("standard").promises_tokens_of(Knobs())
        assert Knobs(verification="standard").promises_tokens_of(Knobs())
