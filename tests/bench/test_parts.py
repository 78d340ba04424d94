"""The parts of `mrv2 bench` that measure something else than workloads, as commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrv2.bench.growth import host_growth
from mrv2.bench.projection import DATA_SHEETS, REACHED, project
from mrv2.cli import main
from mrv2.errors import ConfigError
from mrv2_models.registry import resolve_model


def last_line(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_growth_holds_the_batch_and_the_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "growth.json"
    assert main(["bench", "--growth", "--device", "host", "--max-model-len", "256", "--record", str(out)]) == 0
    record = json.loads(out.read_text())
    assert [(p["num_requests"], p["context"]) for p in record["points"]] == [(1, 128), (2, 128), (4, 128), (8, 128)]
    for point in record["points"]:
        assert min(point["host_ms"], point["device_ms"], point["roofline_share"]) > 0
        assert point["tokens_per_second"] == pytest.approx(1e3 * point["num_requests"] / point["step_ms"])
        assert sum(point["host_stages_ms"].values()) > 0
    shown = last_line(capsys)
    assert shown["points"] == 4 and shown["host_growth"] is None, "8 requests are not more than 8"


def test_the_growth_of_the_host_is_that_at_one_context() -> None:
    def point(num_requests: int, context: int, host_ms: float) -> dict:
        return {"num_requests": num_requests, "context": context, "host_ms": host_ms, "step_ms": 10 * host_ms}

    points = [point(8, 128, 0.2), point(512, 128, 0.5), point(8, 4096, 0.1)]
    found = host_growth(points)
    assert found is not None and (found["ratio"], found["num_requests"]) == (pytest.approx(2.5), 512)
    assert found["host_us_at_most"] == pytest.approx(500) and found["host_share_at_most"] == pytest.approx(0.1)
    assert host_growth(points[1:]) is None, "nothing to hold it against at that context"


def test_prefill_reports_first_tokens_and_the_gaps_beside(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--prefill", "--device", "host"]) == 0
    record = last_line(capsys)
    arrivals, beside = record["arrivals"], record["beside"][0]
    assert [each["prefill_chunk"] for each in record["beside"]] == [0, 64]
    assert 0 < arrivals["ttft_p50_ms"] <= arrivals["ttft_p99_ms"]
    assert arrivals["tokens_per_second"] == pytest.approx(4 * 128 / (1e-3 * arrivals["ttft_p99_ms"]), rel=0.1)
    assert record["rates"] is None, "there are no kernels to record on the host"
    assert 0 < beside["alone_p50_ms"] <= beside["alone_p99_ms"] and beside["beside_p99_ms"] > 0
    assert beside["prefill_ms"] > beside["beside_p50_ms"]


def test_startup_tells_a_cold_cache_from_a_warm_one(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "--startup", "--device", "host", "--max-model-len", "64", "--num-gpu-blocks", "32"]
    assert main(command) == 0
    starts = last_line(capsys)["starts"]
    assert [start["cache"] for start in starts] == ["cold", "warm", "warm"]
    for start in starts:
        parts = ("import_torch_s", "import_engine_s", "load_s", "first_token_s")
        assert start["total_s"] > sum(start[part] for part in parts) and min(start[part] for part in parts) > 0
        assert {"device", "weights", "memory", "runner"} <= set(start["load_parts"])
        assert 0 < sum(start["load_parts"].values()) <= start["load_s"]


def test_an_engine_that_does_not_start_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--startup", "--device", "host", "--max-model-len", "64", "--block-size", "17"]) != 0
    assert "block_size=17" in capsys.readouterr().err


def test_a_projection_grows_with_the_bandwidth(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--project", "gb200"]) == 0
    captured = capsys.readouterr().out
    assert "nothing here was measured" in captured
    config = resolve_model("qwen3-0.6b").config
    found = project(["gb200"], ["a", "d"], config, config.resolve_dtype("auto"))
    for rates in found.values():
        assert list(rates) == ["h200", "gb200"]
        # a memory floor that FLOPs hardly touch: decode at these batches
        ratio = DATA_SHEETS["gb200"].bandwidth / DATA_SHEETS["h200"].bandwidth
        assert rates["gb200"] / rates["h200"] == pytest.approx(ratio, rel=0.02)
    # the floor of a single request: 1.19 GB of weights a token at what an H200 reaches
    assert found["a"]["h200"] == pytest.approx(REACHED * 4.8e12 / 1.2e9, rel=0.05)
    with pytest.raises(ConfigError, match="'gb20'.*did you mean 'gb200'"):
        project(["gb20"], ["a"], config, config.resolve_dtype("auto"))


def test_one_part_at_a_time() -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--growth", "--startup"])


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        (["--samplers", "--model", "tiny-qwen3"], "--model"),
        (["--samplers", "--max-model-len", "64"], "--max-model-len"),
        (["--growth", "--workload", "a"], "--workload"),
        (["--prefill", "--repetitions", "5"], "--repetitions"),
        (["--explain", "--vary", "queue_depth=1,2"], "--vary"),
        (["--project", "gb200", "--graphs", "off"], "--graphs"),
    ],
)
def test_a_part_refuses_what_it_has_no_use_for(
    flags: list[str], refused: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--device", "host", *flags]) != 0
    assert f"{flags[0]} does not take {refused}" in capsys.readouterr().err


def test_a_part_takes_one_setting_of_the_varied_knobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "growth.json"
    sizes = ["--max-model-len", "256", "--max-num-seqs", "1", "--record", str(out)]
    assert main(["bench", "--growth", "--device", "host", "--runners", "v1", "--modes", "sync", *sizes]) == 0
    knobs = json.loads(out.read_text())["knobs"]
    assert knobs["runner"] == "v1" and knobs["async_scheduling"] is False
    assert main(["bench", "--growth", "--device", "host", "--modes", "async,sync"]) != 0
    assert "sync or async" in capsys.readouterr().err
