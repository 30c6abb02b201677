"""Decides whether a value can match two of several JSON schemas. Disjoint means certainly disjoint."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import orjson

MAX_HOPS = 8
MAX_COMPARED = 2000
KINDS = {bool: "boolean", str: "string", int: "number", float: "number", list: "array", dict: "object"}


def resolve_reference(reference: Any, root: Any) -> Any:
    """Return the target of a `$ref` within the root; None if there is none."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found = root
    for step in reference.split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def required_names(schema: Any) -> list[str]:
    """Return the names of the required properties."""
    required = schema.get("required") if isinstance(schema, dict) else None
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


class DisjointCheck:
    """Compares branches of unions within one schema. All comparisons share one budget."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_left = MAX_COMPARED

    def are_disjoint(self, options: list[Any]) -> bool:
        """True if no value matches two of the options."""
        resolved = [self._resolved(each) for each in options]
        return self._have_tags(resolved) or all(self._differ(*pair, 0) for pair in combinations(resolved, 2))

    def _have_tags(self, options: list[Any]) -> bool:
        """True if all options are objects with a required property that has different values in all of them."""
        if not all(isinstance(each, dict) and _kinds(each) == {"object"} for each in options):
            return False
        for name in set[str].intersection(*(set(required_names(each)) for each in options)) if options else ():
            values = [self._named(_property(each, name)) for each in options]
            if all(each is not None for each in values):
                listed = [value for each in values for value in each or ()]
                if len(listed) == len(set(listed)):
                    return True
        return False

    def _named(self, schema: Any) -> set[bytes] | None:
        own = self._resolved(schema)
        return _values(own) if isinstance(own, dict) else None

    def _differ(self, one: Any, other: Any, depth: int) -> bool:
        self._num_left -= 1
        one, other = self._resolved(one), self._resolved(other)
        if one is False or other is False:
            return True
        if not isinstance(one, dict) or not isinstance(other, dict) or self._num_left < 0 or depth > MAX_HOPS:
            return False
        if (apart := _by_values_and_types(one, other)) is not None:
            return apart
        for union, single in ((one, other), (other, one)):
            if (options := union.get("oneOf") or union.get("anyOf")) and isinstance(options, list):
                return all(self._differ(each, single, depth + 1) for each in options)
        if (_kinds(one), _kinds(other)) != ({"object"}, {"object"}):
            return False
        names = dict.fromkeys((*required_names(one), *required_names(other)))
        return any(self._differ(_property(one, name), _property(other, name), depth + 1) for name in names)

    def _resolved(self, schema: Any) -> Any:
        for _ in range(MAX_HOPS):
            if not isinstance(schema, dict) or "$ref" not in schema or "properties" in schema:
                return schema
            schema = resolve_reference(schema["$ref"], self._root)
        return None


def _by_values_and_types(one: dict[str, Any], other: dict[str, Any]) -> bool | None:
    """Compare by listed values and by types; None if they do not decide."""
    values = _values(one), _values(other)
    if values[0] is not None and values[1] is not None:
        return not values[0] & values[1]
    kinds = _kinds(one), _kinds(other)
    return True if kinds[0] is not None and kinds[1] is not None and not kinds[0] & kinds[1] else None


def _values(schema: dict[str, Any]) -> set[bytes] | None:
    """Return the values that a schema lists; None if it lists none."""
    named = [schema["const"]] if "const" in schema else schema.get("enum")
    return {_key(each) for each in named} if isinstance(named, list) else None


def as_whole(value: Any) -> Any:
    """Return 2.0 as 2, if a double represents it exactly."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return int(value) if is_whole else value


def _key(value: Any) -> bytes:
    """Return equal keys for equal values: 1.0 equals 1, true does not."""
    return orjson.dumps(as_whole(value), option=orjson.OPT_SORT_KEYS)


def _kinds(schema: dict[str, Any]) -> set[str] | None:
    """Return the types a value may have, with integer as number; None for any type."""
    kind = schema.get("type")
    if isinstance(kind, str | list):
        kinds = [kind] if isinstance(kind, str) else kind
        return {"number" if each == "integer" else str(each) for each in kinds}
    named = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(named, list):
        return {KINDS.get(type(each), "null") for each in named}
    return None


def _property(schema: dict[str, Any], name: str) -> Any:
    properties = schema.get("properties")
    return properties.get(name, True) if isinstance(properties, dict) else True
