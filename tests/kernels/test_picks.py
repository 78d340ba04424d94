"""The table of plans: which product takes which plan, and that the committed table names plans that suit."""

from __future__ import annotations

import json

import pytest
import torch

from mrv2_kernels.gemm import LIBRARY, LinearPlan, picks_for, picks_of, why_not
from mrv2_kernels.gemm.picks import TABLE, Pick, as_entry, read_picks, write_picks

FEW, MORE = Pick(LinearPlan("gemv"), fused=LinearPlan("gemv", block_n=4)), Pick(LinearPlan("resident"))
PARTS = Pick(LinearPlan("resident"), parts=LinearPlan("warpgroup", 8, 64, splits=4))
PICKS = {(1, 64, 32): FEW, (8, 64, 32): MORE, (4, 32, 64): FEW, (8, 32, 64): PARTS}
# (outputs, inputs) of one layer's products; the third is gated
QWEN3 = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))


def test_rows_between_two_that_were_measured_take_the_greater_ones_plan() -> None:
    picks = picks_of(PICKS, 64, 32)
    assert [picks.at(m) for m in (1, 2, 7, 8)] == [FEW, MORE, MORE, MORE]
    assert picks_of(PICKS, 32, 64).at(3) is FEW


def test_what_lies_beyond_the_table_is_the_librarys() -> None:
    for found in (picks_of(PICKS, 64, 32).at(9), picks_of(PICKS, 64, 64).at(1), picks_of({}, 64, 32).at(1)):
        assert found.plan is LIBRARY and found.fused is None and found.parts is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_host_has_no_picks(dtype: torch.dtype) -> None:
    assert picks_for(torch.device("cpu"), dtype) == {}


def test_every_plan_of_the_committed_table_suits_all_rows_that_take_it() -> None:
    table = read_picks(json.loads(TABLE.read_text()))
    assert table
    for key, picks in table.items():
        weight_bytes = 1 if key.endswith(", fp8") else 2
        for num_outputs, num_inputs in {key[1:] for key in picks}:
            found = picks_of(picks, num_outputs, num_inputs)
            for num_rows in range(1, found.num_rows[-1] + 1):
                pick = found.at(num_rows)
                assert why_not(pick.plan, num_rows, num_outputs, num_inputs, torch.bfloat16, weight_bytes) is None
                if pick.fused is not None:
                    assert pick.fused.variant in ("gemv", "resident") and pick.fused.splits == 1
                    # half the outputs where the product is gated
                    for outputs in (num_outputs, num_outputs // 2):
                        assert why_not(pick.fused, num_rows, outputs, num_inputs, torch.bfloat16, weight_bytes) is None


def test_layers_of_the_committed_table_are_in_one_form_at_a_time() -> None:
    """Forms of a layer were measured with all four products in them."""
    for key, picks in read_picks(json.loads(TABLE.read_text())).items():
        for num_rows in {rows for rows, *shape in picks if tuple(shape) in QWEN3}:
            layer = [picks[num_rows, *shape] for shape in QWEN3]
            for form in ("fused", "parts"):
                assert len({getattr(pick, form) is None for pick in layer}) == 1, f"{key}: {num_rows} rows, {form}"
            assert all(pick.fused is None or pick.parts is None for pick in layer), f"{key}: {num_rows} rows"


def test_plans_in_parts_of_the_committed_table_suit_all_rows_that_take_them() -> None:
    for key, picks in read_picks(json.loads(TABLE.read_text())).items():
        for (num_rows, num_outputs, num_inputs), pick in picks.items():
            if pick.parts is None:
                continue
            assert pick.parts.variant == "warpgroup" and not key.endswith(", fp8")
            gated = (num_outputs, num_inputs) == QWEN3[2]
            outputs = num_outputs // (2 if gated else 1)
            # programs make the rows of a norm, all of them
            assert not pick.parts.normed or (num_rows <= pick.parts.block_m and num_inputs & (num_inputs - 1) == 0)
            assert why_not(pick.parts, 1, outputs, num_inputs, torch.bfloat16) is None
            # only what a norm reads next may be partial sums
            assert pick.parts.splits == 1 or (num_outputs, num_inputs) in (QWEN3[1], QWEN3[3])


def test_all_plans_pass_through_the_table(tmp_path) -> None:
    path = tmp_path / "picks.json"
    path.write_text("{}")
    write_picks("GPU", [as_entry(*key, pick) for key, pick in PICKS.items()], path)
    assert read_picks(json.loads(path.read_text()))["GPU"] == PICKS


def test_products_that_are_not_measured_keep_their_picks(tmp_path) -> None:
    path = tmp_path / "picks.json"
    path.write_text("{}")
    write_picks("GPU", [as_entry(*key, pick) for key, pick in PICKS.items()], path)
    write_picks("GPU", [as_entry(2, 64, 32, MORE)], path)
    kept = {key: pick for key, pick in PICKS.items() if key[1:] == (32, 64)}
    assert read_picks(json.loads(path.read_text()))["GPU"] == {(2, 64, 32): MORE} | kept
