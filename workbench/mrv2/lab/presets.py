"""Named settings of the knobs, and the knobs as a panel describes them: generated from `Knobs`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from mrv2.config import EngineConfig, Knobs, legal_values
from mrv2.errors import ConfigError, nearest

EFFECTS = {"T": "same tokens", "D": "same distribution", "O": "changes the output"}
# what a preset does not name goes back to its default
_SYNC = {"async_scheduling": False}
_PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "V1 as it was": (
        "the dense batch, prepared and booked in Python; every step is waited for",
        {"runner": "v1", "sampler": "softmax_race", **_SYNC},
    ),
    "V1 async": ("the same runner, launched one step ahead", {"runner": "v1", "sampler": "softmax_race"}),
    "V1 + n-gram": (
        "drafts looked up on the host; needs the tokens of each step before the next",
        {"runner": "v1", "sampler": "softmax_race", "spec_method": "ngram", **_SYNC},
    ),
    "V2 sync": ("device-side preparation, but every step is waited for", _SYNC),
    "V2 async": ("the default: step n+1 is launched before the tokens of step n are known", {}),
    "V2 async, depth 4": ("the host runs up to three steps ahead", {"queue_depth": 4}),
    "V2 async, host inputs": ("NumPy on the host builds what kernels build otherwise", {"input_prep": "host"}),
    "V2 async, step graphs": ("one graph from staged writes to post_update", {"cuda_graphs": "step"}),
    "V2 async, eager": ("no CUDA graphs: every kernel is launched from Python", {"cuda_graphs": "off"}),
}
_SPECULATION = {
    "ngram": "n-gram",
    "suffix": "suffix tree",
    "draft_model": "a draft model",
    "eagle3": "EAGLE-3",
    "mtp": "MTP",
}


@dataclass(frozen=True)
class Preset:
    """A name for a setting of every knob."""

    name: str
    about: str
    # every knob
    knobs: dict[str, Any]
    # why it cannot be set here; empty = it can
    reason: str = ""


def presets(config: EngineConfig, on_cuda: bool) -> list[Preset]:
    """Return all presets, those that this engine cannot honour with the reason."""
    found = [_preset(name, about, changes, config) for name, (about, changes) in _PRESETS.items()]
    for method in legal_values("spec_method"):
        if method == "off":
            continue
        drafts = min(3, config.max_num_spec_tokens) or 3
        label = f"V2 async + {_SPECULATION.get(method, method)}"
        about = f"drafts by {method}, verified in one step"
        found.append(_preset(label, about, {"spec_method": method, "num_spec_tokens": drafts}, config))
    if not on_cuda:
        found = [
            Preset(p.name, p.about, p.knobs, "there are no CUDA graphs on the host backend")
            if p.name == "V2 async, eager"
            else p
            for p in found
        ]
    return found


def _preset(name: str, about: str, changes: dict[str, Any], config: EngineConfig) -> Preset:
    defaults = {f.name: f.default for f in fields(Knobs)}
    try:
        knobs = Knobs(**{**defaults, **changes})
        config.check_knobs(knobs)
    except ConfigError as error:
        return Preset(name, about, {**defaults, **changes}, str(error))
    return Preset(name, about, knobs.as_dict())


def find_preset(among: list[Preset], name: str) -> Preset:
    """Return a preset by name; raises `ConfigError` for an unknown one and for one that is not available."""
    names = [preset.name for preset in among]
    if name not in names:
        raise ConfigError(f"preset={name!r}{nearest(name, names)}; presets are {', '.join(names)}")
    found = among[names.index(name)]
    if found.reason:
        raise ConfigError(f"preset {name!r} is not available here: {found.reason}")
    return found


def setting_of(among: list[Preset], config: EngineConfig, given: str | dict[str, Any]) -> dict[str, Any]:
    """Return every knob of a preset, or of changes against the defaults."""
    if isinstance(given, str):
        return find_preset(among, given).knobs
    knobs = Knobs().with_changes(**given)
    config.check_knobs(knobs)
    return knobs.as_dict()


def knob_specs() -> list[dict[str, Any]]:
    """Return every knob as the panel shows it: name, values, default, effect class, help, what to look for."""
    return [
        {
            "name": f.name,
            "label": f.name.replace("_", " "),
            "values": list(legal_values(f.name)),
            "default": f.default,
            "effect": f.metadata["effect"],
            "effectText": EFFECTS[f.metadata["effect"]],
            "help": f.metadata["help"],
            "lookFor": f.metadata["look_for"],
        }
        for f in fields(Knobs)
    ]


def why_not(current: dict[str, Any], name: str, value: Any, config: EngineConfig) -> str:
    """Return why knob `name` cannot become `value` while the others stay as they are; empty = it can."""
    try:
        config.check_knobs(Knobs(**{**current, name: value}))
    except ConfigError as error:
        return str(error)
    return ""


def effect_of(current: dict[str, Any], name: str, value: Any) -> str:
    """Return what changing knob `name` from the `current` settings to `value` does to the tokens of a request."""
    effect = next(f.metadata["effect"] for f in fields(Knobs) if f.name == name)
    try:
        same = Knobs(**{**current, name: value}).promises_tokens_of(Knobs(**current))
    except ConfigError:
        same = effect == "T"
    return EFFECTS["T" if same else effect if effect != "T" else "D"]


def changed_only(knobs: dict[str, Any]) -> dict[str, Any]:
    """Return the knobs that differ from their defaults."""
    return {f.name: knobs[f.name] for f in fields(Knobs) if f.name in knobs and knobs[f.name] != f.default}
