"""What an answer must look like, as clients say it: OpenAI's response_format, vLLM's guided_* and structured_outputs.

Turns each into one AnswerFormat; knows their limits, and nothing of grammars.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from weft.errors import InvalidRequest
from weft_services.gateway.dialects.body_limits import check_body
from weft_services.gateway.dialects.schema_limits import MAX_BYTES, complaint
from weft_services.gateway.generation import AnswerFormat, FormatKind

MAX_REGEX_CHARS = 4 * 1024
MAX_GRAMMAR_CHARS = 16 * 1024
MAX_CHOICES = 1024
MAX_TAGS = 64
MAX_RULES = 80
ANY_OBJECT = {"type": "object"}
# the same kinds by the names of vLLM, older ones; of SGLang; of llama.cpp
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
# vLLM's ways of writing JSON, which are not done here: any value but these is refused
WAYS: dict[str, Any] = {"disable_any_whitespace": False, "disable_additional_properties": False}
UNBOUND = (*WAYS, "whitespace_pattern", "json_object")


def read_format(response_format: Any, extra: dict[str, Any]) -> AnswerFormat | None:
    """The one format that is asked for; None for free text. Raises InvalidRequest naming the field."""
    formats = [
        *_response_format(response_format),
        *(_format(kind, extra[name], name) for name, kind in GUIDED.items() if extra and extra.get(name) is not None),
        *_structured(extra.get("structured_outputs")),
    ]
    if len(formats) > 1:
        field = formats[1].field
        raise InvalidRequest(f"{field}: {formats[0].field} says already what the answer must look like", field)
    return formats[0] if formats else None


def check_schema(schema: Any, field: str) -> dict[str, Any]:
    """A JSON schema within the limits, as a value or as text; true fits all. Raises InvalidRequest naming `field`."""
    if isinstance(schema, str):
        if len(schema) > MAX_BYTES:
            raise InvalidRequest(f"{field}: the schema has more than {MAX_BYTES} bytes", field)
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError as error:
            raise InvalidRequest(f"{field}: not a JSON schema: {error}", field) from error
    checked: dict[str, Any] = {} if schema is True else schema
    if not isinstance(checked, dict):
        raise InvalidRequest(f"{field}: expected a JSON schema", field)
    if (found := complaint(checked)) is not None:
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
                raise InvalidRequest(f"{field}.json_schema: an object with a schema is needed", f"{field}.json_schema")
            yield _format(FormatKind.SCHEMA, wrapper["schema"], f"{field}.json_schema.schema")
        case "structural_tag":
            yield _format(FormatKind.TAGS, value, field)
        case _:
            raise InvalidRequest(
                f"{field}.type: text, json_object, json_schema and structural_tag are known", f"{field}.type"
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
        raise InvalidRequest(f"{field}: one of {', '.join(STRUCTURED)} or json_object is needed", field)
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
    # rules that double one another grow beyond bounds faster than any compiler notices
    if (num_rules := text.count(":")) > MAX_RULES:
        raise InvalidRequest(f"{field}: {num_rules} rules, at most {MAX_RULES}", field)
    if "%json" in text:  # a schema in there would be seen by nobody who knows limits of schemas
        raise InvalidRequest(f"{field}: %json is not taken here, a schema goes into guided_json", field)
    return text


def _choices(value: Any, field: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHOICES:
        raise InvalidRequest(f"{field}: expected a list of 1 to {MAX_CHOICES} strings", field)
    return tuple(_text(choice, field, MAX_REGEX_CHARS) for choice in value)


def _tags(value: Any, field: str) -> tuple[dict[str, Any], ...]:
    """vLLM's structural tags: after a trigger, a begin, a JSON value by a schema, and an end."""
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
        raise InvalidRequest(f"{field}.begin: begins with none of the triggers", f"{field}.begin")
    end = structure.get("end", "")
    if not isinstance(end, str) or len(end) > MAX_REGEX_CHARS:
        raise InvalidRequest(f"{field}.end: expected a string", f"{field}.end")
    schema = check_schema(structure.get("schema", True), f"{field}.schema")
    return {"trigger": trigger, "begin": begin, "schema": schema, "end": end}
