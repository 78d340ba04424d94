"""Every setting explains itself."""

from __future__ import annotations

from dataclasses import MISSING, fields

import pytest

from mrv2.config import EngineConfig, Knobs, legal_values

KNOBS = fields(Knobs)


@pytest.mark.parametrize("knob", [f.name for f in KNOBS])
def test_knob_says_what_it_does_and_what_to_look_for(knob: str) -> None:
    spec = next(f for f in KNOBS if f.name == knob)
    assert spec.default is not MISSING, f"knob {knob} has no default"
    assert spec.metadata.get("effect") in ("T", "D", "O"), f"knob {knob} has no effect class (T, D or O)"
    for text in ("help", "look_for"):
        assert len(spec.metadata.get(text, "")) > 10, f"knob {knob}: `{text}` is empty; panel and CLI show it"
    assert spec.default in legal_values(knob), f"knob {knob}: the default {spec.default!r} is not a legal value"


@pytest.mark.parametrize("setting", [f.name for f in fields(EngineConfig)])
def test_setting_has_a_default(setting: str) -> None:
    spec = next(f for f in fields(EngineConfig) if f.name == setting)
    has_default = spec.default is not MISSING or spec.default_factory is not MISSING
    assert has_default or setting == "model", f"{setting} has no default; only `model` must be given"
