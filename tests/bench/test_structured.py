"""What the benchmark of structured outputs serves, checks and reports."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from mrv2.bench.structured import FORMS, FREE, Outcome, kinds_of, make_record, mask_times, measure_structured, report
from mrv2.config import EngineConfig
from mrv2.engine.core import EngineCore
from mrv2.instrument import Span, stages
from mrv2.tokenizer import Tokenizer

RIGHT = {
    "json": '{"name": "Ann", "age": 3, "tags": ["red", "blue"]}',
    "regex": "the rain falls down.",
    "grammar": "12 + (3 * 4) + 5",
}
WRONG = {
    "json": '{"name": "Ann", "age": 300, "tags": ["red", "blue"]}',
    "regex": "The rain falls down",
    "grammar": "12 + 3 * 4",
}


@pytest.mark.parametrize("name", FORMS)
def test_a_text_of_the_form_is_told_from_one_that_is_not(name: str) -> None:
    assert FORMS[name].check(RIGHT[name])
    assert not FORMS[name].check(WRONG[name]) and not FORMS[name].check("")


def test_the_share_of_constrained_slots() -> None:
    assert kinds_of(4, 0.0) == [FREE] * 4
    assert kinds_of(6, 0.5).count(FREE) == 3 and set(kinds_of(6, 0.5)) == {FREE, *FORMS}
    assert FREE not in kinds_of(5, 1.0)


def test_a_mask_is_exposed_where_the_device_is_idle() -> None:
    fill = Span("engine", stages.FILL_GRAMMAR_MASK, 100, 200, 1, "host")
    wait = Span("engine", "wait: output", 110, 130, 1, "wait")
    forward = Span("main", stages.FORWARD, 90, 160, 1, "device")
    # 100-110 and 130-160 are hidden, 160-200 is not
    assert mask_times([fill, wait, forward]) == (80, 40)


@pytest.mark.slow
def test_real_outputs_have_their_form_and_only_outputs_are_waited_for() -> None:
    sizes: Any = {"max_num_seqs": 4, "max_model_len": 256, "max_num_batched_tokens": 512, "num_gpu_blocks": 80}
    core = EngineCore(EngineConfig(model="smollm2-135m-instruct", device="host", dtype="float32", **sizes))
    from mrv2_models.registry import resolve_model

    folder = resolve_model("smollm2-135m-instruct").folder
    assert folder is not None
    torch.set_num_threads(1)
    outcomes: list[Outcome] = measure_structured(
        core, Tokenizer.from_folder(folder), num_slots=4, num_tokens=160, output_len=60, progress=lambda _: None
    )
    record = make_record(core, outcomes, 4)
    core.shutdown()
    assert json.loads(json.dumps(record)) == record
    assert all(each.num_valid == each.num_ended for each in outcomes) and outcomes[-1].num_ended > 0
    assert all(set(each.waits) <= {"output"} for each in outcomes if each.grammar_overlap == "deferred")
    assert len(report(record).splitlines()) == 3 + len(outcomes)
