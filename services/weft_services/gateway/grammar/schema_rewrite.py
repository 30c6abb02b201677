"""Rewrites JSON schemas to what llguidance supports: drops what constrains nothing, replaces unsupported keywords.

Every answer that matches the result matches the schema. The result may be narrower where a comment says so, never
wider.

pydantic 2.12 writes patterns for decimals that begin with the look-ahead `(?!^[-+.]*$)`, to require a digit. They are
rewritten without it. Two of their four forms constrain nothing, because one branch lacks `$`; the rewritten patterns
mean what those intend, which is narrower.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from itertools import combinations
from typing import Any

import orjson

from weft_services.gateway.text.tag_calls import resolve_reference

MAX_DIGITS = 64
PREFIX = r"^(?!^[-+.]*$)[+-]?0*"
FREE = re.compile(r"\\d\*\\\.\?\\d(?:\*|\{0,(?P<places>\d{1,3})\}0\*)\$")
BOUNDED = re.compile(
    r"\(\?:\\d\{0,(?P<whole>\d{1,3})\}\|\(\?=\[\\d\.\]\{1,(?P<size>\d{1,3})\}0\*\$\)"
    r"\\d(?:\*|\{0,\d{1,3}\})\\\.\\d(?:\*|\{0,(?P<places>\d{1,3})\})0\*\$\)"
)


def without_look_ahead(pattern: str) -> str:
    """Return a pattern for the same texts or fewer, without look-ahead. Unknown patterns are returned unchanged."""
    if not pattern.startswith(PREFIX):
        return pattern
    rest = pattern[len(PREFIX) :]
    if found := FREE.fullmatch(rest):
        places = found["places"]
        after, least = (r"\d*", r"\d+") if places is None else _fractions(int(places))
        return rf"^[+-]?(?:\d+(?:\.{after})?|\.{least})$"
    found = BOUNDED.fullmatch(rest)
    if found is None or int(found["size"]) - 1 > MAX_DIGITS:
        return pattern
    whole, digits = int(found["whole"]), int(found["size"]) - 1
    if found["places"] is None:
        return _any_places(digits)
    after, least = _fractions(min(int(found["places"]), digits))
    before = rf"0*\d{{1,{whole}}}" if whole else "0+"
    return rf"^[+-]?(?:{before}(?:\.{after})?|0*\.{least})$"


def _fractions(places: int) -> tuple[str, str]:
    """Return patterns for the digits after a point: optional, and at least one."""
    return rf"\d{{0,{places}}}0*", rf"\d{{1,{places}}}0*" if places else "0+"


def _any_places(digits: int) -> str:
    """Return a pattern for `digits` digits before and after the point together, without leading and trailing zeros."""
    forms = [rf"0*\d{{1,{digits}}}(?:\.0*)?"]
    forms += [rf"0*\d{{{whole}}}\.\d{{1,{digits - whole}}}0*" for whole in range(digits)]
    return rf"^[+-]?(?:{'|'.join(forms)})$"


Schema = dict[str, Any]

# keywords with client names as keys, and keywords with values that are not schemas
NAMES = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
VALUES = frozenset(("enum", "const", "default", "examples", "example"))
# Formats that llguidance enforces; all others are annotations.
FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
# keywords of drafts 4 to 2020-12 that can reject a value
BINDING = frozenset(
    "$ref $dynamicRef $recursiveRef additionalItems additionalProperties allOf anyOf const contains dependencies "
    "dependentRequired dependentSchemas enum exclusiveMaximum exclusiveMinimum format if items maxItems maxLength "
    "maxProperties maximum minItems minLength minProperties minimum multipleOf not oneOf pattern patternProperties "
    "prefixItems properties propertyNames required type unevaluatedItems unevaluatedProperties uniqueItems".split()
)
# Without any of these, `unevaluatedProperties` means `additionalProperties`.
IN_PLACE = frozenset(
    "$ref $dynamicRef $recursiveRef allOf anyOf oneOf not if then else dependentSchemas dependencies".split()
)
COUNTS = frozenset("minLength maxLength minItems maxItems minProperties maxProperties".split())
DRAFTS = {f"draft-0{number}": f"http://json-schema.org/draft-0{number}/schema#" for number in (4, 6, 7)} | {
    f"draft/{year}": f"https://json-schema.org/draft/{year}/schema" for year in ("2019-09", "2020-12")
}
# Keys of these formats: `propertyNames` becomes a pattern, and patterns have no formats.
NAME_PATTERNS = {
    "uuid": "^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "date": "^[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])$",  # narrower: ends at day 28, which every month has
}


def supported_schema(schema: Schema) -> Schema:
    """Rewrite the schema of an answer or of a tool's arguments."""
    made = _SchemaRewriter(schema).whole()
    return made if isinstance(made, dict) else {"not": {}}  # no answer matches; the compiler reports it


def without_pattern(value: Any, pattern: str) -> Any:
    """Return the schema without that `pattern`, and without the properties it names."""
    if isinstance(value, list):
        return [without_pattern(each, pattern) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: each if key in VALUES else without_pattern(each, pattern)
        for key, each in value.items()
        if key != pattern and (key, each) != ("pattern", pattern)
    }


class _SchemaRewriter:
    """Rewrites one schema; its parts may refer to one another. `schema_limits` bounds its depth beforehand."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._comparison = DisjointCheck(root)
        # reference to a branch of a union -> the property that distinguishes it
        self._tags: dict[str, str] = {}
        self._find_tags(root)

    def whole(self) -> Any:
        made = self._form(self._root)
        for reference, tag in self._tags.items():
            branch = resolve_reference(reference, made)
            if isinstance(branch, dict):
                branch["required"] = list(dict.fromkeys([*required_names(branch), tag]))
        return made

    def _find_tags(self, value: Any) -> None:
        """Find the tags of `discriminator`.

        OpenAPI implies that they are required; pydantic omits `required` with a default.
        """
        if isinstance(value, list):
            for each in value:
                self._find_tags(each)
        if not isinstance(value, dict):
            return
        named, options = value.get("discriminator"), value.get("oneOf")
        tag = named.get("propertyName") if isinstance(named, dict) else None
        for option in options if isinstance(tag, str) and isinstance(options, list) else ():
            branch = self._resolved(option)
            if branch is not option and tag in _mapping(_mapping(branch).get("properties")):
                self._tags[str(option["$ref"])] = str(tag)
        for key, each in value.items():
            if key not in VALUES:
                self._find_tags(each)

    def _form(self, value: Any, has_names: bool = False) -> Any:
        if isinstance(value, list):
            return [self._form(each) for each in value]
        if not isinstance(value, dict):
            return value
        if has_names:
            return {name: self._form(each) for name, each in value.items()}
        made = {
            key: each if key in VALUES else self._form(each, key in NAMES)
            for key, each in value.items()
            if not self._is_idle(key, each, value)
        }
        for rewrite in (_counts, _draft, _pattern, self._one_of, self._names, _unevaluated):
            made = rewrite(made)
        return False if _is_open(made.get("not", False)) else made

    def _is_idle(self, key: str, value: Any, schema: Schema) -> bool:
        """True if the keyword constrains nothing in this schema."""
        if value is None and key not in ("const", "type"):
            return True  # serializers write unset keywords as null
        rule = NO_OPS.get(key)
        return rule is not None and rule(value, schema)

    def _resolved(self, value: Any) -> Any:
        reference = value.get("$ref") if isinstance(value, dict) else None
        return value if reference is None else resolve_reference(reference, self._root)

    def _one_of(self, schema: Schema) -> Schema:
        """Replace `oneOf` by `anyOf` if its options are disjoint; llguidance does not follow references itself."""
        options = schema.get("oneOf")
        if not isinstance(options, list) or "anyOf" in schema:
            return schema
        if not self._comparison.are_disjoint([self._tagged(each) for each in options]):
            return schema
        return {"anyOf" if key == "oneOf" else key: value for key, value in schema.items()}

    def _tagged(self, option: Any) -> Any:
        """Return the option with the tag that `whole` makes required."""
        branch = self._resolved(option)
        tag = self._tags.get(str(option["$ref"])) if branch is not option else None
        return option if tag is None else {**branch, "required": [*required_names(branch), tag]}

    def _names(self, schema: Schema) -> Schema:
        """Replace `propertyNames` by patterns: listed names, known formats, or length limits."""
        names = schema.get("propertyNames")
        if names is None:
            return schema
        own = self._resolved(names)
        if _fits_all_names(own):
            return _without(schema, "propertyNames")
        properties = _mapping(schema.get("properties"))
        is_kept = isinstance(own, dict) and not schema.get("patternProperties")
        pattern = _name_pattern(own, properties) if is_kept else None
        if pattern is None:
            return schema
        listed = _listed(own)
        kept = {name: each if listed is None or name in listed else False for name, each in properties.items()}
        others = {pattern: schema.get("additionalProperties", True)} if pattern else {}
        made = _without(schema, "propertyNames", "additionalProperties", "properties", "patternProperties")
        return {**made, "properties": kept, "patternProperties": others, "additionalProperties": False}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _without(schema: Schema, *keys: str) -> Schema:
    return {key: value for key, value in schema.items() if key not in keys}


def _is_open(schema: Any) -> bool:
    """True if every value matches."""
    return schema is True or (isinstance(schema, dict) and not BINDING & schema.keys())


def _are_open(schemas: Any) -> bool:
    return isinstance(schemas, dict) and all(map(_is_open, schemas.values()))


def _are_required(names: Any, schema: Schema) -> bool:
    return isinstance(names, list) and all(name in required_names(schema) for name in names)


def _are_met(dependencies: Any, schema: Schema) -> bool:
    return isinstance(dependencies, dict) and all(
        _is_open(each) or _are_required(each, schema) for each in dependencies.values()
    )


def _is_whole_anyway(multiple: Any, schema: Schema) -> bool:
    """True if every integer is a multiple, as of 1, 0.5 and 0.01."""
    if schema.get("type") != "integer" or isinstance(multiple, bool) or not isinstance(multiple, int | float):
        return False
    return multiple > 0 and Fraction(str(multiple)).numerator == 1


def _branches_are_open(schema: Schema) -> bool:
    return all(_is_open(schema.get(branch, True)) for branch in ("then", "else"))


# keyword -> whether a value of it constrains nothing in a schema
NO_OPS: dict[str, Callable[[Any, Schema], bool]] = {
    "$dynamicAnchor": lambda value, schema: True,
    "$recursiveAnchor": lambda value, schema: True,
    "additionalItems": lambda value, schema: not isinstance(schema.get("items"), list),
    "contains": lambda value, schema: schema.get("minContains") == 0 and schema.get("maxContains") is None,
    "dependencies": _are_met,
    "dependentRequired": _are_met,
    "dependentSchemas": lambda value, schema: _are_open(value),
    "else": lambda value, schema: "if" not in schema or _branches_are_open(schema),
    "format": lambda value, schema: isinstance(value, str) and value not in FORMATS,
    "if": lambda value, schema: _branches_are_open(schema),
    "maxContains": lambda value, schema: "contains" not in schema,
    "minContains": lambda value, schema: "contains" not in schema or NO_OPS["contains"](value, schema),
    "minItems": lambda value, schema: value == 0,
    "minLength": lambda value, schema: value == 0,
    "minProperties": lambda value, schema: value == 0,
    "multipleOf": _is_whole_anyway,
    "not": lambda value, schema: value is False,
    "then": lambda value, schema: "if" not in schema or _branches_are_open(schema),
    "unevaluatedItems": lambda value, schema: _is_open(value),
    "unevaluatedProperties": lambda value, schema: _is_open(value),
    "uniqueItems": lambda value, schema: value is False or schema.get("maxItems") in (0, 1),
}


def _counts(schema: Schema) -> Schema:
    """Convert counts such as 2.0, an integer in JSON Schema, which the compiler rejects."""
    return {key: as_whole(value) if key in COUNTS else value for key, value in schema.items()}


def _draft(schema: Schema) -> Schema:
    """Drop unknown `$schema` values, which the compiler would fetch. Unknown dialects only add annotations."""
    said = schema.get("$schema")
    if said is None:
        return schema
    known = next((url for name, url in DRAFTS.items() if isinstance(said, str) and name in said), None)
    return {**schema, "$schema": known} if known else _without(schema, "$schema")


def _pattern(schema: Schema) -> Schema:
    pattern = schema.get("pattern")
    return {**schema, "pattern": without_look_ahead(pattern)} if isinstance(pattern, str) else schema


def _unevaluated(schema: Schema) -> Schema:
    """Replace `unevaluatedProperties`; without other schemas for the object it means `additionalProperties`."""
    if "unevaluatedProperties" not in schema or IN_PLACE & schema.keys():
        return schema
    made = _without(schema, "unevaluatedProperties")
    return {"additionalProperties": schema["unevaluatedProperties"], **made}


def _fits_all_names(names: Any) -> bool:
    if _is_open(names):
        return True
    kinds = names.get("type") if isinstance(names, dict) else None
    return (kinds == "string" or (isinstance(kinds, list) and "string" in kinds)) and BINDING & names.keys() == {"type"}


def _listed(names: Schema) -> list[str] | None:
    """Return the keys that the schema lists; None if it lists none. Values that are not strings cannot be keys."""
    values = [names["const"]] if "const" in names else names.get("enum")
    if not isinstance(values, list):
        return None
    is_text = names.get("type") in (None, "string")
    return [value for value in values if isinstance(value, str) and is_text]


def _name_pattern(names: Schema, properties: Mapping[str, Any]) -> str | None:
    """Return the pattern of keys besides `properties`; empty if there are none, None if no pattern expresses them."""
    binding = BINDING & names.keys()
    if binding <= {"type", "enum"} or binding <= {"type", "const"}:
        listed = [name for name in _listed(names) or () if name not in properties]
        return f"^(?:{'|'.join(map(re.escape, listed))})$" if listed else ""
    if properties or names.get("type", "string") != "string":
        return None
    if binding <= {"type", "format"} and isinstance(names["format"], str):
        return NAME_PATTERNS.get(names["format"], "^")  # without a pattern for it, a format constrains nothing
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    if binding <= {"type", "minLength", "maxLength"} and isinstance(least, int) and isinstance(most, int | str):
        return f"^[\\s\\S]{{{least},{most}}}$"
    return None


MAX_HOPS = 8
MAX_COMPARED = 2000
KINDS = {bool: "boolean", str: "string", int: "number", float: "number", list: "array", dict: "object"}


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
