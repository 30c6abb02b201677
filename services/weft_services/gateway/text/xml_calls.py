"""Qwen3-Coder's tool calls: every argument in tags of its own, read as it streams and given out as JSON.

What is written there has no types; the tool's schema says what is text and what is JSON.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping
from typing import Any

from weft_services.gateway.text.incremental_reader import (
    MAX_SPACE,
    Emit,
    Parse,
    TextBuffer,
    begins_with,
    copy_until,
    parse_json,
)
from weft_services.gateway.text.json_repair import SPACE, repaired_object
from weft_services.gateway.text.parts import Parts
from weft_services.gateway.text.tool_parsers import MAX_PYTHON_CHARS, Parser

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
# what may end a value: its own tags, then those that come next where models forget it
VALUE_TAGS = (f"\n{END_PARAMETER}", END_PARAMETER, PARAMETER, f"\n{PARAMETER}", f"\n{END_FUNCTION}", f"\n{END_CALL}")
MAX_KEY_CHARS = 256
LITERALS = {"None": "null"}
# with these a schema says itself what it is of, whatever it refers to
TELLING = frozenset(("type", "properties", "enum", "const", "anyOf", "oneOf", "allOf"))
MAX_HOPS = 8

Schemas = Mapping[str, dict[str, Any]]
Missing = set[str] | None  # parameters that a call has not had yet; None: any name


def qwen_xml(schemas: Schemas) -> Parser:
    """`<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`, text around and between;
    models do forget the outer tag."""

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
    """Without the outer tag only a call of a known tool is one: texts speak of such tags, too."""
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
    """What stands before the bracket that closes the tag, and whether there is one on the same line."""
    written: list[str] = []
    mark = yield from copy_until(buffer, (">", "\n"), written.append)
    name = "".join(written)
    return (name.strip(), bool(name.strip())) if mark == ">" else (name + (mark or ""), False)


def _value(buffer: TextBuffer, parts: Parts, schema: Any, missing: Missing) -> Parse[None]:
    """One line break on either side is not its own. Text streams unless it may be null."""
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
    """Up to the tag that closes a value. Values have such tags within them, so one counts where it stands as the format
    has it: with the next parameter or the function's end behind it, as many as were opened in the value aside. Models
    forget it, and then the next tag on a line of its own ends the value too. `missing`: the parameters that may follow.
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
    """Is a parameter's closing tag the value's own, by what stands behind it."""
    if not num_inner:
        return (yield from _is_before(buffer, (PARAMETER, END_FUNCTION, END_CALL)))
    if missing and (yield from _is_before(buffer, (PARAMETER,))):
        return (yield from _is_missing(buffer, PARAMETER, missing))
    return (yield from _is_before(buffer, (END_FUNCTION,), (END_CALL,)))


def _is_forgotten(buffer: TextBuffer, mark: str, missing: Missing) -> Parse[bool]:
    """Does the value end before this tag, without a tag of its own."""
    if mark == f"\n{PARAMETER}":
        return (yield from _is_missing(buffer, "", missing))
    return mark == f"\n{END_CALL}" or (mark != PARAMETER and (yield from _is_before(buffer, (END_CALL,))))


def _is_before(buffer: TextBuffer, *steps: tuple[str, ...]) -> Parse[bool]:
    """Do tags come next, one of each step, white space aside, as far as the answer goes; nothing is read."""
    while (found := _follows(buffer.text, steps)) is None and not buffer.is_over and len(buffer.text) <= MAX_SPACE:
        yield
    return buffer.is_over if found is None else found


def _follows(text: str, steps: Iterable[tuple[str, ...]]) -> bool | None:
    """None: the text ends before that is known."""
    for tags in steps:
        text = text.lstrip(SPACE)
        tag = next((tag for tag in tags if text.startswith(tag)), None)
        if tag is None:
            return None if any(tag.startswith(text) for tag in tags) else False
        text = text[len(tag) :]
    return True


def _is_missing(buffer: TextBuffer, tag: str, missing: Missing) -> Parse[bool]:
    """Is the key that comes next, with this tag before it, one that is expected; without a schema each of them is."""
    while True:
        text = buffer.text.lstrip(SPACE)[len(tag) :]
        key, bracket, _ = text.partition(">")
        if bracket or buffer.is_over or "\n" in key or len(key) > MAX_KEY_CHARS:
            return bool(bracket) and "\n" not in key and (missing is None or key.strip() in missing)
        yield


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
        return _mended(text) or _from_python(text) or json.dumps(written, ensure_ascii=False)
    return text


def _mended(text: str) -> str | None:
    """Objects and lists; words are strings."""
    found = repaired_object(f'{{"": {text}}}') if text.startswith(("{", "[")) else None
    return found and found[len('{"": ') : -1]


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
