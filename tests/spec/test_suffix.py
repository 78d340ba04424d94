"""Suffix drafts: the kernels against plain Python, and a request that profits from one before it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrv2.config import Knobs
from mrv2.device import make_device
from mrv2.errors import ConfigError
from mrv2.instrument import sync_guard
from mrv2.options import build_config
from mrv2_kernels.spec.suffix import keep_document, propose_suffix
from serving import Collector, alone, make_core, random_prompt
from spec.drafter_cores import K, greedy

ROWS, LENGTH, WIDTH, DOCUMENTS = 6, 60, 40, 3


def plain(history: list[int], newest_first: list[list[int]], k: int, min_n: int, max_n: int) -> list[int]:
    """The longest match wins, then one's own history, then the newest, then the right-most."""
    best, drafts = 0, []
    for text in (history, *newest_first):
        for end in range(len(text) - 1, 0, -1):
            n = 0
            while n < min(end, len(history), max_n) and text[end - 1 - n] == history[-1 - n]:
                n += 1
            if n >= min_n and n > best:
                best, drafts = n, text[end : end + min(k, n)]
    return drafts + [-1] * (k - len(drafts))


@pytest.mark.parametrize("twin", ["torch", "triton"])
@pytest.mark.parametrize("seed", range(8))
def test_drafts_follow_the_longest_match_of_all_documents(twin: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    k, min_n, max_n = int(rng.integers(1, 5)), int(rng.integers(1, 4)), int(rng.integers(4, 9))
    token_ids = torch.from_numpy(rng.integers(0, 3, (ROWS, LENGTH)).astype(np.int32))
    # one history has outgrown its row
    total_len = torch.from_numpy(rng.integers(1, LENGTH + 1, ROWS).astype(np.int32))
    total_len[0] = LENGTH + 2
    documents = torch.full((DOCUMENTS, WIDTH), 77, dtype=torch.int32)
    lengths, count = torch.zeros(DOCUMENTS, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    kept: list[list[int]] = []
    for number in range(int(rng.integers(0, 6))):
        row = int(rng.integers(ROWS))
        keep = getattr(keep_document, twin)
        keep(documents, lengths, count, token_ids, total_len, row=row, place=number % DOCUMENTS)
        kept.append(token_ids[row, : int(total_len[row])].tolist()[-WIDTH:])
    rows = torch.from_numpy(rng.permutation(ROWS)[:4].astype(np.int32))
    rows[0] = 0 if 0 not in rows.tolist() else rows[0]
    speaks = torch.tensor([1, 0, 1, 2], dtype=torch.int32)
    drafts = torch.full((ROWS, 5), 77)
    getattr(propose_suffix, twin)(
        drafts,
        rows,
        documents,
        lengths,
        count,
        token_ids,
        total_len,
        speaks,
        num_draft_tokens=k,
        min_n=min_n,
        max_n=max_n,
        max_len=LENGTH,
    )
    for b, row in enumerate(rows.tolist()):
        history = token_ids[row, : int(total_len[row])].tolist()
        want = plain(history, kept[::-1][:DOCUMENTS], k, min_n, max_n) if speaks[b] else [-1] * k
        assert drafts[row].tolist() == want + [-1] * (5 - k), b
    untouched = [row for row in range(ROWS) if row not in rows.tolist()]
    assert (drafts[untouched] == 77).all()


def test_a_request_drafts_from_one_that_has_ended() -> None:
    """The second asks the same; its row is another request's by then, and nothing else is waited for."""
    core = make_core(
        make_device("host", poison=True),
        max_num_seqs=1,
        enable_prefix_caching=False,
        max_num_spec_tokens=K,
        speculators=("suffix",),
        suffix_documents=2,
        knobs=Knobs(spec_method="suffix", num_spec_tokens=K),
    )
    collector, prompts = Collector(core), [random_prompt(i, 12) for i in range(3)]
    shares = []
    with sync_guard(core.device, mode="error") as guard:
        for turn, index in enumerate((0, 1, 0, 2, 1)):
            before = sum(core.scheduler.stats.num_accepted)
            collector.submit(f"r{turn}", prompts[index], greedy(40))
            collector.run()
            shares.append((sum(core.scheduler.stats.num_accepted) - before) / 40)
    assert not guard.violations and set(guard.waits) == {"output"}
    for turn, index in enumerate((0, 1, 0, 2, 1)):
        assert collector.served[f"r{turn}"].token_ids == alone(tuple(prompts[index]), 0.0, 0, 40)
    # the last repeats a request of which two others have taken the place
    assert shares[2] > 0.5 and max(shares[0], shares[1], shares[3], shares[4]) < shares[2]
    core.shutdown()


def test_suffix_takes_memory_and_must_be_loaded() -> None:
    core = make_core(max_num_spec_tokens=K)
    with pytest.raises(ConfigError, match="spec_method='suffix'"):
        core.set_knobs(spec_method="suffix")
    core.shutdown()
    with pytest.raises(ConfigError, match="suffix_documents=0"):
        build_config("tiny-llama", speculators="suffix", suffix_documents=0)
