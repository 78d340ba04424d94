"""The lab over an engine in a child process on a GPU: knobs turned under load, windows, inspection, A/B."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from lab.benches import until
from mrv2.lab import Load, Workbench

pytestmark = pytest.mark.gpu
SETTINGS = [
    {"async_scheduling": False},
    {"runner": "v1", "sampler": "softmax_race"},
    {"runner": "v2", "async_scheduling": True, "queue_depth": 3},
    {"cuda_graphs": "off"},
    {"cuda_graphs": "step"},
    {"cuda_graphs": "model", "spec_method": "ngram", "num_spec_tokens": 3},
    {"spec_method": "off", "output_copy": "main_stream"},
    {"output_wait": "sleep"},
]


@pytest.fixture(scope="module")
def bench() -> Iterator[Workbench]:
    load = Load(users=8, max_tokens=64, ignore_eos=True)
    with Workbench("tiny-llama", device="cuda", load=load, max_model_len=512, max_num_spec_tokens=3) as made:
        yield made


def test_it_runs_in_a_child_process_and_every_setting_is_applied_under_load(bench: Workbench) -> None:
    assert bench.place == "process" and bench.on_cuda
    for changes in SETTINGS:
        bench.wait(tokens=100)
        intent = bench.set(**changes)
        # requests went on while its graphs were captured, and all of them are there now
        assert intent.state == "applied" and not intent.lacks_graphs and bench.snapshot().capture is None
        bench.wait(tokens=100)
    until(lambda: bench.trace)
    window = bench.driver.window
    assert window is not None and window.idle is not None and window.overlap is not None
    bench.check()


@pytest.mark.parametrize("graphs", ["off", "model", "step"])
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_inspected_inputs_are_those_of_a_decode_step(bench: Workbench, graphs: str, runner: str) -> None:
    bench.set(cuda_graphs=graphs, runner=runner, queue_depth=2, sampler="softmax_race", spec_method="off")
    bench.wait(tokens=50)
    steps = bench.inspect(6).steps[-6:]
    assert [s.step for s in steps] == list(range(steps[0].step, steps[0].step + 6))
    for before, step in pairwise(steps):
        assert step.runner == runner
        ends = step.query_start_loc[1:] - 1
        assert (step.positions[ends] + 1 == step.seq_lens).all()
        place = {req_id: i for i, req_id in enumerate(before.req_ids)}
        for i, req_id in enumerate(step.req_ids):
            if req_id in place:
                assert step.seq_lens[i] == before.seq_lens[place[req_id]] + step.num_scheduled[i]


def test_both_runners_give_the_same_tokens_in_an_ab(bench: Workbench) -> None:
    result = bench.ab("V1 as it was", "V2 async", requests=8, repetitions=2, load=Load(users=1, max_tokens=24))
    same, total = result.same_tokens
    assert total == 8 and same >= 7, result.verdict()
    assert set(result.traces) == {"a", "b"}
