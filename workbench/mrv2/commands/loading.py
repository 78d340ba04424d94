"""Say what loading a model will do before it takes its time."""

from __future__ import annotations

from mrv2.commands.printing import note


def is_fetched() -> bool:
    """Return whether the model that can be fetched is in the cache already."""
    from mrv2_models.smollm2 import MODEL_NAME, cache_dir

    return any(cache_dir().glob(f"{MODEL_NAME}-*/provenance.json"))


def note_loading(model: str) -> None:
    """Announce the loading of `model`, and a download if there will be one."""
    from mrv2_models.registry import FETCHABLE

    fetches = model in FETCHABLE and not is_fetched()
    note(f"loading {model}" + (", which is fetched and converted first (about 93 MB)" if fetches else ""))
