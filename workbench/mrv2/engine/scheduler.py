"""Decides, step by step, which tokens of which requests are computed.

Nothing here waits for the device: progress is counted at launch (`num_computed`), tokens that a
launched step will yield are counted as in flight, and both are settled when the output arrives.

    schedule(n)   computed += scheduled tokens;  in_flight += 1 if the step yields a token
    output(n)     confirmed += scheduled tokens; in_flight -= 1; the token becomes known
    preempt       computed = 0; in flight -> stale (delivered later, settled against nothing)

With k drafts a step schedules 1 + k tokens and yields s of 1 .. 1 + k.  Until its output arrives all
1 + k count as computed and as ahead; then the 1 + k - s rejected ones leave both.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator

from mrv2.engine.adaptive_drafts import AdaptiveDrafts
from mrv2.engine.decode_batch import DecodeBatch, ScheduledEntry, StepRecord, StepRows, who_may_join
from mrv2.engine.kv_cache_manager import KVCacheManager
from mrv2.engine.logprob_rows import token_logprob
from mrv2.engine.messages import EngineOutput, FinishReason
from mrv2.engine.request import Request, RequestStatus
from mrv2.engine.scheduler_check import check_scheduler
from mrv2.engine.scheduler_stats import SchedulerStats
from mrv2.engine.step_outputs import EngineOutputs, TokenColumn
from mrv2.runner.protocol import NewRequest, SchedulerOutput, StepOutput


class Scheduler:
    """Token budget, chunked prefill, mixed batches, prefix caching, preemption by recompute."""

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
    ) -> None:
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enable_chunked_prefill = enable_chunked_prefill
        self.max_chunk = long_prefill_token_threshold or max_num_batched_tokens
        # prompt tokens of a step in which some request decodes; 0 = the budget alone limits them
        self.prefill_chunk = 0
        # both in order of service (`Request.key`)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.in_flight: deque[StepRecord] = deque()
        # drafts that each decoding request gets in a step
        self.num_spec_tokens = 0
        # most drafts that a request gets from its grammar
        self.num_forced_tokens = 0
        # None = all of them in every step
        self.adaptive: AdaptiveDrafts | None = None
        # drafts for the step behind the one that is being scheduled
        self._num_next_drafts = 0
        self.stats = SchedulerStats()
        self.step = 0
        # requests whose rows the runner gives up with the next step
        self.rows_to_free: list[str] = []
        # the running requests that only decode, as far as they count together
        self.decodes: DecodeBatch | None = None

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def add(self, request: Request) -> None:
        """Queue a request; the caller has checked that it can be served at all."""
        assert request.req_id not in self.requests, f"request id {request.req_id} is in use"
        self.requests[request.req_id] = request
        insort(self.waiting, request, key=lambda r: r.key)

    def abort(self, req_ids: Iterable[str]) -> list[EngineOutput]:
        """End requests in any state; unknown and finished ids are ignored."""
        outputs = []
        for req_id in req_ids:
            request = self.requests.get(req_id)
            if request is not None:
                self._finish(request, "abort")
                outputs.append(EngineOutput(req_id=req_id, new_token_ids=[], finish_reason="abort"))
        return outputs

    def schedule(self) -> SchedulerOutput | None:
        """Launchable work for one step, or None if nothing can run now."""
        others = self._beside_decodes()
        new_block_ids: dict[str, tuple[list[int], ...]] = {}
        batch = self.decodes
        if batch is not None:
            new_block_ids = self.kv.add_block(batch.without_room(batch.full_after(batch.num_launched - 1)))
            if not others and not (self.waiting and len(self.running) < self.max_num_seqs):
                return self._launch([], [], new_block_ids)
        return self._schedule_one_by_one(others, new_block_ids)

    def _beside_decodes(self) -> list[Request]:
        """Return the running requests to look at: those that have work beside the batch of decodes, if it goes on."""
        batch = self.decodes
        if batch is not None:
            batch.leave(batch.rows_at_end(), self.in_flight)
        if batch is None or not self._may_go_on(batch):
            self.leave_decodes()
            return self.running.copy()
        if len(self.running) == len(batch.requests):
            return []
        others = [r for r in self.running if r not in batch.members and r.has_work]
        if others and others[0].key < batch.requests[-1].key:
            self.leave_decodes()
            return self.running.copy()
        return others

    def _may_go_on(self, batch: DecodeBatch) -> bool:
        """Say whether every member can compute one more token; nobody drafts behind a member's token."""
        if not batch.requests or self.num_spec_tokens or self.kv.filling:
            return False
        return len(batch.full_after(batch.num_launched - 1)) * self.kv.num_groups <= self.kv.pool.num_free

    def _schedule_one_by_one(
        self, others: list[Request], new_block_ids: dict[str, tuple[list[int], ...]]
    ) -> SchedulerOutput | None:
        """Look at the running requests beside the batch of decodes, then at those that wait."""
        entries: list[ScheduledEntry] = []
        new_requests: list[NewRequest] = []
        prompt_room, batch = self.max_num_batched_tokens, self.decodes
        budget = prompt_room - (len(batch.requests) if batch is not None else 0)
        if self.prefill_chunk and (batch is not None or any(r.num_ahead - r.num_computed == 1 for r in others)):
            prompt_room = min(prompt_room, self.prefill_chunk)
        most = self.num_spec_tokens
        self._num_next_drafts = self.adaptive.choose(most) if self.adaptive is not None and most else most
        preempted, num_preemptions = False, self.stats.num_preemptions

        for request in others:
            if budget <= 0:
                break
            num_expected = request.num_known + request.num_in_flight
            num_tokens = num_expected + request.num_drafts_in_flight - request.num_computed
            # `has_work`, written out; a request further ahead may just have been preempted
            if num_tokens <= 0 or num_expected >= request.max_len or request.status is not RequestStatus.RUNNING:
                continue
            num_drafts = 0
            if num_tokens > 1:
                num_tokens = min(num_tokens, budget, prompt_room, self.max_chunk)
                if not num_tokens:
                    continue
                prompt_room -= num_tokens
            else:
                # drafts that may have been accepted fill the request: what it needs next is known later
                if request.num_computed + 1 >= request.max_len and request.num_drafts_in_flight:
                    continue
                num_drafts = self._num_drafts(request, budget)
                num_tokens += num_drafts
            added = None
            if self.kv.tokens_wanted(request, request.num_computed + num_tokens) > request.capacity:
                added = self._grow_or_preempt(request, request.num_computed + num_tokens)
                if added is None:
                    preempted = True
                    break
            budget -= num_tokens
            if not request.has_row:
                new_requests.append(self._new_row(request))
            elif added is not None:
                new_block_ids[request.req_id] = added
            entries.append(self._entry(request, num_tokens, num_drafts))
        preempted = preempted or self.stats.num_preemptions > num_preemptions

        index = 0
        while index < len(self.waiting) and self._may_admit(min(budget, prompt_room), preempted):
            request = self.waiting[index]
            if request.grammar_ticket is not None:
                # others may pass a request whose grammar is still compiling
                index += 1
                continue
            if request.num_stale:
                break
            admitted = self._admit(request, min(budget, prompt_room))
            if not admitted:
                break
            budget -= admitted
            prompt_room -= admitted
            new_requests.append(self._new_row(request))
            entries.append(self._entry(request, admitted))

        if not entries and batch is None:
            return None
        return self._launch(entries, new_requests, new_block_ids)

    def _may_admit(self, room: int, preempted: bool) -> bool:
        return room > 0 and len(self.running) < self.max_num_seqs and not preempted

    def grammar_rows(self) -> list[tuple[int, Request]]:
        """Return the requests of the newest step that follow a grammar and yield a token, with their batch rows."""
        record = self.in_flight[-1]
        rows = [(row, e.request) for row, e in record.singles if e.request.grammar is not None and e.yields_token]
        if record.batch is not None:
            rows = [(row, record.batch.requests[row]) for row in record.batch.grammar_rows] + rows
        return rows

    def fail(self, request: Request, reason: str) -> EngineOutput:
        """End a request in any state with an error."""
        self._finish(request, "error")
        return EngineOutput(req_id=request.req_id, new_token_ids=[], finish_reason="error", stop_reason=reason)

    def update_from_output(self, output: StepOutput) -> EngineOutputs:
        """Settle the oldest step in flight with its output; return what to tell the front end."""
        record = self.in_flight.popleft()
        assert record.step == output.step, f"output of step {output.step} arrived for step {record.step}"
        column, watched = self._settle_decodes(record, output)
        results, singles, others = EngineOutputs(column), record.singles, []
        if watched or not record.in_place:
            singles = sorted([*singles, *((at, entry) for at, (_, entry) in watched.items())], key=lambda each: each[0])
        for at, result in self._settle_singles(singles, output) if singles else ():
            if at in watched:
                column.special[watched[at][0]] = result
            else:
                others.append(result)
        results += others
        return results

    def _settle_decodes(
        self, record: StepRecord, output: StepOutput
    ) -> tuple[TokenColumn, dict[int, tuple[int, ScheduledEntry]]]:
        """Settle the members' part of a step; return their tokens, and the members that need a closer look.

        These by their rows in the step: rows in the column, and shares.
        """
        batch, num_rows = record.batch, len(record.rows)
        sampled = output.sampled_token_ids[slice(num_rows) if record.in_place else record.rows, 0]
        if batch is None:
            return TokenColumn([], sampled, output.step), {}
        watched = batch.advance_grammars(sampled, batch.rows_to_watch(record.index, sampled))
        batch.settle(sampled, watched)
        batch.publish(self.kv, record.index, num_rows, watched)
        req_ids = batch.req_ids if num_rows == len(batch.req_ids) else batch.req_ids[:num_rows]
        column = TokenColumn(req_ids, sampled, output.step)
        return column, {int(record.rows[row]): (row, batch.entries[row]) for row in watched}

    def _settle_singles(
        self, singles: list[tuple[int, ScheduledEntry]], output: StepOutput
    ) -> Iterator[tuple[int, EngineOutput]]:
        """Settle the shares of requests that count for themselves, in the order of their rows; yield these again."""
        rows = [row for row, _ in singles]
        sampled, num_sampled = output.sampled_token_ids[rows].tolist(), output.num_sampled[rows].tolist()
        # in the logits rows of the step before a request's own
        num_drafts = 0
        for (row, entry), tokens, count in zip(singles, sampled, num_sampled, strict=True):
            result = self._settle(entry, tokens[:count], output, row, row + num_drafts)
            num_drafts += entry.num_drafts
            if result is not None:
                yield row, result

    def _settle(
        self, entry: ScheduledEntry, tokens: list[int], output: StepOutput, row: int, first_row: int
    ) -> EngineOutput | None:
        """Settle one request's share of a step."""
        request, yields_token = entry.request, entry.yields_token
        if request.status is RequestStatus.FINISHED:
            self._count_waste(request, len(tokens))
            return None
        current = entry.epoch == request.epoch
        if current:
            request.num_confirmed += entry.num_tokens
            request.num_in_flight -= yields_token
        elif yields_token:
            request.num_stale -= 1
            self.stats.num_stale_delivered += len(tokens)
        if entry.num_drafts:
            self._settle_drafts(request, entry, len(tokens), current)
        if row in output.prompt_logprobs and request.prompt_logprobs is not None:
            request.prompt_logprobs.add(output.prompt_logprobs[row])
        result = self._deliver(request, tokens, output, row, first_row, entry.num_drafts) if yields_token else None
        if current and request.num_confirmed >= (request.num_published_blocks + 1) * self.kv.block_size:
            self.kv.publish(request)
        return result

    def forget_rows(self) -> None:
        """The runner starts with empty rows: every running request needs one again; blocks and progress stay."""
        assert not self.in_flight, f"{len(self.in_flight)} steps are in flight; drain before the rows are given up"
        for request in self.running:
            request.has_row = False
            request.num_proposed = request.num_forced = 0
        self.rows_to_free.clear()
        self.leave_decodes()

    def leave_decodes(self) -> None:
        """Look at every request again before the next step; until then all counters are up to date."""
        if self.decodes is not None:
            self.decodes.leave(list(range(len(self.decodes.requests))), self.in_flight)
            self.decodes = None

    def bring_up_to_date(self, requests: list[Request] | None = None) -> None:
        """Let the counters and tokens of `requests`, or of all, show what is done."""
        batch = self.decodes
        if batch is not None:
            batch.show_all() if requests is None else batch.show_rows(batch.rows_of(requests))

    def use_drafter(self, filling: int, *, lookahead: int, reads_ahead: bool) -> None:
        """Another drafter, or none, fills its cache from now on: requests that it has not followed start over."""
        assert not self.in_flight, f"{len(self.in_flight)} steps are in flight; drain before exchanging the drafter"
        self.kv.fill(filling, lookahead=lookahead, reads_ahead=reads_ahead)
        for request in list(self.running):
            if filling & ~request.filled:
                self._preempt(request)
            else:
                request.filled = filling

    def forget_drafts(self) -> None:
        """What was drafted so far is not for the verification to come."""
        for request in self.running:
            request.num_proposed = request.num_forced = 0

    def check(self) -> None:
        """Assert the equations that hold between two calls (`scheduler_check`)."""
        check_scheduler(self)

    def _num_drafts(self, request: Request, budget: int) -> int:
        """Return the drafts that a decoding request gets in this step."""
        if request.num_computed < request.prompt_len:
            return 0
        room = min(request.max_len - 1 - request.num_computed, budget) - 1
        proposed = min(self.num_spec_tokens, request.num_proposed)
        forced = min(self.num_forced_tokens, request.num_forced)
        return max(0, min(max(proposed, forced), room))

    def _grow_or_preempt(self, request: Request, num_tokens: int) -> tuple[list[int], ...] | None:
        """Return new blocks for `request`, preempting the last in order of service; None if that is itself."""
        while (added := self.kv.grow(request, num_tokens)) is None:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return None
        return added

    def _admit(self, request: Request, budget: int) -> int:
        """Move a request from waiting to running; return the tokens scheduled, 0 if it must wait."""
        hits = self.kv.find_prefix(request)
        num_hit_tokens = len(hits[0]) * self.kv.block_size
        num_tokens = request.num_known - num_hit_tokens
        if self.enable_chunked_prefill:
            num_tokens = min(num_tokens, budget, self.max_chunk)
        elif num_tokens > budget < self.max_num_batched_tokens:
            return 0
        # a request that outgrew the whole budget before it was preempted is recomputed in chunks all the same
        num_tokens = min(num_tokens, budget)
        if not self.kv.admit(request, hits, num_hit_tokens + num_tokens):
            return 0
        self._remove(self.waiting, request)
        insort(self.running, request, key=lambda r: r.key)
        request.status = RequestStatus.RUNNING
        request.num_computed = request.num_confirmed = num_hit_tokens
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_hit_tokens
        return num_tokens

    def _entry(self, request: Request, num_tokens: int, num_drafts: int = 0) -> ScheduledEntry:
        request.num_computed += num_tokens
        yields_token = request.num_computed == request.num_ahead + num_drafts
        request.num_in_flight += yields_token
        request.num_drafts_in_flight += num_drafts
        request.num_proposed = self._num_next_drafts if yields_token else 0
        num_forced, request.num_forced = min(request.num_forced, num_drafts), 0
        return ScheduledEntry(request, request.epoch, num_tokens, yields_token, num_drafts, num_forced)

    def _new_row(self, request: Request) -> NewRequest:
        request.has_row = True
        return NewRequest(
            req_id=request.req_id,
            token_ids=request.known_tokens(),
            prompt_len=request.prompt_len,
            num_computed_tokens=request.num_computed,
            block_ids=tuple(list(group) for group in request.block_ids),
            sampling=request.sampling_to_come(),
        )

    def _launch(
        self,
        entries: list[ScheduledEntry],
        new_requests: list[NewRequest],
        new_block_ids: dict[str, tuple[list[int], ...]],
    ) -> SchedulerOutput:
        """Make the step of the members of the batch of decodes, of whoever joins it now, and of the other `entries`."""
        batch, num_joined = self._join_decodes(entries)
        singles = entries[num_joined:]
        if batch is None:
            rows, record = StepRows.of(singles), StepRecord(self.step, list(enumerate(singles)))
        else:
            rows, record = batch.launch(self.step, singles)
        scheduled = SchedulerOutput(
            step=self.step,
            freed_req_ids=sorted(self.rows_to_free),
            new_requests=new_requests,
            new_block_ids=new_block_ids,
            fresh_block_ids=self.kv.take_fresh(),
            total_tokens=int(rows.num_scheduled_tokens.sum()) if singles else len(rows.req_ids),
            num_next_drafts=self._num_next_drafts,
            **rows._asdict(),
        )
        self.rows_to_free.clear()
        self.in_flight.append(record)
        self.step += 1
        return scheduled

    def _join_decodes(self, entries: list[ScheduledEntry]) -> tuple[DecodeBatch | None, int]:
        """Let the first of `entries` join the batch of decodes; return it, and how many joined."""
        if self.num_spec_tokens or self.kv.filling:
            return None, 0
        joining = who_may_join(self.decodes, entries, may_be_drafted=self.num_forced_tokens > 0)
        if joining:
            self.decodes = self.decodes or DecodeBatch(self.max_num_seqs, self.kv.block_size)
            self.decodes.join(joining)
        return self.decodes, len(joining)

    def _settle_drafts(self, request: Request, entry: ScheduledEntry, num_sampled: int, current: bool) -> None:
        """Take back the rejected drafts of a step, and count the accepted ones by position."""
        accepted = num_sampled - 1
        for counts in (self.stats.drafts, request.drafts):
            counts.add(entry.num_drafts, accepted)
        if entry.num_forced:
            self.stats.forced.add(entry.num_forced, min(accepted, entry.num_forced))
        elif self.adaptive is not None:
            self.adaptive.observe(entry.num_drafts, accepted)
        if current:
            rejected = entry.num_drafts - accepted
            request.num_drafts_in_flight -= entry.num_drafts
            request.num_computed -= rejected
            request.num_confirmed -= rejected

    def _deliver(
        self, request: Request, tokens: list[int], output: StepOutput, row: int, first_row: int, num_drafts: int
    ) -> EngineOutput:
        """Append a step's tokens up to the one that ends the request, and report them."""
        result = EngineOutput(req_id=request.req_id, new_token_ids=[], step=output.step, num_drafted=num_drafts)
        if request.num_outputs == 0:
            result.num_cached_tokens = max(request.num_cached_tokens, 0)
            if request.prompt_logprobs is not None:
                result.prompt_logprobs = request.prompt_logprobs.take()
        if row in output.errors and -1 in tokens:
            request.dead_end = output.errors[row]
        for place, token in enumerate(tokens):
            result.finish_reason, result.stop_reason = request.take(token)
            if result.finish_reason == "error":
                break
            result.new_token_ids.append(token)
            if output.logprobs is not None or output.wide_logprobs:
                logprob = token_logprob(output, row, first_row, place, request.sampling)
                if logprob is not None:
                    result.logprobs = [*(result.logprobs or []), logprob]
            if result.finish_reason is not None:
                break
        if result.finish_reason is not None:
            result.drafts = request.drafts if request.drafts.num_drafted else None
            self._finish(request, result.finish_reason)
        return result

    def _count_waste(self, request: Request, num_tokens: int) -> None:
        """A step of a request that has ended meanwhile: its output is dropped."""
        request.num_wasted_steps += 1
        reason = request.finish_reason or "abort"
        self.stats.num_wasted_steps[reason] = self.stats.num_wasted_steps.get(reason, 0) + 1
        self.stats.num_discarded_tokens += num_tokens

    def _leave_batch(self, request: Request) -> None:
        """A request ends or is preempted."""
        if self.decodes is not None:
            self.decodes.leave(self.decodes.rows_of([request]), self.in_flight)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self._leave_batch(request)
        queue = self.running if request.status is RequestStatus.RUNNING else self.waiting
        self._remove(queue, request)
        self._give_up_row(request)
        request.status, request.finish_reason = RequestStatus.FINISHED, reason
        del self.requests[request.req_id]

    def _preempt(self, request: Request) -> None:
        self._leave_batch(request)
        self._remove(self.running, request)
        self._give_up_row(request)
        request.reset_progress()
        insort(self.waiting, request, key=lambda r: r.key)
        self.stats.num_preemptions += 1

    def _give_up_row(self, request: Request) -> None:
        self.kv.free(request)
        if request.has_row:
            self.rows_to_free.append(request.req_id)
            request.has_row = False

    @staticmethod
    def _remove(queue: list[Request], request: Request) -> None:
        index = bisect_left(queue, request.key, key=lambda r: r.key)
        assert queue[index] is request, f"request {request.req_id} is not where its key says"
        queue.pop(index)
