"""Reads tool calls with a tag around each argument, and streams the arguments out as JSON.

One reader serves all families: `TagSyntax` names their tags. The values carry no types; the tool's schema decides what
is text and what is JSON, unless the tags say so.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
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

MAX_KEY_CHARS = 256
# A name that no tag encloses.
BARE_NAME = re.compile(r"[\w.:/-]{1,128}")
CDATA, END_CDATA = "<![CDATA[", "]]>"
LITERALS = {"None": "null"}
# With one of these keywords a schema defines its type itself, even beside a `$ref`.
TELLING = frozenset(("type", "properties", "enum", "const", "anyOf", "oneOf", "allOf"))
MAX_HOPS = 8

Schemas = Mapping[str, dict[str, Any]]
Missing = set[str] | None  # parameters the call has not had yet; None: any name
IS_TEXT, IS_JSON = ' string="true"', ' string="false"'


@dataclass(frozen=True, slots=True)
class TagSyntax:
    """The tags of one family. Each pair is what precedes and what follows; an empty string stands for no tag.

    - `sections`: the pairs that may surround all calls.
    - `call`: surrounds one call.
    - `name`: surrounds the name. Without a tag behind it, the name ends with the line or at the next tag.
    - `end`: ends the arguments, within `call`.
    - `key`, `value`: surround a parameter's key and value.
    - `padding`: a line break at each end of a value that is not part of it.
    - `has_cdata`: texts may be enclosed in `<![CDATA[` and `]]>`.
    - `has_types`: keys have an attribute `string`, which tells text from JSON.
    """

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    call: tuple[str, str] = ("", "")
    end: str = ""
    sections: tuple[tuple[str, str], ...] = ()
    padding: str = ""
    has_types: bool = False
    has_cdata: bool = False

    def parser(self, schemas: Schemas) -> Parser:
        """Return a parser for calls with text around them. Models sometimes omit the outermost tags."""
        return partial(_parse, _Tags(self), schemas)


class _Tags:
    """The tags of a syntax by what they mean to the parser."""

    def __init__(self, syntax: TagSyntax) -> None:
        self.call, self.end_call = syntax.call
        self.name, end_name = syntax.name
        self.sections = dict(syntax.sections)
        self.key, end_key = syntax.key
        self.value, end_value = syntax.value
        self.is_padded = bool(syntax.padding)
        self.has_cdata = syntax.has_cdata
        self.openings = tuple(filter(None, (*self.sections, self.call, self.name)))
        self.closings = tuple(filter(None, (syntax.end, self.end_call, *self.sections.values())))
        # Without a tag around it, a call's end is no surer than text in a value that looks like it.
        is_enclosed = bool(self.end_call or self.sections)
        self.final = self.end_call or (syntax.end if is_enclosed else "")
        self.last_steps = tuple((tag,) for tag in (syntax.end, self.end_call) if tag)
        self.end_names = (end_name, "\n") if end_name else ()
        types = (IS_TEXT, IS_JSON) if syntax.has_types else ()
        self.end_keys = (*(end_key.replace(">", f"{each}>") for each in types), end_key, "\n")
        self.end_key_letter = end_key[0]
        # What may end a value: its own tags, or the tags that follow if the model omits them.
        self.end_values = (f"\n{end_value}", end_value) if self.is_padded else (end_value,)
        ends = (syntax.end, self.end_call) if is_enclosed else ()
        forgotten = (f"\n{tag}" for tag in (self.key, *ends) if tag)
        self.value_tags = (*self.end_values, self.key, *forgotten)


def _parse(tags: _Tags, schemas: Schemas, buffer: TextBuffer, parts: Parts) -> Parse[None]:
    is_in_section = False
    while mark := (yield from copy_until(buffer, tags.openings, parts.text)):
        buffer.mark()
        if mark in tags.sections:
            is_in_section = (yield from _is_before(buffer, (tags.call or tags.name,))) and bool(buffer.text.strip())
            if not is_in_section:
                parts.text(mark)
            continue
        is_tagged = is_in_section or mark == tags.call
        if mark == tags.call and tags.name and not (yield from begins_with(buffer, tags.name)):
            parts.text(mark)
            continue
        if (yield from _call(tags, buffer, parts, schemas, mark, is_tagged)):
            for end_section in tags.sections.values():
                is_in_section &= not (yield from begins_with(buffer, end_section))


def _call(
    tags: _Tags, buffer: TextBuffer, parts: Parts, schemas: Schemas, opening: str, is_tagged: bool
) -> Parse[bool]:
    """Read one call. Without an outer tag only a known tool counts, because texts also mention such tags."""
    name, is_named = yield from _tool_name(tags, buffer)
    if not is_named or not (is_tagged or name in schemas):
        parts.text(opening + buffer.taken)
        return False
    parts.begin_call(name)
    root = schemas.get(name, {})
    whole = resolved(root, root)
    properties = whole.get("properties") if isinstance(whole, dict) else None
    properties = properties if isinstance(properties, dict) else {}
    missing = set(properties) if properties else None
    separator = "{"
    while (mark := (yield from copy_until(buffer, (tags.key, *tags.closings), _ignore))) == tags.key:
        key, end_key = yield from _until_line_end(buffer, tags.end_keys)
        if not key or end_key not in tags.end_keys[:-1]:
            continue
        if missing:
            missing.discard(key)
        parts.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        if tags.value:
            yield from begins_with(buffer, tags.value)
        schema = resolved(properties.get(key), root)
        if end_key.endswith(f"{IS_TEXT}>") or end_key.endswith(f"{IS_JSON}>"):
            schema = {"type": "string" if end_key.endswith(f"{IS_TEXT}>") else "object"}
        yield from _value(tags, buffer, parts, schema, missing)
    parts.arguments("}" if separator == ", " else "{}")
    parts.end_call()
    if mark is not None and mark in tags.sections.values():
        buffer.unread(mark)
    elif tags.end_call:
        yield from begins_with(buffer, tags.end_call)
    return True


def _tool_name(tags: _Tags, buffer: TextBuffer) -> Parse[tuple[str, bool]]:
    """Read a name. Return it, and whether it is one: its tag is complete, or arguments or the end follow."""
    if tags.end_names:
        name, end = yield from _until_line_end(buffer, tags.end_names)
        return name, bool(name) and end == tags.end_names[0]
    written: list[str] = []
    mark = yield from copy_until(buffer, ("\n", tags.key, *tags.closings), written.append)
    if mark:
        buffer.unread(mark)
    name = "".join(written).strip()
    is_name = mark is not None and BARE_NAME.fullmatch(name) is not None
    return name, is_name and (yield from _is_before(buffer, (tags.key, *tags.closings)))


def _until_line_end(buffer: TextBuffer, ends: tuple[str, ...]) -> Parse[tuple[str, str | None]]:
    """Read up to one of `ends`, of which the last is the line's end. Return the text and what ended it."""
    written: list[str] = []
    mark = yield from copy_until(buffer, ends, written.append)
    return "".join(written).strip(), mark


def _value(tags: _Tags, buffer: TextBuffer, parts: Parts, schema: Any, missing: Missing) -> Parse[None]:
    """Read a value. Text streams unless it may be null."""
    if tags.is_padded:
        while not buffer.text and not buffer.is_over:
            yield
        if buffer.text.startswith("\n"):
            buffer.take(1)
    if tags.has_cdata and (yield from begins_with(buffer, CDATA)):
        parts.arguments('"')
        yield from copy_until(buffer, (END_CDATA,), lambda text: parts.arguments(escaped(text)))
        parts.arguments('"')
        yield from begins_with(buffer, tags.end_values[-1])
        return
    if is_text(schema) and not is_nullable(schema):
        parts.arguments('"')
        yield from _until_end(tags, buffer, lambda text: parts.arguments(escaped(text)), missing)
        parts.arguments('"')
        return
    written: list[str] = []
    yield from _until_end(tags, buffer, written.append, missing)
    value = "".join(written)
    if is_text(schema):
        parts.arguments("null" if LITERALS.get(value, value) == "null" else json.dumps(value, ensure_ascii=False))
    else:
        parts.arguments(as_json(value))


def _until_end(tags: _Tags, buffer: TextBuffer, emit: Emit, missing: Missing) -> Parse[None]:
    """Read up to the tag that closes a value. `missing`: the parameters that may follow.

    Values may contain such tags. So a closing tag counts only if the next parameter or the call's end follows, and not
    for tags opened inside the value. If the model omits it, the next tag on a line of its own ends the value.
    """
    num_inner = 0
    while mark := (yield from copy_until(buffer, tags.value_tags, emit)):
        if mark in tags.end_values:
            if (yield from _is_closing(tags, buffer, num_inner, missing)):
                return
            num_inner = max(0, num_inner - 1)
        elif not num_inner and (yield from _is_forgotten(tags, buffer, mark, missing)):
            buffer.unread(mark)
            return
        else:
            num_inner += mark.endswith(tags.key)
        emit(mark)


def _is_closing(tags: _Tags, buffer: TextBuffer, num_inner: int, missing: Missing) -> Parse[bool]:
    """True if a closing tag belongs to the value itself, judged by the text after it."""
    if not num_inner:
        return (yield from _is_before(buffer, (tags.key, *tags.closings)))
    if missing and (yield from _is_before(buffer, (tags.key,))):
        return (yield from _is_missing(tags, buffer, tags.key, missing))
    return (yield from _is_before(buffer, *tags.last_steps))


def _is_forgotten(tags: _Tags, buffer: TextBuffer, mark: str, missing: Missing) -> Parse[bool]:
    """True if the value ends before this tag, without a closing tag."""
    if mark == f"\n{tags.key}":
        return (yield from _is_missing(tags, buffer, "", missing))
    if not tags.final or mark == tags.key:
        return False
    return mark == f"\n{tags.final}" or (yield from _is_before(buffer, (tags.final,)))


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


def _is_missing(tags: _Tags, buffer: TextBuffer, tag: str, missing: Missing) -> Parse[bool]:
    """Return whether `tag` and an expected key come next; without a schema every key is expected."""
    while True:
        text = buffer.text.lstrip(SPACE)[len(tag) :]
        key, end, _ = text.partition(tags.end_key_letter)
        if end or buffer.is_over or "\n" in key or len(key) > MAX_KEY_CHARS:
            return bool(end) and "\n" not in key and (missing is None or key.strip() in missing)
        yield


def resolved(schema: Any, root: dict[str, Any]) -> Any:
    """Follow a `$ref` within the root. Schemas made from Python refer to whole classes and enums so."""
    found = schema
    for _ in range(MAX_HOPS):
        path = found.get("$ref") if isinstance(found, dict) and not TELLING & found.keys() else None
        if not isinstance(path, str):
            return found
        found = resolve_reference(path, root)
        if found is None:
            break
    return schema


def resolve_reference(reference: Any, root: Any) -> Any:
    """Return the target of a `$ref` within the root; None if there is none."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found = root
    for step in reference.split("/")[1:]:
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


def as_json(written: str) -> str:
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


def escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _ignore(text: str) -> None:
    """Ignore white space between tags."""
