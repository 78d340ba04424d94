"""Sampler features through the engine: both runners, every schedule, one answer."""

from __future__ import annotations

from itertools import pairwise

import pytest

from mrv2 import SamplingParams
from mrv2.device import make_device
from sampler.cases import MODES, alone, random_params, random_requests, serve_in
from serving import Collector, Served, make_core, random_prompt


def said(served: dict[str, Served]) -> dict[str, tuple[list[int], str | None]]:
    return {name: (one.token_ids, one.finish_reason) for name, one in served.items()}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forty_combinations_get_the_same_tokens_from_both_runners(temperature: float) -> None:
    requests = {f"r{i}": (random_prompt(i, 4 + i), random_params(i, temperature)) for i in range(40)}
    v2 = said(serve_in("v2 depth 2", requests, max_num_seqs=8))
    assert said(serve_in("v1 async", requests, max_num_seqs=8)) == v2
    assert len({tuple(tokens) for tokens, _ in v2.values()}) > 20, "the combinations hardly differ"


@pytest.fixture(scope="module")
def requests() -> dict:
    return random_requests(7, 9)


@pytest.fixture(scope="module")
def expected(requests: dict) -> dict:
    return said({name: alone(name, requests) for name in requests})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_blocks", [64, 9])
def test_tokens_do_not_depend_on_neighbours_slot_preemption_or_schedule(
    mode: str, num_blocks: int, requests: dict, expected: dict
) -> None:
    assert said(serve_in(mode, requests, num_gpu_blocks=num_blocks, max_num_batched_tokens=24)) == expected
    backwards = dict(reversed(requests.items()))
    assert said(serve_in(mode, backwards, num_gpu_blocks=num_blocks, max_num_seqs=3)) == expected


@pytest.mark.parametrize("mode", MODES)
def test_frequency_penalty_counts_real_outputs_whatever_is_in_flight(mode: str) -> None:
    """Placeholders of tokens in flight must not be counted: greedy, 50 tokens, async equals sync."""
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0, max_tokens=50, ignore_eos=True)
    requests = {"r": (random_prompt(3, 20), params)}
    want = alone("r", requests).token_ids
    assert serve_in(mode, requests)["r"].token_ids == want
    plain = alone("r", {"r": (random_prompt(3, 20), params.replace(frequency_penalty=0.0))}).token_ids
    assert max(map(want.count, want)) < max(map(plain.count, plain)), "the penalty changes nothing here"


@pytest.mark.parametrize("mode", MODES)
def test_min_tokens_yields_exactly_as_many_before_a_forced_stop(mode: str) -> None:
    params = SamplingParams(
        temperature=1.0, seed=1, min_tokens=5, max_tokens=20, ignore_eos=True, stop_token_ids=[9], logit_bias={9: 100.0}
    )
    served = serve_in(mode, {"r": (random_prompt(1, 7), params)})["r"]
    assert len(served.token_ids) == 6 and served.token_ids[-1] == 9 and 9 not in served.token_ids[:-1]
    assert (served.finish_reason, served.stop_reason) == ("stop", 9)


@pytest.mark.parametrize("mode", MODES)
def test_allowed_tokens_and_bad_words_bound_the_output(mode: str) -> None:
    params = SamplingParams(
        temperature=1.0, seed=4, max_tokens=40, ignore_eos=True, allowed_token_ids=[5, 6, 7], bad_words=[[5, 6], [7, 7]]
    )
    # the prompt ends in a prefix, which does not count
    tokens = serve_in(mode, {"r": ([1, 2, 5], params)})["r"].token_ids
    pairs = list(pairwise(tokens))
    assert set(tokens) <= {5, 6, 7} and (5, 6) not in pairs and (7, 7) not in pairs


@pytest.mark.parametrize("mode", MODES)
def test_a_row_that_is_masked_whole_ends_with_an_error_and_harms_no_other(mode: str) -> None:
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=9, ignore_eos=True)
    doomed = params.replace(allowed_token_ids=[5], bad_words=[[5, 5, 5]])
    requests = {"doomed": ([1, 2, 3], doomed), "fine": (random_prompt(5, 9), params)}
    served = serve_in(mode, requests)
    assert served["doomed"].token_ids == [5, 5] and served["doomed"].finish_reason == "error"
    assert "masked" in str(served["doomed"].stop_reason)
    assert served["fine"].token_ids == alone("fine", requests).token_ids


@pytest.mark.parametrize("mode", MODES)
def test_a_thought_ends_when_its_budget_is_spent(mode: str) -> None:
    params = SamplingParams(
        temperature=1.0,
        seed=2,
        max_tokens=30,
        ignore_eos=True,
        thinking_token_budget=6,
        thinking_start=[3, 4],
        thinking_end=[8, 9, 10],
        # neither marker arises by chance
        bad_words=[[3], [8]],
    )
    thinking = serve_in(mode, {"r": ([1, 2, 3, 4], params)})["r"].token_ids
    assert thinking[6:9] == [8, 9, 10] and thinking.count(9) == 1
    silent = serve_in(mode, {"r": ([1, 2, 3], params)})["r"].token_ids
    assert [8, 9, 10] not in [silent[i : i + 3] for i in range(len(silent))]


def test_exchanging_the_runner_in_mid_run_changes_no_token(requests: dict, expected: dict) -> None:
    core = make_core(make_device("host", poison=True), num_gpu_blocks=12, max_num_batched_tokens=24)
    collector = Collector(core)
    for name, (prompt, params) in requests.items():
        collector.submit(name, prompt, params)
    turn = 0
    while core.has_unfinished:
        collector.step()
        turn += 1
        if turn % 5 == 0:
            runner = ("v1", "v2")[turn // 5 % 2]
            core.set_knobs(runner=runner, async_scheduling=turn % 3 > 0, queue_depth=2)
    core.shutdown()
    assert said(collector.served) == expected


def test_v1_waits_for_output_tokens_only_where_a_feature_looks_at_them() -> None:
    plain = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    for params, waits in (
        (plain, False),
        (plain.replace(logit_bias={3: 1.0}), False),
        (plain.replace(presence_penalty=0.5), True),
        (plain.replace(bad_words=[[1, 2]]), True),
    ):
        core = make_core(knobs=MODES["v1 async"])
        collector = Collector(core)
        collector.submit("r", [1, 2, 3], params)
        collector.run()
        assert ("v1: output tokens for penalties" in core.device.waits) == waits
        core.shutdown()
