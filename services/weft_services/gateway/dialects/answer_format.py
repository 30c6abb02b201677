"""Constraints on an answer: OpenAI's response_format, vLLM's guided_* and structured_outputs, and their limits.

Every form becomes one AnswerFormat. Schemas are bounded in size, depth and known explosions before any compiler sees
them, without recursion.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, TypeGuard

import orjson

from weft.errors import InvalidRequest
from weft_services.gateway.dialects.body_checks import check_body, depth_of
from weft_services.gateway.generation import AnswerFormat, FormatKind

MAX_REGEX_CHARS = 4 * 1024
MAX_GRAMMAR_CHARS = 16 * 1024
MAX_CHOICES = 1024
MAX_TAGS = 64
MAX_RULES = 80
ANY_OBJECT = {"type": "object"}
# Aliases: older vLLM names first, then SGLang's and llama.cpp's.
GUIDED = {
    "guided_json": FormatKind.SCHEMA,
    "guided_regex": FormatKind.REGEX,
    "guided_grammar": FormatKind.GRAMMAR,
    "guided_choice": FormatKind.CHOICE,
    "json_schema": FormatKind.SCHEMA,
    "regex": FormatKind.REGEX,
    "ebnf": FormatKind.GRAMMAR,
    "grammar": FormatKind.GRAMMAR,
}
STRUCTURED = {
    "json": FormatKind.SCHEMA,
    "regex": FormatKind.REGEX,
    "grammar": FormatKind.GRAMMAR,
    "choice": FormatKind.CHOICE,
    "structural_tag": FormatKind.TAGS,
}
# vLLM's options for writing JSON. Weft implements none of them, so other values than these are rejected.
WAYS: dict[str, Any] = {"disable_any_whitespace": False, "disable_additional_properties": False}
UNBOUND = (*WAYS, "whitespace_pattern", "json_object")
MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_DEPTH = 64  # JSON levels; a schema level is two of them, properties and the name
MAX_SCHEMA_OBJECTS = 2048
MAX_SCHEMA_PROPERTIES = 512
MAX_SCHEMA_BRANCHES = 128
MAX_SCHEMA_VALUES = 1000
MAX_MULTIPLE = 2000
# llguidance stores numbers as doubles, and integers in 64 bits. -2^63 crashes the process. 2^63 - 1 is allowed: schemas
# of int64 use it, and it survives the round trip.
MIN_INTEGER, MAX_INTEGER = -(2**63), 2**63 - 1
BRANCHES = ("anyOf", "oneOf", "allOf")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def read_format(response_format: Any, extra: dict[str, Any]) -> AnswerFormat | None:
    """Return the one constraint of a request, None for free text. Raises InvalidRequest naming the field."""
    formats = [
        *_response_format(response_format),
        *(_format(kind, extra[name], name) for name, kind in GUIDED.items() if extra and extra.get(name) is not None),
        *_structured(extra.get("structured_outputs")),
    ]
    if len(formats) > 1:
        field = formats[1].field
        raise InvalidRequest(f"{field}: {formats[0].field} already sets the answer's format; use one of them", field)
    return formats[0] if formats else None


def check_schema(schema: Any, field: str) -> dict[str, Any]:
    """Return a JSON schema, given as a value or as text, if it is within the limits; true accepts everything.

    Raises InvalidRequest naming `field`.
    """
    if isinstance(schema, str):
        if len(schema) > MAX_SCHEMA_BYTES:
            raise InvalidRequest(f"{field}: the schema has more than {MAX_SCHEMA_BYTES} bytes", field)
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError as error:
            raise InvalidRequest(f"{field}: not a JSON schema: {error}", field) from error
    checked: dict[str, Any] = {} if schema is True else schema
    if not isinstance(checked, dict):
        raise InvalidRequest(f"{field}: expected a JSON schema", field)
    if (found := schema_problem(checked)) is not None:
        raise InvalidRequest(f"{field}: the schema {found}", field)
    return checked


def _response_format(value: Any) -> Iterator[AnswerFormat]:
    field = "response_format"
    if value is None:
        return
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field}: expected an object", field)
    match value.get("type"):
        case "text":
            return
        case "json_object":
            yield AnswerFormat(FormatKind.SCHEMA, ANY_OBJECT, field)
        case "json_schema":
            wrapper = value.get("json_schema")
            if not isinstance(wrapper, dict) or wrapper.get("schema") is None:
                raise InvalidRequest(f"{field}.json_schema: expected an object with a schema", f"{field}.json_schema")
            yield _format(FormatKind.SCHEMA, wrapper["schema"], f"{field}.json_schema.schema")
        case "structural_tag":
            yield _format(FormatKind.TAGS, value, field)
        case _:
            raise InvalidRequest(
                f"{field}.type: expected text, json_object, json_schema or structural_tag", f"{field}.type"
            )


def _structured(value: Any) -> Iterator[AnswerFormat]:
    field = "structured_outputs"
    if value is None:
        return
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field}: expected an object", field)
    given = [name for name, each in value.items() if each is not None]
    for name in given:
        if name not in STRUCTURED and (
            name not in UNBOUND or (name != "json_object" and value[name] != WAYS.get(name))
        ):
            raise InvalidRequest(f"{field}.{name} is not supported here", f"{field}.{name}", "unsupported_parameter")
    if not value.get("json_object") and not any(name in STRUCTURED for name in given):
        raise InvalidRequest(f"{field}: expected one of {', '.join(STRUCTURED)} or json_object", field)
    if value.get("json_object"):
        yield AnswerFormat(FormatKind.SCHEMA, ANY_OBJECT, f"{field}.json_object")
    for name, kind in STRUCTURED.items():
        if value.get(name) is not None:
            yield _format(kind, value[name], f"{field}.{name}")


def _format(kind: FormatKind, value: Any, field: str) -> AnswerFormat:
    match kind:
        case FormatKind.SCHEMA:
            return AnswerFormat(kind, check_schema(value, field), field)
        case FormatKind.REGEX:
            return AnswerFormat(kind, _text(value, field, MAX_REGEX_CHARS), field)
        case FormatKind.GRAMMAR:
            return AnswerFormat(kind, _rules(value, field), field)
        case FormatKind.CHOICE:
            return AnswerFormat(kind, _choices(value, field), field)
        case FormatKind.TAGS:
            return AnswerFormat(kind, _tags(value, field), field)


def _text(value: Any, field: str, max_chars: int) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= max_chars:
        raise InvalidRequest(f"{field}: expected a string of 1 to {max_chars} characters", field)
    return value


def _rules(value: Any, field: str) -> str:
    text = _text(value, field, MAX_GRAMMAR_CHARS)
    # Rules that double each other grow exponentially, before any compiler notices.
    if (num_rules := text.count(":")) > MAX_RULES:
        raise InvalidRequest(f"{field}: {num_rules} rules, at most {MAX_RULES}", field)
    if "%json" in text:  # the schema limits do not see a schema in there
        raise InvalidRequest(f"{field}: %json is not supported; put the schema into guided_json", field)
    return text


def _choices(value: Any, field: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHOICES:
        raise InvalidRequest(f"{field}: expected a list of 1 to {MAX_CHOICES} strings", field)
    return tuple(_text(choice, field, MAX_REGEX_CHARS) for choice in value)


def _tags(value: Any, field: str) -> tuple[dict[str, Any], ...]:
    """Read vLLM's structural tags: after a trigger, a begin, a JSON value by a schema, and an end."""
    if isinstance(value, str):
        check_body(value.encode(errors="replace"))
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise InvalidRequest(f"{field}: not JSON: {error}", field) from error
    structures = value.get("structures") if isinstance(value, dict) else None
    triggers = value.get("triggers") if isinstance(value, dict) else None
    if not isinstance(structures, list) or not 1 <= len(structures) <= MAX_TAGS:
        raise InvalidRequest(f"{field}: structures must be a list of 1 to {MAX_TAGS} objects", field)
    if not isinstance(triggers, list) or not 1 <= len(triggers) <= MAX_TAGS:
        raise InvalidRequest(f"{field}: triggers must be a list of 1 to {MAX_TAGS} strings", field)
    for place, each in enumerate(triggers):
        _text(each, f"{field}.triggers.{place}", MAX_REGEX_CHARS)
    return tuple(_tag(each, triggers, f"{field}.structures.{place}") for place, each in enumerate(structures))


def _tag(structure: Any, triggers: list[str], field: str) -> dict[str, Any]:
    if not isinstance(structure, dict):
        raise InvalidRequest(f"{field}: expected an object", field)
    begin = _text(structure.get("begin"), f"{field}.begin", MAX_REGEX_CHARS)
    trigger = next((each for each in triggers if begin.startswith(each)), None)
    if trigger is None:
        raise InvalidRequest(f"{field}.begin: must start with one of the triggers", f"{field}.begin")
    end = structure.get("end", "")
    if not isinstance(end, str) or len(end) > MAX_REGEX_CHARS:
        raise InvalidRequest(f"{field}.end: expected a string", f"{field}.end")
    schema = check_schema(structure.get("schema", True), f"{field}.schema")
    return {"trigger": trigger, "begin": begin, "schema": schema, "end": end}


def schema_problem(schema: dict[str, Any]) -> str | None:
    """Return what exceeds the limits, or None."""
    if (depth := depth_of(schema)) > MAX_SCHEMA_DEPTH:
        return f"is nested {depth} levels deep, at most {MAX_SCHEMA_DEPTH}"
    try:
        size = len(orjson.dumps(schema))
    except TypeError:
        return "has an integer of more than 64 bits"
    if size > MAX_SCHEMA_BYTES:
        return f"has {size} bytes, at most {MAX_SCHEMA_BYTES}"
    multiple = 1
    for number, each in enumerate(_schema_objects(schema)):
        if number >= MAX_SCHEMA_OBJECTS:
            return f"has more than {MAX_SCHEMA_OBJECTS} objects"
        if (found := _size_problem(each) or _number_problem(each)) is not None:
            return found
        # An automaton that counts remainders has as many states, and several automata multiply.
        multiple = math.lcm(multiple, _coefficient(each.get("multipleOf")))
        if multiple > MAX_MULTIPLE:
            return f"has a multipleOf, or several that meet, above {MAX_MULTIPLE}"
    return None


def _schema_objects(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    waiting: list[Any] = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _size_problem(schema: dict[str, Any]) -> str | None:
    if len(schema) > MAX_SCHEMA_PROPERTIES:
        return f"has an object with {len(schema)} keys, at most {MAX_SCHEMA_PROPERTIES}"
    for name, value in schema.items():
        limit = MAX_SCHEMA_BRANCHES if name in BRANCHES else MAX_SCHEMA_VALUES
        if isinstance(value, list) and len(value) > limit:
            return f"has {len(value)} entries in {name[:32]}, at most {limit}"
    return None


def _number_problem(schema: dict[str, Any]) -> str | None:
    """Return what is wrong with a number of this object, its const or enum: llguidance cannot store it."""
    if _is_number(multiple := schema.get("multipleOf")) and multiple <= 0:
        return f"has {multiple} as its multipleOf, which must be above 0"
    for name in BOUNDS:
        if _is_number(value := schema.get(name)) and not (_is_kept(value) or value > MAX_INTEGER):
            return f"has {value} as its {name}, which is not kept exactly"
    named = [schema.get("const"), schema.get("enum")]
    while named:
        value = named.pop()
        if isinstance(value, list | dict):
            named += value.values() if isinstance(value, dict) else value
        elif _is_number(value) and not _is_kept(value):
            return f"names {value}, which is not kept exactly"
    return None


def _is_kept(value: int | float) -> bool:
    return value == MAX_INTEGER or (MIN_INTEGER < float(value) < MAX_INTEGER and float(value) == value)


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _coefficient(multiple: Any) -> int:
    """Return the digits without powers of ten, which cost nothing: 0.05 counts as 5, 300 as 3."""
    if isinstance(multiple, bool) or not isinstance(multiple, int | float) or not 0 < multiple < math.inf:
        return 1
    digits = int("".join(map(str, Decimal(str(multiple)).as_tuple().digits)))
    while digits % 10 == 0:
        digits //= 10
    return digits
