"""The settings of a workbench as Python that makes another one like it."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from mrv2.lab.load import Load
from mrv2.lab.presets import changed_only

if TYPE_CHECKING:
    from mrv2.lab.workbench import Workbench


def as_code(workbench: Workbench) -> str:
    """Return Python with the model, the options, the knobs that differ from their defaults, and the load."""
    return code_of(workbench.model_name, workbench.options, workbench.knobs, workbench.load)


def code_of(model: str, options: dict[str, Any], knobs: dict[str, Any], load: Load) -> str:
    """Return the same from its parts."""
    lines = [f"    {model!r},"]
    lines += [f"    {name}={value!r}," for name, value in options.items()]
    changed = changed_only(knobs)
    if changed:
        inside = ", ".join(f"{name!r}: {value!r}" for name, value in changed.items())
        lines.append(f"    knobs={{{inside}}},")
    different = {f.name: getattr(load, f.name) for f in fields(Load) if getattr(load, f.name) != f.default}
    inside = ", ".join(f"{name}={value!r}" for name, value in different.items())
    lines.append(f"    load=Load({inside}),")
    return "\n".join(["from mrv2.lab import Load, Workbench", "", "wb = Workbench(", *lines, ")", "wb"])
