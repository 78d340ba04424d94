"""The sampler benchmark's record and table, from times that are made up; the measurement itself needs CUDA."""

from __future__ import annotations

import json

import pytest
import torch

from mrv2.bench import samplers
from mrv2.bench.bandwidth import Limit
from mrv2.bench.samplers import BASELINE, CASES, ROWS, SamplerTime, headline, make_record, measure_samplers, report
from mrv2.config import legal_values
from mrv2.device import make_device
from mrv2.errors import ConfigError

VARIANTS = (*legal_values("sampler"), BASELINE)


def made_up_record() -> dict:
    times = [
        SamplerTime(case, variant, n, 10.0 * (1 + index) * (2 if case == "top-k/p" else 1), 100.0, 0.5 / (1 + index))
        for n in ROWS
        for case in CASES
        for index, variant in enumerate(VARIANTS)
    ]
    return make_record(times, Limit(4e12, "made up"), 1000)


def test_the_record_holds_the_ratios() -> None:
    record = made_up_record()
    assert record["two_pass_over_fused"] == {"1": 2.0, "32": 2.0, "256": 2.0}
    assert record["truncated_over_plain"]["gumbel_fused"] == {"1": 2.0, "32": 2.0, "256": 2.0}
    assert record["fastest_share_of_read_bandwidth"]["256"] == 0.5
    assert json.loads(json.dumps(record)) == record


def test_the_table_has_a_line_for_each_variant_and_case() -> None:
    lines = report(made_up_record()).splitlines()
    for case in CASES:
        for variant in VARIANTS:
            assert any(line.startswith(case) and variant in line for line in lines)
    assert "\n" not in json.dumps(headline(made_up_record()))


def test_it_needs_cuda() -> None:
    device = make_device("host")
    with pytest.raises(ConfigError, match="CUDA"):
        measure_samplers(device)
    device.close()


def test_every_case_is_drawn_by_every_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed on a GPU, on the host's references: penalties and truncation reach the draw."""
    monkeypatch.setattr(samplers, "_BUFFER_BYTES", 1)
    device = make_device("host")
    batch = samplers.SamplerBatch(device, 3, 100)
    drawn: dict[str, list[torch.Tensor]] = {case: [] for case in CASES}

    def draw_all() -> None:
        for case in CASES:
            for variant in ("gumbel_fused", "softmax_race", "gumbel_two_pass"):
                batch.draw(variant, batch.buffers[0], case)
                drawn[case].append(batch.sampled.clone())
            batch._draw_in_torch(batch.buffers[0], case)
            assert (batch.sampled >= 0).all() and (batch.sampled < 100).all()

    device.main.run("measure", draw_all)
    device.synchronize("test")
    device.close()
    for case in CASES:
        assert all(torch.equal(tokens, drawn[case][0]) for tokens in drawn[case]), case
