"""Only the newest request counts, errors are told, and the thread ends by itself."""

from __future__ import annotations

import threading
import time

from mrv2.viz.latest import LatestWins


def test_requests_that_wait_are_replaced_by_the_newest() -> None:
    may_go, started, done = threading.Event(), threading.Event(), []

    def work(request: int) -> None:
        started.set()
        may_go.wait(10)
        done.append(request)

    latest = LatestWins(work, lambda error: None)
    latest.submit(0)
    assert started.wait(10)
    for request in range(1, 6):
        latest.submit(request)
    may_go.set()
    assert latest.settle(10)
    assert done == [0, 5]
    assert latest.num_dropped == 4


def test_an_error_is_told_and_the_next_request_is_served() -> None:
    errors, done = [], []

    def work(request: int) -> None:
        if request == 0:
            raise ValueError("broken")
        done.append(request)

    latest = LatestWins(work, errors.append)
    latest.submit(0)
    assert latest.settle(10)
    latest.submit(1)
    assert latest.settle(10)
    assert [str(error) for error in errors] == ["broken"]
    assert done == [1]


def test_the_thread_ends_when_idle_and_starts_again() -> None:
    done = []
    before = set(threading.enumerate())
    latest = LatestWins(done.append, lambda error: None, idle_s=0.01)
    latest.submit(0)
    assert latest.settle(10)
    deadline = time.monotonic() + 10
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before
    latest.submit(1)
    assert latest.settle(10)
    assert done == [0, 1]
