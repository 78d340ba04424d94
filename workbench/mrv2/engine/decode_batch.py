"""A batch that only decodes, kept from step to step: what stays the same is not built again.

While every scheduled request computes one token a step, the next step follows from the last one: each counter
moves by one, and only requests whose block has filled up need another.  When that is, is known in advance:

    step k of the batch      0    1    2   ...
    blocks full after it     [f]  [c]  []  ...      by the place of each request in its block, with its period
    k = `last`                         the step with which the first request reaches its length

A batch is left for good when a member ends or is preempted, when another request may be admitted, or when its
last step is launched; then the scheduler looks at every request again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from mrv2.engine.grammar.backend import GrammarMatcher
from mrv2.engine.messages import EngineOutput
from mrv2.engine.request import Request

# up to so many are compared one by one, which is faster than looking them up
_FEW_STOP_IDS = 8


@dataclass(slots=True)
class ScheduledEntry:
    """One request's share of a step, kept until its output arrives."""

    request: Request
    epoch: int
    num_tokens: int
    yields_token: bool
    num_drafts: int = 0
    # the first of them that a grammar forced
    num_forced: int = 0


@dataclass(slots=True)
class StepRecord:
    """A launched step, with what its output will settle."""

    step: int
    entries: list[ScheduledEntry]
    # not None = it is step `index` of a batch that only decodes
    batch: DecodeBatch | None = None
    index: int = 0


@dataclass(slots=True, eq=False)
class DecodeBatch:
    """B requests that compute and yield one token a step each; their entries serve every step."""

    entries: list[ScheduledEntry]
    # one list for all steps of the batch: a runner may know it again
    req_ids: list[str]
    # [B] int32: tokens computed before step 0, which was scheduled the long way
    computed_before: np.ndarray
    block_size: int

    requests: list[Request] = field(init=False)
    members: set[Request] = field(init=False)
    # [B], never written again
    ones: np.ndarray = field(init=False)
    zeros: np.ndarray = field(init=False)
    yields: np.ndarray = field(init=False)
    # ids that end a request, of all members together
    stop_ids: list[int] = field(init=False)
    # requests by the step after which their blocks are full, modulo the block size
    _full_after: list[list[Request]] = field(init=False)
    # some member follows a grammar
    has_grammar: bool = field(init=False)
    # steps launched, and the number of the last one that may be
    num_launched: int = 1
    last: int = field(init=False)
    # rows that reach their length with the last step
    _ending: list[int] = field(init=False)
    # False once a member has left
    intact: bool = True

    def __post_init__(self) -> None:
        requests = self.requests = [entry.request for entry in self.entries]
        self.members = set(requests)
        self.ones = np.ones(len(requests), dtype=np.int32)
        self.zeros = np.zeros(len(requests), dtype=np.int32)
        self.yields = np.ones(len(requests), dtype=np.bool_)
        self.stop_ids = sorted(set().union(*{request.stop_ids for request in requests}))
        self.has_grammar = any(request.grammar is not None for request in requests)
        self._full_after = [[] for _ in range(self.block_size)]
        for request in requests:
            self._full_after[-request.num_computed % self.block_size].append(request)
        left = [request.max_len - request.num_known - request.num_in_flight for request in requests]
        self.last = min(left)
        self._ending = [row for row, steps in enumerate(left) if steps == self.last]

    @staticmethod
    def fits(entries: Iterable[ScheduledEntry]) -> bool:
        """Say whether these requests can make a batch: plain ones, each with one token."""
        return all(
            entry.num_tokens == 1
            and entry.yields_token
            and not entry.num_drafts
            # the first token of a request brings more than itself
            and entry.request.num_outputs + entry.request.num_in_flight > 1
            and entry.request.is_plain
            for entry in entries
        )

    @property
    def may_go_on(self) -> bool:
        return self.intact and self.num_launched <= self.last

    def full_after(self, index: int) -> list[Request]:
        """Return the requests whose blocks are full once step `index` has run."""
        return self._full_after[index % self.block_size]

    def launch(self) -> np.ndarray:
        """Count the next step as launched; return the tokens computed before it. [B] int32"""
        for request in self.requests:
            request.num_computed += 1
            request.num_in_flight += 1
        computed = self.computed_before + np.int32(self.num_launched)
        self.num_launched += 1
        return computed

    def rows_to_watch(self, index: int, sampled: np.ndarray) -> set[int]:
        """Return the rows of step `index` that end with their token of `sampled` [B] int64: stop, error or length."""
        watched = sampled < 0
        if len(self.stop_ids) > _FEW_STOP_IDS:
            watched |= np.isin(sampled, self.stop_ids)
        else:
            for token in self.stop_ids:
                watched |= sampled == token
        rows = set(np.flatnonzero(watched).tolist())
        return rows.union(self._ending) if index == self.last else rows

    def settle(self, step: int, tokens: list[int], watched: set[int]) -> list[EngineOutput | None]:
        """Take the tokens of a step, one a row, of all rows that are not `watched`; None where one is.

        Rows whose grammar does not go on behind their token join `watched`.
        """
        if self.has_grammar:
            for row, (request, token) in enumerate(zip(self.requests, tokens, strict=True)):
                if request.grammar is not None and row not in watched and not _goes_on(request.grammar, token):
                    watched.add(row)
        results: list[EngineOutput | None] = []
        for row, (request, req_id, token) in enumerate(zip(self.requests, self.req_ids, tokens, strict=True)):
            if watched and row in watched:
                results.append(None)
                continue
            request.num_confirmed += 1
            request.num_in_flight -= 1
            request.token_ids.append(token)
            request.num_known += 1
            results.append(EngineOutput(req_id=req_id, new_token_ids=[token], step=step))
        return results


def _goes_on(grammar: GrammarMatcher, token: int) -> bool:
    """Advance over `token`; return False, and stay, if that is illegal or the end."""
    if not grammar.accept(token):
        return False
    if grammar.terminated:
        grammar.rollback(1)
        return False
    return True
