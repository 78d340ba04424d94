"""Errors of model loading: what was found, what was expected, what to do."""

from __future__ import annotations


class ModelFileError(ValueError):
    """A model file is missing, truncated, or does not fit its config."""


class UnsupportedModelError(ValueError):
    """A config asks for something that no family here implements."""


class ShardError(ValueError):
    """A dimension cannot be divided over the ranks."""
