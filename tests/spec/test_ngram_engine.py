"""Speculation in the engine: fewer steps, the same tokens, no further wait."""

from __future__ import annotations

import pytest

import schedule_cases
from mrv2.config import Knobs
from mrv2.engine.core import EngineCore
from mrv2.errors import ConfigError
from mrv2.instrument import sync_guard
from mrv2.options import build_config
from mrv2.sampling_params import SamplingParams
from schedule_cases import KnowingSpeculator, draw_case, run_case
from serving import Collector, alone, logprobs_of, make_core, random_prompt, serve

K = 3
SPEC = {"spec_method": "ngram", "num_spec_tokens": K}


def greedy(max_tokens: int, **fields: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **fields)  # type: ignore[arg-type]


def with_knowing(core: EngineCore, *sequences: list[int]) -> EngineCore:
    """Let a speculator draft what `sequences` say, without mistakes."""
    knowing = KnowingSpeculator(0)
    knowing.rng = type("Never", (), {"random": staticmethod(lambda: 1.0)})()  # type: ignore[assignment]
    knowing.sequences += [list(s) for s in sequences]
    core.executor.runner.drafting.speculators["ngram"] = knowing  # type: ignore[attr-defined]
    return core


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_accepted_drafts_save_steps(depth: int) -> None:
    prompt = random_prompt(1, 20)
    whole = alone(tuple(prompt), 0.0, 0, 17)
    core = make_core(max_num_spec_tokens=K, knobs=Knobs(queue_depth=depth, **SPEC))
    with_knowing(core, prompt + whole)
    served = serve(core, {"r": (prompt, greedy(17))})
    assert served["r"].token_ids == whole
    stats = core.scheduler.stats
    # one step for the prompt, then four tokens a step
    assert core.scheduler.step <= 1 + 4 + (depth - 1)
    assert stats.num_accepted[0] == stats.num_drafted[0] > 0
    snapshot = core.snapshot()
    assert snapshot.acceptance[0] == 1.0 and snapshot.mean_accepted_length == pytest.approx(4.0)


@pytest.mark.parametrize("position", range(1, 9))
def test_a_stop_token_inside_an_accepted_run_ends_the_request_there(position: int) -> None:
    prompt = random_prompt(2, 12)
    whole = alone(tuple(prompt), 1.0, 3, 16)
    stop = whole[position]
    core = with_knowing(make_core(max_num_spec_tokens=K, knobs=Knobs(queue_depth=4, **SPEC)), prompt + whole)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=16, ignore_eos=True, stop_token_ids=[stop])
    served = serve(core, {"r": (prompt, params)})
    assert served["r"].token_ids == whole[: whole.index(stop) + 1]
    assert served["r"].finish_reason == "stop" and served["r"].stop_reason == stop


@pytest.mark.parametrize("max_tokens", range(1, 11))
def test_max_tokens_inside_a_run(max_tokens: int) -> None:
    prompt = random_prompt(3, 9)
    whole = alone(tuple(prompt), 0.0, 0, 16)
    core = with_knowing(make_core(max_num_spec_tokens=K, knobs=Knobs(queue_depth=2, **SPEC)), prompt + whole)
    served = serve(core, {"r": (prompt, greedy(max_tokens))})
    assert served["r"].token_ids == whole[:max_tokens] and served["r"].finish_reason == "length"


@pytest.mark.parametrize("room", range(1, 7))
def test_the_edge_of_max_model_len(room: int) -> None:
    prompt = random_prompt(4, 40 - room)
    whole = alone(tuple(prompt), 0.0, 0, 16)
    core = make_core(max_model_len=40, max_num_spec_tokens=K, num_gpu_blocks=4, knobs=Knobs(queue_depth=4, **SPEC))
    with_knowing(core, prompt + whole)
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    assert serve(core, {"r": (prompt, params)})["r"].token_ids == whole[:room]


def test_a_request_as_large_as_the_pool_is_not_preempted_by_its_own_drafts() -> None:
    prompt = random_prompt(5, 28)
    core = make_core(num_gpu_blocks=4, max_num_spec_tokens=K, knobs=Knobs(queue_depth=4, **SPEC), ngram_min=1)
    assert serve(core, {"r": (prompt, greedy(20))})["r"].token_ids == alone(tuple(prompt), 0.0, 0, 20)
    assert core.scheduler.stats.num_preemptions == 0


def test_logprobs_of_accepted_tokens_are_those_of_plain_decoding() -> None:
    prompt = random_prompt(6, 15)
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=12, logprobs=2, ignore_eos=True)
    plain = serve(make_core(), {"r": (prompt, params)})["r"]
    core = with_knowing(make_core(max_num_spec_tokens=K, knobs=Knobs(**SPEC)), prompt + plain.token_ids)
    fast = serve(core, {"r": (prompt, params)})["r"]
    rows = [[row for output in s.outputs for row in output.logprobs or []] for s in (plain, fast)]
    assert fast.token_ids == plain.token_ids and len(rows[0]) == len(rows[1]) == 12
    for a, b in zip(*rows, strict=True):
        assert a.token_ids == b.token_ids and a.sampled_rank == b.sampled_rank
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-6)


def test_repetitive_text_is_drafted_from_itself() -> None:
    """Without a helping hand: the n-gram kernels alone, on a request that repeats itself."""
    core = make_core(max_num_spec_tokens=K, ngram_min=1, knobs=Knobs(**SPEC))
    requests = {f"r{i}": (random_prompt(i, 12), greedy(60)) for i in range(6)}
    served = serve(core, requests)
    for name, (prompt, _) in requests.items():
        assert served[name].token_ids == alone(tuple(prompt), 0.0, 0, 60)
    assert sum(core.scheduler.stats.num_accepted) > 0


@pytest.mark.parametrize("depth", [2, 4])
def test_nothing_but_the_output_is_waited_for(depth: int) -> None:
    core = make_core(
        max_num_seqs=6, num_gpu_blocks=24, max_num_spec_tokens=K, ngram_min=1, knobs=Knobs(queue_depth=depth, **SPEC)
    )
    collector = Collector(core)
    params = (greedy(30), SamplingParams(temperature=1.0, seed=1, top_k=20, max_tokens=20, logprobs=2, ignore_eos=True))

    def feed(index: int) -> None:
        collector.submit(f"r{index}", random_prompt(index % 5, 3 + 11 * index % 60), params[index % 2])

    for index in range(8):
        feed(index)
    collector.run()
    first, index = core.scheduler.step, 8
    with sync_guard(core.device, mode="error") as guard:
        while core.scheduler.step - first < 300:
            if len(core.scheduler.waiting) < 3:
                feed(index)
                index += 1
            collector.step()
        core.drain()
    assert not guard.violations and set(guard.waits) == {"output"}
    core.abort(list(core.scheduler.requests))
    collector.run()
    core.shutdown()


FEATURES = [
    {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    {"logit_bias": {5: 3.0, 9: -4.0}},
    {"allowed_token_ids": list(range(40, 90))},
    {"min_tokens": 9, "stop_token_ids": list(range(0, 512, 5))},
    {"frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"repetition_penalty": 1.4},
    # few tokens, so that what is penalised or forbidden would come again
    {"frequency_penalty": 2.0, "allowed_token_ids": list(range(40, 46))},
    {"repetition_penalty": 2.0, "presence_penalty": 1.0, "allowed_token_ids": list(range(40, 46))},
    {"bad_words": [[a, b] for a in range(40, 44) for b in range(40, 44, 2)], "allowed_token_ids": list(range(40, 46))},
    {
        "thinking_token_budget": 3,
        "thinking_start": [41],
        "thinking_end": [44, 45],
        "allowed_token_ids": [41, 42, 44, 45],
    },
    {"logprobs": 3},
    {"logprobs": 0, "frequency_penalty": 1.0},
    {"logprob_token_ids": [3, 1, 400]},
    {"prompt_logprobs": 2, "logprobs": 1},
]


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("features", FEATURES, ids=lambda f: next(iter(f)))
def test_sampling_features_beside_drafts(features: dict, depth: int) -> None:
    """The request with the feature drafts as its neighbour does, and both say what they say without drafts."""
    prompts = [random_prompt(40, 14), random_prompt(41, 9)]
    all_params = [
        SamplingParams(**{"temperature": 1.0, "seed": 4, "max_tokens": 16, "ignore_eos": True, **features}),
        greedy(16),
    ]
    requests = {f"r{i}": (p, q) for i, (p, q) in enumerate(zip(prompts, all_params, strict=True))}
    plain = serve(make_core(), requests)
    core = make_core(max_num_spec_tokens=K, knobs=Knobs(queue_depth=depth, **SPEC))
    knowing = KnowingSpeculator(2)
    knowing.sequences += [p + plain[f"r{i}"].token_ids for i, p in enumerate(prompts)]
    core.executor.runner.drafting.speculators["ngram"] = knowing  # type: ignore[attr-defined]
    fast = serve(core, requests)
    for name in requests:
        assert fast[name].token_ids == plain[name].token_ids, name
        assert fast[name].finish_reason == plain[name].finish_reason, name
        for a, b in zip(logprobs_of(fast[name]), logprobs_of(plain[name]), strict=True):
            assert a[:2] == b[:2] and a[2] == pytest.approx(b[2], abs=1e-6)
    stats = core.scheduler.stats
    assert sum(stats.num_accepted) > 0 and core.scheduler.step < 24, "the request with the feature drafted nothing"
    assert sum(stats.num_accepted) < sum(stats.num_drafted), "no draft was refused"


def test_method_and_number_change_while_requests_run() -> None:
    prompts = [random_prompt(20 + i, 10) for i in range(3)]
    core = make_core(max_num_spec_tokens=4, ngram_min=1)
    collector = Collector(core)
    for i, prompt in enumerate(prompts):
        collector.submit(f"r{i}", prompt, greedy(40))
    for k in (0, 4, 1, 3):
        for _ in range(3):
            collector.step()
        core.set_knobs(spec_method="ngram", num_spec_tokens=k)
    for _ in range(2):
        collector.step()
    core.set_knobs(spec_method="off")
    served = collector.run()
    core.shutdown()
    for i, prompt in enumerate(prompts):
        assert served[f"r{i}"].token_ids == alone(tuple(prompt), 0.0, 0, 40)


def test_the_product_of_schedules_accepts_drafts() -> None:
    """The property over random schedules would prove little about drafts if none were accepted."""
    accepted: list[int] = []
    knowing = [s for s in range(220) if draw_case(s).axes["drafter"] == "knowing" and draw_case(s).axes["num_drafts"]]
    cores: list[EngineCore] = []
    make = schedule_cases.make_core
    try:
        schedule_cases.make_core = lambda *args, **kwargs: cores.append(make(*args, **kwargs)) or cores[-1]
        for seed in knowing[:6]:
            run_case(draw_case(seed))
            accepted.append(sum(cores[-1].scheduler.stats.num_accepted))
    finally:
        schedule_cases.make_core = make
    assert sum(n > 0 for n in accepted) >= 4, accepted


class TestRefusals:
    def test_more_drafts_than_were_loaded(self) -> None:
        core = make_core(max_num_spec_tokens=2)
        with pytest.raises(ConfigError, match="max_num_spec_tokens=2"):
            core.set_knobs(spec_method="ngram", num_spec_tokens=3)
        assert core.knobs.spec_method == "off"
        core.shutdown()

    def test_asking_for_drafts_at_load_keeps_memory_for_them(self) -> None:
        assert build_config("tiny-llama", spec_method="ngram", num_spec_tokens=2).max_num_spec_tokens == 2
        assert build_config("tiny-llama").max_num_spec_tokens == 0
        with pytest.raises(ConfigError, match="max_num_spec_tokens=1"):
            build_config("tiny-llama", spec_method="ngram", max_num_spec_tokens=1)

    def test_vllm_names(self) -> None:
        config = build_config(
            "tiny-llama",
            speculative_config={"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5},
        )
        assert (config.max_num_spec_tokens, config.knobs.num_spec_tokens, config.ngram_max) == (4, 4, 5)
        assert config.knobs.spec_method == "ngram"
        with pytest.raises(ConfigError, match="num_speculative_tokens"):
            build_config("tiny-llama", speculative_config={"method": "ngram"})
        with pytest.raises(ConfigError, match="'medusa'"):
            build_config("tiny-llama", speculative_config={"method": "medusa", "num_speculative_tokens": 2})
        with pytest.raises(ConfigError, match="did you mean 'method'"):
            build_config("tiny-llama", speculative_config={"metod": "ngram", "num_speculative_tokens": 2})
