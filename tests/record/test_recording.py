"""record(): one interface, whatever records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mrv2.config import EngineConfig
from mrv2.engine.client import InprocClient
from mrv2.engine.connect import make_client
from mrv2.engine.core import EngineCore
from mrv2.engine.messages import EngineRequest
from mrv2.engine.recording import StepLimit
from mrv2.errors import ConfigError, MRV2Error
from mrv2.instrument import context, no_sync, stage, stages
from mrv2.llm import LLM
from mrv2.record import RecordError, record
from mrv2.record.kernels import unpack_stages
from mrv2.sampling_params import SamplingParams
from mrv2.trace import Trace, load
from record.engines import OPTIONS, drain, running_core

LEVELS = ("stages", "kernels")
HOST_STAGES = {stages.SCHEDULE, stages.EXECUTE_MODEL, stages.SAMPLE_TOKENS, stages.WAIT_OUTPUT}


@pytest.fixture
def core() -> Iterator[EngineCore]:
    with running_core() as core:
        yield core


def own_ranges(trace: Trace) -> list[tuple[str, int]]:
    """Return (name, step) of the ranges of this package's domain."""
    mine = trace.ranges.take(trace.ranges.domain == trace.string_id("mrv2"))
    return list(zip(trace.name_of(mine.name), mine.step.tolist(), strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_steps_limit_stops_by_itself(core: EngineCore, level: str) -> None:
    first = core.scheduler.step
    with record(steps=5, level=level, core=core) as rec:  # type: ignore[arg-type]
        assert drain(core) > 10
    found = own_ranges(rec.trace())
    assert {name for name, _ in found} >= HOST_STAGES
    assert [step for name, step in found if name == stages.SCHEDULE] == list(range(first, first + 5))
    assert "step" not in core.__dict__ and context.recorder is None


@pytest.mark.parametrize("level", LEVELS)
def test_meta_says_what_was_recorded(core: EngineCore, level: str) -> None:
    with record(level=level, core=core) as rec:  # type: ignore[arg-type]
        core.step()
    meta = rec.trace().meta
    assert meta["level"] == level and meta["knobs"] == core.knobs.as_dict()
    assert meta["config"]["model"] == "tiny-llama" and "knobs" not in meta["config"]
    assert meta["versions"]["torch"] and meta["command"] and "path" not in meta


def test_stages_hold_the_device_lane_and_its_steps(core: EngineCore) -> None:
    with record(steps=4, core=core) as rec:
        drain(core)
    trace = rec.trace()
    forwards = trace.ops.take(trace.ops.name == trace.string_id(stages.FORWARD))
    # the work of every recorded step is there to its end, though the recording stopped while it ran
    assert np.diff(forwards.step).tolist() == [1, 1, 1]
    assert "wait: end of recording" not in trace.strings


def test_recording_changes_no_token() -> None:
    found = []
    for level in (None, *LEVELS):
        with running_core() as core:
            tokens: dict[str, list[int]] = {}
            with record(steps=6, level=level, core=core) if level else stage("nothing"):  # type: ignore[arg-type]
                while core.has_unfinished:
                    for output in core.step():
                        tokens.setdefault(output.req_id, []).extend(output.new_token_ids)
            found.append(tokens)
    assert found[0] == found[1] == found[2]


def test_kernels_see_operators_of_the_stream_threads_inside_their_stages(core: EngineCore) -> None:
    with record(steps=3, level="kernels", core=core) as rec:
        drain(core)
    trace = rec.trace()
    ranges = trace.ranges
    forward = ranges.take(ranges.name == trace.string_id(stages.FORWARD))
    assert set(trace.name_of(forward.category)) == {"device stage"}
    inside = (
        (ranges.domain == trace.string_id("cpu_op"))
        & (ranges.thread == forward.thread[0])
        & (ranges.start >= forward.start[0])
        & (ranges.end <= forward.end[0])
    )
    assert inside.sum() > 20, "the operators of the forward pass were not recorded"
    assert len(trace.waits) and "host" in trace.diagnostics[-1]
    # without a GPU nothing is said about one
    assert not trace.coverage.has("ops")


def test_an_unfinished_or_used_recording_says_so(core: EngineCore) -> None:
    rec = record(core=core)
    with pytest.raises(RecordError, match="has not begun"):
        rec.trace()
    with rec:
        with pytest.raises(RecordError, match="leave the block"):
            rec.trace()
        core.step()
    assert rec.trace() is rec.trace()
    with pytest.raises(RecordError, match="used once"):
        rec.start()


def test_a_block_without_a_step_is_an_error(core: EngineCore) -> None:
    with pytest.raises(RecordError, match="no step of the engine ran"), record(core=core):
        pass
    # an error inside the block is the one to see
    with pytest.raises(KeyError, match="mine"), record(core=core):
        raise KeyError("mine")
    assert context.recorder is None


def test_two_recordings_at_once_are_refused(core: EngineCore) -> None:
    with record(core=core):
        with pytest.raises(MRV2Error, match="already running"), record(steps=3, core=core):
            pass
        assert "step" not in core.__dict__
        core.step()
    with record(level="kernels", core=core):
        with pytest.raises(RecordError, match="profiler is running already"), record(level="kernels", core=core):
            pass
        core.step()


def test_bad_arguments(core: EngineCore) -> None:
    with pytest.raises(ConfigError, match="level='kernel'; did you mean 'kernels'"):
        record(level="kernel", core=core)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="steps=0"):
        record(steps=0, core=core)
    with pytest.raises(ConfigError, match=r"core=..., device=...\): give one of them"):
        record(core=core, device=core.device)
    with pytest.raises(ConfigError, match="with_stack=True needs level='kernels'"):
        record(with_stack=True, core=core)
    for level in LEVELS:
        with pytest.raises(RecordError, match="steps needs an engine"):
            record(steps=3, level=level)  # type: ignore[arg-type]


def test_without_an_engine_the_process_or_a_device_is_recorded(core: EngineCore) -> None:
    with record() as rec, stage("mine", step=7):
        pass
    assert own_ranges(rec.trace()) == [("mine", 7)] and not rec.trace().coverage.has("ops")
    with record(device=core.device) as rec:
        core.step()
    assert len(rec.trace().ops)


def test_recording_stops_inside_a_sync_guard(core: EngineCore) -> None:
    with no_sync(), record(steps=2, core=core) as rec:
        for _ in range(4):
            core.step()
    assert own_ranges(rec.trace())


def test_step_limit_is_transparent() -> None:
    class Loop:
        turns = 0

        def step(self) -> int:
            self.turns += 1
            return self.turns

    loop, called = Loop(), []
    limit = StepLimit(loop, 2, lambda: called.append(loop.turns))
    assert [loop.step() for _ in range(4)] == [1, 2, 3, 4]
    assert called == [2] and limit.num_steps == 2
    limit = StepLimit(loop, 2, lambda: called.append(-1))
    limit.remove()
    loop.step()
    loop.step()
    assert called == [2] and "step" not in loop.__dict__
    with pytest.raises(ConfigError, match="steps=0"):
        StepLimit(loop, 0, lambda: None)


def test_files(core: EngineCore, tmp_path: Path) -> None:
    with record(steps=3, level="kernels", core=core) as rec:
        drain(core)
    ranges = own_ranges(rec.trace())
    for name in ("a.npz", "a.json", "sub/a.json.gz"):
        path = rec.save(tmp_path / name)
        again = load(path, cache=False)
        assert own_ranges(again) == ranges, f"{name} lost or changed ranges"
        assert again.meta["knobs"] == core.knobs.as_dict() and again.meta["versions"]["torch"]
    assert "host_name" not in (tmp_path / "a.json").read_text()
    with pytest.raises(RecordError, match=r"saved as .json, .json.gz, .npz or a folder"):
        rec.save(tmp_path / "a.sqlite")


def test_stage_events_are_unpacked_without_touching_a_digit() -> None:
    text = (
        '{"traceEvents": [\n  {\n    "ph": "X", "cat": "user_annotation", "name": "mrv2:device:-1:v1: sample",\n'
        '    "ts": 5107190017934.9400001, "dur": 1.250,\n    "args": {\n      "External id": 1\n    }\n  },\n'
        '  {"ph": "X", "name": "mrv2:wait:3:wait: output", "args": {}}, {"name": "aten::mm", "args": {}}]}'
    )
    found = unpack_stages(text)
    assert '"ts": 5107190017934.9400001, "dur": 1.250' in found
    assert '"name": "v1: sample"' in found and '"category": "device stage", "step": -1, "External id": 1' in found
    assert '"name": "wait: output", "args": {"domain": "mrv2", "category": "wait", "step": 3}}' in found
    assert found.endswith('{"name": "aten::mm", "args": {}}]}')


def submit(client: object) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    client.submit([EngineRequest(req_id="a", prompt_token_ids=[1, 2, 3], params=params)])  # type: ignore[attr-defined]


@pytest.mark.parametrize("place", ["inproc", "thread"])
def test_stages_through_a_client(place: str) -> None:
    config = EngineConfig(model="tiny-llama", device="host", **OPTIONS)  # type: ignore[arg-type]
    with make_client(config, place) as client:
        with record(steps=4, engine=client) as rec:
            submit(client)
            tokens = 0
            while tokens < 20:
                tokens += sum(len(output.new_token_ids) for output in client.poll(5.0))
        trace = rec.trace()
        schedules = [step for name, step in own_ranges(trace) if name == stages.SCHEDULE]
        assert schedules == list(range(schedules[0], schedules[0] + 4))
        assert len(trace.ops) and trace.meta["knobs"]["runner"] == "v2"
        if place == "inproc":
            assert isinstance(client, InprocClient) and client.core.steps_in_flight == 0
        else:
            with pytest.raises(RecordError, match="cannot count the steps of an engine on a thread of its own"):
                record(steps=4, level="kernels", engine=client)


class _Elsewhere:
    """A client whose engine is in another process."""


def test_kernels_of_another_process_are_refused() -> None:
    for level in ("kernels", "nsight"):
        with pytest.raises(RecordError, match=f"level='{level}' records this process, and the engine runs in another"):
            record(level=level, engine=_Elsewhere())  # type: ignore[arg-type]


def test_llm_record() -> None:
    with LLM("tiny-llama", device="host", **OPTIONS) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        with llm.record(steps=4) as rec:
            llm.generate([[1, 2, 3]], params, use_tqdm=False)
        assert sum(name == stages.SCHEDULE for name, _ in own_ranges(rec.trace())) == 4
        with llm.record(level="kernels") as rec:
            llm.generate([[1, 2, 3]], params, use_tqdm=False)
        assert stages.PROCESS_OUTPUTS in {name for name, _ in own_ranges(rec.trace())}
        # the plain switch
        assert llm.record(True) == []
        llm.generate([[1, 2, 3]], params, use_tqdm=False)
        assert {"host", "device"} <= {span.kind for span in llm.record(False)}
        with pytest.raises(ConfigError, match="takes neither steps nor level"):
            llm.record(True, steps=3)  # type: ignore[call-overload]
