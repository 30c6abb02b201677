"""Arguments as Qwen3-Coder writes them, each in tags of its own, as a grammar. Compiles nothing."""

from __future__ import annotations

from typing import Any

from weft_services.gateway.grammar.answer_grammar import TEXT, Part, lark_part, quote, schema_part
from weft_services.gateway.text.xml_calls import END_PARAMETER, PARAMETER, is_text

END = f"\n{END_PARAMETER}\n"


def xml_parts(schema: dict[str, Any], name: str, is_lenient: bool) -> list[Part]:
    """In the order of the schema's properties, those that are required always. A text is any text, or one of an enum;
    other values are JSON by their schemas."""
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    required = schema.get("required")
    required = required if isinstance(required, list) else []
    start, rules, parts = [], [f"TEXT: {TEXT}"], list[Part]()
    for place, (key, own) in enumerate(properties.items()):
        start.append(f"p{place}" if key in required else f"p{place}?")
        opening = quote(f"{PARAMETER}{key}>\n")
        if not is_text(own):
            inner = f"{name}_{place}"
            parts.append(schema_part({**_shared(schema), **own}, inner, is_lenient))
            rules.append(f"p{place}: {opening} @{inner} {quote(END)}")
        elif values := _texts(own):
            rules.append(f"p{place}: {opening} ({' | '.join(map(quote, values))}) {quote(END)}")
        else:
            rules += [f"p{place}: {opening} v{place}", f"v{place}[lazy]: TEXT {quote(END)}"]
    return [lark_part("\n".join([f"start: {' '.join(start) or quote('')}", *rules]), name), *parts]


def _shared(schema: dict[str, Any]) -> dict[str, Any]:
    """What references lead to."""
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def _texts(schema: Any) -> list[str]:
    values = schema.get("enum") if isinstance(schema, dict) else None
    return values if isinstance(values, list) and all(isinstance(value, str) for value in values) else []
