"""The names of the methods of speculation, and what has to be loaded for them."""

from __future__ import annotations

from collections.abc import Iterable

from mrv2.errors import ConfigError, nearest

# methods with weights and a KV cache of their own
MODEL_METHODS = ("draft_model", "eagle3", "mtp")
# methods that `EngineConfig.speculators` must name, because they take memory at load
LOADED_METHODS = (*MODEL_METHODS, "suffix")


def parse_speculators(entries: Iterable[str]) -> dict[str, str | None]:
    """Return method -> what to load, from texts ``method`` or ``method=model``; raises `ConfigError`.

    The model is a folder or a name: of a draft head for eagle3 and mtp (None = the one that ships for the
    target, or random weights beside random weights), of any model for draft_model; suffix has none.
    """
    found: dict[str, str | None] = {}
    for entry in entries:
        if not isinstance(entry, str):
            raise ConfigError(f"speculators: {entry!r} must be a text 'method' or 'method=model'")
        method, _, model = entry.partition("=")
        if method not in LOADED_METHODS:
            raise ConfigError(
                f"speculators: no method {method!r} in {entry!r}{nearest(method, LOADED_METHODS)}; methods that are "
                f"loaded are {', '.join(LOADED_METHODS)}, as 'method' or 'method=model' ('ngram' needs no loading)"
            )
        if method in found:
            raise ConfigError(f"speculators: {method!r} is named twice; one of each method can be loaded")
        if method == "draft_model" and not model:
            raise ConfigError("speculators: 'draft_model' needs a model of the target's vocabulary: 'draft_model=NAME'")
        if method == "suffix" and model:
            raise ConfigError(f"speculators: 'suffix' takes no model, not {model!r}")
        found[method] = model or None
    return found
