"""What a decode step costs the host, counted in executed bytecodes: what changes in it, and no visit to every request.

Times depend on the machine; what the interpreter executes does not.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from mrv2.config import Knobs
from mrv2.engine.core import EngineCore
from mrv2.engine.output_processor import OutputProcessor
from mrv2.engine.step_outputs import EngineOutputs, TokenLog
from mrv2.outputs import RequestOutput
from mrv2.sampling_params import RequestOutputKind, SamplingParams
from serving import BLOCK_SIZE, make_core, random_prompt

FEW, MANY = 4, 64
MAX_TOKENS = 4 * BLOCK_SIZE
# of a row whose block is full: the next block taken, written to the block table, and the full one published
CODES_A_BLOCK = 400
# of a request in a step with another batch than the one before: its row, its place in the front end
CODES_A_NAME = 30


def count_codes(call: Callable[[], Any]) -> tuple[int, Any]:
    """Return how many bytecodes this thread executes in `call`, and its result."""
    count = 0

    def trace(frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    # what a collection would finalize is no part of the call
    gc.disable()
    sys.settrace(trace)
    try:
        result = call()
    finally:
        sys.settrace(before)
        gc.enable()
    return count, result


def serve(num_requests: int, knobs: Knobs) -> tuple[EngineCore, OutputProcessor]:
    """Return an engine in which so many requests of one length decode, and a front end that waits for their ends."""
    core = make_core(
        max_num_seqs=MANY,
        max_num_batched_tokens=1024,
        num_gpu_blocks=512,
        debug_checks=False,
        dtype="float32",
        warm_up="first_use",
        knobs=knobs,
    )
    processor = OutputProcessor(None)
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, seed=0, output_kind=RequestOutputKind.FINAL_ONLY)
    for index in range(num_requests):
        prompt = random_prompt(index, 10)
        for message in processor.add_request(f"r{index}", None, prompt, params):
            core.add_request(message)
    return core, processor


def codes_of_steps(num_requests: int, knobs: Knobs) -> tuple[list[int], list[int], list[int]]:
    """Return the bytecodes of 16 decode steps, with the first and the last of which blocks fill up, by who ran them.

    The engine; a front end that shows the end alone; a log of tokens.
    """
    core, processor = serve(num_requests, knobs)
    log = TokenLog()
    while core.scheduler.step < 2 * BLOCK_SIZE:
        outputs = core.step()
        processor.process(outputs), log.take(outputs)
    found: tuple[list[int], list[int], list[int]] = [], [], []
    for _ in range(BLOCK_SIZE):
        codes, outputs = count_codes(core.step)
        assert isinstance(outputs, EngineOutputs) and len(outputs) == num_requests
        found[0].append(codes)
        found[1].append(count_codes(lambda outputs=outputs: processor.process(outputs))[0])
        found[2].append(count_codes(lambda outputs=outputs: log.take(outputs))[0])
    ended: list[RequestOutput] = []
    while core.has_unfinished:
        outputs = core.step()
        ended += processor.process(outputs).outputs
        log.take(outputs)
    core.shutdown()
    assert len(ended) == num_requests and all(len(end.outputs[0].token_ids) == MAX_TOKENS for end in ended)
    assert {end.request_id: end.outputs[0].token_ids for end in ended} == log.tokens()
    return found


@pytest.mark.parametrize(
    "knobs",
    [Knobs(cuda_graphs="step"), Knobs(cuda_graphs="off"), Knobs(async_scheduling=False)],
    ids=["graphs", "eager", "sync"],
)
def test_a_decode_step_executes_no_code_for_each_request(knobs: Knobs) -> None:
    few, many = codes_of_steps(FEW, knobs), codes_of_steps(MANY, knobs)
    # nobody's block fills up: as much code, whatever the batch, but for what a wait happens to take
    assert sorted(many[0])[: BLOCK_SIZE // 2] == pytest.approx(sorted(few[0])[: BLOCK_SIZE // 2], rel=0.02)
    assert many[1] == few[1] and many[2] == few[2]
    # with everybody's: for each block what a block takes
    num_filled = MANY - FEW
    assert sum(many[0]) - sum(few[0]) < CODES_A_BLOCK * num_filled


def codes_of_traffic(num_requests: int) -> list[int]:
    """Return the bytecodes of 16 steps, engine and front end; in every fourth one request ends and one arrives."""
    core, processor = serve(num_requests, Knobs(cuda_graphs="step"))
    num_events = BLOCK_SIZE // 4

    def add(name: str, max_tokens: int) -> None:
        params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, seed=0, output_kind=RequestOutputKind.FINAL_ONLY
        )
        for message in processor.add_request(name, None, random_prompt(0, 10), params):
            core.add_request(message)

    for event in range(num_events):
        add(f"short{event}", 2 * BLOCK_SIZE + 4 * event)
    while core.scheduler.step < 2 * BLOCK_SIZE:
        processor.process(core.step())
    codes, num_ended = [], 0
    for step in range(BLOCK_SIZE):
        if step % 4 == 2:
            add(f"late{step}", MAX_TOKENS)
        count, done = count_codes(lambda: processor.process(core.step()))
        codes.append(count)
        num_ended += len(done.outputs)
    assert num_ended == num_events and not core.scheduler.waiting
    processor.abort(list(core.scheduler.requests))
    core.abort(list(core.scheduler.requests))
    while core.has_unfinished:
        core.step()
    core.shutdown()
    return codes


def test_an_end_or_an_arrival_is_no_visit_to_every_request() -> None:
    """Who is in the batch is written down anew, a few codes a request; a visit to each would take hundreds."""
    few, many = sum(codes_of_traffic(FEW)), sum(codes_of_traffic(MANY - BLOCK_SIZE // 2))
    num_more = MANY - BLOCK_SIZE // 2 - FEW
    assert many - few < (CODES_A_BLOCK + CODES_A_NAME * BLOCK_SIZE) * num_more


def test_more_code_for_more_requests_would_be_seen() -> None:
    """The law above proves little if the counter counts nothing."""
    few, many = (count_codes(lambda n=n: [str(i) for i in range(n)])[0] for n in (FEW, MANY))
    assert many - few > MANY - FEW and few > FEW
