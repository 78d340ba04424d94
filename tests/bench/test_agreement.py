"""Where two runs part: a tie within the tolerance of the arithmetic, or an error."""

from __future__ import annotations

import pytest
import torch

from bench.small_engine import small_core
from mrv2.bench import agreement
from mrv2.bench.agreement import Difference, find_differences
from mrv2.bench.serving import serve
from mrv2.bench.workloads import BenchRequest, Workload


def workload(temperature: float) -> Workload:
    requests = tuple(BenchRequest(tuple(range(start, start + 9)), 5) for start in (1, 40, 90))
    return Workload("agreement", "", requests, temperature)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_wrong_token_is_found_and_judged(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    small = workload(temperature)
    with small_core(small) as core:
        requests = small.engine_requests()
        expected = serve(core, requests).tokens
        assert find_differences(core, requests, expected, expected) == []

        # the likeliest token that was not drawn at index 2 of request 1
        scores = agreement._scores(core, requests[1], expected["1"][:2])
        ranked = sorted(scores, key=lambda token: -scores[token])
        assert ranked[0] == expected["1"][2], "the sampler draws the token of the largest score"
        other = ranked[1]
        changed = {**expected, "1": [*expected["1"][:2], other, 7, 7]}
        (difference,) = find_differences(core, requests, expected, changed)
        assert (difference.req_id, difference.index) == ("1", 2)
        assert (difference.expected, difference.found) == (ranked[0], other)
        margin = scores[ranked[0]] - scores[other]
        assert difference.margin == pytest.approx(margin, abs=1e-4)
        assert not difference.is_tie
        assert "not a tie: margin" in difference.describe()

        monkeypatch.setitem(agreement.TIE_TOLERANCE, torch.float32, 2 * margin)
        (difference,) = find_differences(core, requests, expected, changed)
        assert difference.is_tie
        assert "; tie: margin" in difference.describe()


def test_a_missing_token_is_no_tie() -> None:
    small = workload(0.0)
    with small_core(small) as core:
        requests = small.engine_requests()
        expected = serve(core, requests).tokens
        (difference,) = find_differences(core, requests, expected, {**expected, "2": expected["2"][:3]})
    assert (difference.index, difference.found, difference.margin) == (3, None, None)
    assert not difference.is_tie


def test_an_unlikely_token_is_no_tie() -> None:
    assert not Difference("0", 0, 1, 2, None, 0.1).is_tie
    assert "likeliest" in Difference("0", 0, 1, 2, None, 0.1).describe()
