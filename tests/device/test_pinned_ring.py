"""PinnedRing: a slot is rewritten only after the step that used it has ended."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from mrv2.device import Device, DeviceError, PinnedRing, make_device


@pytest.fixture
def device() -> Iterator[Device]:
    device = make_device("host")
    yield device
    device.close()


def test_slots_take_turns(device: Device) -> None:
    ring = PinnedRing(device, 3, (2, 4), torch.int32)
    assert ring.depth == 3
    seen = []
    for step in range(6):
        slot = ring.acquire(step)
        assert slot.shape == (2, 4) and slot.dtype == torch.int32 and device.is_pinned(slot)
        seen.append(slot.data_ptr())
        ring.release(slot, device.main.record_event())
        device.synchronize("test")
    assert seen[:3] == seen[3:] and len(set(seen)) == 3


def test_a_slot_that_was_not_released_names_ring_and_step(device: Device) -> None:
    ring = PinnedRing(device, 1, 1, torch.int32, name="ids")
    ring.acquire(7)
    with pytest.raises(AssertionError, match="'ids': step 8 needs the slot of step 7"):
        ring.acquire(8)


def test_a_release_with_an_unrecorded_event_is_caught(device: Device) -> None:
    ring = PinnedRing(device, 1, 1, torch.int32, name="ids")
    ring.release(ring.acquire(7), device.event())
    with pytest.raises(AssertionError, match="'ids': step 8 needs the slot of step 7"):
        ring.acquire(8)


def test_a_second_release_and_a_foreign_tensor_are_caught(device: Device) -> None:
    ring = PinnedRing(device, 2, 1, torch.int32, name="ids")
    slot = ring.acquire(0)
    ring.release(slot, device.main.record_event())
    with pytest.raises(AssertionError, match="released twice"):
        ring.release(slot, device.main.record_event())
    with pytest.raises(AssertionError, match="not one of its slots"):
        ring.release(torch.empty(1), device.main.record_event())


def _busy_ring(device: Device, *, debug: bool) -> tuple[PinnedRing, threading.Event]:
    gate = threading.Event()
    ring = PinnedRing(device, 1, 1, torch.int32, name="ids", debug=debug)
    slot = ring.acquire(0)
    device.main.run("gate", gate.wait, 10.0)
    ring.release(slot, device.main.record_event())
    return ring, gate


def test_debug_refuses_a_ring_that_is_too_shallow(device: Device) -> None:
    ring, gate = _busy_ring(device, debug=True)
    with pytest.raises(DeviceError, match="'ids' is too shallow: step 1 needs the slot of step 0"):
        ring.acquire(1)
    gate.set()


def test_otherwise_acquire_waits_by_name(device: Device) -> None:
    ring, gate = _busy_ring(device, debug=False)
    threading.Timer(0.02, gate.set).start()
    ring.acquire(1)
    assert device.waits == {"ring ids": 1}


def test_depth_is_checked(device: Device) -> None:
    with pytest.raises(ValueError, match="depth=0"):
        PinnedRing(device, 0, 1, torch.int32)
