"""record() on a GPU: what the torch profiler delivers there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mrv2.config import EngineConfig
from mrv2.engine.core import EngineCore
from mrv2.instrument import stages
from mrv2.record import record
from mrv2.trace import OpKind
from mrv2.trace.analysis import Analysis
from record.engines import OPTIONS, add_requests, drain

pytestmark = pytest.mark.gpu


@pytest.fixture
def core() -> Iterator[EngineCore]:
    core = EngineCore(EngineConfig(model="tiny-llama", device="cuda", dtype="bfloat16", **OPTIONS))  # type: ignore[arg-type]
    add_requests(core)
    for _ in range(6):
        core.step()
    yield core
    core.shutdown()


def test_stages(core: EngineCore) -> None:
    with record(steps=8, core=core) as rec:
        drain(core)
    trace = rec.trace()
    assert trace.meta["gpu_name"] and (trace.ops.kind == OpKind.STAGE).all()
    assert len(trace.ops.take(trace.ops.name == trace.string_id(stages.FORWARD))) == 8


def test_kernels(core: EngineCore) -> None:
    with record(steps=8, level="kernels", core=core) as rec:
        drain(core)
    trace = rec.trace()
    analysis = Analysis(trace)
    assert (trace.ops.kind == OpKind.KERNEL).sum() > 8 * 5
    assert analysis.join.has_call.mean() > 0.95, "kernels lost their calls"
    assert len(analysis.windows) == 8 and len(trace.waits)
    overview = analysis.overview()
    assert overview.overlap_cpu is not None and overview.causes is not None
    syncs = analysis.syncs()
    assert syncs is not None and set(syncs.in_steps.reason) <= {"output"}
