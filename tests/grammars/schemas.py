"""Random JSON schemas of the kinds people send: nesting, enums, patterns, numbers, references, unions."""

from __future__ import annotations

from random import Random
from typing import Any

PATTERNS = ["^[a-z]{1,5}$", "^(yes|no|maybe)$", r"^\d{3}-\d{2}$", "^[A-Z][a-z]*( [A-Z][a-z]*){0,2}$"]
FORMATS = ["date", "uuid", "ipv4", "email"]


def random_schema(random: Random, depth: int = 3) -> dict[str, Any]:
    """An object schema whose every answer is short."""
    shared = {"point": _object(random, 0), "level": {"enum": ["low", "high", 3, None]}}
    schema = _object(random, depth)
    return {**schema, "$defs": shared}


def _object(random: Random, depth: int) -> dict[str, Any]:
    names = random.sample(["name", "id", "tags", "size", "colour", "when", "what next"], random.randint(1, 4))
    required = [name for name in names if random.random() < 0.7]
    properties = {name: _value(random, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value(random: Random, depth: int) -> dict[str, Any]:
    leaves = [_string, _number, _enum]
    inner = [_object, _array, _union, _reference] if depth > 0 else []
    return random.choice([*leaves, *inner])(random, depth)


def _string(random: Random, _: int) -> dict[str, Any]:
    return random.choice(
        [
            {"type": "string", "pattern": random.choice(PATTERNS), "maxLength": 20},
            {"type": "string", "format": random.choice(FORMATS)},
            {"type": "string", "minLength": random.randint(0, 3), "maxLength": random.randint(3, 8)},
        ]
    )


def _number(random: Random, _: int) -> dict[str, Any]:
    low = random.randint(-50, 50)
    return random.choice(
        [
            {"type": "integer", "minimum": low, "maximum": low + random.randint(0, 500)},
            {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 9},
            {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 1000},
            {"type": "number", "minimum": low, "maximum": low + 1},
            {"type": "boolean"},
            {"type": "null"},
        ]
    )


def _enum(random: Random, _: int) -> dict[str, Any]:
    return random.choice([{"enum": ["a b", "ü", 1, False, None]}, {"const": random.choice(["x", 7, {"k": [1]}])}])


def _array(random: Random, depth: int) -> dict[str, Any]:
    low = random.randint(0, 2)
    return {"type": "array", "items": _value(random, depth - 1), "minItems": low, "maxItems": low + 2}


def _union(random: Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(random, depth - 1) for _ in range(random.randint(2, 3))]}


def _reference(random: Random, _: int) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{random.choice(['point', 'level'])}"}
