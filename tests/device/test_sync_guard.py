"""The sync guard on the host backend: what it catches, what it lets pass."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from mrv2.device import Device, PinnedRing, make_device
from mrv2.errors import SyncError
from mrv2.instrument import no_sync, set_step, sync_allowed, sync_guard

# device tensors of the cases: f [4] float, i [4] int, m [4] bool, s [] int
Case = Callable[[dict[str, torch.Tensor]], object]
WAITING: dict[str, Case] = {
    "item": lambda t: t["s"].item(),
    "tolist": lambda t: t["f"].tolist(),
    "numpy": lambda t: t["f"].numpy(),
    "np.asarray": lambda t: np.asarray(t["f"]),
    "cpu": lambda t: t["f"].cpu(),
    "to": lambda t: t["f"].to("cpu"),
    "to device=": lambda t: t["f"].to(device=torch.device("cpu")),
    "to dtype and device": lambda t: t["f"].to("cpu", torch.float64),
    "bool": lambda t: bool(t["s"]),
    "if": lambda t: 1 if t["s"] else 0,
    "int": lambda t: int(t["s"]),
    "float": lambda t: float(t["s"]),
    "index": lambda t: range(t["s"]),
    "nonzero": lambda t: t["f"].nonzero(),
    "torch.nonzero": lambda t: torch.nonzero(t["f"]),
    "where": lambda t: torch.where(t["m"]),
    "argwhere": lambda t: torch.argwhere(t["f"]),
    "masked_select": lambda t: torch.masked_select(t["f"], t["m"]),
    "unique": lambda t: torch.unique(t["i"]),
    "unique_consecutive": lambda t: t["i"].unique_consecutive(),
    "bincount": lambda t: torch.bincount(t["i"]),
    "repeat_interleave": lambda t: torch.repeat_interleave(t["f"], t["i"]),
    "mask index": lambda t: t["f"][t["m"]],
    "mask in a tuple": lambda t: t["f"][t["m"], None],
    "mask write of a tensor": lambda t: t["f"].__setitem__(t["m"], torch.zeros(4)),
    "scalar index": lambda t: t["f"][t["s"]],
    "slice bound": lambda t: t["f"][: t["s"]],
    "host list index": lambda t: t["f"][[0, 1]],
    "equal": lambda t: torch.equal(t["f"], t["f"]),
    "allclose": lambda t: torch.allclose(t["f"], t["f"]),
    "in": lambda t: 1.0 in t["f"],
    "repr": lambda t: repr(t["f"]),
    "format": lambda t: f"{t['s']}",
    "deepcopy": lambda t: copy.deepcopy(t["f"]),
    "arange": lambda t: torch.arange(t["s"]),
    "tensor of scalars": lambda t: torch.tensor([t["s"]]),
}
OFF_STREAM: dict[str, Case] = {
    "add": lambda t: t["f"] + 1,
    "fill_": lambda t: t["f"].fill_(0),
    "copy in": lambda t: t["f"].copy_(torch.zeros(4)),
    "copy out": lambda t: torch.zeros(4).copy_(t["f"]),
    "stack": lambda t: torch.stack([t["f"], t["f"]]),
}
ALLOWED: dict[str, Case] = {
    "views": lambda t: t["f"][1:3].view(2, 1).expand(2, 2).t().unbind(0)[0].select(0, 1).detach(),
    "metadata": lambda t: (t["f"].shape, t["f"].dtype, t["f"].data_ptr(), len(t["f"]), t["f"].is_contiguous()),
    "empty_like": lambda t: torch.empty_like(t["f"]),
    "host tensors": lambda t: torch.arange(4)[torch.tensor([True, False, True, False])].tolist(),
    "host numpy": lambda t: torch.zeros(3).numpy(),
    "dtype only": lambda t: torch.zeros(3).to(torch.int32).to("cpu"),
}


@pytest.fixture
def device() -> Iterator[Device]:
    device = make_device("host")
    yield device
    device.close()


@pytest.fixture
def tensors(device: Device) -> dict[str, torch.Tensor]:
    return {
        "f": device.full(4, 1.0),
        "i": device.full(4, 1, torch.int64),
        "m": device.full(4, True, torch.bool),
        "s": device.full((), 2, torch.int64),
    }


@pytest.mark.parametrize("name", WAITING)
def test_a_waiting_call_is_an_error_that_names_call_place_and_remedy(
    device: Device, tensors: dict[str, torch.Tensor], name: str
) -> None:
    with sync_guard(device) as guard, pytest.raises(SyncError) as caught:
        WAITING[name](tensors)
    message = str(caught.value)
    assert f"{__file__}:" in message, "the error does not name the user's line"
    assert "would make the host wait" in message and "sync_allowed" in message
    assert [record.kind for record in guard.records] in (["sync"], ["blocking_copy"])


@pytest.mark.parametrize("name", WAITING)
def test_a_waiting_call_is_recorded_once_and_runs_in_record_mode(
    device: Device, tensors: dict[str, torch.Tensor], name: str
) -> None:
    device.synchronize("settle")
    with sync_guard(device, "record") as guard:
        WAITING[name](tensors)
    assert len([r for r in guard.violations if r.kind != "off_stream"]) == 1, guard.records
    assert guard.records[0].duration_ns is not None
    assert guard.records[0].where.startswith(__file__) and guard.records[0].stack


@pytest.mark.parametrize("name", OFF_STREAM)
def test_computing_outside_a_stream_is_an_error(device: Device, tensors: dict[str, torch.Tensor], name: str) -> None:
    with sync_guard(device), pytest.raises(SyncError, match=r"off_stream.*Stream\.run"):
        OFF_STREAM[name](tensors)


@pytest.mark.parametrize("name", ALLOWED)
def test_a_harmless_call_passes(device: Device, tensors: dict[str, torch.Tensor], name: str) -> None:
    with sync_guard(device) as guard:
        ALLOWED[name](tensors)
    assert not guard.records


def test_a_mask_write_of_a_scalar_does_not_wait(device: Device, tensors: dict[str, torch.Tensor]) -> None:
    with sync_guard(device, "record") as guard:
        tensors["f"][tensors["m"]] = 0.0
    assert {r.kind for r in guard.records} == {"off_stream"}


def test_a_step_through_streams_and_events_passes_and_its_waits_are_counted(device: Device) -> None:
    src, x, out = device.pinned(4), device.empty(4), device.pinned(4)
    copy_stream = device.stream("copy")
    with sync_guard(device) as guard:
        src.fill_(2.0)
        device.upload(x, src)
        device.main.run("forward", x.mul_, 2.0)
        copy_stream.wait_stream(device.main)
        copy_stream.copy("output_copy", out, x)
        copy_stream.record_event().synchronize("output")
        assert out.tolist() == [4.0] * 4
    assert not guard.records
    assert guard.waits == {"output": 1}


def test_copies_that_would_block_are_caught(device: Device) -> None:
    x, pinned, pageable = device.empty(4), device.pinned(8), torch.zeros(4)
    pinned_ints = device.pinned(4, torch.int32)
    with sync_guard(device):
        with pytest.raises(SyncError, match=r"pageable.*Device\.pinned"):
            device.upload(x, pageable)
        with pytest.raises(SyncError, match="pageable"):
            device.main.copy("output_copy", pageable, x)
        with pytest.raises(SyncError, match="strided"):
            device.upload(x, pinned[::2])
        with pytest.raises(SyncError, match="converts"):
            device.upload(x, pinned_ints)
        device.upload(x, pinned[4:])
        device.main.copy("post_update", x, x)


def test_device_synchronize_and_new_pinned_memory_are_caught(device: Device) -> None:
    with sync_guard(device):
        with pytest.raises(SyncError, match=r"Event\.synchronize"):
            device.synchronize("drain")
        with pytest.raises(SyncError, match="PinnedRing"):
            device.pinned(4)


def test_allowed_block_is_recorded_with_its_reason(device: Device, tensors: dict[str, torch.Tensor]) -> None:
    with no_sync() as guard:
        with sync_allowed("grammar needs the token"):
            tensors["s"].item()
            device.synchronize("drain")
        with pytest.raises(SyncError):
            tensors["s"].item()
    allowed, refused = guard.records
    assert (allowed.kind, allowed.call) == ("allowed", "grammar needs the token")
    assert allowed.duration_ns is not None and allowed.where.startswith(__file__)
    assert guard.violations == [refused]


def test_allowed_block_without_a_guard_does_nothing() -> None:
    with sync_allowed("nobody watches"):
        pass


def test_no_sync_covers_every_live_device(device: Device) -> None:
    other = make_device("host")
    x = other.zeros(1)
    with no_sync(), pytest.raises(SyncError):
        x.item()
    other.close()


def test_a_guard_watches_its_own_thread_only(device: Device, tensors: dict[str, torch.Tensor]) -> None:
    seen: list[int] = []
    with sync_guard(device) as guard:
        thread = threading.Thread(target=lambda: seen.append(tensors["s"].item()))  # type: ignore[arg-type]  # an int
        thread.start()
        thread.join()
    assert seen == [2] and not guard.records


def test_the_guard_ends_with_its_block_and_nests(device: Device, tensors: dict[str, torch.Tensor]) -> None:
    with sync_guard(device, "record") as outer:
        with pytest.raises(SyncError), sync_guard(device):
            tensors["s"].item()
        tensors["s"].item()
    tensors["s"].item()
    assert len(outer.records) == 1


def test_records_carry_the_step(device: Device, tensors: dict[str, torch.Tensor]) -> None:
    set_step(12)
    with sync_guard(device, "record") as guard:
        tensors["s"].item()
    set_step(None)
    assert guard.records[0].step == 12


def test_an_unknown_mode_is_refused(device: Device) -> None:
    with pytest.raises(ValueError, match="'error' and 'record'"), sync_guard(device, "warn"):  # type: ignore[arg-type]
        pass


def test_poison_mode_and_rings_are_compatible_with_the_guard() -> None:
    device = make_device("host", poison=True)
    ring = PinnedRing(device, 2, 4, torch.float32)
    x = device.empty(4)
    with sync_guard(device) as guard:
        for step in range(6):
            slot = ring.acquire(step)
            slot.fill_(step)
            temporary = device.empty(4)
            device.upload(temporary, slot)
            device.main.run("forward", torch.Tensor.copy_, x, temporary)
            del temporary
            ring.release(slot, device.main.record_event())
    device.synchronize("drain")
    assert x.tolist() == [5.0] * 4 and not guard.violations
    device.close()
