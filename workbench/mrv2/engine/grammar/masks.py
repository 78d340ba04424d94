"""The masks of one step, filled on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mrv2.engine.request import Request


def fill_masks(
    requests: Sequence[Request],
    # [G, W] int32, one mask a request, written in place
    bits: np.ndarray,
) -> None:
    """Write what each request may yield next; where that is nothing, note why in `Request.dead_end`."""
    for row, request in enumerate(requests):
        matcher = request.grammar
        assert matcher is not None, f"request {request.req_id} follows no grammar"
        try:
            matcher.fill(bits, row)
        except Exception as error:  # whatever the library raises concerns this request alone
            bits[row] = 0
            request.dead_end = f"the grammar failed after {request.num_outputs} tokens: {error}"
            continue
        if request.num_outputs < request.message.params.min_tokens:
            _hold_back(bits[row], request.stop_ids.union(request.message.eos_token_ids))
    for row in np.flatnonzero(~bits.any(axis=1)).tolist():
        request = requests[row]
        request.dead_end = request.dead_end or (
            f"dead end: after {request.num_outputs} tokens no token of the vocabulary continues the grammar"
        )


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
