"""Everything a step sends to the device, in one pinned slot: copied, or read by the device itself.

    slot:   | query_start_loc [R+1] | idx_mapping [R] | num_sampled [R] | cu_num_logits [R+1] | counts | runs |
    counts: | requests | runs n | output slot | words used |
    runs:   | starts [n] | cu_lens [n+1] | contents [m] |

Batch rows past the last request map to row 0, so that whoever is not told the number of requests reads something legal.

The device half is one persistent buffer (`ForwardBuffers.step_words`; its head is what graphs read as
`query_start_loc`): the copy of step n+1 is ordered behind every reader of step n on the main stream.
The pinned half is a ring, for the host runs ahead.

A graph of a whole step begins by reading its slot (`mrv2_kernels.state.mailbox`): the slots it reads, the mailbox,
stay where they are, and every run of such a graph, the first one before its capture too, takes the next of them.
Once a step is announced, the graph of the step before may read its slot, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from mrv2.device import Device, Event, PinnedRing, Stream
from mrv2.instrument import stages
from mrv2.logits_processor import RowTable
from mrv2.runner.protocol import SchedulerOutput
from mrv2.runner.v2.arena import DeviceArena
from mrv2.runner.v2.sampler import SAMPLING_SECTIONS
from mrv2_kernels.state.mailbox import Mailbox, next_number

# starts [n], cu_lens [n + 1], contents [m], longest run: see `DeviceArena.take_runs`
TakenRuns = tuple[np.ndarray, np.ndarray, np.ndarray, int]
# copies are cut to multiples of this many words, so that few views serve all of them
_COPY_STEP = 512


@dataclass(slots=True)
class UploadedBatch:
    """Device views of one step's upload."""

    # [B] int32, batch row -> request row
    idx_mapping: torch.Tensor
    # [B] int32: 1 if the request yields a token in this step
    num_sampled: torch.Tensor
    # [B + 1] int32: logits rows of each request
    cu_num_logits: torch.Tensor
    # [n], [n], [n+1], [m] int32
    run_rows: torch.Tensor
    run_starts: torch.Tensor
    run_cu_lens: torch.Tensor
    run_contents: torch.Tensor
    num_runs: int
    max_run: int
    # [1] int32: B
    num_reqs: torch.Tensor
    sent: SentStep


class SentStep(NamedTuple):
    """The pinned slot of a step's upload, and what lies in it."""

    # [capacity] int32, and its ring, for the release; None if the device reads the mailbox alone
    slot: torch.Tensor | None
    ring: PinnedRing
    num_runs: int
    max_run: int
    # words that were copied; 0 if the device reads them itself
    used: int
    # the slot of the mailbox, of a step that runs as a graph, and the step's number there
    mail: torch.Tensor | None = None
    number: int = -1


def step_words_capacity(
    *,
    max_num_seqs: int,
    max_model_len: int,
    blocks_per_row: int,
    num_groups: int,
    tables: Sequence[RowTable] = (),
) -> int:
    """Return the words that the largest possible step uploads: every row taken anew with a full history."""
    sampling_words = sum(max(width, 1) * dtype.itemsize // 4 for width, dtype in SAMPLING_SECTIONS.values())
    sampling_words += sum(3 + table.width for table in tables)
    runs_per_row = 16 + len(SAMPLING_SECTIONS) + 2 * num_groups
    words_per_row = max_model_len + num_groups * blocks_per_row + sampling_words + 3 * runs_per_row
    return 4 * max_num_seqs + 7 + max_num_seqs * words_per_row


class StepUpload:
    """Packs a step's batch header and staged runs and submits their copy."""

    def __init__(
        self,
        device: Device,
        arena: DeviceArena,
        max_num_seqs: int,
        # [capacity] int32, device
        step_words: torch.Tensor,
        *,
        depth: int,
    ) -> None:
        self.device = device
        self.arena = arena
        self.max_num_seqs = max_num_seqs
        self.words = step_words
        self.depth = depth
        self.counts = 4 * max_num_seqs + 2
        self.used_at = self.counts + 3
        self.header = self.counts + 4
        # [1] int32 each, device: what a graph reads of a step
        self.num_reqs, self.num_runs, self.output_slot = (step_words[self.counts + i :][:1] for i in range(3))
        # [R] int32, device: 1 if the request yields a token in this step, 0 past the batch
        self.yields = step_words[2 * max_num_seqs + 1 : 3 * max_num_seqs + 1]
        # int32, device: as many runs as `num_runs` says
        self.runs = step_words[self.header :]
        # [header] int32, host: what lies before the runs, of the batch `_rows`
        self._header_np = np.zeros(self.header, dtype=np.int32)
        self._rows: np.ndarray | None = None
        # [capacity / 3]: all runs edit row 0 of the arena; a run takes three words at least
        self.zeros = device.zeros((step_words.shape[0] // 3,), torch.int32)
        # short prompts fit from the start; a rare larger step grows the ring
        self._make_ring(min(step_words.shape[0], self.header + 64 * max_num_seqs + (1 << 18)))

        # a few runs a request: blocks, of a step of decodes
        self.mail_words = min(step_words.shape[0], -(-(self.header + 16 * max_num_seqs) // _COPY_STEP) * _COPY_STEP)
        slots = device.pinned((depth, self.mail_words), torch.int32)
        numbers = device.pinned((depth,), torch.int32)
        numbers.fill_(-1)
        self.mailbox = Mailbox(slots, numbers, device.zeros((2,), torch.int32), self.used_at)
        self.mail = PinnedRing(device, depth, (self.mail_words,), torch.int32, name="step mailbox", slots=list(slots))
        self._mail_np = {id(slot): slot.numpy() for slot in self.mail.slots}
        self._slot_index = {id(slot): index for index, slot in enumerate(self.mail.slots)}
        self._numbers_np = numbers.numpy()
        # [mail_words + 1] int32, device: see `fetch_step`
        self.peeked = device.full((self.mail_words + 1,), -1, torch.int32)
        # of the next step that goes through the mailbox
        self._number = 0

    def _make_ring(self, capacity: int) -> None:
        self.capacity = capacity
        self.ring = PinnedRing(self.device, self.depth, (capacity,), torch.int32, name="step upload")
        # views are made once: (which slot, words) -> destination and source of a copy
        self._views: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._slots_np = {id(slot): slot.numpy() for slot in self.ring.slots}

    def send(
        self,
        stream: Stream,
        scheduled: SchedulerOutput,
        # [B] int32
        rows: np.ndarray,
        output_slot: int = 0,
    ) -> SentStep:
        """Submit the copy of one step; what is returned must be released with an event at the end of the step."""
        return self._copy(stream, scheduled, rows, self.arena.take_runs(), output_slot)

    def post(
        self,
        stream: Stream,
        scheduled: SchedulerOutput,
        # [B] int32
        rows: np.ndarray,
        output_slot: int,
    ) -> SentStep:
        """Put one step into the mailbox, for the graph that is submitted next; released as what `send` returns.

        What does not fit is copied to where the graph would have put it.
        """
        runs = self.arena.take_runs()
        used = self._words_of(runs)
        number, mail, host = self._next_mail(scheduled.step)
        if used > self.mail_words:
            host[self.used_at] = 0
            return self._copy(stream, scheduled, rows, runs, output_slot)._replace(mail=mail, number=number)
        self._pack(host, scheduled, rows, runs, output_slot)
        return SentStep(None, self.ring, len(runs[0]), runs[3], 0, mail, number)

    def post_nothing(self) -> SentStep:
        """Put a step of no requests into the mailbox."""
        number, mail, host = self._next_mail(-1)
        host[: self.header + 1] = 0
        host[self.used_at] = self.header + 1
        return SentStep(None, self.ring, 0, 0, 0, mail, number)

    def announce(self, sent: SentStep) -> None:
        """Let the graph of the step before read what was posted; behind the launch of the graph that it is for."""
        assert sent.mail is not None, "the step does not go through the mailbox"
        self._numbers_np[self._slot_index[id(sent.mail)]] = sent.number

    def _next_mail(self, step: int) -> tuple[int, torch.Tensor, np.ndarray]:
        """Return the number of the next step in the mailbox, its slot, and that as an array."""
        number, self._number = self._number, next_number(self._number)
        mail = self.mail.acquire(step)
        return number, mail, self._mail_np[id(mail)]

    def _copy(
        self, stream: Stream, scheduled: SchedulerOutput, rows: np.ndarray, runs: TakenRuns, output_slot: int
    ) -> SentStep:
        used = self._words_of(runs)
        if used > self.capacity:
            self._make_ring(min(self.words.shape[0], 1 << (used - 1).bit_length()))
        slot = self.ring.acquire(scheduled.step)
        self._pack(self._slots_np[id(slot)], scheduled, rows, runs, output_slot)
        stream.copy(stages.UPLOAD, *self._views_of(slot, used))
        return SentStep(slot, self.ring, len(runs[0]), runs[3], used)

    def _words_of(self, runs: TakenRuns) -> int:
        return self.header + 2 * len(runs[0]) + 1 + len(runs[2])

    def _pack(
        self,
        # [capacity] int32
        host: np.ndarray,
        scheduled: SchedulerOutput,
        rows: np.ndarray,
        runs: TakenRuns,
        output_slot: int,
    ) -> None:
        """Write one step into a slot."""
        if rows is not self._rows:
            self._fill_header(scheduled, rows)
        starts, cu_lens, contents, _ = runs
        num_runs, used = len(starts), self._words_of(runs)
        host[: self.header] = self._header_np
        host[self.counts + 1], host[self.counts + 2], host[self.used_at] = num_runs, output_slot, used
        if num_runs:
            at = self.header
            host[at : at + num_runs] = starts
            host[at + num_runs : at + 2 * num_runs + 1] = cu_lens
            host[at + 2 * num_runs + 1 : used] = contents

    def _fill_header(self, scheduled: SchedulerOutput, rows: np.ndarray) -> None:
        """Write what depends on the batch alone; the same array of rows is the same batch of decodes."""
        host, num_reqs, max_num_seqs = self._header_np, len(rows), self.max_num_seqs
        np.cumsum(scheduled.num_scheduled_tokens, out=host[1 : num_reqs + 1])
        host[num_reqs + 1 : max_num_seqs + 1] = scheduled.total_tokens
        at = max_num_seqs + 1
        host[at : at + num_reqs] = rows
        host[at + num_reqs : at + max_num_seqs] = 0
        host[at + max_num_seqs : at + max_num_seqs + num_reqs] = scheduled.yields_token
        host[at + max_num_seqs + num_reqs : at + 2 * max_num_seqs] = 0
        cu_num_logits = at + 2 * max_num_seqs
        np.cumsum(scheduled.num_draft_tokens + 1, out=host[cu_num_logits + 1 : cu_num_logits + 1 + num_reqs])
        host[self.counts] = num_reqs
        self._rows = rows

    def _views_of(self, slot: torch.Tensor, used: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return destination and source of a copy of at least `used` words; what is copied beyond them is not read."""
        size = min(self.capacity, -(-used // _COPY_STEP) * _COPY_STEP)
        views = self._views.get((id(slot), size))
        if views is None:
            views = self._views[id(slot), size] = self.words[:size], slot[:size]
        return views

    def submit(
        self,
        stream: Stream,
        scheduled: SchedulerOutput,
        # [B] int32
        rows: np.ndarray,
    ) -> UploadedBatch:
        """Do what `send` does, and return the step's device views."""
        sent = self.send(stream, scheduled, rows)
        words, num_reqs, max_num_seqs, num_runs = self.words, len(rows), self.max_num_seqs, sent.num_runs
        at, cu_num_logits = self.header, 3 * max_num_seqs + 1
        return UploadedBatch(
            idx_mapping=words[max_num_seqs + 1 : max_num_seqs + 1 + num_reqs],
            num_sampled=words[2 * max_num_seqs + 1 : 2 * max_num_seqs + 1 + num_reqs],
            cu_num_logits=words[cu_num_logits : cu_num_logits + num_reqs + 1],
            run_rows=self.zeros[:num_runs],
            run_starts=words[at : at + num_runs],
            run_cu_lens=words[at + num_runs : at + 2 * num_runs + 1],
            run_contents=words[at + 2 * num_runs + 1 : sent.used],
            num_runs=num_runs,
            max_run=sent.max_run,
            num_reqs=self.num_reqs,
            sent=sent,
        )

    def release(self, sent: SentStep, end_of_step: Event) -> None:
        """Give the pinned slots back to their rings once `end_of_step` has passed."""
        if sent.slot is not None:
            sent.ring.release(sent.slot, end_of_step)
        if sent.mail is not None:
            self.mail.release(sent.mail, end_of_step)
