"""`StructuredOutputsParams`: the form that a request's output must have; names as in vLLM's offline API."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from mrv2.errors import RequestError, nearest

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """Exactly one constraint on the text of a request, checked when made; a bad value raises `RequestError`.

    Frozen and hashable: two equal objects share one compiled grammar.  After construction ``json`` and
    ``structural_tag`` are texts and ``choice`` is a tuple.
    """

    # JSON schema: an object, or its text; with minLength or maxLength no tab stands between the parts of the text
    json: str | Mapping[str, Any] | bool | None = None
    # regular expression that the whole text matches
    regex: str | None = None
    # texts of which the output is one
    choice: Sequence[str] | None = None
    # EBNF with the rule `root`; a part with bounded repetitions is masked much faster as Regex("...") than as rules
    grammar: str | None = None
    # any JSON object
    json_object: bool = False
    # free text with constrained parts, as xgrammar describes them: an object, or its text
    structural_tag: str | Mapping[str, Any] | None = None
    # with `json`: write no whitespace but one space after each comma and colon
    disable_any_whitespace: bool = False

    def __new__(cls, *args: Any, **kwargs: Any) -> StructuredOutputsParams:
        """Refuse unknown names before the generated ``__init__`` runs."""
        legal = [f.name for f in fields(cls)]
        for name in kwargs:
            if name not in legal:
                raise RequestError(
                    f"unknown structured_outputs field {name!r}{nearest(name, legal)}; legal are {', '.join(legal)}"
                )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            _check(name, getattr(self, name), isinstance(getattr(self, name), bool), "True or False")
        given = [
            name for name in CONSTRAINTS if getattr(self, name) not in (None, False) or self._is_false_schema(name)
        ]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise RequestError(f"structured_outputs takes exactly one of {', '.join(CONSTRAINTS)}; given: {found}")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            _check(name, value, value is None or (isinstance(value, str) and bool(value)), "a non-empty string")
        if self.choice is not None:
            ok = isinstance(self.choice, (list, tuple)) and all(isinstance(c, str) and c for c in self.choice)
            _check("choice", self.choice, ok and bool(self.choice), "a list of non-empty strings")
            object.__setattr__(self, "choice", tuple(self.choice))
        for name in ("json", "structural_tag"):
            if name in given:
                object.__setattr__(self, name, _json_text(name, getattr(self, name)))
        if self.disable_any_whitespace and self.json is None:
            raise RequestError("structured_outputs: disable_any_whitespace has an effect only together with json")

    @property
    def kind(self) -> str:
        """Name of the constraint that is given."""
        return next(name for name in CONSTRAINTS if getattr(self, name) not in (None, False))

    @property
    def text(self) -> str:
        """The constraint as text; the JSON list for ``choice``, nothing for ``json_object``."""
        value = getattr(self, self.kind)
        if value is True:
            return ""
        return value if isinstance(value, str) else json.dumps(value)

    def _is_false_schema(self, name: str) -> bool:
        """``json=False`` is a schema too, of which nothing is an instance."""
        return name == "json" and self.json is False


def normalise(value: Any) -> StructuredOutputsParams | None:
    """Return the object for what ``SamplingParams.structured_outputs`` was given: it, its fields as a dict, or None."""
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if isinstance(value, Mapping):
        return StructuredOutputsParams(**value)
    raise RequestError(
        f"structured_outputs={value!r} must be a StructuredOutputsParams or a dict of its fields, "
        'for example {"json": {"type": "object"}}'
    )


def _json_text(name: str, value: Any) -> str:
    if isinstance(value, str):
        try:
            json.loads(value)
        except ValueError as error:
            raise RequestError(f"structured_outputs.{name} is not valid JSON: {error}") from error
        return value
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise RequestError(f"structured_outputs.{name} must be JSON, as an object or as text: {error}") from error


def _check(name: str, value: Any, ok: bool, legal: str) -> None:
    if not ok:
        raise RequestError(f"structured_outputs.{name}={value!r}: must be {legal}")
