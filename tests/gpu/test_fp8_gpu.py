"""quantization="fp8" and kv_cache_dtype="fp8" on a GPU: graphs and runners agree."""

from __future__ import annotations

import pytest
import torch

from mrv2.config import Knobs
from mrv2.sampling_params import SamplingParams
from mrv2_kernels.attention.kv_write import write_kv
from mrv2_kernels.gemm import FP8
from serving import Collector, make_core, random_prompt

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("option", [{"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}], ids=str)
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3"])
def test_graphs_and_runners_say_the_same(model: str, option: dict) -> None:
    """Every level pads a batch alike, so that bfloat16 adds in the same order."""
    said = []
    for knobs in (Knobs(cuda_graphs="off"), Knobs(), Knobs(cuda_graphs="step"), Knobs(runner="v1")):
        core = make_core(model=model, device="cuda", dtype="bfloat16", knobs=knobs, max_num_seqs=12, **option)
        collector = Collector(core)
        for i in range(11):
            params = SamplingParams(temperature=0.0, max_tokens=8 + i, ignore_eos=True)
            # of one length, so that all of them decode in the same batches under every setting
            collector.submit(f"r{i}", random_prompt(i, 5), params)
        said.append({name: served.token_ids for name, served in collector.run().items()})
        core.shutdown()
    assert all(each == said[0] for each in said)


def test_graphs_captured_late_say_the_same() -> None:
    said = []
    for warm_up in ("all", "first_use"):
        for level in ("model", "step"):
            core = make_core(
                device="cuda", dtype="bfloat16", warm_up=warm_up, max_num_seqs=12, knobs=Knobs(cuda_graphs=level)
            )
            collector = Collector(core)
            for i in range(11):
                params = SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=8 + 3 * i, ignore_eos=True)
                collector.submit(f"r{i}", random_prompt(i, 5), params)
            said.append({name: served.token_ids for name, served in collector.run().items()})
            assert core.executor.runner.stats.num_graph_replays > 10  # type: ignore[attr-defined]
            core.shutdown()
    assert all(each == said[0] for each in said)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_cache_rounds_as_the_reference_does(dtype: torch.dtype) -> None:
    """To the nearest number of the format, small and large ones included."""
    sizes = torch.logspace(-4, 4, 64, device="cuda")[:, None, None]
    k, v = (torch.randn(64, 8, 128, device="cuda").mul(sizes).to(dtype) for _ in range(2))
    slots = torch.randperm(80, device="cuda")[:64].int() - 1
    written = []
    for twin in (write_kv.triton, write_kv.torch):
        caches = torch.zeros(2, 5, 16, 8, 128, device="cuda").to(FP8)
        twin(k, v, caches[0], caches[1], slots)
        written.append(caches.view(torch.uint8))
    assert torch.equal(*written)
