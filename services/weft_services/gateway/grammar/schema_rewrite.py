"""The patterns that pydantic 2.12 writes for decimals, in a form without look-ahead.

Theirs begin with `(?!^[-+.]*$)`, for at least one digit. Two of the four forms then bound nothing, as one branch has no
`$`: those become what they are meant to say, which is narrower.


JSON schemas in the form that llguidance keeps: without what binds nothing, and with other words for what it lacks.

Every answer that fits the result fits the schema. The result may be narrower where a comment says so, never wider.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from weft_services.gateway.grammar.disjoint import DisjointCheck, as_whole, required_names, resolve_reference

MAX_DIGITS = 64
PREFIX = r"^(?!^[-+.]*$)[+-]?0*"
FREE = re.compile(r"\\d\*\\\.\?\\d(?:\*|\{0,(?P<places>\d{1,3})\}0\*)\$")
BOUNDED = re.compile(
    r"\(\?:\\d\{0,(?P<whole>\d{1,3})\}\|\(\?=\[\\d\.\]\{1,(?P<size>\d{1,3})\}0\*\$\)"
    r"\\d(?:\*|\{0,\d{1,3}\})\\\.\\d(?:\*|\{0,(?P<places>\d{1,3})\})0\*\$\)"
)


def without_look_ahead(pattern: str) -> str:
    """The same texts, or fewer: see above. A pattern of another form comes back as it is."""
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
    """What may follow a point: at all, and with at least one digit."""
    return rf"\d{{0,{places}}}0*", rf"\d{{1,{places}}}0*" if places else "0+"


def _any_places(digits: int) -> str:
    """That many digits on both sides of the point together, zeros at either end not counted."""
    forms = [rf"0*\d{{1,{digits}}}(?:\.0*)?"]
    forms += [rf"0*\d{{{whole}}}\.\d{{1,{digits - whole}}}0*" for whole in range(digits)]
    return rf"^[+-]?(?:{'|'.join(forms)})$"


Schema = dict[str, Any]

# where keys are names of the client's own, and where what follows is no schema
NAMES = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
VALUES = frozenset(("enum", "const", "default", "examples", "example"))
# the formats that llguidance knows; any other only says what a text is
FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
# the keywords of drafts 4 to 2020-12 that a value can fail
BINDING = frozenset(
    "$ref $dynamicRef $recursiveRef additionalItems additionalProperties allOf anyOf const contains dependencies "
    "dependentRequired dependentSchemas enum exclusiveMaximum exclusiveMinimum format if items maxItems maxLength "
    "maxProperties maximum minItems minLength minProperties minimum multipleOf not oneOf pattern patternProperties "
    "prefixItems properties propertyNames required type unevaluatedItems unevaluatedProperties uniqueItems".split()
)
# with none of these next to it, `unevaluatedProperties` means `additionalProperties`
IN_PLACE = frozenset(
    "$ref $dynamicRef $recursiveRef allOf anyOf oneOf not if then else dependentSchemas dependencies".split()
)
COUNTS = frozenset("minLength maxLength minItems maxItems minProperties maxProperties".split())
DRAFTS = {f"draft-0{number}": f"http://json-schema.org/draft-0{number}/schema#" for number in (4, 6, 7)} | {
    f"draft/{year}": f"https://json-schema.org/draft/{year}/schema" for year in ("2019-09", "2020-12")
}
# what keys of these formats look like: `propertyNames` becomes a pattern, which has no formats
NAME_PATTERNS = {
    "uuid": "^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "date": "^[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])$",  # narrower: no month has fewer days
}


def supported_schema(schema: Schema) -> Schema:
    """The whole schema of an answer or of a tool's arguments."""
    made = _SchemaRewriter(schema).whole()
    return made if isinstance(made, dict) else {"not": {}}  # no answer fits: the compiler says so


def without_pattern(value: Any, pattern: str) -> Any:
    """The same without that `pattern`, and without properties of which it says the names."""
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
    """One schema, whose parts may refer to one another. Its depth is limited before, see `schema_limits`."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._comparison = DisjointCheck(root)
        # properties that tell the branches of a union apart, by the reference to each branch
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
        """Of `discriminator`, which OpenAPI takes for required; pydantic leaves out `required` beside a default."""
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
        """Does it bind nothing, here."""
        if value is None and key not in ("const", "type"):
            return True  # as serializers write what is not set
        rule = NO_OPS.get(key)
        return rule is not None and rule(value, schema)

    def _resolved(self, value: Any) -> Any:
        reference = value.get("$ref") if isinstance(value, dict) else None
        return value if reference is None else resolve_reference(reference, self._root)

    def _one_of(self, schema: Schema) -> Schema:
        """What no value fits twice is `anyOf`; llguidance does not look into references."""
        options = schema.get("oneOf")
        if not isinstance(options, list) or "anyOf" in schema:
            return schema
        if not self._comparison.are_disjoint([self._tagged(each) for each in options]):
            return schema
        return {"anyOf" if key == "oneOf" else key: value for key, value in schema.items()}

    def _tagged(self, option: Any) -> Any:
        """With the tag that `whole` makes required."""
        branch = self._resolved(option)
        tag = self._tags.get(str(option["$ref"])) if branch is not option else None
        return option if tag is None else {**branch, "required": [*required_names(branch), tag]}

    def _names(self, schema: Schema) -> Schema:
        """Keys that are listed, of a known format or of a certain length, as patterns of properties."""
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
    """Every value fits it."""
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
    """Every integer is a multiple of 1, of 0.5 and of 0.01."""
    if schema.get("type") != "integer" or isinstance(multiple, bool) or not isinstance(multiple, int | float):
        return False
    return multiple > 0 and Fraction(str(multiple)).numerator == 1


def _branches_are_open(schema: Schema) -> bool:
    return all(_is_open(schema.get(branch, True)) for branch in ("then", "else"))


# keyword -> whether that value of it binds nothing in that schema
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
    """2.0 is an integer to JSON Schema, and none to the compiler."""
    return {key: as_whole(value) if key in COUNTS else value for key, value in schema.items()}


def _draft(schema: Schema) -> Schema:
    """The compiler looks for dialects that it does not know on the web. Others only add what binds nothing."""
    said = schema.get("$schema")
    if said is None:
        return schema
    known = next((url for name, url in DRAFTS.items() if isinstance(said, str) and name in said), None)
    return {**schema, "$schema": known} if known else _without(schema, "$schema")


def _pattern(schema: Schema) -> Schema:
    pattern = schema.get("pattern")
    return {**schema, "pattern": without_look_ahead(pattern)} if isinstance(pattern, str) else schema


def _unevaluated(schema: Schema) -> Schema:
    """Without other schemas for the same object, everything beyond `properties` is unevaluated."""
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
    """The keys that there may be, where the schema lists them. A key is a string: others are never there."""
    values = [names["const"]] if "const" in names else names.get("enum")
    if not isinstance(values, list):
        return None
    is_text = names.get("type") in (None, "string")
    return [value for value in values if isinstance(value, str) and is_text]


def _name_pattern(names: Schema, properties: Mapping[str, Any]) -> str | None:
    """What keys beside `properties` look like; empty where there are none, None where no pattern says it."""
    binding = BINDING & names.keys()
    if binding <= {"type", "enum"} or binding <= {"type", "const"}:
        listed = [name for name in _listed(names) or () if name not in properties]
        return f"^(?:{'|'.join(map(re.escape, listed))})$" if listed else ""
    if properties or names.get("type", "string") != "string":
        return None
    if binding <= {"type", "format"} and isinstance(names["format"], str):
        return NAME_PATTERNS.get(names["format"], "^")  # a format is no bound where there is no pattern for it
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    if binding <= {"type", "minLength", "maxLength"} and isinstance(least, int) and isinstance(most, int | str):
        return f"^[\\s\\S]{{{least},{most}}}$"
    return None
