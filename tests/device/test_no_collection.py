"""No reference cycle is collected while a graph is captured: it may hold another graph."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from mrv2.device.cuda import no_collection


class Cycle:
    def __init__(self) -> None:
        self.me = self


def churn() -> None:
    """Allocate enough containers for many collections."""
    thresholds = gc.get_threshold()
    gc.set_threshold(10, 1, 1)
    try:
        [[i] for i in range(20_000)]
    finally:
        gc.set_threshold(*thresholds)


def test_a_cycle_outlives_the_block_and_not_what_follows() -> None:
    with no_collection():
        gone = weakref.ref(Cycle())
        churn()
        assert gone() is not None
    churn()
    assert gone() is None


def test_the_collector_is_as_before_after_an_error_too() -> None:
    was_enabled = []

    def fail() -> None:
        with no_collection():
            was_enabled.append(gc.isenabled())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert was_enabled == [False] and gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with no_collection(), no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_it_stays_off_until_the_last_thread_leaves() -> None:
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with no_collection():
            entered.set()
            leave.wait(10.0)

    with no_collection():
        other = threading.Thread(target=hold)
        other.start()
        assert entered.wait(10.0)
    assert not gc.isenabled()
    leave.set()
    other.join()
    assert gc.isenabled()
