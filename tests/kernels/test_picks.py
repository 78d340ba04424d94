"""The table of plans: which product takes which plan, and that the committed table names plans that suit."""

from __future__ import annotations

import json

import pytest
import torch

from mrv2_kernels.gemm import LIBRARY, LinearPlan, picks_for, picks_of, why_not
from mrv2_kernels.gemm.picks import TABLE, Pick, as_entry, read_picks, write_picks

FEW, MORE = Pick(LinearPlan("gemv"), LinearPlan("gemv", block_n=4)), Pick(LinearPlan("resident"))
PICKS = {(1, 64, 32): FEW, (8, 64, 32): MORE, (4, 32, 64): FEW}


def test_rows_between_two_that_were_measured_take_the_greater_ones_plan() -> None:
    picks = picks_of(PICKS, 64, 32)
    assert [picks.at(m) for m in (1, 2, 7, 8)] == [FEW, MORE, MORE, MORE]
    assert picks_of(PICKS, 32, 64).at(3) is FEW


def test_what_lies_beyond_the_table_is_the_librarys() -> None:
    for found in (picks_of(PICKS, 64, 32).at(9), picks_of(PICKS, 64, 64).at(1), picks_of({}, 64, 32).at(1)):
        assert found.plan is LIBRARY and found.fused is None


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


def test_both_plans_pass_through_the_table(tmp_path) -> None:
    path = tmp_path / "picks.json"
    path.write_text("{}")
    write_picks("GPU", [as_entry(*key, pick) for key, pick in PICKS.items()], path)
    assert read_picks(json.loads(path.read_text()))["GPU"] == PICKS
