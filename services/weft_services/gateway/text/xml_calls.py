"""Parses Qwen3-Coder's tool calls: each argument has its own tags, and streams out as JSON.

The values carry no types; the tool's schema decides what is text and what is JSON.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping
from typing import Any

from weft_services.gateway.text.json_repair import SPACE, repaired_object
from weft_services.gateway.text.parts import (
    MAX_SPACE,
    Emit,
    Parse,
    Parser,
    Parts,
    TextBuffer,
    begins_with,
    copy_until,
    parse_json,
)
from weft_services.gateway.text.tool_parsers import MAX_PYTHON_CHARS

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
# What may end a value: its own tags, or the tags that follow if the model omits them.
VALUE_TAGS = (f"\n{END_PARAMETER}", END_PARAMETER, PARAMETER, f"\n{PARAMETER}", f"\n{END_FUNCTION}", f"\n{END_CALL}")
MAX_KEY_CHARS = 256
LITERALS = {"None": "null"}
# With one of these keywords a schema defines its type itself, even beside a `$ref`.
TELLING = frozenset(("type", "properties", "enum", "const", "anyOf", "oneOf", "allOf"))
MAX_HOPS = 8

Schemas = Mapping[str, dict[str, Any]]
Missing = set[str] | None  # parameters the call has not had yet; None: any name


def qwen_xml(schemas: Schemas) -> Parser:
    """`<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`, with text around.

    Models sometimes omit the outer tag.
    """

    def parse(buffer: TextBuffer, parts: Parts) -> Parse[None]:
        while mark := (yield from copy_until(buffer, (CALL, FUNCTION), parts.text)):
            buffer.mark()
            if mark == FUNCTION:
                yield from _call(buffer, parts, schemas, is_tagged=False)
            elif (yield from begins_with(buffer, FUNCTION)):
                yield from _call(buffer, parts, schemas, is_tagged=True)
            else:
                parts.text(mark)

    return parse


def _call(buffer: TextBuffer, parts: Parts, schemas: Schemas, is_tagged: bool) -> Parse[None]:
    """Read one call. Without the outer tag only a known tool counts, because texts also mention such tags."""
    name, is_named = yield from _name(buffer)
    if not is_named or not (is_tagged or name in schemas):
        parts.text((CALL if is_tagged else FUNCTION) + buffer.taken)
        return
    parts.begin_call(name)
    root = schemas.get(name, {})
    whole = resolved(root, root)
    properties = whole.get("properties") if isinstance(whole, dict) else None
    properties = properties if isinstance(properties, dict) else {}
    missing = set(properties) if properties else None
    separator = "{"
    while (yield from copy_until(buffer, (PARAMETER, END_FUNCTION, END_CALL), _nothing)) == PARAMETER:
        key, is_named = yield from _name(buffer)
        if not is_named:
            continue
        if missing:
            missing.discard(key)
        parts.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        yield from _value(buffer, parts, resolved(properties.get(key), root), missing)
    parts.arguments("}" if separator == ", " else "{}")
    parts.end_call()
    yield from begins_with(buffer, END_CALL)


def _name(buffer: TextBuffer) -> Parse[tuple[str, bool]]:
    """Read the name up to the end of the tag. Return it, and whether the tag is complete on one line."""
    written: list[str] = []
    mark = yield from copy_until(buffer, (">", "\n"), written.append)
    name = "".join(written)
    return (name.strip(), bool(name.strip())) if mark == ">" else (name + (mark or ""), False)


def _value(buffer: TextBuffer, parts: Parts, schema: Any, missing: Missing) -> Parse[None]:
    """Read a value without one line break at each end. Text streams unless it may be null."""
    while not buffer.text and not buffer.is_over:
        yield
    if buffer.text.startswith("\n"):
        buffer.take(1)
    if is_text(schema) and not is_nullable(schema):
        parts.arguments('"')
        yield from _until_end(buffer, lambda text: parts.arguments(_escaped(text)), missing)
        parts.arguments('"')
        return
    written: list[str] = []
    yield from _until_end(buffer, written.append, missing)
    value = "".join(written)
    if is_text(schema):
        parts.arguments("null" if LITERALS.get(value, value) == "null" else json.dumps(value, ensure_ascii=False))
    else:
        parts.arguments(_as_json(value))


def _until_end(buffer: TextBuffer, emit: Emit, missing: Missing) -> Parse[None]:
    """Read up to the tag that closes a value. `missing`: the parameters that may follow.

    Values may contain such tags. So a closing tag counts only if the next parameter or the function's end follows, and
    not for tags opened inside the value. If the model omits it, the next tag on a line of its own ends the value.
    """
    num_inner = 0
    while mark := (yield from copy_until(buffer, VALUE_TAGS, emit)):
        if mark in VALUE_TAGS[:2]:
            if (yield from _is_closing(buffer, num_inner, missing)):
                return
            num_inner = max(0, num_inner - 1)
        elif not num_inner and (yield from _is_forgotten(buffer, mark, missing)):
            buffer.unread(mark)
            return
        else:
            num_inner += mark.endswith(PARAMETER)
        emit(mark)


def _is_closing(buffer: TextBuffer, num_inner: int, missing: Missing) -> Parse[bool]:
    """True if a closing tag belongs to the value itself, judged by the text after it."""
    if not num_inner:
        return (yield from _is_before(buffer, (PARAMETER, END_FUNCTION, END_CALL)))
    if missing and (yield from _is_before(buffer, (PARAMETER,))):
        return (yield from _is_missing(buffer, PARAMETER, missing))
    return (yield from _is_before(buffer, (END_FUNCTION,), (END_CALL,)))


def _is_forgotten(buffer: TextBuffer, mark: str, missing: Missing) -> Parse[bool]:
    """True if the value ends before this tag, without a closing tag."""
    if mark == f"\n{PARAMETER}":
        return (yield from _is_missing(buffer, "", missing))
    return mark == f"\n{END_CALL}" or (mark != PARAMETER and (yield from _is_before(buffer, (END_CALL,))))


def _is_before(buffer: TextBuffer, *steps: tuple[str, ...]) -> Parse[bool]:
    """Return whether these tags come next, one per step, apart from white space. Nothing is read."""
    while (found := _follows(buffer.text, steps)) is None and not buffer.is_over and len(buffer.text) <= MAX_SPACE:
        yield
    return buffer.is_over if found is None else found


def _follows(text: str, steps: Iterable[tuple[str, ...]]) -> bool | None:
    """Return whether the tags come next; None if the text ends too early to tell."""
    for tags in steps:
        text = text.lstrip(SPACE)
        tag = next((tag for tag in tags if text.startswith(tag)), None)
        if tag is None:
            return None if any(tag.startswith(text) for tag in tags) else False
        text = text[len(tag) :]
    return True


def _is_missing(buffer: TextBuffer, tag: str, missing: Missing) -> Parse[bool]:
    """Return whether `tag` and an expected key come next; without a schema every key is expected."""
    while True:
        text = buffer.text.lstrip(SPACE)[len(tag) :]
        key, bracket, _ = text.partition(">")
        if bracket or buffer.is_over or "\n" in key or len(key) > MAX_KEY_CHARS:
            return bool(bracket) and "\n" not in key and (missing is None or key.strip() in missing)
        yield


def resolved(schema: Any, root: dict[str, Any]) -> Any:
    """Follow a `$ref` within the root. Schemas made from Python refer to whole classes and enums so."""
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
    """Return the values that a schema lists, also across several schemas, as for Optional[Literal[...]]."""
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
    """True if the value may be a string; also if the schema does not say."""
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
    """True if a value that may be a string may also be null."""
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
    """Return the text as JSON: unchanged if it is JSON, converted if it is Python, otherwise as a string."""
    text = written.strip()
    try:
        parse_json(text)
    except ValueError:
        return _mended(text) or _from_python(text) or json.dumps(written, ensure_ascii=False)
    return text


def _mended(text: str) -> str | None:
    """Repair an object or a list."""
    found = repaired_object(f'{{"": {text}}}') if text.startswith(("{", "[")) else None
    return found and found[len('{"": ') : -1]


def _from_python(text: str) -> str | None:
    if len(text) > MAX_PYTHON_CHARS:
        return None
    try:
        found = json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
        found.encode()  # raises for an unpaired surrogate, which cannot be sent
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return None
    return found


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _nothing(text: str) -> None:
    """Ignore white space between tags."""
