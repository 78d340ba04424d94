"""Speculation over runners: random arrivals, intervals, and the commands that print them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrv2.bench.spec_rates import arrivals_of, make_record, mean_of, measure_rates, ratio_of_means, report, serve_open
from mrv2.bench.spec_runners import legal_methods, settings_of
from mrv2.cli import main
from mrv2.config import Knobs
from mrv2.engine.core import EngineCore
from mrv2.engine.messages import EngineRequest
from mrv2.errors import ConfigError
from mrv2.options import build_config
from mrv2.runner.v1.bookkeeping import ACCEPTED_WAIT
from mrv2.sampling_params import SamplingParams

TINY = ["bench", "--speculation", "--device", "host", "--model", "tiny-qwen3", "--repetitions", "1", "--scale", "32"]


def small_core(**options: Any) -> EngineCore:
    sizes = dict(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, num_gpu_blocks=40, device="host")
    options = {"speculators": "mtp", "num_spec_tokens": 1, "max_num_spec_tokens": 1, **options}
    options |= {"benchmark": True, "verification": "synthetic", "synthetic_acceptance": "0.8"}
    return EngineCore(build_config("tiny-llama", **sizes, **options))


def test_arrivals_are_a_poisson_process() -> None:
    arrivals = arrivals_of(5.0, 20_000, seed=1)
    gaps = np.diff(arrivals)
    assert (gaps > 0).all() and gaps.mean() == pytest.approx(0.2, rel=0.03)
    # exponential: as spread as it is long, and without memory
    assert gaps.std() == pytest.approx(0.2, rel=0.05)
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.03
    assert (arrivals_of(5.0, 10, seed=1) == arrivals[:10]).all() and arrivals_of(5.0, 10, seed=2)[0] != arrivals[0]
    with pytest.raises(ConfigError, match="more than 0"):
        arrivals_of(0.0, 3, seed=0)


def test_intervals_cover_the_mean_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for seed in range(200):
        found = mean_of(rng.exponential(3.0, size=80), seed)
        assert found.low < found.mean < found.high
        covered += found.low <= 3.0 <= found.high
    assert 0.88 <= covered / 200 <= 0.99


def test_pairs_tell_more_than_their_sides() -> None:
    """Requests differ a lot, the settings by a tenth each time: only the ratio over pairs sees it."""
    rng = np.random.default_rng(0)
    slow = rng.exponential(3.0, size=60)
    fast = 0.9 * slow * rng.normal(1.0, 0.01, size=60)
    ratio, alone = ratio_of_means(fast, slow), mean_of(slow)
    assert ratio.low < 0.9 < ratio.high and ratio.high < 0.92
    assert alone.low < fast.mean() < alone.high


def test_requests_are_served_as_they_arrive() -> None:
    core = small_core()
    requests = [
        EngineRequest(
            req_id=str(i),
            prompt_token_ids=[i + 1, 2, 3],
            params=SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False),
        )
        for i in range(3)
    ]
    arrivals = np.array([0.0, 0.3, 0.31])
    admitted: list[int] = []
    add = core.add_request
    core.add_request = lambda message: (admitted.append(len(core.scheduler.running)), add(message))[1]  # type: ignore[method-assign]
    run = serve_open(core, requests, arrivals)
    assert admitted[1] == 0, "the first had ended before the second arrived"
    assert (run.ttft > 0).all() and (run.tpot > 0).all() and run.seconds > 0.31
    assert run.num_tokens == 18 and run.num_steps >= 10 and run.waits["output"] == run.num_steps
    assert run.in_service < run.seconds * 3
    core.shutdown()


def test_both_runners_get_the_same_requests_and_accept_the_same() -> None:
    core = small_core()
    prompts = [[5 * i + j for j in range(7)] for i in range(2)]
    settings = {f"{label} mtp": {**changes, "spec_method": "mtp"} for label, changes in modes().items()}
    outcomes, comparisons = measure_rates(core, prompts, settings, (40.0, 80.0), num_requests=5, num_tokens=24)
    assert [(o.rate, o.label) for o in outcomes] == [(rate, label) for rate in (40.0, 80.0) for label in settings]
    for outcome in outcomes:
        assert outcome.tpot_ms.low <= outcome.tpot_ms.mean <= outcome.tpot_ms.high
        assert len(outcome.tpots_ms) == 5 and outcome.tokens_per_second > 0
        assert 1.5 < outcome.tau <= 2.0
        assert (ACCEPTED_WAIT in outcome.waits_per_step) == outcome.label.startswith("v1")
    assert {(c.label, c.against) for c in comparisons} == {(label, "v1 sync mtp") for label in list(settings)[1:]}
    record = make_record(core, outcomes, comparisons, num_requests=5, num_tokens=24, repetitions=1)
    assert all(label in report(record) for label in settings)
    core.shutdown()


def modes() -> dict[str, dict[str, Any]]:
    return settings_of(("v1", "v2"), ("sync", "async"))


def test_settings_and_methods_that_a_runner_lacks_are_named() -> None:
    assert list(modes()) == ["v1 sync", "v1 async", "v2 sync", "v2 async"]
    with pytest.raises(ConfigError, match="legal are v1, v2"):
        settings_of(("v3",), ("sync",))
    with pytest.raises(ConfigError, match="legal are sync, async"):
        settings_of(("v1",), ("late",))
    why: list[str] = []
    assert legal_methods(Knobs(runner="v1"), ["ngram", "suffix", "eagle3", "mtp"], why.append) == ["eagle3", "mtp"]
    assert len(why) == 2 and "async_scheduling=False" in why[0] and "'suffix'" in why[1]


def test_the_command_compares_runners_under_random_arrivals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rates.json"
    assert main([*TINY, "--rates", "40,80", "--record", str(out)]) == 0
    printed = capsys.readouterr().out
    shown = json.loads(printed.splitlines()[-1])
    assert set(shown["tpot_ms"]) == {f"{r} async mtp@{rate}" for r in ("v1", "v2") for rate in (40, 80)}
    assert set(shown["ratios"]) == {f"v2 async mtp : v1 async mtp@{rate}" for rate in (40, 80)}
    record = json.loads(out.read_text())
    assert record["synthetic_acceptance"] == [0.8, 0.6, 0.4] and record["outcomes"][0]["knobs"]["num_spec_tokens"] == 1
    assert all(low <= mean <= high for mean, low, high in shown["ratios"].values())


def test_the_command_compares_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--runners", "v1,v2", "--modes", "async", "--acceptance", "1.0,0.5,0.0"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out.splitlines()[-1])["tpot_ms_and_tau"]
    methods = {label.split("@")[0] for label in found}
    assert methods == {f"v1 async {m}" for m in ("off", "eagle3", "mtp")} | {
        f"v2 async {m}" for m in ("off", "ngram", "eagle3", "mtp")
    }
    assert "left out: runner='v1' drafts with spec_method='ngram' only with async_scheduling=False" in captured.err
    for runner in ("v1", "v2"):
        assert found[f"{runner} async off@1"][1] == 1.0 and 2.0 <= found[f"{runner} async mtp@1"][1] <= 3.0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rates", "4"], "belongs to --speculation"),
        (["--growth", "--acceptance", "0.5"], "belongs to --speculation"),
        (["--speculation", "--rates", "4,x"], "numbers with commas"),
        (["--speculation", "--rates", "0"], "more than 0"),
        (["--speculation", "--runners", "v3"], "legal are v1, v2"),
        (["--speculation", "--rates", "4", "--runners", "v1", "--spec-method", "suffix"], "spec_method='suffix'"),
    ],
)
def test_refusals(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "host", "--model", "tiny-qwen3", "--scale", "32", *flags]) != 0
    assert message in capsys.readouterr().err
