"""A step's log-probabilities on their way to the host.

Three kinds: `narrow` of all requests side by side, up to `MAX_LOGPROBS` a row; `wide` of one request each
(more than that, or of tokens that it named); `prompts`, runs of prompt tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from mrv2.device import Device, Stream
from mrv2.instrument import stages
from mrv2.runner.protocol import LogprobRows, PromptLogprobRows, StepOutput
from mrv2.sampling_params import MAX_LOGPROBS

# rows in one pass of prompt log-probabilities, and elements of its result
MAX_CHUNK_ROWS = 1024
MAX_CHUNK_ELEMENTS = 1 << 24


class LogprobTensors(NamedTuple):
    """Ids [n, 1+k] int64, log-probabilities [n, 1+k] float32, ranks [n] int64; flat where memory is handed out."""

    ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor


class PinnedSource(Protocol):
    """Hands pinned memory out and takes it back."""

    def take(self, num_rows: int, width: int) -> PendingLogprobs: ...

    def give_back(self, buffers: LogprobTensors) -> None: ...


@dataclass(slots=True)
class PendingLogprobs:
    """Pinned destinations of n rows of log-probabilities."""

    tensors: LogprobTensors
    # the memory to give back, and to whom
    buffers: LogprobTensors
    source: PinnedSource

    @classmethod
    def in_buffers(cls, buffers: LogprobTensors, num_rows: int, width: int, source: PinnedSource) -> PendingLogprobs:
        """Return contiguous tensors at the head of `buffers`."""
        ids, logprobs, ranks = buffers
        size, shape = num_rows * width, (num_rows, width)
        tensors = LogprobTensors(ids[:size].view(shape), logprobs[:size].view(shape), ranks[:num_rows])
        return cls(tensors, buffers, source)

    def rows(self) -> LogprobRows:
        """Copy the arrived values out and give the memory back."""
        ids, logprobs, ranks = (tensor.numpy().copy() for tensor in self.tensors)
        self.source.give_back(self.buffers)
        return LogprobRows(ids, logprobs, ranks)


class LogprobSlots:
    """Pinned memory for the narrow rows of a whole batch, one set per step in flight."""

    def __init__(self, device: Device, *, count: int, max_num_seqs: int, max_num_logprobs: int) -> None:
        self._max_width = 1 + max_num_logprobs
        size = max_num_seqs * self._max_width
        self._free = [_pinned(device, size, max_num_seqs) for _ in range(count)]

    def take(self, num_rows: int, width: int) -> PendingLogprobs:
        assert width <= self._max_width, f"{width - 1} logprobs asked for, the slots hold {self._max_width - 1}"
        assert self._free, "every logprob slot is in flight: the queue is deeper than the slots that were made for it"
        return PendingLogprobs.in_buffers(self._free.pop(), num_rows, width, self)

    def give_back(self, buffers: LogprobTensors) -> None:
        self._free.append(buffers)


class LogprobPool:
    """Pinned memory for wide rows and prompts: made when none that is free is large enough, then kept."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._free: list[LogprobTensors] = []

    def take(self, num_rows: int, width: int) -> PendingLogprobs:
        size = num_rows * width
        fitting = [b for b in self._free if len(b.ids) >= size and len(b.ranks) >= num_rows]
        if fitting:
            buffers = min(fitting, key=lambda b: len(b.ids))
            self._free = [b for b in self._free if b is not buffers]
        else:
            # one shape for all but the widest, so that what one prompt needed serves the next
            capacity = max(MAX_CHUNK_ROWS * (1 + MAX_LOGPROBS), 1 << (size - 1).bit_length())
            buffers = _pinned(self.device, capacity, max(MAX_CHUNK_ROWS, num_rows))
        return PendingLogprobs.in_buffers(buffers, num_rows, width, self)

    def give_back(self, buffers: LogprobTensors) -> None:
        self._free.append(buffers)


@dataclass(slots=True)
class LogprobTransfer:
    """Device tensors that the step fills, and where they will arrive."""

    tensors: LogprobTensors
    pending: PendingLogprobs

    @classmethod
    def make(cls, device: Device, source: PinnedSource, num_rows: int, width: int) -> LogprobTransfer:
        shape = (num_rows, width)
        tensors = LogprobTensors(
            device.empty(shape, torch.int64), device.empty(shape, torch.float32), device.empty(num_rows, torch.int64)
        )
        return cls(tensors, source.take(num_rows, width))


@dataclass(slots=True)
class PromptPiece:
    """The part of a chunk that belongs to one prompt."""

    batch_row: int
    # first row of the chunk, and rows
    offset: int
    count: int
    # position of the first token in the prompt
    start: int
    width: int


@dataclass(slots=True)
class PromptChunk:
    """Consecutive tokens [begin, end) of the step whose followers get log-probabilities in one pass."""

    begin: int
    end: int
    width: int
    pieces: list[PromptPiece] = field(default_factory=list)


@dataclass(slots=True)
class StepLogprobs:
    """All log-probabilities of one step."""

    narrow: LogprobTransfer | None = None
    wide: dict[int, LogprobTransfer] = field(default_factory=dict)
    prompts: list[tuple[PromptChunk, LogprobTransfer]] = field(default_factory=list)

    def transfers(self) -> list[LogprobTransfer]:
        one = [] if self.narrow is None else [self.narrow]
        return [*one, *self.wide.values(), *(transfer for _, transfer in self.prompts)]

    def submit_copies(self, stream: Stream) -> None:
        """Send everything on its way."""
        for transfer in self.transfers():
            for target, source in zip(transfer.pending.tensors, transfer.tensors, strict=True):
                stream.copy(stages.OUTPUT_COPY, target, source)

    def arrive(self, output: StepOutput) -> None:
        """After the wait for the copies: put everything into `output`."""
        if self.narrow is not None:
            output.logprobs = self.narrow.pending.rows()
        for row, transfer in self.wide.items():
            output.wide_logprobs[row] = transfer.pending.rows()
        for chunk, transfer in self.prompts:
            rows = transfer.pending.rows()
            for piece in chunk.pieces:
                inside = slice(piece.offset, piece.offset + piece.count)
                own = LogprobRows(
                    rows.token_ids[inside, : piece.width], rows.logprobs[inside, : piece.width], rows.ranks[inside]
                )
                output.prompt_logprobs.setdefault(piece.batch_row, []).append(PromptLogprobRows(piece.start, own))


class PromptSegment(NamedTuple):
    """Tokens of one prompt in the step whose followers are prompt tokens too."""

    batch_row: int
    # index of the first token in the step, and tokens
    begin: int
    count: int
    # position of the first follower
    start: int
    width: int


def cut_into_chunks(segments: list[PromptSegment], *, max_rows: int = MAX_CHUNK_ROWS) -> list[PromptChunk]:
    """Return passes over all segments, in order; none is longer than `max_rows`, nor its result too large.

    Short gaps (the last token of a prompt, decodes) are computed along and dropped: a pass per prompt
    would cost more.
    """
    chunks: list[PromptChunk] = []
    for segment in segments:
        done = 0
        while done < segment.count:
            begin = segment.begin + done
            chunk = chunks[-1] if chunks else None
            limit = _rows_of(max(segment.width, chunk.width) if chunk else segment.width, max_rows)
            if chunk is None or begin - chunk.end > 8 or begin + 1 - chunk.begin > limit:
                limit = _rows_of(segment.width, max_rows)
                chunk = PromptChunk(begin, begin, segment.width)
                chunks.append(chunk)
            count = min(segment.count - done, chunk.begin + limit - begin)
            chunk.end, chunk.width = begin + count, max(chunk.width, segment.width)
            chunk.pieces.append(
                PromptPiece(segment.batch_row, begin - chunk.begin, count, segment.start + done, segment.width)
            )
            done += count
    return chunks


def _rows_of(width: int, max_rows: int) -> int:
    return max(1, min(max_rows, MAX_CHUNK_ELEMENTS // width))


def _pinned(device: Device, size: int, num_rows: int) -> LogprobTensors:
    return LogprobTensors(
        device.pinned(size, torch.int64), device.pinned(size, torch.float32), device.pinned(num_rows, torch.int64)
    )
