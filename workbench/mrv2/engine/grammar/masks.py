"""The masks of one step, filled on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mrv2.engine.grammar.backend import fill_draft_rows
from mrv2.engine.request import Request


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
    first = 0
    for request, mine in zip(requests, drafts, strict=True):
        _fill_request(request, mine, bits, first)
        first += 1 + len(mine)


def _fill_request(
    request: Request,
    drafts: Sequence[int],
    # [G, W] int32
    bits: np.ndarray,
    first: int,
) -> None:
    matcher, end = request.grammar, first + 1 + len(drafts)
    assert matcher is not None, f"request {request.req_id} follows no grammar"
    request.dead_end = None
    try:
        num_legal = fill_draft_rows(matcher, drafts, bits, first)
    except Exception as error:  # whatever the library raises concerns this request alone
        bits[first:end] = 0
        request.dead_end = f"the grammar failed after {request.num_outputs} tokens: {error}"
        return
    for place in range(num_legal + 1):
        num_outputs = request.num_outputs + place
        if num_outputs < request.message.params.min_tokens:
            _hold_back(bits[first + place], request.stop_ids.union(request.message.eos_token_ids))
        if not bits[first + place].any():
            request.dead_end = f"dead end: after {num_outputs} tokens no token of the vocabulary continues the grammar"
            break


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
