"""`StructuredOutputsParams` and the JSON schemas that are refused."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest

from mrv2.engine.grammar.json_schema import enforceable_schema
from mrv2.engine.grammar.regex import regex_error
from mrv2.errors import RequestError
from mrv2.sampling_params import SamplingParams
from mrv2.structured_outputs import StructuredOutputsParams


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of json, regex, .*given: none"),
        ({"json": {}, "regex": "a"}, "given: json and regex"),
        ({"regx": "a"}, "unknown structured_outputs field 'regx'; did you mean 'regex'"),
        ({"json": "{"}, "structured_outputs.json is not valid JSON"),
        ({"json": {"a": {1}}}, "must be JSON"),
        ({"choice": []}, "a list of non-empty strings"),
        ({"choice": ["a", ""]}, "a list of non-empty strings"),
        ({"regex": 3}, "a non-empty string"),
        ({"json_object": 1}, "True or False"),
        ({"regex": "a", "disable_any_whitespace": True}, "only together with json"),
    ],
)
def test_bad_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        StructuredOutputsParams(**fields)


def test_normal_form_is_shared_hashable_and_travels() -> None:
    params = SamplingParams(structured_outputs={"json": {"type": "integer"}})
    assert params.structured_outputs == StructuredOutputsParams(json='{"type": "integer"}')
    assert len({params.structured_outputs, StructuredOutputsParams(json={"type": "integer"})}) == 1
    assert pickle.loads(pickle.dumps(params)) == params
    assert params.replace(seed=1).structured_outputs is params.structured_outputs
    choice = StructuredOutputsParams(choice=["a", "b"])
    assert (choice.kind, choice.text) == ("choice", '["a", "b"]')


def test_other_types_are_refused() -> None:
    with pytest.raises(RequestError, match="must be a StructuredOutputsParams or a dict"):
        SamplingParams(structured_outputs="json")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (False, "#: the schema false"),
        ([], "#: a schema must be an object"),
        ({"type": "integer", "anyOf": [{}]}, "#/type: .*beside anyOf"),
        ({"anyOf": []}, "#/anyOf: must be a list"),
        ({"anyOf": [{"type": "null"}, {"type": "number", "multipleOf": 2}]}, "#/anyOf/1/multipleOf"),
        ({"allOf": [{}, {}]}, "#/allOf: 2 schemas"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#/oneOf/1: .*use anyOf"),
        ({"oneOf": [{"const": 1}, {"const": 2}]}, "#/oneOf/0"),
        ({"$ref": "http://x/y"}, "#/\\$ref: .*only references within"),
        ({"$ref": "#/$defs/a", "$defs": {"b": {}}}, "#/\\$ref: .*points to nothing"),
        ({"enum": [1, "a"], "type": "integer"}, "#/enum: 'a' is not of type"),
        ({"minLength": 3}, "#/minLength: .*only beside type 'string'"),
        ({"type": "string", "format": "regex"}, "#/format: 'regex' is not one of"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "#/maxLength: .*beside pattern"),
        ({"type": "string", "minLength": 4, "maxLength": 3}, "#/maxLength: 3 is less than"),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, "#/required: 'b' has no schema"),
        ({"type": "object", "patternProperties": {}}, "#/patternProperties: .*did you mean"),
        ({"type": "array", "prefixItems": [{}, {"contains": {}}]}, "#/prefixItems/1/contains"),
        ({"type": "array", "items": {"if": {}}}, "#/items/if"),
        ({"type": "object", "additionalProperties": {"contains": {}}}, "#/additionalProperties/contains"),
    ],
)  # fmt: skip
def test_schemas_are_refused_with_the_place(schema: Any, place: str) -> None:
    with pytest.raises(RequestError, match=f"structured_outputs.json is refused at {place}"):
        enforceable_schema(schema)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (r"a\bc", r"position 2: the escape '\\b'"),
        (r"\p{L}", "position 1: the escape"),
        ("a(?!b)", "position 2: of the groups"),
        ("(?i)a", "position 1: of the groups"),
        ("a^b", "position 2: '\\^' is supported at the start"),
        ("a$b", "position 2: '\\$' is supported at the end"),
        ("[[:alpha:]]", "position 2: POSIX"),
        ("ab\\", "position 3: the escape"),
    ],
)
def test_patterns_that_would_be_read_otherwise_are_named(pattern: str, message: str) -> None:
    assert re.search(message, regex_error(pattern) or "nothing wrong")


@pytest.mark.parametrize("pattern", [r"^a$|^b$", r"[\]^$(?]+", r"\d{2}(?:x|y)*\.", r"\^\$", "[^a]"])
def test_plain_patterns_pass(pattern: str) -> None:
    assert regex_error(pattern) is None


def test_recursive_schemas_and_annotations_pass_unchanged() -> None:
    tree = {
        "title": "tree",
        "type": "object",
        "properties": {"left": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "n": {"type": "integer", "default": 3}},
    }
    assert enforceable_schema(tree) == tree
