"""What grammars force, as chains of tokens that the device drafts from.

    position   q-1 | q   ..  q+k-1 | q+k ......
    step n         | its k drafts  | forced tokens      masks of step n are made; q tokens are known
    step n+1       at the end of step n the device drafts for it, from the place that the history has reached

The chain of a request holds the legal drafts that its step verifies and what must follow them, so that the device
can tell whether the request has kept to it.  The step yields the token behind its drafts, too: the first
forced one; those after it are left to draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mrv2.engine.grammar.masks import DraftedRow
from mrv2.engine.request import Request
from mrv2.runner.protocol import DraftChains


def chains_of(
    # of the requests, their row in the batch
    batch_rows: Sequence[int],
    requests: Sequence[Request],
    drafted: Sequence[DraftedRow],
    # most drafts of a request
    num_drafts: int,
) -> DraftChains | None:
    """Return the chains that leave something to draft, and note how much in `Request.num_forced`; None if none does."""
    found = [
        (batch_row, request, [*row.drafts[: row.num_legal], *row.forced])
        for batch_row, request, row in zip(batch_rows, requests, drafted, strict=True)
        if row.error is None and len(row.forced) > 1
    ]
    if not found:
        return None
    tokens = np.zeros((len(found), 2 * num_drafts + 1), dtype=np.int32)
    for index, (_, _, chain) in enumerate(found):
        tokens[index, : len(chain)] = chain
    for request, row in zip(requests, drafted, strict=True):
        request.num_forced = max(0, len(row.forced) - 1)
    return DraftChains(
        np.array([batch_row for batch_row, _, _ in found], dtype=np.int32),
        np.array([request.num_known for _, request, _ in found], dtype=np.int32),
        np.array([len(chain) for _, _, chain in found], dtype=np.int32),
        tokens,
    )
