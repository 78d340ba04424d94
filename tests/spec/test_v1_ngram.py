"""Speculation of the V1 runner: n-gram drafts from the host's lists, without async scheduling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grammar.serving import mixed_params, mixed_prompt, submit, text_of, toy_core
from mrv2.config import Knobs
from mrv2.errors import ConfigError
from mrv2.runner.v1.speculation import LogitRows, parse_output, propose_ngram
from mrv2.sampling_params import SamplingParams
from sampler.cases import random_requests
from serving import Collector, Served, alone, logprobs_of, make_core, random_prompt, serve

K = 3
SPEC: dict[str, Any] = {"spec_method": "ngram", "num_spec_tokens": K}
V1 = Knobs(runner="v1", async_scheduling=False, **SPEC)


def plain_ngram(history: list[int], k: int, min_n: int, max_n: int) -> list[int]:
    for n in range(max_n, min_n - 1, -1):
        for end in range(len(history) - 1, n - 1, -1):
            if history[end - n : end] == history[len(history) - n :]:
                return history[end : end + k]
    return []


@pytest.mark.parametrize("seed", range(30))
def test_drafts_are_what_followed_the_longest_rightmost_match(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 3, size=int(rng.integers(1, 40))).astype(np.int32)
    k, min_n = int(rng.integers(1, 6)), int(rng.integers(1, 3))
    max_n = min_n + int(rng.integers(0, 3))
    assert propose_ngram(tokens, k, min_n=min_n, max_n=max_n) == plain_ngram(tokens.tolist(), k, min_n, max_n)


def test_index_arrays_of_a_step_with_drafts() -> None:
    rows = LogitRows.of([[], [5, 6], [], [7]])
    indices = rows.indices(np.array([4, 7, 8, 10]))
    assert indices.logits_indices.tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert indices.target_logits_indices.tolist() == [1, 2, 5]
    assert indices.bonus_logits_indices.tolist() == [0, 3, 4, 6]
    assert indices.cu_num_draft_tokens.tolist() == [0, 2, 2, 3]
    assert rows.in_order([3, 0, 1, 2]) == [5, 6, 0, 1, 2, 3, 4]


def test_placeholders_of_rejected_drafts_are_taken_out() -> None:
    sampled = [[10, -1, -1], [5, 8, -1], [11, 3, -1], [7, 12, 9], [-1, -1, -1]]
    lists = parse_output(sampled, [False, False, True, False, False])
    assert lists == [[10], [5, 8], [], [7, 12, 9], [-1]], "a row of NaN keeps one placeholder"


def serve_knowing(
    monkeypatch: pytest.MonkeyPatch, requests: dict[str, tuple[list[int], SamplingParams]], plain: dict[str, Served]
) -> tuple[dict[str, Served], Any]:
    """Serve on V1 with drafts from what the requests say, every fourth of them spoilt."""
    texts = [prompt + plain[name].token_ids for name, (prompt, _) in requests.items()]
    rng = np.random.default_rng(1)

    def propose(tokens: np.ndarray, num_drafts: int, **_: int) -> list[int]:
        known = next((t for t in texts if t[: len(tokens)] == tokens.tolist()), [])
        drafts = known[len(tokens) : len(tokens) + num_drafts]
        return [7 if rng.random() < 0.25 else draft for draft in drafts]

    monkeypatch.setattr("mrv2.runner.v1.drafting.propose_ngram", propose)
    core = make_core(max_num_spec_tokens=K, knobs=V1)
    return serve(core, requests), core


@pytest.mark.parametrize("seed", range(6))
def test_every_sampling_feature_is_what_it_is_without_drafts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = random_requests(seed, 5)
    for index, (name, (prompt, params)) in enumerate(list(requests.items())):
        more = ({"logprobs": 2}, {"prompt_logprobs": 1, "logprobs": 0}, {"logprob_token_ids": [3, 9]}, {})[index % 4]
        requests[name] = (prompt, params.replace(**more))
    plain = serve(make_core(knobs=Knobs(async_scheduling=False)), requests)
    fast, core = serve_knowing(monkeypatch, requests, plain)
    for name in requests:
        assert fast[name].token_ids == plain[name].token_ids, name
        assert fast[name].finish_reason == plain[name].finish_reason, name
        for a, b in zip(logprobs_of(fast[name]), logprobs_of(plain[name]), strict=True):
            assert a[0] == b[0] and a[2] == pytest.approx(b[2], abs=1e-6)
    stats = core.scheduler.stats
    assert 0 < sum(stats.num_accepted) < sum(stats.num_drafted)
    assert set(core.device.waits) <= {"v1: to_list", "v1: accepted tokens", "v1: prompt logprobs"}


def test_repetitive_text_is_drafted_from_itself() -> None:
    core = make_core(max_num_spec_tokens=K, ngram_min=1, knobs=V1)
    requests = {
        f"r{i}": (random_prompt(i, 12), SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
        for i in range(6)
    }
    served = serve(core, requests)
    for name, (prompt, _) in requests.items():
        assert served[name].token_ids == alone(tuple(prompt), 0.0, 0, 60)
    assert sum(core.scheduler.stats.num_accepted) > 0


def test_both_runners_draft_and_accept_the_same() -> None:
    counts = {}
    for knobs in (V1, Knobs(async_scheduling=False, **SPEC)):
        core = make_core(max_num_spec_tokens=K, ngram_min=1, max_num_seqs=2, knobs=knobs)
        params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
        serve(core, {f"r{i}": (random_prompt(i, 12), params) for i in range(4)})
        counts[knobs.runner] = (core.scheduler.stats.num_drafted, core.scheduler.stats.num_accepted)
    assert counts["v1"] == counts["v2"]


def test_tight_pools_and_changes_of_runner_change_nothing() -> None:
    prompts = [random_prompt(60 + i, 10 + 9 * i) for i in range(5)]
    core = make_core(max_num_spec_tokens=4, ngram_min=1, num_gpu_blocks=12, knobs=V1, max_num_batched_tokens=32)
    collector = Collector(core)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        collector.submit(f"r{i}", prompt, params)
    changes: tuple[dict[str, Any], ...] = (
        {"runner": "v2"},
        {"runner": "v2", "async_scheduling": True},
        {"runner": "v1", "async_scheduling": False, "num_spec_tokens": 4},
        {"num_spec_tokens": 1},
        {"spec_method": "off", "async_scheduling": True},
        {"spec_method": "ngram", "async_scheduling": False, "adaptive_drafts": True},
    )
    for change in changes:
        for _ in range(7):
            collector.step()
        core.set_knobs(**change)
    served = collector.run()
    assert core.scheduler.stats.num_preemptions > 0
    core.shutdown()
    for i, prompt in enumerate(prompts):
        assert served[f"r{i}"].token_ids == alone(tuple(prompt), 0.0, 0, 40)


def test_constrained_texts_validate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are what the request says without a grammar's help, and now and then not legal."""
    texts: list[list[int]] = []

    def serve_mixed(knobs: Knobs) -> tuple[dict[str, Served], int]:
        core = toy_core(tmp_path, max_num_spec_tokens=K, knobs=knobs)
        collector = Collector(core)
        for index in range(8):
            submit(collector, f"r{index}", mixed_prompt(index), mixed_params(index)[0])
        served = collector.run()
        core.shutdown()
        return served, sum(core.scheduler.stats.num_accepted)

    def propose(tokens: np.ndarray, num_drafts: int, **_: int) -> list[int]:
        known = next((t for t in texts if t[: len(tokens)] == tokens.tolist()), [])
        drafts = known[len(tokens) : len(tokens) + num_drafts]
        return drafts[:1] + [3 + ord("q")] if len(tokens) % 5 == 0 and num_drafts > 1 else drafts

    plain, _ = serve_mixed(Knobs(async_scheduling=False))
    texts += [mixed_prompt(index) + plain[f"r{index}"].token_ids for index in range(8)]
    monkeypatch.setattr("mrv2.runner.v1.drafting.propose_ngram", propose)
    for overlap in ("deferred", "blocking"):
        fast, accepted = serve_mixed(V1.with_changes(grammar_overlap=overlap))
        assert accepted > 0
        for index in range(8):
            assert fast[f"r{index}"].token_ids == plain[f"r{index}"].token_ids
            constraint = mixed_params(index)[1]
            assert constraint is None or constraint.accepts(text_of(fast[f"r{index}"].token_ids))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"async_scheduling": True}, "async_scheduling=False"),
        ({"verification": "block"}, "'token_exact', 'standard', 'synthetic'"),
        ({"spec_method": "suffix"}, "'ngram', 'eagle3', 'mtp' or 'off'"),
        ({"spec_method": "draft_model"}, "'ngram', 'eagle3', 'mtp' or 'off'"),
    ],
)
def test_what_v1_cannot_do_is_refused_with_the_reason(change: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        V1.with_changes(**change)
