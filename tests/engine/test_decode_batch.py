"""Scheduling a batch of decodes once more is what looking at every request would have scheduled."""

from __future__ import annotations

import pickle
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from mrv2.engine import decode_batch
from mrv2.engine.decode_batch import DecodeBatch, ScheduledEntry, who_may_join
from mrv2.engine.grammar.backend import GrammarMatcher
from mrv2.engine.kv_cache_manager import KVCacheManager
from mrv2.engine.messages import EngineOutput, EngineRequest
from mrv2.engine.request import Request
from mrv2.engine.scheduler import Scheduler
from mrv2.engine.step_outputs import ColumnWire, EngineOutputs, TokenColumn, TokenLog
from mrv2.runner.protocol import RowSampling, SchedulerOutput, StepOutput
from mrv2.sampling_params import SamplingParams

BLOCK_SIZE = 16
# a token below it may be somebody's stop id
NUM_STOPS = 30


def make_scheduler(rng: np.random.Generator) -> Scheduler:
    max_num_seqs = int(rng.integers(1, 9))
    return Scheduler(
        KVCacheManager(
            int(rng.integers(16, 60)), BLOCK_SIZE, int(rng.integers(1, 3)), enable_prefix_caching=bool(rng.integers(2))
        ),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=int(rng.integers(max(8, max_num_seqs), 80)),
    )


class Twin:
    """A scheduler with a device that draws random tokens; `slow` looks at every request in every step."""

    def __init__(self, seed: int, slow: bool) -> None:
        self.scheduler = make_scheduler(np.random.default_rng(seed))
        if slow:
            self.scheduler._join_decodes = lambda entries: (None, 0)  # type: ignore[method-assign]
        self.flying: list[SchedulerOutput] = []
        self.num_repeated = 0
        self._last: list[str] | None = None

    def launch(self) -> SchedulerOutput | None:
        scheduled = self.scheduler.schedule()
        if scheduled is not None:
            self.flying.append(scheduled)
            self.num_repeated += scheduled.req_ids is self._last
            self._last = scheduled.req_ids
        return scheduled

    def settle(self, tokens: dict[str, int]) -> list[EngineOutput]:
        scheduled = self.flying.pop(0)
        sampled = np.array([[tokens[req_id]] for req_id in scheduled.req_ids], dtype=np.int64)
        output = StepOutput(scheduled.step, scheduled.req_ids, sampled, scheduled.yields_token.astype(np.int32))
        # one for each request at most; in which order is all the same
        return sorted(self.scheduler.update_from_output(output), key=lambda output: output.req_id)


class Counting(GrammarMatcher):
    """Allows tokens up to `limit`, and nothing behind the first multiple of `end`."""

    def __init__(self, limit: int, end: int) -> None:
        self.limit, self.end, self.tokens = limit, end, []

    def accept(self, token: int) -> bool:
        legal = 0 <= token <= self.limit and not self.terminated
        if legal:
            self.tokens.append(token)
        return legal

    def rollback(self, num_tokens: int) -> None:
        del self.tokens[len(self.tokens) - num_tokens :]

    def fill(self, bits: np.ndarray, row: int) -> None:
        raise AssertionError("no mask is asked for here")

    @property
    def terminated(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] % self.end == 0


def make_request(name: str, arrival: int, drawn: dict[str, Any]) -> Request:
    params = SamplingParams(max_tokens=drawn["max_tokens"], ignore_eos=True)
    message = EngineRequest(req_id=name, prompt_token_ids=drawn["prompt"], params=params, priority=drawn["priority"])
    request = Request(
        message=message,
        sampling=RowSampling(),
        max_tokens=drawn["max_tokens"],
        max_model_len=200,
        stop_ids=frozenset(drawn["stops"]),
        arrival=arrival,
    )
    request.grammar = Counting(*drawn["grammar"]) if "grammar" in drawn else None
    return request


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, list) and a and hasattr(a[0], "__dataclass_fields__"):
        return len(a) == len(b) and all(same_fields(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def same_fields(a: Any, b: Any) -> bool:
    return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))


@pytest.mark.parametrize("seed", range(60))
def test_both_ways_schedule_and_settle_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random arrivals, aborts, stops, errors and depths; a pool so small that some preempt."""
    if seed % 2:
        # tokens go to the requests every few steps, as in batches that live long
        monkeypatch.setattr(decode_batch, "_FIRST_KEPT", 3)
        monkeypatch.setattr(decode_batch, "_MAX_KEPT", 0)
    rng = np.random.default_rng(seed)
    depth, pace = int(rng.integers(1, 5)), float(rng.choice([0.02, 0.1, 0.4]))
    twins = Twin(seed, slow=False), Twin(seed, slow=True)
    num_added, turn = 0, 0
    while turn < 400 or any(t.scheduler.has_unfinished for t in twins):
        if turn < 400 and rng.random() < pace and len(twins[0].scheduler.requests) < 12:
            drawn = {
                "prompt": rng.integers(0, 500, int(rng.integers(1, 50))).tolist(),
                "max_tokens": int(rng.integers(1, 70)),
                "stops": rng.integers(0, NUM_STOPS, int(rng.choice([0, 0, 1, 12]))).tolist(),
                "priority": int(rng.integers(2)),
            }
            if rng.random() < 0.4:
                drawn["grammar"] = (int(rng.choice([2900, 4000])), int(rng.choice([23, 5000])))
            for twin in twins:
                twin.scheduler.add(make_request(f"r{num_added}", num_added, drawn))
            num_added += 1
        if num_added and rng.random() < 0.02:
            victim = [f"r{int(rng.integers(num_added))}"]
            fast, slow = (twin.scheduler.abort(victim) for twin in twins)
            assert same(fast, slow)
        fast, slow = (twin.launch() for twin in twins)
        assert (fast is None) == (slow is None), turn
        assert fast is None or slow is None or same_fields(fast, slow), turn
        if twins[0].flying and (fast is None or len(twins[0].flying) >= depth):
            names = twins[0].flying[0].req_ids
            drawn_tokens = rng.integers(0, 3000, len(names))
            tokens = dict(zip(names, np.where(drawn_tokens > 2995, -1, drawn_tokens).tolist(), strict=True))
            outputs = [twin.settle(tokens) for twin in twins]
            assert same(*outputs), turn
        for twin in twins:
            twin.scheduler.check()
        assert twins[0].scheduler.kv.pool.cached == twins[1].scheduler.kv.pool.cached, turn
        if rng.random() < 0.7:
            # most of the time nobody asks, and the batch counts on
            turn += 1
            continue
        for twin in twins:
            twin.scheduler.bring_up_to_date()
        books = [
            [
                (
                    r.req_id,
                    r.num_computed,
                    r.num_confirmed,
                    r.num_in_flight,
                    r.num_published_blocks,
                    r.token_ids[:],
                    getattr(r.grammar, "tokens", None),
                )
                for r in twin.scheduler.running
            ]
            for twin in twins
        ]
        assert books[0] == books[1], turn
        turn += 1
        assert turn < 4000, "not done"
    assert twins[0].scheduler.stats == twins[1].scheduler.stats
    assert twins[1].num_repeated == 0


def test_the_traffic_meets_what_it_should() -> None:
    """The twins would prove little if none preempted, stopped, or repeated a batch."""
    scheduler = Scheduler(KVCacheManager(40, BLOCK_SIZE), max_num_seqs=4, max_num_batched_tokens=64)
    twin = Twin(0, slow=False)
    twin.scheduler = scheduler
    for i in range(4):
        drawn = {"prompt": [1] * 10, "max_tokens": 60, "stops": [7], "priority": 0}
        # two of them follow a grammar, which has no end
        drawn |= {"grammar": (100, 11)} if i % 2 else {}
        scheduler.add(make_request(f"r{i}", i, drawn))
    for step in range(30):
        twin.launch()
        twin.settle({f"r{i}": 7 if step == 20 and i == 2 else 9 for i in range(4)})
    # one prefill, one look at the decodes, one more after the stop
    assert twin.num_repeated == 30 - 3
    assert [r.req_id for r in scheduler.running] == ["r0", "r1", "r3"]


def test_a_repeated_step_visits_no_request() -> None:
    """Members' own counters stand still until somebody asks: else a step would cost the host as many visits as rows."""
    scheduler = Scheduler(KVCacheManager(200, BLOCK_SIZE), max_num_seqs=8, max_num_batched_tokens=256)
    twin = Twin(0, slow=False)
    twin.scheduler = scheduler
    for i in range(8):
        drawn = {"prompt": [i + 1] * 3, "max_tokens": 60, "stops": [7], "priority": 0}
        scheduler.add(make_request(f"r{i}", i, drawn))
    tokens = {f"r{i}": 9 + i for i in range(8)}
    for _ in range(4):
        twin.launch()
        twin.settle(tokens)
    scheduler.bring_up_to_date()
    before = [(r.num_computed, r.num_known, len(r.token_ids)) for r in scheduler.running]
    for _ in range(5):
        twin.launch()
        twin.settle(tokens)
    assert twin.num_repeated >= 5
    assert [(r.num_computed, r.num_known, len(r.token_ids)) for r in scheduler.running] == before
    scheduler.check()
    scheduler.bring_up_to_date()
    after = [(r.num_computed, r.num_known, len(r.token_ids)) for r in scheduler.running]
    assert after == [tuple(n + 5 for n in each) for each in before]
    assert [r.token_ids[-5:] for r in scheduler.running] == [[9 + i] * 5 for i in range(8)]


def decoding_entry(arrival: int, **fields: Any) -> ScheduledEntry:
    request = make_request(f"r{arrival}", arrival, {"prompt": [1] * 4, "max_tokens": 9, "stops": [], "priority": 0})
    request.num_known, request.num_in_flight, request.num_computed = 6, 1, 6
    return ScheduledEntry(**({"request": request, "epoch": 0, "num_tokens": 1, "yields_token": True} | fields))


def test_who_joins_is_behind_the_members_and_computes_one_token() -> None:
    batch = DecodeBatch(8, BLOCK_SIZE)
    batch.join([decoding_entry(3)])
    entries = [decoding_entry(arrival) for arrival in (4, 6, 5, 7)]
    assert who_may_join(batch, entries, may_be_drafted=False) == entries[:2], "5 is served before 6"
    assert who_may_join(None, [decoding_entry(2), *entries], may_be_drafted=False)[1:] == entries[:2]
    assert who_may_join(batch, [decoding_entry(2)], may_be_drafted=False) == []
    for odd in ({"num_tokens": 2}, {"yields_token": False}, {"num_tokens": 2, "num_drafts": 1}):
        entries = [decoding_entry(4), decoding_entry(5, **odd), decoding_entry(6)]
        assert who_may_join(batch, entries, may_be_drafted=False) == entries[:1]
    ruled = decoding_entry(4)
    ruled.request.grammar = Counting(100, 11)
    assert who_may_join(batch, [ruled], may_be_drafted=True) == []
    assert who_may_join(batch, [ruled], may_be_drafted=False) == [ruled]


def test_an_output_of_a_column_is_as_the_constructor_makes_it() -> None:
    end = EngineOutput(req_id="b", new_token_ids=[6], step=3, finish_reason="stop", stop_reason=6)
    column = TokenColumn(["a", "b", "c"], np.array([5, 6, 7]), 3, {1: end})
    made = [
        EngineOutput(req_id="a", new_token_ids=[5], step=3),
        end,
        EngineOutput(req_id="c", new_token_ids=[7], step=3),
    ]
    assert list(column) == made and list(column.of_rows([2, 1])) == made[:0:-1]
    assert all(type(token) is int for output in column for token in output.new_token_ids)
    assert pickle.loads(pickle.dumps(list(column))) == made
    first = next(iter(column))
    first.finish_reason = "stop"
    assert next(iter(column)).finish_reason is None, "what one reader does to an output is no other's"


def test_a_log_of_columns_holds_what_its_outputs_hold() -> None:
    """Random traffic: columns of ids that go on or change, ends among them, single outputs between them."""
    rng = np.random.default_rng(0)
    log, expected, ends = TokenLog(), {}, {}
    req_ids = ["r0"]
    for step in range(200):
        outputs = EngineOutputs()
        for _ in range(int(rng.integers(3))):
            if rng.random() < 0.2:
                req_ids = [f"r{i}" for i in rng.permutation(9)[: int(rng.integers(1, 9))]]
            tokens = rng.integers(0, 50, len(req_ids))
            special = {
                row: EngineOutput(req_id=req_ids[row], new_token_ids=[int(tokens[row])], finish_reason="length")
                for row in np.flatnonzero(rng.random(len(req_ids)) < 0.02).tolist()
            }
            outputs += TokenColumn(req_ids, tokens, step, special)
        if rng.random() < 0.2:
            outputs.append(EngineOutput(req_id=f"r{rng.integers(9)}", new_token_ids=rng.integers(0, 50, 3).tolist()))
        log.take(outputs)
        for output in outputs:
            expected.setdefault(output.req_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                ends[output.req_id] = output
        if rng.random() < 0.05:
            assert log.tokens() == expected
    assert log.tokens() == expected and log.ends == ends and len(ends) > 2


def test_ids_that_go_on_pass_a_pipe_once() -> None:
    near, far = ColumnWire(), ColumnWire()
    ids, others = [f"r{i}" for i in range(400)], ["a", "b"]
    sent = []
    for step, req_ids in enumerate((ids, ids, others, ids, ids)):
        outputs = EngineOutputs([EngineOutput(req_id="x", new_token_ids=[step])])
        outputs += TokenColumn(req_ids, np.arange(len(req_ids)), step, {0: EngineOutput(req_id="r", new_token_ids=[])})
        sent.append(outputs)
    pickled = [pickle.dumps(near.pack(outputs)) for outputs in sent]
    arrived = [far.unpack(pickle.loads(data)) for data in pickled]
    assert arrived == sent, "what is packed stays what it was"
    lists = [part.req_ids for outputs in arrived for part in outputs.parts if isinstance(part, TokenColumn)]
    assert lists[0] is lists[1] and lists[3] is lists[4] and lists[2] == others
    assert len(pickled[1]) < len(pickled[0]) - len(ids) and len(pickled[4]) < len(pickled[3]) - len(ids)
