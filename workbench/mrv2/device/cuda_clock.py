"""When stages ran on a CUDA device, on the host's clock, from pooled timing events; it never waits.

A stage costs the launching thread two event records.  Reading the times is put off until the host waits for an
output anyway, until somebody asks for the spans, or until no event of the pool is free.
"""

from __future__ import annotations

import threading
from collections import deque
from itertools import islice
from time import perf_counter_ns

import torch

from mrv2.instrument import context
from mrv2.instrument.recorder import Recorder

# a fresh anchor each second keeps CUDA's float32 milliseconds well below a microsecond
_ANCHOR_LIFE_MS = 1000.0
_ANCHOR_TRIES = 5
# events that a recording begins with: some thirty steps' worth
NUM_EVENTS = 512
_BATCH = 16

# lane, stage, step, start, end: of a stage whose end has not been seen done yet
_Pending = tuple[str, str, "int | None", torch.cuda.Event, torch.cuda.Event]


class SpanClock:
    """Times stages with event pairs and hands them to a recorder as device spans."""

    def __init__(self, device: torch.device, rec: Recorder, pool: list[torch.cuda.Event]) -> None:
        """Read the offset between both clocks from an idle stream, so that nothing running is disturbed.

        Args:
            pool: timing events that are free; it is filled up, used, and outlives the clock.
        """
        self._rec = rec
        self._pool = pool
        self._polling = threading.Lock()
        # in order of submission
        self._pending: deque[_Pending] = deque()
        idle, shortest = torch.cuda.Stream(device), None
        for _ in range(_ANCHOR_TRIES):
            event = torch.cuda.Event(enable_timing=True)
            before = perf_counter_ns()
            event.record(idle)
            while not event.query():
                pass
            after = perf_counter_ns()
            if shortest is None or after - before < shortest:
                shortest = after - before
                self._anchor, self._anchor_ns = event, (before + after) // 2
        while len(pool) < NUM_EVENTS:
            # an event is made by its first record
            event = torch.cuda.Event(enable_timing=True)
            event.record(idle)
            pool.append(event)
        rec.add_poller(self.poll)

    def start(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Record and return the start event of a stage."""
        if not self._pool:
            self.poll(limit=_BATCH)
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def end(self, stream: torch.cuda.Stream, lane: str, stage: str, start: torch.cuda.Event) -> None:
        """Record the end of the stage that `start` began."""
        self._pending.append((lane, stage, context.local.step, start, self.start(stream)))

    def poll(self, until: torch.cuda.Event | None = None, limit: int | None = None) -> None:
        """Hand the stages that are done to the recorder, in order, `until` an event is done, or `limit` of them.

        Returns at once while another thread does so.
        """
        if not self._polling.acquire(blocking=False):
            return
        try:
            num_done = 0
            while (limit is None or num_done < limit) and (until is None or not until.query()):
                batch = self._take_done()
                for span in batch:
                    self._resolve(*span)
                num_done += len(batch)
                if not batch:
                    return
        finally:
            self._polling.release()

    def _take_done(self) -> list[_Pending]:
        """Take up to a batch of the oldest stages off the list, if they are done."""
        batch = list(islice(self._pending, _BATCH))
        # a stream is in order: its newest stage is done last
        newest = {span[0]: span[4] for span in batch}
        if not all(event.query() for event in newest.values()):
            batch = batch[:1] if batch[0][4].query() else []
        for _ in batch:
            self._pending.popleft()
        return batch

    def _resolve(self, lane: str, stage: str, step: int | None, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        start_ms, end_ms = self._anchor.elapsed_time(start), self._anchor.elapsed_time(end)
        end_ns = self._anchor_ns + round(end_ms * 1e6)
        self._rec.add("device", lane, stage, self._anchor_ns + round(start_ms * 1e6), end_ns, step)
        self._pool.append(start)
        if end_ms > _ANCHOR_LIFE_MS:
            self._pool.append(self._anchor)
            self._anchor, self._anchor_ns = end, end_ns
        else:
            self._pool.append(end)
