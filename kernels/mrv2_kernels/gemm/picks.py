"""Which plan computes which product: a table measured per GPU, read once.

The choice is a function of the GPU, the padded number of rows and the shape of the weights alone, never of what else
runs: so a token's arithmetic is the same in every step that pads to the same number of rows.  Whatever the table
does not name is the library's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mrv2_kernels.gemm.plan import LIBRARY, LinearPlan

TABLE = Path(__file__).parent / "picks.json"

# (rows, outputs, inputs) -> plan
Picks = dict[tuple[int, int, int], LinearPlan]


def read_picks(table: Mapping[str, Iterable[Mapping[str, Any]]]) -> dict[str, Picks]:
    """Return GPU name -> picks from the table's plain values.

    Raises `ValueError` for a plan that is not one, and for a product named twice.
    """
    found: dict[str, Picks] = {}
    for gpu, entries in table.items():
        picks: Picks = {}
        for entry in entries:
            key = (entry["num_rows"], entry["num_outputs"], entry["num_inputs"])
            if key in picks:
                raise ValueError(f"{gpu}: the product {key} is named twice")
            picks[key] = LinearPlan(**entry["plan"])
        found[gpu] = picks
    return found


def write_picks(gpu: str, entries: Iterable[Mapping[str, Any]], path: Path = TABLE) -> None:
    """Replace a GPU's picks in the table by those of a benchmark record (its ``picks``)."""
    table = json.loads(path.read_text(encoding="utf-8"))
    table[gpu] = [dict(entry) for entry in entries]
    read_picks(table)
    lines = [
        f"  {json.dumps(name)}: [\n" + ",\n".join(f"    {json.dumps(entry)}" for entry in each) + "\n  ]"
        for name, each in sorted(table.items())
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def pick(picks: Picks, num_rows: int, num_outputs: int, num_inputs: int) -> LinearPlan:
    """Return the plan of a product whose rows are padded to `num_rows`."""
    return picks.get((num_rows, num_outputs, num_inputs), LIBRARY)


@cache
def _table() -> dict[str, Picks]:
    return read_picks(json.loads(TABLE.read_text(encoding="utf-8")))


@cache
def picks_for(device: torch.device) -> Picks:
    """Return the picks for a device; none on the host and for a GPU that nobody measured."""
    return _table().get(torch.cuda.get_device_name(device), {}) if device.type == "cuda" else {}


def as_entry(num_rows: int, num_outputs: int, num_inputs: int, plan: LinearPlan) -> dict[str, Any]:
    """Return one product's line of the table."""
    return {"num_rows": num_rows, "num_outputs": num_outputs, "num_inputs": num_inputs, "plan": asdict(plan)}
