"""Poison mode: memory that nobody wrote, or that its owner dropped, reads as garbage."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from mrv2.device import Device, PinnedRing, make_device
from mrv2.device.base import fill_garbage

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool]


@pytest.fixture
def device() -> Iterator[Device]:
    device = make_device("host", poison=True)
    yield device
    device.close()


def _is_garbage(tensor: torch.Tensor) -> bool:
    expected = torch.empty_like(tensor)
    fill_garbage(expected)
    return torch.equal(tensor.isnan(), expected.isnan()) and torch.equal(tensor.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fresh_memory_is_garbage(device: Device, dtype: torch.dtype) -> None:
    assert _is_garbage(device.empty((2, 3), dtype))
    assert _is_garbage(device.pinned((2, 3), dtype))
    assert not device.zeros((2, 3), dtype).any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_integer_garbage_is_out_of_range_as_an_index(device: Device, dtype: torch.dtype) -> None:
    with pytest.raises(IndexError):
        torch.zeros(1000)[device.empty(1, dtype)]


def _copy(*, dst: torch.Tensor, src: torch.Tensor) -> None:
    dst.copy_(src)


def _read_on_side_stream(device: Device, *, keep_reference: bool, by_keyword: bool = False) -> torch.Tensor:
    """Let the side stream read a tensor of the main stream after its owner may have dropped it."""
    main, side, out = device.main, device.stream("copy"), device.pinned(4)
    x = device.zeros(4)
    main.run("forward", x.detach().fill_, 1.0)
    side.wait_stream(main)
    gate = threading.Event()
    side.run("gate", gate.wait, 10.0)
    if by_keyword:
        side.run("output_copy", _copy, dst=out, src=x)
    else:
        side.copy("output_copy", out, x)
    done = side.record_event()
    held = x if keep_reference else None
    del x
    main.record_event().synchronize("main is past the point of the drop")
    gate.set()
    done.synchronize("output")
    del held
    return out


@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_missing_reference_on_a_side_stream_reads_garbage(device: Device, by_keyword: bool) -> None:
    assert _is_garbage(_read_on_side_stream(device, keep_reference=False, by_keyword=by_keyword))


def test_a_held_reference_is_not_disturbed(device: Device) -> None:
    assert _read_on_side_stream(device, keep_reference=True).tolist() == [1.0] * 4


def test_a_view_holds_its_memory(device: Device) -> None:
    view = device.full((2, 4), 3.0).unbind(0)[1]
    device.synchronize("test")
    assert view.tolist() == [3.0] * 4


def test_a_temporary_of_the_main_stream_may_be_dropped_at_once(device: Device) -> None:
    out = device.zeros(1)
    for i in range(50):
        temporary = device.full(1, i)
        device.main.run("forward", out.add_, temporary)
        del temporary
    device.synchronize("test")
    assert out.item() == sum(range(50))


def test_a_released_ring_slot_is_garbage_for_late_readers(device: Device) -> None:
    ring = PinnedRing(device, 2, 4, torch.float32)
    slot, dst, late = ring.acquire(0), device.empty(4), device.empty(4)
    slot.fill_(1.0)
    device.upload(dst, slot)
    ring.release(slot, device.main.record_event())
    device.upload(late, slot)
    device.synchronize("test")
    assert dst.tolist() == [1.0] * 4
    assert _is_garbage(late)


def test_without_poison_dropped_memory_is_left_alone() -> None:
    device = make_device("host")
    assert _read_on_side_stream(device, keep_reference=False).tolist() == [1.0] * 4
    device.close()
