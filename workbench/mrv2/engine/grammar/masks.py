"""The masks of one step, filled on the host: those of all requests together, then those behind drafts 1, 2, ..."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mrv2.engine.grammar.backend import ALL_ALLOWED, GrammarMatcher
from mrv2.engine.request import Request


@dataclass(slots=True)
class DraftedRow:
    """A matcher, the drafts that follow, and the rows of their masks."""

    matcher: GrammarMatcher
    drafts: Sequence[int]
    # its masks are rows first_row .. first_row + len(drafts)
    first_row: int
    # filled in: drafts that may be accepted, and what the library raised
    num_legal: int = 0
    error: Exception | None = None

    @property
    def end_row(self) -> int:
        return self.first_row + 1 + len(self.drafts)


def fill_draft_rows(
    drafted: Sequence[DraftedRow],
    # [rows, W] int32, C-contiguous, written in place
    bits: np.ndarray,
) -> None:
    """Write the K + 1 masks of each row with K drafts: mask i is that of the state after drafts 1..i.

    From the first draft that the grammar refuses on, the last legal mask is repeated: verification
    stops there, so that no later mask is ever used.  The matchers are left as they were.
    """
    wave = list(drafted)
    _fill_wave(wave, bits)
    for place in range(max((len(row.drafts) for row in drafted), default=0)):
        wave = [row for row in wave if row.error is None and place < len(row.drafts) and _advance(row, bits)]
        _fill_wave(wave, bits)
    for row in drafted:
        try:
            if row.num_legal:
                row.matcher.rollback(row.num_legal)
        except Exception as error:  # as below
            row.error = error
        if row.error is None:
            last = row.first_row + row.num_legal
            bits[last + 1 : row.end_row] = bits[last]
        else:
            bits[row.first_row : row.end_row] = 0


def _advance(
    row: DraftedRow,
    # [rows, W] int32
    bits: np.ndarray,
) -> bool:
    """Accept the next draft; return True if a mask is to be filled behind it."""
    token = row.drafts[row.num_legal]
    try:
        if token < 0 or row.matcher.terminated or not row.matcher.accept(token):
            return False
    except Exception as error:  # whatever the library raises concerns this request alone
        row.error = error
        return False
    row.num_legal += 1
    if not row.matcher.terminated:
        return True
    # what follows the end token is discarded
    bits[row.first_row + row.num_legal] = ALL_ALLOWED
    return False


def _fill_wave(
    wave: Sequence[DraftedRow],
    # [rows, W] int32
    bits: np.ndarray,
) -> None:
    by_type: dict[type[GrammarMatcher], list[DraftedRow]] = {}
    for row in wave:
        by_type.setdefault(type(row.matcher), []).append(row)
    for kind, rows in by_type.items():
        try:
            kind.fill_many([row.matcher for row in rows], bits, [row.first_row + row.num_legal for row in rows])
        except Exception:  # one of them failed: once more, each for itself
            for row in rows:
                try:
                    row.matcher.fill(bits, row.first_row + row.num_legal)
                except Exception as error:
                    row.error = error


def fill_masks(
    requests: Sequence[Request],
    # of each request: the drafts that its step verifies
    drafts: Sequence[Sequence[int]],
    # [G, W] int32, one mask a logits row, written in place
    bits: np.ndarray,
) -> None:
    """Write what each request may yield next and behind each of its drafts.

    Where that is nothing, note why in `Request.dead_end`: it ends the request if that row is reached.
    """
    drafted, first = [], 0
    for request, mine in zip(requests, drafts, strict=True):
        assert request.grammar is not None, f"request {request.req_id} follows no grammar"
        drafted.append(DraftedRow(request.grammar, mine, first))
        first += 1 + len(mine)
    fill_draft_rows(drafted, bits)
    for request, row in zip(requests, drafted, strict=True):
        request.dead_end = None
        if row.error is not None:
            request.dead_end = f"the grammar failed after {request.num_outputs} tokens: {row.error}"
        elif request.num_outputs < request.message.params.min_tokens:
            held_back = request.stop_ids.union(request.message.eos_token_ids)
            places = min(request.message.params.min_tokens - request.num_outputs, row.num_legal + 1)
            for mask in bits[row.first_row : row.first_row + places]:
                _hold_back(mask, held_back)
    # [G]
    is_empty = np.bitwise_or.reduce(bits[:first], axis=1) == 0
    if not is_empty.any():
        return
    for request, row in zip(requests, drafted, strict=True):
        empty = np.flatnonzero(is_empty[row.first_row : row.first_row + row.num_legal + 1])
        if row.error is None and len(empty):
            count = request.num_outputs + int(empty[0])
            request.dead_end = f"dead end: after {count} tokens no token of the vocabulary continues the grammar"


def _hold_back(
    # [W] int32
    bits: np.ndarray,
    stop_ids: frozenset[int],
) -> None:
    """min_tokens: no stop id yet, unless nothing else is left, for a grammar that has ended cannot go on."""
    kept = bits.copy()
    for token in stop_ids:
        kept[token // 32] &= ~np.uint32(1 << (token % 32)).astype(np.int32)
    if kept.any():
        bits[:] = kept
