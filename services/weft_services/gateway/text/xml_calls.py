"""Qwen3-Coder's tool calls: every argument in tags of its own, read as it streams and given out as JSON.

What is written there has no types; the tool's schema says what is text and what is JSON.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from weft_services.gateway.text.feed import Emit, Feed, Reading, begins_with, copy_until, parse_json
from weft_services.gateway.text.parts import Parts
from weft_services.gateway.text.tool_parsers import MAX_PYTHON_CHARS, Parser

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
NEXT_TAGS = (f"\n{PARAMETER}", f"\n{END_FUNCTION}", "\n</tool_call>")
LITERALS = {"None": "null"}
# with these a schema says itself what it is of, whatever it refers to
TELLING = frozenset(("type", "properties", "enum", "const", "anyOf", "oneOf", "allOf"))
MAX_HOPS = 8

Schemas = Mapping[str, dict[str, Any]]


def qwen_xml(schemas: Schemas) -> Parser:
    """`<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`, text around and between;
    models do forget the outer tag."""

    def parse(feed: Feed, parts: Parts) -> Reading[None]:
        while mark := (yield from copy_until(feed, ("<tool_call>", FUNCTION), parts.text)):
            if mark == FUNCTION or (yield from begins_with(feed, FUNCTION)):
                yield from _call(feed, parts, schemas)
                yield from begins_with(feed, "</tool_call>")
            else:
                parts.text(mark)

    return parse


def _call(feed: Feed, parts: Parts, schemas: Schemas) -> Reading[None]:
    name, is_named = yield from _name(feed)
    if not is_named:
        parts.text(f"{FUNCTION}{name}")
        return
    parts.begin_call(name)
    root = schemas.get(name, {})
    whole = resolved(root, root)
    properties = whole.get("properties") if isinstance(whole, dict) else None
    separator = "{"
    while True:
        mark = yield from copy_until(feed, (PARAMETER, END_FUNCTION, "</tool_call>"), _nothing)
        if mark != PARAMETER:
            break
        key, is_named = yield from _name(feed)
        schema = resolved(properties.get(key) if isinstance(properties, dict) else None, root)
        parts.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        if not is_named or not (yield from _value(feed, parts, schema)):
            return  # cut off
    if mark is not None:
        parts.arguments("}" if separator == ", " else "{}")
        parts.end_call()


def _name(feed: Feed) -> Reading[tuple[str, bool]]:
    """What stands before the bracket that closes the tag, and whether there is one on the same line."""
    written: list[str] = []
    mark = yield from copy_until(feed, (">", "\n"), written.append)
    name = "".join(written)
    return (name.strip(), bool(name.strip())) if mark == ">" else (name + (mark or ""), False)


def _value(feed: Feed, parts: Parts, schema: Any) -> Reading[bool]:
    """One line break on either side is not its own. Text streams unless it may be null; False when the answer ends
    before the value does."""
    while not feed.text and not feed.is_over:
        yield
    if feed.text.startswith("\n"):
        feed.take(1)
    if is_text(schema) and not is_nullable(schema):
        parts.arguments('"')
        is_ended = yield from _until_end(feed, lambda text: parts.arguments(_escaped(text)))
        parts.arguments('"' if is_ended else "")
        return is_ended
    written: list[str] = []
    is_ended = yield from _until_end(feed, written.append)
    value = "".join(written)
    if is_text(schema):
        value = "null" if LITERALS.get(value, value) == "null" else json.dumps(value, ensure_ascii=False)
    elif is_ended:
        value = _as_json(value)
    parts.arguments(value)
    return is_ended


def _until_end(feed: Feed, emit: Emit) -> Reading[bool]:
    """Up to the tag that closes a value; models forget it, and then the next tag on a line of its own ends it too."""
    mark = yield from copy_until(feed, (f"\n{END_PARAMETER}", END_PARAMETER, *NEXT_TAGS), emit)
    if mark in NEXT_TAGS:
        feed.text = mark + feed.text
    return mark is not None


def resolved(schema: Any, root: dict[str, Any]) -> Any:
    """What it refers to, if that is within the root; as whole classes are, and enums, in schemas made of Python."""
    found = schema
    for _ in range(MAX_HOPS):
        path = found.get("$ref") if isinstance(found, dict) and not TELLING & found.keys() else None
        if not isinstance(path, str):
            return found
        found = _at(path, root)
        if found is None:
            break
    return schema


def _at(path: str, root: dict[str, Any]) -> Any:
    found: Any = root if path.startswith("#/") else None
    for step in path[2:].split("/"):
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def named_values(schema: Any) -> list[Any] | None:
    """Those that a value must be one of, where the schema says so; as Optional[Literal[...]] is, of several schemas."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema or schema.get("type") == "null":
        return [schema.get("const")]
    if isinstance(values := schema.get("enum"), list):
        return values
    found: list[Any] = []
    options = schema.get("anyOf") or schema.get("oneOf")
    for each in options if isinstance(options, list) else ():
        if (values := named_values(each)) is None:
            return None
        found += values
    return found or None


def is_text(schema: Any) -> bool:
    """May the value be a string; where nobody says, it is one."""
    if not isinstance(schema, dict):
        return True
    kind = schema.get("type")
    if kind is not None:
        return isinstance(kind, str | list) and "string" in kind
    if (values := named_values(schema)) is not None:
        return any(isinstance(value, str) for value in values)
    options = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(options, list):
        return any(map(is_text, options))
    every = schema.get("allOf")
    return all(map(is_text, every)) if isinstance(every, list) else "$ref" not in schema


def is_nullable(schema: Any) -> bool:
    """May the value be null, where it may be a string."""
    if not isinstance(schema, dict):
        return False
    if "type" in schema:
        kind = schema["type"]
        return (isinstance(kind, list) and "null" in kind) or schema.get("nullable") is True
    if (values := named_values(schema)) is not None:
        return None in values
    options = schema.get("anyOf") or schema.get("oneOf")
    return isinstance(options, list) and any(isinstance(each, dict) and each.get("type") == "null" for each in options)


def _as_json(written: str) -> str:
    """As it stands if it is JSON; as JSON if it is Python, which models write too; else it is a string after all."""
    text = written.strip()
    try:
        parse_json(text)
    except ValueError:
        return _from_python(text) or json.dumps(written, ensure_ascii=False)
    return text


def _from_python(text: str) -> str | None:
    if len(text) > MAX_PYTHON_CHARS:
        return None
    try:
        found = json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
        found.encode()  # half of a surrogate pair could not be sent
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return None
    return found


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _nothing(text: str) -> None:
    """White space between tags."""
