"""The invariants of the scheduler, as equations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mrv2.engine.decode_batch import ScheduledEntry
from mrv2.engine.request import RequestStatus

if TYPE_CHECKING:
    from mrv2.engine.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    """Assert the equations that hold between two calls of a scheduler."""
    assert len(scheduler.running) <= scheduler.max_num_seqs, "more running requests than rows"
    scheduler.kv.check(scheduler.running)
    # what the batch of decodes counts for its members: steps that their own counters do not show
    batch = scheduler.decodes
    pending = {r: batch.pending(row) for row, r in enumerate(batch.requests)} if batch is not None else {}
    if batch is not None:
        assert batch.members == set(batch.requests) <= set(scheduler.running), "a member of the batch does not run"
        keys = [r.key for r in batch.requests]
        assert keys == sorted(keys), "the members of the batch are not in order of service"
        assert batch.req_ids == [r.req_id for r in batch.requests], "ids and members of the batch differ"
    flying: dict[int, list[ScheduledEntry]] = {}
    for record in scheduler.in_flight:
        for _, entry in record.shares():
            flying.setdefault(id(entry.request), []).append(entry)
    for r in scheduler.requests.values():
        mine = flying.get(id(r), [])
        current = [e for e in mine if e.epoch == r.epoch]
        stale = [e for e in mine if e.epoch != r.epoch]
        launched, settled = pending.get(r, (0, 0))
        num_computed, num_confirmed = r.num_computed + launched, r.num_confirmed + settled
        num_in_flight, num_outputs = r.num_in_flight + launched - settled, r.num_outputs + settled
        assert len(r.token_ids) == r.num_known, f"{r.req_id}: {len(r.token_ids)} tokens, {r.num_known} counted"
        assert num_in_flight == sum(e.yields_token for e in current), f"{r.req_id}: steps in flight"
        assert r.num_drafts_in_flight == sum(e.num_drafts for e in current), f"{r.req_id}: drafts in flight"
        assert r.num_stale == sum(e.yields_token for e in stale), f"{r.req_id}: stale steps"
        assert num_computed - num_confirmed == sum(e.num_tokens for e in current), (
            f"{r.req_id}: computed {num_computed} - confirmed {num_confirmed} != tokens in flight"
        )
        assert num_computed <= r.capacity or not r.block_ids, (
            f"{r.req_id}: {num_computed} tokens, room for {r.capacity}"
        )
        num_ahead = r.prompt_len + num_outputs + num_in_flight + r.num_drafts_in_flight
        assert 0 <= num_confirmed <= num_computed <= num_ahead, f"{r.req_id}: progress out of order"
        assert num_outputs + num_in_flight + r.num_stale <= r.max_tokens, f"{r.req_id}: too many tokens"
        waiting = r.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        assert waiting == (r in scheduler.waiting), f"{r.req_id}: {r.status} but in the wrong queue"
        assert (r.status is RequestStatus.RUNNING) == (r in scheduler.running), f"{r.req_id}: {r.status}, wrong queue"
        assert not (waiting and any(r.block_ids)), f"{r.req_id}: waits but holds blocks"
        assert not (waiting and r.has_row and r.req_id not in scheduler.rows_to_free), (
            f"{r.req_id}: waits but keeps a row"
        )
