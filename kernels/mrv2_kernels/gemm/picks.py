"""Which plan computes which product: a table measured per GPU, read once.

The choice is a function of the GPU, the dtype, how weights are kept, the padded number of rows and the shape of the
weights alone, never of what else runs: so a token's arithmetic is the same in every step that pads to the same number
of rows.  Numbers of rows between two that were measured take the greater one's plan.  Whatever lies beyond the table
is the library's.

The plans of the H200 are those of `mrv2 bench --gemms` (traces/bench/h200-gemms-plans.json, h200-gemms-fp8.json), but
for the ``parts`` and the logits.  Those are of scripts: chosen in forward passes with attention
(h200-products-in-parts.json, h200-forward-tuning-parts.json), where 2 rows have the plans of 1 and 4 rows those of 8;
and behind a few layers (h200-logits.json), where 16 rows have the plan of 8 with a tile of their own.  192 rows have
those of a later h200-gemms.json: steps of 192 requests with mixed contexts took 4,890 us with these and 5,146 with the
tiles of 64 before; at 128 rows, 3,521 and 3,550, and 256, nothing was to be gained (h200-picks-in-steps.json).
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mrv2_kernels.gemm.plan import LIBRARY, LinearPlan

TABLE = Path(__file__).parent / "picks.json"


@dataclass(frozen=True)
class Pick:
    """How one product is computed."""

    plan: LinearPlan = LIBRARY
    # of the product together with what surrounds it in a layer (`gemm.fused_linear`); None where that was not faster
    fused: LinearPlan | None = None
    # of the product in a layer whose norms stand alone and add partial sums (`gemm.warpgroup`); None likewise
    parts: LinearPlan | None = None


# (rows, outputs, inputs) -> pick
Picks = dict[tuple[int, int, int], Pick]


def read_picks(table: Mapping[str, Iterable[Mapping[str, Any]]]) -> dict[str, Picks]:
    """Return GPU name -> picks from the table's plain values.

    Raises `ValueError` for a plan that is not one, and for a product named twice.
    """
    found: dict[str, Picks] = {}
    for gpu, entries in table.items():
        picks: Picks = {}
        for entry in entries:
            key = _key(entry)
            if key in picks:
                raise ValueError(f"{gpu}: the product {key} is named twice")
            others = {name: LinearPlan(**entry[name]) for name in ("fused", "parts") if entry.get(name) is not None}
            picks[key] = Pick(LinearPlan(**entry["plan"]), **others)
        found[gpu] = picks
    return found


def _key(entry: Mapping[str, Any]) -> tuple[int, int, int]:
    return entry["num_rows"], entry["num_outputs"], entry["num_inputs"]


def write_picks(
    gpu: str, entries: Iterable[Mapping[str, Any]], path: Path = TABLE, quantization: str | None = None
) -> None:
    """Replace a GPU's picks in the table by those of a benchmark record (its ``picks``, ``quantization``).

    Products that the record does not measure, such as a model's logits, keep their picks; so do products in parts,
    which are chosen with attention between them: the record's replace none that are there.
    """
    table = json.loads(path.read_text(encoding="utf-8"))
    key = table_key(gpu, quantization)
    in_parts = {_key(entry): {"parts": entry["parts"]} for entry in table.get(key, []) if "parts" in entry}
    replaced = [dict(entry) | in_parts.get(_key(entry), {}) for entry in entries]
    measured = {(entry["num_outputs"], entry["num_inputs"]) for entry in replaced}
    kept = [each for each in table.get(key, []) if (each["num_outputs"], each["num_inputs"]) not in measured]
    table[key] = replaced + kept
    read_picks(table)
    lines = [
        f"  {json.dumps(name)}: [\n" + ",\n".join(f"    {json.dumps(entry)}" for entry in each) + "\n  ]"
        for name, each in sorted(table.items())
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


_LIBRARY = Pick()


@dataclass(frozen=True)
class ProductPicks:
    """The picks of one product, [num_outputs, num_inputs] weights, by the number of rows."""

    # ascending
    num_rows: tuple[int, ...] = ()
    picks: tuple[Pick, ...] = ()

    def at(self, num_rows: int) -> Pick:
        """Return the pick for a padded number of rows."""
        index = bisect_left(self.num_rows, num_rows)
        return self.picks[index] if index < len(self.picks) else _LIBRARY


def picks_of(picks: Picks, num_outputs: int, num_inputs: int) -> ProductPicks:
    """Return one product's picks."""
    sizes = tuple(sorted(key[0] for key in picks if key[1:] == (num_outputs, num_inputs)))
    return ProductPicks(sizes, tuple(picks[m, num_outputs, num_inputs] for m in sizes))


@cache
def _table() -> dict[str, Picks]:
    return read_picks(json.loads(TABLE.read_text(encoding="utf-8")))


def table_key(gpu: str, quantization: str | None = None) -> str:
    """Return under which name the table has a GPU's picks for weights that are kept so."""
    return gpu if quantization is None else f"{gpu}, {quantization}"


@cache
def picks_for(device: torch.device, dtype: torch.dtype, quantization: str | None = None) -> Picks:
    """Return the picks for a device; none on the host, for a GPU that nobody measured and but for bfloat16."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return {}
    return _table().get(table_key(torch.cuda.get_device_name(device), quantization), {})


def as_entry(num_rows: int, num_outputs: int, num_inputs: int, pick: Pick) -> dict[str, Any]:
    """Return one product's line of the table."""
    plans = {name: plan for name, plan in asdict(pick).items() if plan is not None}
    return {"num_rows": num_rows, "num_outputs": num_outputs, "num_inputs": num_inputs} | plans
