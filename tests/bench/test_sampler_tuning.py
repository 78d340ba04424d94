"""Tuning of sampler launches: its record, its candidates, and its command line; times need CUDA."""

from __future__ import annotations

import json
import os
from importlib import import_module

import pytest
import torch

from mrv2.bench import sampler_tuning
from mrv2.bench.sampler_tuning import Candidate, candidates, headline, make_record, report, tune_samplers
from mrv2.bench.samplers import SamplerBatch
from mrv2.cli import main
from mrv2.device import make_device
from mrv2.errors import ConfigError


def test_the_fastest_of_each_group_and_batch_is_found() -> None:
    times = [
        {"group": group, "name": name, "num_rows": n, "us": us}
        for group, name, n, us in (
            ("plain a", "x", 1, 4.0),
            ("plain a", "y", 1, 2.0),
            ("plain a", "x", 256, 10.0),
            ("plain b", "x", 256, 5.0),
        )
    ]
    record = make_record(times, {"plain a: z": "does not compile"}, 4e12, 1000)
    assert {key: (each["name"], each["us"]) for key, each in record["best"].items()} == {
        "plain a 1": ("y", 2.0),
        "plain a 256": ("x", 10.0),
        "plain b 256": ("x", 5.0),
    }
    # 512,000 bytes in 5 us
    assert record["best"]["plain b 256"]["share"] == pytest.approx(512_000 / 5e-6 / 4e12)
    text = report(record)
    # 512,000 bytes in 10 us at 4 TB/s
    assert next(line for line in text.splitlines() if line.startswith("plain a") and " x " in line).endswith(
        "10.0    1%"
    )
    assert "failed plain a: z: does not compile" in text
    assert "\n" not in json.dumps(headline(record))


def test_a_candidate_is_in_force_only_meanwhile() -> None:
    for each in candidates():
        module = import_module(f"mrv2_kernels.sampling.{each.module}")
        before = [getattr(module, name) for name, _ in each.values]
        with each.used():
            assert [getattr(module, name) for name, _ in each.values] == [value for _, value in each.values]
        assert [getattr(module, name) for name, _ in each.values] == before


def test_candidates_are_told_apart() -> None:
    names = [(each.group, each.name) for each in candidates()]
    assert len(set(names)) == len(names)


def test_a_failing_candidate_costs_itself_only() -> None:
    """Without CUDA every check fails; it says why and does not raise."""
    broken = Candidate("plain", "gumbel_fused", "no_such_module", (), "broken")
    assert sampler_tuning.check(broken) != ""


@pytest.mark.parametrize(("variant", "case"), [("gumbel_fused", "top-k/p"), ("gumbel_blocked", "plain")])
def test_the_reference_of_a_check_draws_what_the_variant_draws(variant: str, case: str) -> None:
    device = make_device("host")
    batch = SamplerBatch(device, 4, 200, num_buffers=1)
    drawn: list[torch.Tensor] = []

    def draw_both() -> None:
        for is_reference in (False, True):
            batch.draw(variant, batch.buffers[0], case, is_reference=is_reference)
            drawn.append(batch.sampled.clone())

    device.main.run("measure", draw_both)
    device.synchronize("test")
    assert drawn[0].equal(drawn[1])
    device.close()


def test_it_needs_cuda() -> None:
    device = make_device("host")
    with pytest.raises(ConfigError, match="CUDA"):
        tune_samplers(device)
    device.close()


def test_tune_belongs_to_parts_with_launches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--tune"]) != 0
    error = capsys.readouterr().err
    assert "--samplers --tune" in error and "--layers --tune" in error


def test_seconds_belong_to_tune(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--samplers", "--seconds", "5"]) != 0
    assert "--seconds belongs to --samplers --tune" in capsys.readouterr().err
    assert main(["bench", "--samplers", "--tune", "--seconds", "0"]) != 0
    assert "above 0" in capsys.readouterr().err


def test_candidates_without_time_left_are_named() -> None:
    turn = candidates()[:2]
    assert sampler_tuning._check_in_turn(turn, until=0.0) == ["no time was left"] * 2


def test_a_check_that_kills_its_process_costs_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_tuning, "check", _deadly)
    turn = [Candidate("plain", "v", "m", (), name) for name in ("dies", "works")]
    reasons = sampler_tuning._check_in_turn(turn, until=float("inf"))
    assert "BrokenProcessPool" in reasons[0]
    assert reasons[1] == ""


def _deadly(candidate: Candidate) -> str:
    if candidate.name == "dies":
        os._exit(3)
    return ""
