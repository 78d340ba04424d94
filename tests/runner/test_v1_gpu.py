"""On a GPU too the V1-style runner gives the tokens of V2, eagerly and through graphs, with its named waits only."""

from __future__ import annotations

import pytest
import torch

from mrv2.config import Knobs
from mrv2.instrument.sync_guard import no_sync
from mrv2.sampling_params import SamplingParams
from serving import Collector, make_core, random_prompt, serve

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OPTIONS: dict[str, object] = dict(device="cuda", dtype="float32", max_num_seqs=8)


def requests() -> dict[str, tuple[list[int], SamplingParams]]:
    """Return requests of mixed lengths, with and without sampling features."""
    return {
        f"r{i}": (
            random_prompt(i, 1 + 13 * i),
            SamplingParams(
                temperature=0.5 * (i % 3),
                top_k=20 * (i % 2),
                top_p=0.9 if i % 4 == 3 else 1.0,
                seed=i,
                max_tokens=6 + 2 * i,
                ignore_eos=True,
            ),
        )
        for i in range(8)
    }


@pytest.mark.parametrize("cuda_graphs", ["off", "model"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_tokens_are_those_of_v2(async_scheduling: bool, cuda_graphs: str) -> None:
    tokens = {}
    for runner in ("v1", "v2"):
        knobs = Knobs(runner=runner, async_scheduling=async_scheduling, cuda_graphs=cuda_graphs)  # type: ignore[arg-type]
        served = serve(make_core(knobs=knobs, **OPTIONS), requests())
        tokens[runner] = {req_id: one.token_ids for req_id, one in served.items()}
    assert tokens["v1"] == tokens["v2"]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_no_wait_goes_unnamed(async_scheduling: bool) -> None:
    core = make_core(knobs=Knobs(runner="v1", async_scheduling=async_scheduling), **OPTIONS)
    # the first round allocates and compiles what start-up did not
    for round_ in range(2):
        collector = Collector(core)
        for req_id, (prompt, params) in requests().items():
            collector.submit(f"{round_}-{req_id}", prompt, params)
        if round_ == 0:
            collector.run()
        else:
            with no_sync():
                collector.run()
    core.shutdown()
