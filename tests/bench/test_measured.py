"""What README says was measured is what the committed records say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

REPO = Path(__file__).parents[2]
MEASURED = (REPO / "README.md").read_text(encoding="utf-8").split("### Measured")[1].split("\n## ")[0]

# a median of fewer would be one run
COUNTS = {3: "three", 5: "five"}


def record(name: str) -> dict[str, Any]:
    return json.loads((REPO / "traces" / "bench" / f"h200-{name}.json").read_text(encoding="utf-8"))


def variants(name: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Return workload -> "v2 async" -> the variant."""
    return {
        workload["name"]: {variant["label"].split(" graphs")[0]: variant for variant in workload["variants"]}
        for workload in record(name)["workloads"]
    }


def rows_of(heading: str) -> dict[str, list[str]]:
    """Return the first cell -> the other cells of the table whose head begins so."""
    table = MEASURED[MEASURED.index(heading) :].split("\n\n")[0].split("\n")[2:]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    return {first: rest for first, *rest in cells}


def test_rates_shares_and_ratios_are_those_of_the_records() -> None:
    ours, four = variants("graphs-step"), variants("graphs-step-both")
    rows = rows_of("| workload | V1 sync")
    assert {first.split(":")[0] for first in rows} == {"a", "b", "c", "d", "e", "f"}
    for first, cells in rows.items():
        name = first.split(":")[0]
        best = ours[name]["v2 async"]
        assert best["tok_s_median"] == median(best["tok_s"])
        assert f"median of {COUNTS[len(best['tok_s'])]} timed runs" in MEASURED
        assert (max(best["tok_s"]) - min(best["tok_s"])) / min(best["tok_s"]) < 0.02
        assert cells[3:5] == [f"{best['tok_s_median']:,.0f}", f"{best['roofline_share']:.0%}".replace("%", " %")]
        if name not in four:
            assert not any(cells[:3] + cells[5:8])
            continue
        rate = {label: variant["tok_s_median"] for label, variant in four[name].items()}
        assert cells[:3] == [f"{rate[label]:,.0f}" for label in ("v1 sync", "v1 async", "v2 sync")]
        profile = four[name]["v2 sync"]["profile"]
        host, gpu = profile["host_ms"], profile["device_ms"]
        ratios = (
            rate["v2 async"] / rate["v1 async"],
            rate["v2 async"] / rate["v2 sync"],
            (host + gpu) / max(host, gpu),
        )
        assert cells[5:8] == [f"{ratio:.2f}" for ratio in ratios]


def test_every_setting_gave_the_same_tokens() -> None:
    ours, four = variants("graphs-step"), variants("graphs-step-both")
    for name, each in four.items():
        assert len(each) == 4
        assert len({variant["tokens_digest"] for variant in [*each.values(), *ours[name].values()]}) == 1, name


def test_drawn_tokens_are_those_of_the_record() -> None:
    ours = {name: each["v2 async"]["tok_s_median"] for name, each in variants("graphs-step").items()}
    (text,) = re.findall(r"^Drawn tokens .*?\n\n", MEASURED, re.MULTILINE | re.DOTALL)
    for name in ("d-t1", "f-t1", "d-k50", "f-k50"):
        assert f"`{name}`" in text and f"{ours[name]:,.0f}" in text
    below = [f"{100 * (1 - ours[f'{name}-t1'] / ours[name]):.1f}" for name in "df"]
    assert f"{below[0]} and {below[1]} % below greedy" in text


@pytest.mark.parametrize(
    "line, chain",
    [
        ("products in parts, partial sums left to whoever reads them", "parts, products alone"),
        ("products in parts, norms between them", "picked, parts"),
        ("with norms and activation: the library", "library, in layers"),
    ],
)
def test_products_in_parts_are_those_of_the_record(line: str, chain: str) -> None:
    heads = [int(cell) for cell in re.findall(r"\d+", MEASURED[MEASURED.index("| rows | 1 |") :].split("\n")[0])]
    cells = rows_of("| rows | 1 |")[line]
    found = {rows: int(cell.replace(",", "")) for rows, cell in zip(heads, cells, strict=True) if cell}
    chains = record("products-in-parts")["chains"]
    assert found == {each["num_rows"]: each["microseconds"] for each in chains if each["name"] == chain}


def test_further_runs_are_those_of_their_records() -> None:
    best = {name: max(each["v2 async"]["tok_s"]) for name, each in variants("graphs-step").items()}
    assert "Best of the three runs: " + ", ".join(f"{name} {best[name]:,.0f}" for name in "abcdef") + "." in MEASURED
    more = {name: each["v2 async"] for name, each in variants("graphs-step-af").items()}
    assert {len(each["tok_s"]) for each in more.values()} == {8}
    a, f = (f"{more[name]['tok_s_median']:,.0f}" for name in "af")
    assert f"Of eight more runs on the same GPU a gave {a} and f {f}" in MEASURED
    four = {name: each["v2 async"]["tok_s_median"] for name, each in variants("graphs-step-both").items()}
    assert f"(V2 async {' / '.join(f'{four[name]:,.0f}' for name in 'abcdf')} in it)" in MEASURED


def test_draws_are_those_of_the_record() -> None:
    draws = record("samplers")
    times = {(t["variant"], t["case"], t["num_rows"]): t["microseconds"] for t in draws["times"]}
    for first, cells in rows_of("| | temperature 0.8 | greedy").items():
        for case, cell in zip(("plain", "greedy", "top-k/p"), cells, strict=True):
            for num_rows, shown in zip((1, 32, 256), cell.split(" / "), strict=True):
                digits = len(shown.partition(".")[2])
                assert shown == f"{times[first.strip('`'), case, num_rows]:.{digits}f}", (first, case, num_rows)
    text = MEASURED.replace("\n", " ")
    shares = [draws["vocab"] * 512 / times["gumbel_blocked", case, 256] for case in ("plain", "greedy")]
    drawn, read = (f"{share / 1e3 / draws['read_gigabytes_per_second']:.0%}".replace("%", " %") for share in shares)
    assert f"draws at {drawn} of the read bandwidth" in text and f"hashed never, at {read}" in text
    over = {variant: list(by_rows.values()) for variant, by_rows in draws["truncated_over_plain"].items()}
    blocked, fused, two_pass = (over[f"gumbel_{name}"] for name in ("blocked", "fused", "two_pass"))
    # the one near its limit has a digit more
    assert f"`gumbel_blocked` {blocked[0]:.2f} / {blocked[1]:.1f} / {blocked[2]:.1f} times its plain draw" in text
    for name, ratios in (("gumbel_fused", fused), ("gumbel_two_pass", two_pass)):
        assert f"`{name}` {' / '.join(f'{ratio:.1f}' for ratio in ratios)}" in text
