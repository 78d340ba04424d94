"""Streams of closed devices serve the next ones; what a real GPU keeps of them is a GPU test."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from mrv2.device.cuda import _IdleStreams


def test_streams_given_back_are_handed_out_in_the_order_they_had(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = count()
    monkeypatch.setattr(torch.cuda, "Stream", lambda index: (index, next(fresh)))
    idle = _IdleStreams()
    streams = [idle.take(0), idle.take(0)]
    assert streams == [(0, 0), (0, 1)]
    idle.give(0, streams)
    assert idle.take(1) == (1, 2), "another device's are its own"
    assert [idle.take(0) for _ in range(3)] == [*streams, (0, 3)]
