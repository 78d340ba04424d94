"""Requests as the lab follows them: their tokens, when each came, in which step, drafted or drawn."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mrv2.engine.detokenizer import TextDecoder, make_decoder
from mrv2.engine.messages import EngineOutput
from mrv2.sampling_params import SamplingParams
from mrv2.tokenizer import Tokenizer

# a token that the target drew itself, and one that a drafter proposed and the target accepted
DRAWN, ACCEPTED = 0, 1


@dataclass(slots=True, eq=False)
class LabRequest:
    """One request of the lab; times in seconds of `time.monotonic`."""

    req_id: str
    prompt: str
    prompt_token_ids: list[int]
    params: SamplingParams
    submitted: float
    # who sent it: a user of the load, or None = by hand
    user: int | None = None
    first_token: float | None = None
    last_token: float | None = None
    # one entry a token
    token_ids: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    # number of tokens before which drafts were rejected -> how many
    rejected: dict[int, int] = field(default_factory=dict)
    # token -> log-probability at the first generated position, as far as they were asked for
    top_logprobs: dict[int, float] = field(default_factory=dict)
    finish_reason: str | None = None
    error: str | None = None
    decoder: TextDecoder | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """The generated text as far as it is certain."""
        return "".join(self.pieces)

    @property
    def ttft(self) -> float | None:
        """Seconds from submission to the first token."""
        return None if self.first_token is None else self.first_token - self.submitted

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None with fewer than two tokens."""
        if self.first_token is None or self.last_token is None or len(self.token_ids) < 2:
            return None
        return (self.last_token - self.first_token) / (len(self.token_ids) - 1)

    def take(self, output: EngineOutput, now: float) -> None:
        """Append what a step brought."""
        new = output.new_token_ids
        if new:
            self.first_token = now if self.first_token is None else self.first_token
            self.last_token = now
            step = -1 if output.step is None else output.step
            if output.num_drafted:
                missed = output.num_drafted - (len(new) - 1)
                if missed > 0:
                    self.rejected[len(self.token_ids) + len(new) - 1] = missed
            self.token_ids += new
            self.steps += [step] * len(new)
            self.origins += [ACCEPTED] * (len(new) - 1) + [DRAWN]
            given = output.logprobs or ()
            if given and not self.top_logprobs:
                self.top_logprobs = dict(zip(given[0].token_ids, given[0].logprobs))
            self.logprobs += [given[i].logprobs[0] if i < len(given) else None for i in range(len(new))]
            self.pieces += [self._piece(token) for token in new]
        if output.finish_reason is not None:
            if self.decoder is not None and self.pieces:
                self.pieces[-1] += self.decoder.flush()
            self.finish_reason = output.finish_reason
            self.error = str(output.stop_reason) if output.finish_reason == "error" else None

    def _piece(self, token: int) -> str:
        return self.decoder.push(token) if self.decoder is not None else f" {token}"

    def as_dict(self) -> dict[str, Any]:
        """Return what a session keeps."""
        return {
            "req_id": self.req_id,
            "prompt": self.prompt,
            "prompt_token_ids": self.prompt_token_ids,
            "seed": self.params.seed,
            "temperature": self.params.temperature,
            "max_tokens": self.params.max_tokens,
            "token_ids": self.token_ids,
            "steps": self.steps,
            "origins": self.origins,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "ttft_s": self.ttft,
            "tpot_s": self.tpot,
        }


class RequestBook:
    """Every request of a session: those that run, and the last ones that have finished; used by one thread."""

    def __init__(self, tokenizer: Tokenizer | None, *, keep: int = 400) -> None:
        self._tokenizer = tokenizer
        self.open: dict[str, LabRequest] = {}
        self.finished: deque[LabRequest] = deque(maxlen=keep)
        self.num_finished = self.num_tokens = 0
        # tokens that a verification of drafts yielded -> how often
        self.lengths: Counter[int] = Counter()

    def add(self, request: LabRequest) -> None:
        """Follow a request that is being submitted."""
        if self._tokenizer is not None:
            request.decoder = make_decoder(self._tokenizer, skip_special_tokens=True)
        self.open[request.req_id] = request

    def withdraw(self, request: LabRequest) -> None:
        """Forget a request that the engine refused."""
        self.open.pop(request.req_id, None)

    def take(self, output: EngineOutput, now: float) -> LabRequest | None:
        """Sort an output to its request; None if nobody follows it. The request leaves `open` with its last output."""
        request = self.open.get(output.req_id)
        if request is None:
            return None
        request.take(output, now)
        self.num_tokens += len(output.new_token_ids)
        if output.num_drafted and output.new_token_ids:
            self.lengths[len(output.new_token_ids)] += 1
        if request.finished:
            del self.open[request.req_id]
            self.finished.append(request)
            self.num_finished += 1
        return request

    def newest(self, count: int) -> Iterator[LabRequest]:
        """Yield up to `count` requests to show: those that run, oldest first, then the last finished ones."""
        running = list(self.open.values())[:count]
        yield from running
        done = list(self.finished)
        yield from reversed(done[-(count - len(running)) :] if count > len(running) else [])
