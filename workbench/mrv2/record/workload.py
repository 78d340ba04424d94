"""A named workload, recorded in its steady state."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from mrv2.bench.workloads import Workload
from mrv2.engine.core import EngineCore
from mrv2.engine.messages import EngineRequest
from mrv2.errors import ConfigError
from mrv2.instrument import stage, stages
from mrv2.record.backend import Level
from mrv2.record.recording import Recording, record
from mrv2.sampling_params import SamplingParams

_ARRIVAL_OUTPUT_LEN = 4


@dataclass(frozen=True)
class Window:
    """Which part of a workload's run is recorded, in turns of the engine's loop."""

    steps: int = 30
    # turns before it: prefill, and the first decodes
    skip: int = 30
    # a prompt of `arrival_len` tokens joins every so many recorded turns; 0 = none
    arrive_every: int = 0
    arrival_len: int = 200

    def __post_init__(self) -> None:
        if self.steps < 1 or self.skip < 0 or self.arrive_every < 0 or self.arrival_len < 1:
            raise ConfigError(
                f"steps={self.steps} and arrival_len={self.arrival_len} must be at least 1, skip={self.skip} and "
                f"arrive_every={self.arrive_every} at least 0"
            )

    def longest(self, workload: Workload) -> int:
        """Return the tokens of the longest request, prompt and output together."""
        arrival = self.arrival_len + _ARRIVAL_OUTPUT_LEN if self.arrive_every else 0
        return max(workload.longest, arrival)


def record_workload(
    core: EngineCore, workload: Workload, window: Window, *, level: Level = "stages", with_stack: bool = False
) -> tuple[Recording, int]:
    """Run the window once to warm up and once under a recorder; return the recording and its number of turns.

    The number is below ``window.steps`` if the workload ends before; then make it longer or skip less.
    Raises `RecordError` if the capture fails, `ConfigError` if the workload ends before the window begins.
    """
    recording = record(level=level, core=core, with_stack=with_stack)
    _run(core, workload, window, None)
    num_steps = _run(core, workload, window, recording)
    recording.annotate(workload=workload.name, num_steps=num_steps)
    return recording, num_steps


def _run(core: EngineCore, workload: Workload, window: Window, recording: Recording | None) -> int:
    """Serve `workload` up to the end of the window, then drop it; return the turns inside the window."""
    core.kv.pool.forget_all()
    for message in workload.engine_requests():
        core.add_request(message)
    for _ in range(window.skip):
        _turn(core)
    if not core.has_unfinished:
        raise ConfigError(
            f"workload {workload.name} ends within the {window.skip} steps that are skipped; skip fewer, or take a "
            "longer workload"
        )
    arrivals = _arrivals(window, core.executor.vocab_size)
    num_steps = 0
    if recording is not None:
        recording.start()
    while num_steps < window.steps and core.has_unfinished:
        if window.arrive_every and num_steps % window.arrive_every == window.arrive_every // 2:
            core.add_request(next(arrivals))
        _turn(core)
        num_steps += 1
    if recording is not None:
        recording.stop()
    core.abort(list(core.scheduler.requests))
    while core.has_unfinished:
        core.step()
    return num_steps


def _turn(core: EngineCore) -> int:
    """Step once, and take note of the outputs as a front end does; return the number of new tokens."""
    outputs = core.step()
    with stage(stages.PROCESS_OUTPUTS):
        return sum(len(output.new_token_ids) for output in outputs)


def _arrivals(window: Window, vocab_size: int) -> Iterator[EngineRequest]:
    """Yield prompts of their own, so that none is found in the prefix cache."""
    rng = random.Random(1)
    params = SamplingParams(temperature=0.0, max_tokens=_ARRIVAL_OUTPUT_LEN, ignore_eos=True, detokenize=False)
    number = 0
    while True:
        prompt = [rng.randrange(vocab_size) for _ in range(window.arrival_len)]
        yield EngineRequest(req_id=f"arrival-{number}", prompt_token_ids=prompt, params=params)
        number += 1
