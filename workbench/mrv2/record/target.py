"""What is being recorded: an engine in this process, one elsewhere, a device, or just this process."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrv2.errors import ConfigError
from mrv2.record.backend import RecordError

if TYPE_CHECKING:
    from mrv2.config import EngineConfig
    from mrv2.device.base import Device
    from mrv2.engine.client import EngineClient
    from mrv2.llm import LLM


@dataclass(frozen=True)
class Target:
    """At most one of `client` and `device` is given by the caller; `core` is the engine where it can be reached."""

    # an EngineCore, or what stands in for one
    core: Any = None
    client: EngineClient | None = None
    device: Device | None = None

    @classmethod
    def of(cls, *, llm: LLM | None, engine: EngineClient | None, core: Any, device: Device | None) -> Target:
        """Resolve what the caller gave; raises `ConfigError` if it is more than one thing."""
        given = {"llm": llm, "engine": engine, "core": core, "device": device}
        names = [name for name, value in given.items() if value is not None]
        if len(names) > 1:
            raise ConfigError(f"record({', '.join(f'{name}=...' for name in names)}): give one of them")
        client = llm.client if llm is not None else engine
        if client is not None:
            core = getattr(client, "core", None)
        return cls(core=core, client=client, device=core.device if core is not None else device)

    def require_here(self, level: str, *, with_steps: bool) -> None:
        """Raise `RecordError` unless a recorder of this process sees the engine."""
        if self.client is None or self.core is not None:
            return
        is_thread = type(self.client).__name__ == "ThreadClient"
        if not is_thread:
            raise RecordError(
                f"level={level!r} records this process, and the engine runs in another; load it with engine='inproc', "
                "or record with level='stages'"
            )
        if with_steps:
            raise RecordError(
                f"level={level!r} cannot count the steps of an engine on a thread of its own; leave steps out, "
                "load the engine with engine='inproc', or record with level='stages'"
            )

    def settle(self, reason: str) -> None:
        """Wait for the device, so that a capture has clean edges; counts as an allowed wait."""
        if self.device is None:
            return
        from mrv2.instrument import current_step, set_step, sync_allowed

        step = current_step()
        # the wait belongs to no step
        set_step(None)
        try:
            with sync_allowed(reason):
                self.device.synchronize(reason)
        finally:
            set_step(step)

    def describe(self) -> dict[str, Any]:
        """Return what is known of the engine, for `Trace.meta`: config, knobs, model, GPU; no paths."""
        from mrv2.bench.environment import package_version

        packages = {name: version for name in ("torch", "triton", "nvtx") if (version := package_version(name))}
        found: dict[str, Any] = {"versions": packages}
        config: EngineConfig | None = None
        if self.core is not None:
            config = self.core.config
            found["knobs"] = self.core.knobs.as_dict()
        elif self.client is not None:
            config = self.client.info.config
            found["knobs"] = dict(self.client.snapshot().knobs)
        if config is not None:
            values = asdict(config)
            values.pop("knobs")
            found["config"] = {**values, "model": Path(config.model).name}
        gpu = self._gpu_name()
        if gpu is not None:
            found["gpu_name"] = gpu
        return found

    def _gpu_name(self) -> str | None:
        if self.device is None or self.device.type != "cuda":
            return None
        import torch

        return torch.cuda.get_device_name(self.device.torch_device)
