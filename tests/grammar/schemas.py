"""Random JSON schemas out of what the engine promises to enforce."""

from __future__ import annotations

from typing import Any

import numpy as np

_PATTERNS = ("^[a-c]{1,4}$", "^x(y|z)*w$", "[0-9]{3}", "^.{1,3}$", "^[^a]{2}$", "^\\d+-\\w$")
FORMATS = ("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid")
FORMATS += ("uri", "uri-reference", "uri-template")


def random_schema(rng: np.random.Generator, depth: int = 3, formats: tuple[str, ...] = ("date", "ipv4", "uuid")) -> Any:
    """Return a schema whose instances are short: bounded strings, arrays and numbers."""
    leaves = ("integer", "number", "string", "pattern", "format", "boolean", "null", "enum", "const", "types")
    kinds = leaves + ("object", "array", "tuple", "anyOf", "oneOf", "allOf", "ref") * (2 if depth else 0)
    kind = kinds[int(rng.integers(len(kinds)))]

    def below() -> Any:
        return random_schema(rng, depth - 1, formats)

    def bounds(low: str, high: str, largest: int) -> dict[str, int]:
        a, b = sorted(int(x) for x in rng.integers(0, largest, size=2))
        return {low: a, high: b}

    match kind:
        case "integer":
            extra: dict[str, Any] = bounds("minimum", "maximum", 5000) if rng.random() < 0.7 else {}
            if not extra and rng.random() < 0.5:
                extra = {"multipleOf": int(rng.integers(2, 9)), "minimum": 10, "maximum": 99}
            return {"type": "integer", **extra}
        case "number":
            low = float(rng.integers(-50, 50)) / 4
            return {"type": "number", "minimum": low, "exclusiveMaximum": low + float(rng.integers(1, 40))}
        case "string":
            return {"type": "string", **bounds("minLength", "maxLength", 9)}
        case "pattern":
            return {"type": "string", "pattern": _PATTERNS[int(rng.integers(len(_PATTERNS)))]}
        case "format":
            return {"type": "string", "format": formats[int(rng.integers(len(formats)))]}
        case "boolean" | "null":
            return {"type": kind, "description": "annotated"}
        case "enum":
            return {"enum": [1, 'a"b', None, 2.5, True, {"k": [1]}][: int(rng.integers(1, 7))]}
        case "const":
            return {"const": [3, "é\n", {"a": 1}][int(rng.integers(3))]}
        case "types":
            return {"type": ["integer", "null"], "minimum": 3, "maximum": 40}
        case "object":
            names = [f"k{i}" for i in range(int(rng.integers(0, 4)))]
            schema: dict[str, Any] = {"type": "object", "properties": {name: below() for name in names}}
            schema["required"] = [name for name in names if rng.random() < 0.6]
            if rng.random() < 0.5:
                schema["additionalProperties"] = False
            return schema
        case "array":
            return {"type": "array", "items": below(), **bounds("minItems", "maxItems", 4)}
        case "tuple":
            return {"type": "array", "prefixItems": [below(), below()], "items": False, "minItems": 1}
        case "anyOf":
            return {"anyOf": [below(), below()]}
        case "oneOf":
            return {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 4}, {"type": "null"}]}
        case "allOf":
            return {"allOf": [below()]}
        case _:
            return {"$ref": "#/$defs/leaf"}


def random_document(rng: np.random.Generator, **options: Any) -> dict[str, Any]:
    """Return a root schema with the definition that its references point to."""
    schema = random_schema(rng, **options)
    return {"$defs": {"leaf": random_schema(rng, 0)}, "anyOf": [schema]}
