"""From prompts to `EngineRequest`s, and from `EngineOutput`s to `RequestOutput`s.

A request with ``n > 1`` is n sequences in the engine; here they meet again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mrv2.engine.detokenizer import Detokenizer
from mrv2.engine.messages import EngineOutput, EngineRequest, FinishReason, PromptLogprobs, TokenLogprob
from mrv2.engine.step_outputs import EngineOutputs, TokenColumn
from mrv2.engine.token_sequences import bad_word_ids, marker_ids
from mrv2.errors import RequestError
from mrv2.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from mrv2.sampling_params import RequestOutputKind, SamplingParams
from mrv2.tokenizer import Tokenizer


@dataclass(slots=True)
class ProcessedOutputs:
    """What one step means for the callers."""

    outputs: list[RequestOutput] = field(default_factory=list)
    # sequences that a stop string ended here: the engine must abort them
    abort_ids: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Sequence:
    """One of the n sequences of a request."""

    req_id: str
    index: int
    request: _Request
    # None: no text is wanted, or only the final text (one decode at the end)
    detokenizer: Detokenizer | None
    token_ids: list[int] = field(default_factory=list)
    # as they came, and (the beginning of) the same in the form that callers see
    raw_logprobs: list[TokenLogprob] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    num_shown: int = 0
    # the first output has come, and the caller sees only the last
    is_quiet: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class _Request:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    admission_index: int
    metrics: RequestMetrics
    sequences: list[_Sequence] = field(default_factory=list)
    num_running: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    final_only: bool = False

    def __post_init__(self) -> None:
        self.final_only = self.params.output_kind is RequestOutputKind.FINAL_ONLY


# tokens that are kept of a sequence at most before it gets them
_MAX_KEPT = 128


class _QuietTokens:
    """The tokens of sequences that show nothing before their end: a column of them is kept without a look at each."""

    def __init__(self) -> None:
        # sequence id -> its row of what follows
        self._row_of: dict[str, int] = {}
        self._sequences: list[_Sequence] = []
        self._free_rows: list[int] = []
        # [rows, _MAX_KEPT] int32; [rows] int64, how many of them; [rows] float64, when the last one came
        self._tokens = np.zeros((0, _MAX_KEPT), dtype=np.int32)
        self._counts = np.zeros(0, dtype=np.int64)
        self._times = np.zeros(0)
        # of the newest column: its ids, the row of each or -1, and its places that are looked at one by one
        self._req_ids: list[str] | None = None
        self._rows = np.zeros(0, dtype=np.int64)
        self._loud: list[int] = []

    def add(self, sequence: _Sequence) -> None:
        """Keep the tokens of `sequence` from now on."""
        if not self._free_rows:
            num_rows = len(self._sequences)
            num_more = max(16, num_rows)
            self._free_rows = list(range(num_rows + num_more - 1, num_rows - 1, -1))
            self._sequences += [sequence] * num_more
            self._tokens = np.concatenate((self._tokens, np.zeros((num_more, _MAX_KEPT), dtype=np.int32)))
            self._counts = np.concatenate((self._counts, np.zeros(num_more, dtype=np.int64)))
            self._times = np.concatenate((self._times, np.zeros(num_more)))
        row = self._row_of[sequence.req_id] = self._free_rows.pop()
        self._sequences[row] = sequence

    def discard(self, sequence: _Sequence) -> None:
        """Keep no more tokens of a sequence that has got them all."""
        row = self._row_of.pop(sequence.req_id, None)
        if row is not None:
            self._free_rows.append(row)
            # it may have a place in columns to come
            self._req_ids = None

    def take(self, column: TokenColumn, known: dict[str, _Sequence], now: float) -> tuple[list[int], int]:
        """Keep what a column brings to the sequences here; return whom else it brings something, and how many tokens.

        The places of the column are returned whose sequences are `known`, but not here, or have more than a token.
        """
        if column.req_ids is not self._req_ids:
            self._req_ids = column.req_ids
            rows = [self._row_of.get(req_id, -1) for req_id in column.req_ids]
            self._loud = [at for at, row in enumerate(rows) if row < 0 and column.req_ids[at] in known]
            self._rows = np.array(rows, dtype=np.int64)
        rows, loud = self._rows, self._loud
        if column.special:
            places = list(column.special)
            rows, loud = rows.copy(), sorted({*loud, *(at for at in places if column.req_ids[at] in known)})
            rows[places] = -1
        kept = rows >= 0
        rows, tokens = rows[kept], column.tokens[kept]
        if len(rows) and self._counts[rows].max() == _MAX_KEPT:
            for row in rows[self._counts[rows] == _MAX_KEPT].tolist():
                self.hand_out(self._sequences[row])
        self._tokens[rows, self._counts[rows]] = tokens
        self._counts[rows] += 1
        self._times[rows] = now
        return loud, len(rows)

    def hand_out(self, sequence: _Sequence) -> None:
        """Give a sequence the tokens that are kept of it."""
        row = self._row_of.get(sequence.req_id)
        if row is None or not self._counts[row]:
            return
        count, self._counts[row] = int(self._counts[row]), 0
        sequence.token_ids += self._tokens[row, :count].tolist()
        metrics = sequence.request.metrics
        metrics.num_generation_tokens += count
        metrics.last_token_ts = max(metrics.last_token_ts, float(self._times[row]))


class OutputProcessor:
    """Keeps the text side of every unfinished request; not thread-safe."""

    def __init__(self, tokenizer: Tokenizer | None, *, eos_token_ids: Sequence[int] = ()) -> None:
        """Without a tokenizer all texts stay empty; `eos_token_ids` end a sequence, the first one silently."""
        self.tokenizer = tokenizer
        self.eos_token_ids = tuple(eos_token_ids)
        self.num_generated_tokens = 0
        self._requests: dict[str, _Request] = {}
        # unfinished sequences by engine id
        self._sequences: dict[str, _Sequence] = {}
        self._quiet = _QuietTokens()
        self._next_index = 0

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def add_request(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
    ) -> list[EngineRequest]:
        """Register a request and return its n sequences for the engine, sample 0 first.

        Raises `RequestError` for an id in use, and for texts among the parameters without a tokenizer.
        """
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use by an unfinished request")
        if params.stop_strings and self.tokenizer is None:
            raise RequestError(
                f"stop={list(params.stop_strings)!r} needs text, and this engine has no tokenizer: use stop_token_ids"
            )
        tokens = self._token_sequences(params)
        metrics = RequestMetrics(arrival_time=time.time(), arrival_ts=time.monotonic())
        request = _Request(request_id, prompt, prompt_token_ids, params, self._next_index, metrics)
        self._next_index += 1
        self._requests[request_id] = request
        for index in range(params.n):
            req_id = request_id if params.n == 1 else f"{request_id}/{index}"
            sequence = _Sequence(req_id, index, request, self._make_detokenizer(params))
            request.sequences.append(sequence)
            self._sequences[req_id] = sequence
        request.num_running = params.n
        return [self._engine_request(sequence, priority, tokens) for sequence in request.sequences]

    def withdraw(self, request_ids: Iterable[str]) -> None:
        """Forget requests that the engine refused, as though they had never been added."""
        found = [self._requests.pop(request_id) for request_id in request_ids if request_id in self._requests]
        for request in sorted(found, key=lambda request: -request.admission_index):
            for sequence in request.sequences:
                self._sequences.pop(sequence.req_id, None)
                self._quiet.discard(sequence)
            if request.admission_index == self._next_index - 1:
                self._next_index -= 1

    def abort(self, request_ids: Iterable[str]) -> ProcessedOutputs:
        """End requests with finish reason "abort"; unknown and finished ids are skipped."""
        done = ProcessedOutputs()
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None:
                continue
            changed = [sequence for sequence in request.sequences if sequence.finish_reason is None]
            for sequence in changed:
                self._finish(sequence, "abort", None)
                done.abort_ids.append(sequence.req_id)
            done.outputs.append(self._request_output(request, changed))
        return done

    def process(self, outputs: EngineOutputs | list[EngineOutput]) -> ProcessedOutputs:
        """Take one step's outputs; those of sequences that have ended here are dropped."""
        done = ProcessedOutputs()
        now = time.monotonic()
        # requests with something to show -> their changed sequences by index
        changed: dict[str, tuple[_Request, dict[int, _Sequence]]] = {}
        for output in self._to_look_at(outputs, now):
            sequence = self._sequences.get(output.req_id)
            if sequence is None:
                continue
            request = sequence.request
            if sequence.is_quiet:
                self._quiet.hand_out(sequence)
            if sequence.is_quiet and output.finish_reason is None and not output.logprobs:
                # nothing but more tokens, of which nothing is shown yet
                sequence.token_ids += output.new_token_ids
                self.num_generated_tokens += len(output.new_token_ids)
                request.metrics.num_generation_tokens += len(output.new_token_ids)
                request.metrics.last_token_ts = now
                continue
            self._take_tokens(sequence, output, now)
            if not sequence.is_quiet and request.final_only and sequence.detokenizer is None:
                sequence.is_quiet = True
                if sequence.finish_reason is None:
                    self._quiet.add(sequence)
            if sequence.stop_reason is not None and output.finish_reason is None:
                done.abort_ids.append(sequence.req_id)
            if not request.final_only or request.num_running == 0:
                changed.setdefault(request.request_id, (request, {}))[1][sequence.index] = sequence
        for request, sequences in changed.values():
            done.outputs.append(self._request_output(request, list(sequences.values())))
        return done

    def _to_look_at(self, outputs: EngineOutputs | list[EngineOutput], now: float) -> Iterator[EngineOutput]:
        """Yield what has to be looked at one by one; columns of tokens that nobody sees yet are kept as they are."""
        for part in outputs.parts if isinstance(outputs, EngineOutputs) else [outputs]:
            if not isinstance(part, TokenColumn):
                yield from part
                continue
            places, num_kept = self._quiet.take(part, self._sequences, now)
            self.num_generated_tokens += num_kept
            yield from part.of_rows(places)

    def _engine_request(self, sequence: _Sequence, priority: int, tokens: dict[str, Any]) -> EngineRequest:
        request = sequence.request
        return EngineRequest(
            req_id=sequence.req_id,
            prompt_token_ids=request.prompt_token_ids,
            params=request.params,
            priority=priority,
            sample_index=sequence.index,
            parent_index=request.admission_index,
            eos_token_ids=self.eos_token_ids,
            **tokens,
        )

    def _token_sequences(self, params: SamplingParams) -> dict[str, Any]:
        """Return the parameters that are texts as the tokens that the engine compares."""
        found: dict[str, Any] = {}
        if params.bad_words is not None:
            found["bad_words"] = bad_word_ids(params.bad_words, self.tokenizer)
        if params.thinking_token_budget is not None:
            for name in ("thinking_start", "thinking_end"):
                found[name] = marker_ids(name, getattr(params, name), self.tokenizer)
        return found

    def _make_detokenizer(self, params: SamplingParams) -> Detokenizer | None:
        late = params.output_kind is RequestOutputKind.FINAL_ONLY and not params.stop_strings
        if self.tokenizer is None or not params.detokenize or late:
            return None
        return Detokenizer(self.tokenizer, params)

    def _take_tokens(self, sequence: _Sequence, output: EngineOutput, now: float) -> None:
        """Append a step's tokens up to a stop string, and finish the sequence where it ends."""
        request, tokens = sequence.request, output.new_token_ids
        matched, num_taken = False, len(tokens)
        if sequence.detokenizer is not None:
            matched, num_taken = self._push_text(sequence.detokenizer, sequence, output)
        sequence.token_ids += tokens[:num_taken]
        if output.logprobs:
            sequence.raw_logprobs += output.logprobs[:num_taken]
        self.num_generated_tokens += num_taken
        metrics = request.metrics
        if num_taken:
            metrics.first_token_ts = metrics.first_token_ts or now
            metrics.last_token_ts = now
            metrics.num_generation_tokens += num_taken
        if output.prompt_logprobs is not None:
            request.prompt_logprobs = [None, *self._prompt_logprobs(output.prompt_logprobs)]
        if output.drafts is not None:
            metrics.drafts.merge(output.drafts)
        if sequence.index == 0 and output.num_cached_tokens:
            request.num_cached_tokens = output.num_cached_tokens
        if matched:
            self._finish(sequence, "stop", None)
        elif output.finish_reason is not None:
            silent = output.finish_reason == "stop" and self._is_silent(request.params, output.stop_reason)
            self._finish(sequence, output.finish_reason, None if silent else output.stop_reason)

    def _is_silent(self, params: SamplingParams, stop_reason: int | str | None) -> bool:
        """The model's own end token is no reason worth naming, unless the caller asked for it by id."""
        return stop_reason in self.eos_token_ids[:1] and stop_reason not in (params.stop_token_ids or ())

    def _push_text(self, detokenizer: Detokenizer, sequence: _Sequence, output: EngineOutput) -> tuple[bool, int]:
        """Return whether a stop string was completed, and after how many of the step's tokens."""
        tokens, params = output.new_token_ids, sequence.request.params
        num_unstoppable = params.min_tokens - len(sequence.token_ids)
        num_with_text = len(tokens)
        if output.finish_reason == "stop" and not params.include_stop_str_in_output:
            num_with_text -= 1
        for taken, token_id in enumerate(tokens[:num_with_text], start=1):
            if detokenizer.push(token_id, may_stop=taken > num_unstoppable):
                return True, taken
        return False, len(tokens)

    def _finish(self, sequence: _Sequence, reason: FinishReason, stop_reason: int | str | None) -> None:
        request, detokenizer = sequence.request, sequence.detokenizer
        self._quiet.hand_out(sequence)
        self._quiet.discard(sequence)
        if detokenizer is not None:
            detokenizer.finish()
            if detokenizer.stop_reason is not None:
                reason, stop_reason = "stop", detokenizer.stop_reason
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        del self._sequences[sequence.req_id]
        request.num_running -= 1
        if request.num_running == 0:
            del self._requests[request.request_id]

    def _request_output(self, request: _Request, changed: list[_Sequence]) -> RequestOutput:
        kind, prompt_logprobs = request.params.output_kind, request.prompt_logprobs
        if kind is RequestOutputKind.DELTA:
            request.prompt_logprobs = None
        shown = changed if kind is RequestOutputKind.DELTA else request.sequences
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[self._completion(sequence, delta=kind is RequestOutputKind.DELTA) for sequence in shown],
            finished=request.num_running == 0,
            metrics=request.metrics,
            num_cached_tokens=request.num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
        )

    def _completion(self, sequence: _Sequence, *, delta: bool) -> CompletionOutput:
        start = sequence.num_shown if delta else 0
        sequence.num_shown = len(sequence.token_ids)
        logprobs, total = None, None
        params = sequence.request.params
        if params.logprobs is not None or params.logprob_token_ids is not None:
            for raw in sequence.raw_logprobs[len(sequence.logprobs) :]:
                sequence.logprobs.append(self._logprobs(raw, named=params.logprob_token_ids is not None))
                sequence.cumulative_logprob += raw.logprobs[0]
            logprobs, total = sequence.logprobs[start:], sequence.cumulative_logprob
        return CompletionOutput(
            index=sequence.index,
            text=self._text(sequence, delta=delta),
            token_ids=sequence.token_ids[start:],
            cumulative_logprob=total,
            logprobs=logprobs,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )

    def _text(self, sequence: _Sequence, *, delta: bool) -> str:
        detokenizer, params = sequence.detokenizer, sequence.request.params
        if detokenizer is not None:
            return detokenizer.take() if delta else detokenizer.visible
        if self.tokenizer is None or not params.detokenize:
            return ""
        token_ids = sequence.token_ids
        if sequence.finish_reason == "stop" and not params.include_stop_str_in_output:
            token_ids = token_ids[:-1]
        return self.tokenizer.decode(token_ids, skip_special_tokens=params.skip_special_tokens)

    def _prompt_logprobs(self, prompt: PromptLogprobs) -> Iterator[dict[int, Logprob]]:
        for ids, logprobs, rank in zip(
            prompt.token_ids.tolist(), prompt.logprobs.tolist(), prompt.ranks.tolist(), strict=True
        ):
            yield self._logprobs(TokenLogprob(ids, logprobs, rank))

    def _logprobs(self, raw: TokenLogprob, *, named: bool = False) -> dict[int, Logprob]:
        """Column 0 is the token with its own rank; a later duplicate of it is dropped.

        Of tokens that the request `named` the rank is not known.
        """
        others = range(1, len(raw.token_ids))
        ranks: list[int | None] = [raw.sampled_rank, *([None] * len(others) if named else others)]
        rows: dict[int, Logprob] = {}
        for token_id, logprob, rank in zip(raw.token_ids, raw.logprobs, ranks, strict=True):
            text = self.tokenizer.token_text(token_id) if self.tokenizer is not None else None
            rows.setdefault(token_id, Logprob(logprob, rank, text))
        return rows
