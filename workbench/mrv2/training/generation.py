"""A model writes dialogues: many rows at once, each at its own place in its own dialogue.

One step feeds one token a row.  The token that follows is forced while a script lasts (prompt, template),
drawn from the model otherwise; a row whose dialogue is over waits until the host collects it and gives it
the next plan.  A step reads and writes device tensors only, so that it can be one CUDA graph.

    script        prompt ......  |          | to_answer |          | to_question | ...
    drawn                        question   end         answer     end

Legend: B rows, L longest dialogue, F scripts of P tokens at most, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from mrv2.device.cuda import no_collection
from mrv2.errors import ConfigError
from mrv2.training.dialogues import TRAIN, Dialogue
from mrv2.training.scripts import ChatScripts, Plan
from mrv2.training.target import FrozenTarget

log = logging.getLogger(__name__)

QUESTION, ANSWER = 0, 1
# tokens below this share of the likeliest one's probability are never drawn
MIN_P = 0.02


@dataclass(frozen=True)
class Limits:
    """Lengths in tokens, and how often the host looks."""

    # of a dialogue
    length: int = 384
    min_question: int = 4
    max_question: int = 72
    max_answer: int = 256
    # steps between two collections
    window: int = 16


class DialogueWriter:
    """The rows of one batch and the step that moves all of them on by one token."""

    def __init__(
        self, target: FrozenTarget, scripts: ChatScripts, num_rows: int, limits: Limits, *, use_graph: bool
    ) -> None:
        self.target, self.limits, self.num_rows = target, limits, num_rows
        device = target.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # [B, L]
        self.token_ids, self.is_answer = (
            zeros(num_rows, limits.length),
            zeros(num_rows, limits.length, dtype=torch.bool),
        )
        # [B]: index of the newest token; tokens drawn in this turn; tokens of the script already used
        self.position, self.drawn, self.used = zeros(num_rows), zeros(num_rows), zeros(num_rows)
        self.phase, self.more_turns, self.script_length = zeros(num_rows), zeros(num_rows), zeros(num_rows)
        self.temperature = zeros(num_rows, dtype=torch.float32)
        # a row begins done: it has no plan yet
        self.done = ~zeros(num_rows, dtype=torch.bool)
        # [B, L]
        self.script = zeros(num_rows, limits.length)
        self.to_answer, self.to_question = (
            torch.tensor(ids, dtype=torch.int64, device=device) for ids in (scripts.to_answer, scripts.to_question)
        )
        self.end_ids = torch.tensor(scripts.end_ids, dtype=torch.int64, device=device)
        self.cache = target.allocate_cache(num_rows, limits.length)
        self._rows = torch.arange(num_rows, device=device)
        self._graph = self._captured() if use_graph and device.type == "cuda" else None

    def advance(self, num_steps: int) -> None:
        """Run some steps; the host waits for none of them."""
        advance = self.step if self._graph is None else self._graph.replay
        for _ in range(num_steps):
            advance()

    @torch.no_grad()
    def step(self) -> None:
        """Feed every row's newest token and append what follows."""
        rows, limits = self._rows, self.limits
        active = ~self.done
        logits = self.target.decode(self.token_ids[rows, self.position], self.position, self.cache)
        temperature = self.temperature.masked_fill(self.phase == QUESTION, 1.0)
        forced = self.used < self.script_length
        scripted = self.script[rows, self.used.clamp(max=limits.length - 1)]
        token = torch.where(forced, scripted, draw(logits, temperature))
        free = active & ~forced
        self.used += active & forced
        self.drawn += free
        self._append(token, active, free & (self.phase == ANSWER))
        self._turn(token, free)
        self.done |= active & (self.position >= limits.length - 1)

    # token [B], active and answering [B] bool
    def _append(self, token: torch.Tensor, active: torch.Tensor, answering: torch.Tensor) -> None:
        rows = self._rows
        place = (self.position + 1).clamp(max=self.limits.length - 1)
        self.token_ids[rows, place] = torch.where(active, token, self.token_ids[rows, place])
        self.is_answer[rows, place] = torch.where(active, answering, self.is_answer[rows, place])
        self.position.copy_(torch.where(active, place, self.position))

    # token [B], free [B] bool: the row drew its token
    def _turn(self, token: torch.Tensor, free: torch.Tensor) -> None:
        """End questions and answers, and load the script that comes next."""
        limits = self.limits
        asking = free & (self.phase == QUESTION)
        answering = free & (self.phase == ANSWER)
        ended = (token[:, None] == self.end_ids).any(-1)
        asked = asking & (token == self.end_ids[0])
        refused = asking & ended & ~asked | asked & (self.drawn <= limits.min_question)
        refused |= asking & ~ended & (self.drawn >= limits.max_question)
        goes_on = answering & (token == self.end_ids[0]) & (self.more_turns > 0)
        over = answering & ~goes_on & (ended | (self.drawn >= limits.max_answer))
        self.done |= over | refused
        for switched, script in ((asked, self.to_answer), (goes_on, self.to_question)):
            size = script.shape[0]
            self.script[:, :size] = torch.where(switched[:, None], script, self.script[:, :size])
            self.script_length.masked_fill_(switched, size)
            self.used.masked_fill_(switched, 0)
            self.drawn.masked_fill_(switched, 0)
        self.phase.masked_fill_(asked, ANSWER).masked_fill_(goes_on, QUESTION)
        self.more_turns -= goes_on.long()

    # rows [n] int64
    def assign(self, rows: np.ndarray, plans: Sequence[Plan]) -> None:
        """Give rows that are done a new dialogue each."""
        longest = self.limits.length - 2
        if any(not 1 <= len(plan.prompt) <= longest for plan in plans):
            raise ConfigError(f"a prompt of a dialogue must have 1..{longest} tokens")
        script = np.zeros((len(plans), self.limits.length), np.int64)
        for line, plan in zip(script, plans):
            # the first token is fed, the others follow by force
            line[: len(plan.prompt)] = plan.prompt
        index = torch.from_numpy(rows).to(self.target.device)

        def put(field: torch.Tensor, values: np.ndarray) -> None:
            field[index] = torch.from_numpy(values).to(field)

        put(self.token_ids, script)
        put(self.script, script)
        put(self.is_answer, np.zeros(script.shape, bool))
        put(self.position, np.zeros(len(plans), np.int64))
        put(self.drawn, np.zeros(len(plans), np.int64))
        put(self.used, np.ones(len(plans), np.int64))
        put(self.script_length, np.array([len(plan.prompt) for plan in plans]))
        put(self.phase, np.array([ANSWER if plan.answer_first else QUESTION for plan in plans]))
        put(self.more_turns, np.array([plan.more_turns for plan in plans]))
        put(self.temperature, np.array([plan.temperature for plan in plans], np.float32))
        put(self.done, np.zeros(len(plans), bool))

    def collect(self, rows: np.ndarray, split: int) -> list[Dialogue]:
        """Return the finished dialogues of some rows, without those whose question led to no answer."""
        index = torch.from_numpy(rows).to(self.target.device)
        parts = (self.token_ids, self.is_answer, self.position + 1, self.temperature == 0)
        ids, answers, lengths, greedy = (part[index].cpu().numpy() for part in parts)
        return [
            Dialogue(ids[i, :n].copy(), answers[i, :n].copy(), bool(greedy[i]), split)
            for i, n in enumerate(lengths)
            if answers[i, :n].any()
        ]

    def _captured(self) -> torch.cuda.CUDAGraph | None:
        """Capture the step as a CUDA graph; None if this device or version refuses."""
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self.step()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with no_collection(), torch.cuda.graph(graph):
                self.step()
        except RuntimeError as error:
            log.warning("generation runs without a CUDA graph: %s", error)
            return None
        return graph


# logits [B, V], temperature [B] -> [B] int64
def draw(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Draw a token a row, the likeliest at temperature 0; unlikely tail tokens are never drawn (`MIN_P`)."""
    scaled = logits.float() / temperature.clamp(min=1e-3)[:, None]
    unlikely = scaled < scaled.amax(-1, keepdim=True) + float(np.log(MIN_P))
    # the largest of z + Gumbel noise; minus the log of an exponential is Gumbel noise
    noisy = scaled - torch.empty_like(scaled).exponential_().log_()
    noisy.masked_fill_(unlikely, float("-inf"))
    return torch.where(temperature > 0, noisy.argmax(-1), logits.argmax(-1))


def write_dialogues(
    writer: DialogueWriter, plans: Iterator[Plan], *, split: int = TRAIN, deadline: float, max_answer_tokens: int
) -> Iterator[list[Dialogue]]:
    """Yield finished dialogues until the plans are done, the clock passes `deadline` or there is enough.

    `deadline` is of ``time.monotonic``.  What rows have in hand at the end is dropped.
    """
    holds_plan = np.zeros(writer.num_rows, bool)
    num_tokens = 0
    while True:
        done = writer.done.cpu().numpy()
        finished = np.flatnonzero(done & holds_plan)
        if len(finished):
            dialogues = writer.collect(finished, split)
            num_tokens += sum(int(d.is_answer.sum()) for d in dialogues)
            holds_plan[finished] = False
            yield dialogues
        if num_tokens >= max_answer_tokens or time.monotonic() >= deadline:
            return
        vacant = np.flatnonzero(~holds_plan)
        given = list(islice(plans, len(vacant)))
        if given:
            writer.assign(vacant[: len(given)], given)
            holds_plan[vacant[: len(given)]] = True
        if not holds_plan.any():
            return
        writer.advance(writer.limits.window)
