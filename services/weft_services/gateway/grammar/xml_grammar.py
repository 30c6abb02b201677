"""Arguments as Qwen3-Coder writes them, each in tags of its own, as a grammar. Compiles nothing."""

from __future__ import annotations

from typing import Any

from weft.errors import InvalidRequest
from weft_services.gateway.grammar.answer_grammar import TEXT, Part, lark_part, quote, schema_part
from weft_services.gateway.text.xml_calls import END_PARAMETER, PARAMETER, is_text, named_values, resolved

END = f"\n{END_PARAMETER}\n"
ROOT = "arguments"
# what a schema may ask of a text that stands free between its tags
UNKEPT = ("pattern", "minLength", "maxLength", "format")


def xml_parts(schema: dict[str, Any], name: str, field: str, is_lenient: bool) -> list[Part]:
    """In the order of the schema's properties, those that are required always. A text is any, or one that is named;
    other values are JSON by their schemas. `field` is the client's name for the schema. Raises InvalidRequest for what
    cannot be kept, unless lenient."""
    whole = resolved(schema, schema)
    properties, required = (whole.get(name) if isinstance(whole, dict) else None for name in ("properties", "required"))
    properties = properties if isinstance(properties, dict) else {}
    required = required if isinstance(required, list) else []
    start, rules, parts = [], [f"TEXT: {TEXT}"], list[Part]()
    for place, (key, own) in enumerate(properties.items()):
        start.append(f"p{place}" if key in required else f"p{place}?")
        opening = quote(f"{PARAMETER}{key}>\n")
        meant = resolved(own, schema)
        if not is_text(meant):
            inner = f"{name}_{place}"
            parts.append(schema_part(_alone(own, schema), inner, f"{field}.properties.{key}", is_lenient))
            rules.append(f"p{place}: {opening} @{inner} {quote(END)}")
        elif values := _texts(meant):
            rules.append(f"p{place}: {opening} ({' | '.join(map(quote, values))}) {quote(END)}")
        else:
            if not is_lenient:
                _check_free(meant, f"{field}.properties.{key}", field)
            rules += [f"p{place}: {opening} v{place}", f"v{place}[lazy]: TEXT {quote(END)}"]
    return [lark_part("\n".join([f"start: {' '.join(start) or quote('')}", *rules]), name), *parts]


def _alone(own: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of one value by itself, with what its references lead to."""
    moved = _moved(own)
    return own if moved == own else {**moved, "$defs": {ROOT: _moved(schema)}}


def _moved(value: Any) -> Any:
    """The same, references to the root leading to where the root is now."""
    if isinstance(value, list):
        return [_moved(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: f"#/$defs/{ROOT}{each[1:]}"
        if key == "$ref" and isinstance(each, str) and each[:1] == "#"
        else _moved(each)
        for key, each in value.items()
    }


def _check_free(schema: Any, path: str, field: str) -> None:
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, dict):
            continue
        if (name := next((name for name in UNKEPT if name in each), None)) is not None:
            message = f"{path}.{name}: not kept, as this model writes texts in tags and not as JSON; leave it out"
            raise InvalidRequest(message, field, "invalid_value")
        for inner in (each.get(branch) for branch in ("anyOf", "oneOf", "allOf")):
            waiting += inner if isinstance(inner, list) else []


def _texts(schema: Any) -> list[str]:
    values = named_values(schema) or []
    if not all(isinstance(value, str | None) for value in values):
        return []
    return ["null" if value is None else value for value in values]
