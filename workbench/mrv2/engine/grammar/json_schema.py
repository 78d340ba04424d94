"""Which JSON schemas are enforced in full.

The grammar library drops what it cannot express with a warning at most, and the output would then not be
what was asked for.  So a schema is read here first: every keyword must be one that is enforced where it
stands, else the request is refused with the place (a JSON pointer).
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, NoReturn
from urllib.parse import unquote

from mrv2.engine.grammar.regex import regex_error
from mrv2.errors import RequestError, nearest

_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"$schema", "$id", "$comment", "$defs", "definitions"}
)
# keywords by the type that they constrain
_BY_TYPE: dict[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "boolean": frozenset(),
    "null": frozenset(),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
_TYPED = frozenset().union(*_BY_TYPE.values())
_ALTERNATIVES = ("enum", "const", "anyOf", "oneOf", "allOf", "$ref")
_FORMATS = frozenset(
    {"date", "time", "date-time", "duration", "uuid", "email", "hostname", "ipv4", "ipv6"}
    | {"uri", "uri-reference", "uri-template"}
)
_LEGAL = sorted({"type", *_ALTERNATIVES, *_TYPED, *_ANNOTATIONS})
# a character of a JSON string that stands for itself
_PLAIN = r'[^"\\\x00-\x1f]'
_PYTHON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


def enforceable_schema(
    schema: Any,
    place: str = "#",
    pattern_error: Callable[[str], str | None] = regex_error,
    *,
    lengths_as_patterns: bool = False,
) -> Any:
    """Return a copy of `schema` in the words that xgrammar enforces.

    Its own rule for the length of strings lets raw control characters through, which JSON forbids: whoever
    leaves `minLength` and `maxLength` in must mask those, or have them turned into patterns, which are slow
    beyond 128 characters.  Raises `RequestError` with the place of what is malformed or would not be enforced.
    `pattern_error` says what is wrong with a regular expression, if anything.
    """
    copy = deepcopy(schema)
    _Checker(copy, place, pattern_error, lengths_as_patterns).check(copy, place)
    return copy


class _Checker:
    """Walks a schema; rewrites it in place."""

    def __init__(
        self, root: Any, root_place: str, pattern_error: Callable[[str], str | None], lengths_as_patterns: bool
    ) -> None:
        self.root, self.root_place = root, root_place
        self.pattern_error, self.lengths_as_patterns = pattern_error, lengths_as_patterns
        # places already checked: references may be recursive
        self.seen: set[str] = set()

    def check(self, schema: Any, place: str) -> None:
        if place in self.seen:
            return
        self.seen.add(place)
        if schema is True:
            return
        if schema is False:
            _refuse(place, "the schema false allows nothing")
        if not isinstance(schema, dict):
            _refuse(place, f"a schema must be an object or true, not {schema!r}")
        for keyword in schema:
            if keyword not in _LEGAL:
                _refuse(f"{place}/{keyword}", f"this keyword would not be enforced{nearest(keyword, _LEGAL)}")
        alternatives = [keyword for keyword in _ALTERNATIVES if keyword in schema]
        if alternatives:
            self._check_alternatives(schema, alternatives, place)
        else:
            self._check_typed(schema, place)

    def _check_alternatives(self, schema: dict[str, Any], alternatives: list[str], place: str) -> None:
        """One of enum, const, anyOf, oneOf, allOf and $ref stands alone: beside it nothing is enforced."""
        keyword = alternatives[0]
        beside = [k for k in schema if k != keyword and k not in _ANNOTATIONS]
        if keyword in ("enum", "const") and beside == ["type"]:
            self._check_values_fit(schema, keyword, place)
            beside = []
        if beside:
            _refuse(f"{place}/{beside[0]}", f"this keyword would not be enforced beside {keyword}")
        value = schema[keyword]
        if keyword == "$ref":
            self._check_reference(value, f"{place}/$ref")
        elif keyword != "const" and (not isinstance(value, list) or not value):
            _refuse(f"{place}/{keyword}", f"must be a list with at least one entry, not {value!r}")
        elif keyword in ("anyOf", "oneOf", "allOf"):
            if keyword == "allOf" and len(value) > 1:
                _refuse(f"{place}/allOf", f"{len(value)} schemas at once would not be enforced; merge them into one")
            for index, each in enumerate(value):
                self.check(each, f"{place}/{keyword}/{index}")
            if keyword == "oneOf":
                self._check_disjoint(value, f"{place}/oneOf")

    def _check_values_fit(self, schema: dict[str, Any], keyword: str, place: str) -> None:
        types = _types(schema, place)
        for value in schema["enum"] if keyword == "enum" else [schema["const"]]:
            found = _type_of(value)
            if found not in types and not (found == "integer" and "number" in types):
                _refuse(f"{place}/{keyword}", f"{value!r} is not of type {schema['type']!r}")

    def _check_reference(self, target: Any, place: str) -> None:
        if not isinstance(target, str) or not (target == "#" or target.startswith("#/")):
            _refuse(place, f"{target!r}: only references within the schema, '#' or '#/...', are resolved")
        node, at = self.root, self.root_place
        for part in target.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and key.isdecimal() and int(key) < len(node):
                node = node[int(key)]
            elif isinstance(node, dict) and key in node:
                node = node[key]
            else:
                _refuse(place, f"{target!r} points to nothing in the schema")
            at = f"{at}/{part}"
        self.check(node, at)

    def _check_disjoint(self, schemas: list[Any], place: str) -> None:
        """That only one of the schemas matches is not enforced, so it must follow from their types."""
        taken: set[str] = set()
        for index, schema in enumerate(schemas):
            types = set(_types(schema, place)) if isinstance(schema, dict) and "type" in schema else None
            if types is not None and types & {"integer", "number"}:
                types |= {"integer", "number"}
            if types is None or types & taken:
                _refuse(
                    f"{place}/{index}",
                    "that one schema alone matches would not be enforced unless each has a type "
                    "that no other has; use anyOf",
                )
            taken |= types

    def _check_typed(self, schema: dict[str, Any], place: str) -> None:
        types = _types(schema, place) if "type" in schema else ()
        legal = frozenset().union(*(_BY_TYPE[name] for name in types))
        for keyword in schema:
            if keyword in _TYPED and keyword not in legal:
                owners = ", ".join(repr(name) for name, keywords in _BY_TYPE.items() if keyword in keywords)
                _refuse(f"{place}/{keyword}", f"this keyword is enforced only beside type {owners}")
        if "pattern" in schema or "format" in schema:
            for keyword in ("minLength", "maxLength", "pattern"):
                if keyword in schema and not (keyword == "pattern" and "format" not in schema):
                    _refuse(f"{place}/{keyword}", "this keyword would not be enforced beside pattern or format")
        if "format" in schema and schema["format"] not in _FORMATS:
            _refuse(f"{place}/format", f"{schema['format']!r} is not one of {', '.join(sorted(_FORMATS))}")
        if "pattern" in schema:
            pattern = schema["pattern"]
            error = self.pattern_error(pattern) if isinstance(pattern, str) else f"{pattern!r} is not a string"
            if error is not None:
                _refuse(f"{place}/pattern", error)
        if "multipleOf" in schema and "number" in types:
            _refuse(f"{place}/multipleOf", "this keyword is enforced for integers only")
        if "minLength" in schema or "maxLength" in schema:
            low, high = _checked_lengths(schema, place)
            if self.lengths_as_patterns:
                schema["pattern"] = f"^{_PLAIN}{{{low},{'' if high is None else high}}}$"
                schema.pop("minLength", None)
                schema.pop("maxLength", None)
        if "array" in types:
            self._check_array(schema, place)
        if "object" in types:
            self._check_object(schema, place)

    def _check_array(self, schema: dict[str, Any], place: str) -> None:
        prefix = schema.get("prefixItems", [])
        if not isinstance(prefix, list):
            _refuse(f"{place}/prefixItems", f"must be a list of schemas, not {prefix!r}")
        for index, each in enumerate(prefix):
            self.check(each, f"{place}/prefixItems/{index}")
        if schema.get("items") is not False:
            self.check(schema.get("items", True), f"{place}/items")

    def _check_object(self, schema: dict[str, Any], place: str) -> None:
        properties = schema.get("properties", {})
        if not isinstance(properties, dict):
            _refuse(f"{place}/properties", f"must be an object of schemas, not {properties!r}")
        for name, each in properties.items():
            self.check(each, f"{place}/properties/{name}")
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            _refuse(f"{place}/required", f"must be a list of names, not {required!r}")
        for name in required:
            if name not in properties:
                _refuse(f"{place}/required", f"{name!r} has no schema in properties, so it would not be enforced")
        if schema.get("additionalProperties") is not False:
            self.check(schema.get("additionalProperties", True), f"{place}/additionalProperties")


def _checked_lengths(schema: dict[str, Any], place: str) -> tuple[int, int | None]:
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    for name, value in (("minLength", low), ("maxLength", high)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            _refuse(f"{place}/{name}", f"must be an integer >= 0, not {value!r}")
    if high is not None and low > high:
        _refuse(f"{place}/maxLength", f"{high} is less than minLength {low}")
    return low, high


def _types(schema: dict[str, Any], place: str) -> tuple[str, ...]:
    given = schema["type"]
    types = tuple(given) if isinstance(given, list) else (given,)
    for name in types:
        if name not in _BY_TYPE:
            hint = nearest(name, _BY_TYPE) if isinstance(name, str) else ""
            _refuse(f"{place}/type", f"{name!r} is not one of {', '.join(_BY_TYPE)}{hint}")
    return types


def _type_of(value: Any) -> str:
    return _PYTHON_TYPES.get(type(value)) or ("array" if isinstance(value, list) else "object")


def _refuse(place: str, reason: str) -> NoReturn:
    raise RequestError(f"structured_outputs.json is refused at {place}: {reason}")
