"""A ring of pinned buffers: each step writes its own slot, so nothing in flight is ever rewritten."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mrv2.device.base import Device, DeviceError, Event, Shape, fill_garbage


class PinnedRing:
    """`depth` pinned host tensors of one shape, handed out in turn, one a step.

    A slot is freed by an event recorded at the END of the step that used it; the output event of a
    step comes earlier and does not do.  NumPy results must be copied out before their slot's turn.
    """

    def __init__(
        self,
        device: Device,
        depth: int,
        shape: Shape,
        dtype: torch.dtype,
        *,
        name: str = "pinned",
        debug: bool = False,
        slots: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """With `debug`, a slot whose readers are still at work when its turn comes is an error.

        `slots` are pinned tensors of the ring's shape to hand out; they are allocated otherwise.
        """
        if depth < 1:
            raise ValueError(f"PinnedRing {name!r}: depth={depth} must be at least 1")
        self.device = device
        self.name = name
        self.debug = debug
        self.slots = [device.pinned(shape, dtype) for _ in range(depth)] if slots is None else list(slots)
        # per slot: the step that took it last, and the event that frees it (None = not released)
        self._steps: list[int | None] = [None] * depth
        self._freed_by: list[Event | None] = [None] * depth
        self._turn = 0

    @property
    def depth(self) -> int:
        return len(self.slots)

    def acquire(self, step: int) -> torch.Tensor:
        """Return the next slot for `step`; its content is undefined.

        Fails if the step that used the slot before never released it.  If that step's end has not been
        reached yet: an error with `debug`, else a host wait named ``ring <name>``.
        """
        i = self._turn
        user, event = self._steps[i], self._freed_by[i]
        if user is not None:
            assert event is not None and event.recorded, (
                f"ring {self.name!r}: step {step} needs the slot of step {user}, which was not released with an "
                f"event recorded at the end of step {user}"
            )
            if not event.query():
                if self.debug:
                    raise DeviceError(
                        f"ring {self.name!r} is too shallow: step {step} needs the slot of step {user}, which is "
                        f"still in flight; its depth {self.depth} must exceed the number of steps in flight"
                    )
                event.synchronize(f"ring {self.name}")
        self._turn = (i + 1) % self.depth
        self._steps[i], self._freed_by[i] = step, None
        slot = self.slots[i]
        if self.device.poison:
            fill_garbage(slot)
        return slot

    def release(self, slot: torch.Tensor, event: Event) -> None:
        """Free `slot` once `event`, recorded at the end of its step, is done."""
        i = next((i for i, mine in enumerate(self.slots) if mine is slot), None)
        assert i is not None, f"ring {self.name!r}: the tensor released is not one of its slots"
        assert self._steps[i] is not None and self._freed_by[i] is None, (
            f"ring {self.name!r}: slot {i} was released twice (step {self._steps[i]})"
        )
        self._freed_by[i] = self.device.retire_pinned(slot, event) if event.recorded else event
