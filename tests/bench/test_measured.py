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
