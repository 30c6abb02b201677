"""Parsers for the tool calls of the supported model families. A parser reads a whole answer, text included."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from typing import Any, ClassVar

from weft_services.gateway.text.json_repair import repaired_object
from weft_services.gateway.text.parts import (
    Parse,
    Parser,
    Parts,
    TextBuffer,
    begins_with,
    copy_json,
    copy_until,
    is_next,
    json_text,
    next_letter,
    parse_json,
    peek_letter,
)

MAX_PYTHON_CHARS = 64 * 1024
# Without a marker, an object that begins with another field is not a call.
FIELDS = ("name", "type", "id", "arguments", "parameters")


class Malformed(Exception):
    """The text is not a call, and nothing of it has been emitted."""


def tagged_objects(opening: str, closing: str) -> Parser:
    """Hermes, Qwen, weft-nano: an object with name and arguments between two tags, with text around and between.

    GigaChat has no closing tag, which is empty then.
    """

    def parse(buffer: TextBuffer, parts: Parts) -> Parse[None]:
        is_unclosed = False  # the last call's closing tag is due; it is not text
        while mark := (yield from copy_until(buffer, (opening, closing) if is_unclosed else (opening,), parts.text)):
            if mark == closing:
                is_unclosed = False
            elif (yield from _object_or_text(buffer, parts, opening)):
                is_unclosed = bool(closing) and not (yield from begins_with(buffer, closing))

    return parse


def mistral(buffer: TextBuffer, parts: Parts) -> Parse[None]:
    """Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`; newer ones `[TOOL_CALLS]name[ARGS]{...}`."""
    while (yield from copy_until(buffer, ("[TOOL_CALLS]",), parts.text)):
        if (yield from next_letter(buffer)) == "{":  # an object without the list around it
            yield from _object_or_text(buffer, parts, "[TOOL_CALLS]")
            continue
        if buffer.text[:1] != "[":
            yield from _named_call(buffer, parts, "[TOOL_CALLS]", ("[ARGS]",), _mistral_name)
            continue
        yield from _objects(buffer, parts, "[TOOL_CALLS]")


def object_list(opening: str, closing: str) -> Parser:
    """Nemotron 2 and others: a list of objects with name and arguments between two tags, with text around.

    MiniMax M1 writes no brackets. Granite has no closing tag, which is empty then.
    """

    def parse(buffer: TextBuffer, parts: Parts) -> Parse[None]:
        while (yield from copy_until(buffer, (opening,), parts.text)):
            if (yield from peek_letter(buffer)) not in ("[", "{"):
                parts.text(opening)
                continue
            if (yield from next_letter(buffer)) == "[":
                yield from _objects(buffer, parts, opening)
            while (yield from peek_letter(buffer)) == "{":
                if not (yield from _object_or_text(buffer, parts, opening)):
                    break
            if closing:
                yield from begins_with(buffer, closing)

    return parse


def named_objects(opening: str, closing: str) -> Parser:
    """Apertus: a list of objects between two tags, with text around. The key of an object is the tool's name."""

    def parse(buffer: TextBuffer, parts: Parts) -> Parse[None]:
        while (yield from copy_until(buffer, (opening,), parts.text)):
            if not (yield from begins_with(buffer, "[")):
                parts.text(opening)
                continue
            if (yield from next_letter(buffer)) not in ("{", "]"):
                parts.text(f"{opening}[")
                continue
            is_call = yield from _named_object(buffer, parts, f"{opening}[")
            while is_call and (yield from begins_with(buffer, ",")):
                is_call = yield from _named_object(buffer, parts, "")
            yield from begins_with(buffer, "]")
            yield from begins_with(buffer, closing)

    return parse


def functionary(buffer: TextBuffer, parts: Parts) -> Parse[None]:
    """Functionary: `<function=name>{...}</function>`, with text around and between."""
    while (yield from copy_until(buffer, ("<function=",), parts.text)):
        yield from _named_call(buffer, parts, "<function=", (">",), lambda header: (header, ""))
        yield from begins_with(buffer, "</function>")


def python_list(opening: str, closing: str, names: frozenset[str]) -> Parser:
    """LFM2 and OLMo 3: Python calls between two tags, in a list or one a line, with text around.

    Only calls of known tools count. MiniCPM 3 fences the code.
    """

    def parse(buffer: TextBuffer, parts: Parts) -> Parse[None]:
        while (yield from copy_until(buffer, (opening,), parts.text)):
            written: list[str] = []
            end = yield from copy_until(buffer, (closing,), written.append)
            _say_python_calls(parts, "".join(written), names, opening, end or "")

    return parse


def deepseek(buffer: TextBuffer, parts: Parts) -> Parse[None]:
    """DeepSeek V3 (type, separator, name, fenced JSON) and V3.1 (name, separator, JSON), each call in its own tags."""
    marks = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>", "<｜tool▁call▁begin｜>")
    while mark := (yield from copy_until(buffer, marks, parts.text)):
        if mark == marks[3]:
            yield from _deepseek_call(buffer, parts, marks)


def kimi(buffer: TextBuffer, parts: Parts) -> Parse[None]:
    """Kimi K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>` in a section."""
    marks = (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_end|>",
        "<|tool_call_begin|>",
    )
    while mark := (yield from copy_until(buffer, marks, parts.text)):
        if mark == marks[3]:
            yield from _named_call(buffer, parts, mark, ("<|tool_call_argument_begin|>",), _kimi_name)


def solar(buffer: TextBuffer, parts: Parts) -> Parse[None]:
    """Solar: `<|tool_call:begin|>id<|tool_call:name|>name<|tool_call:args|>{...}<|tool_call:end|>` in a section."""
    marks = ("<|tool_calls|>", "<|tool_call:end|>", "<|calls|>", "<|tool_call:begin|>")
    while mark := (yield from copy_until(buffer, marks, parts.text)):
        if mark == marks[3]:
            yield from _named_call(buffer, parts, mark, ("<|tool_call:args|>",), _solar_name)


def llama(names: frozenset[str]) -> Parser:
    """Llama 3 and 4: JSON objects with name and parameters, separated by `;`, or Python calls in brackets.

    No marker introduces a call, so only calls of known tools count.
    """

    def parse(buffer: TextBuffer, parts: Parts) -> Parse[None]:
        for tag in ("<|python_tag|>", "<|python_start|>", "<|python_end|>"):  # Llama 4 may write an empty pair
            yield from begins_with(buffer, tag)
        if (yield from peek_letter(buffer)) == "[":
            yield from _python_calls(buffer, parts, names)
        while (yield from peek_letter(buffer)) == "{":
            if not (yield from _object_or_text(buffer, parts, "", names)):
                break
            yield from begins_with(buffer, ";")
        yield from begins_with(buffer, "<|python_end|>")
        yield from copy_until(buffer, (), parts.text)

    return parse


def _objects(buffer: TextBuffer, parts: Parts, opening: str) -> Parse[None]:
    """Read a list of call objects from its bracket on. If it begins with something else, its opening is text."""
    buffer.take(1)
    if (yield from next_letter(buffer)) not in ("{", "]"):
        parts.text(f"{opening}[")
    while (yield from next_letter(buffer)) == "{":
        yield from _object_or_text(buffer, parts, "")
        if (yield from next_letter(buffer)) == ",":
            buffer.take(1)
    if buffer.text.startswith("]"):
        buffer.take(1)


def _object_or_text(buffer: TextBuffer, parts: Parts, opening: str, names: frozenset[str] | None = None) -> Parse[bool]:
    """Read a JSON object as a call. If it is not one, emit it and the marker before it as text."""
    buffer.mark()
    num_calls = parts.num_calls
    try:
        yield from _object(buffer, parts, names)
    except (Malformed, ValueError):
        if parts.num_calls == num_calls:  # Otherwise part of the call was emitted and cannot be taken back.
            parts.text(opening + buffer.taken)
            return False
    yield from _skip_closers(buffer)
    return True


def _named_object(buffer: TextBuffer, parts: Parts, opening: str) -> Parse[bool]:
    """Read `{"name": {...}}` as a call. If it is not one, emit it and the marker before it as text."""
    if (yield from next_letter(buffer)) != "{":
        return False
    buffer.mark()
    buffer.take(1)
    num_calls = parts.num_calls
    try:
        name = yield from _key(buffer)
        if _is_name(name, None):
            yield from _arguments(buffer, parts, opening, name)
            return parts.num_calls > num_calls
    except (Malformed, ValueError):
        pass
    parts.text(opening + buffer.taken)
    return False


def _skip_closers(buffer: TextBuffer) -> Parse[None]:
    """Skip extra closing brackets, which models write after a call."""
    while (yield from begins_with(buffer, "}")):
        pass


def _object(buffer: TextBuffer, parts: Parts, names: frozenset[str] | None) -> Parse[None]:
    """Read a call object. Arguments stream as soon as the name is known."""
    if (yield from next_letter(buffer)) != "{":
        raise Malformed
    buffer.take(1)
    fields: dict[str, Any] = {}
    written: dict[str, str] = {}
    is_begun = False
    while (letter := (yield from next_letter(buffer))) != "}":
        if letter == ",":
            buffer.take(1)
            continue
        key = yield from _key(buffer)
        key = "name" if key == "tool_name" else key  # Command R's word
        if names is not None and "name" not in fields and key not in FIELDS:
            raise Malformed
        is_it = key in ("arguments", "parameters") and "name" in fields and not is_begun
        if is_it and (yield from next_letter(buffer)) == "{":
            parts.begin_call(fields["name"], str(fields.get("id") or ""))
            is_begun = True
            yield from copy_json(buffer, parts.arguments)
            parts.end_call()
            continue
        written[key] = yield from json_text(buffer)
        fields[key] = parse_json(written[key])
        if key == "name" and not _is_name(fields[key], names):
            raise Malformed
    buffer.take(1)
    if not is_begun:
        _whole_call(parts, fields, written)


def _key(buffer: TextBuffer) -> Parse[Any]:
    if (yield from next_letter(buffer)) not in ("'", '"'):
        raise Malformed
    key = parse_json((yield from json_text(buffer)))
    if (yield from next_letter(buffer)) != ":":
        raise Malformed
    buffer.take(1)
    return key


def _is_name(value: Any, names: frozenset[str] | None) -> bool:
    """True for a usable name. U+FFFD stands for an unpaired surrogate, which names no tool."""
    return isinstance(value, str) and bool(value) and "\ufffd" not in value and (names is None or value in names)


def _whole_call(parts: Parts, fields: dict[str, Any], written: dict[str, str]) -> None:
    """Emit a call with arguments that preceded the name, are a string, or are missing."""
    if "name" not in fields:
        raise Malformed
    key = "arguments" if "arguments" in fields else "parameters"
    _say_call(parts, fields["name"], str(fields.get("id") or ""), _as_object(fields.get(key), written.get(key, "")))


def _as_object(value: Any, written: str) -> str:
    """Return arguments as the text of a JSON object. They may be an object, a string with one, or missing."""
    if not value:
        return "{}"
    if isinstance(value, dict):
        return written
    found = repaired_object(value) if isinstance(value, str) else None
    if found is None:
        raise Malformed
    return found


def _say_call(parts: Parts, name: str, call_id: str, arguments: str) -> None:
    parts.begin_call(name, call_id)
    parts.arguments(arguments)
    parts.end_call()


def _named_call(
    buffer: TextBuffer,
    parts: Parts,
    opening: str,
    separators: tuple[str, ...],
    read_name: Callable[[str], tuple[str, str]],
) -> Parse[None]:
    """Read name, separator and JSON; the name may include the call's id. Without a name, all of it is text."""
    header: list[str] = []
    buffer.mark()
    separator = yield from copy_until(buffer, (*separators, "{"), header.append)
    name, call_id = read_name("".join(header).strip())
    if separator is None or not name:
        parts.text(opening + buffer.taken)
        return
    if separator == "{":
        buffer.unread(separator)
    yield from _arguments(buffer, parts, opening, name, call_id)


def _arguments(buffer: TextBuffer, parts: Parts, opening: str, name: str, call_id: str = "") -> Parse[None]:
    """Read the arguments, which may be missing. If they cannot become an object, all text since `mark` is text."""
    letter = yield from next_letter(buffer)
    if letter == "{":
        parts.begin_call(name, call_id)
        yield from copy_json(buffer, parts.arguments)
        parts.end_call()
        yield from _skip_closers(buffer)
        return
    written = ""
    if letter and letter not in "<`" and not (yield from is_next(buffer, "[TOOL_CALLS]")):
        written = yield from json_text(buffer)
    try:
        _say_call(parts, name, call_id, _as_object(parse_json(written) if written else None, written))
    except (Malformed, ValueError):
        parts.text(opening + buffer.taken)


def _mistral_name(header: str) -> tuple[str, str]:
    name, _, call_id = header.partition("[CALL_ID]")
    return name, call_id


def _kimi_name(header: str) -> tuple[str, str]:
    """Split `functions.name:0`; all of it is the call's id, because the template writes it back."""
    name = header.removeprefix("functions.")
    return name.rpartition(":")[0] or name, header


def _solar_name(header: str) -> tuple[str, str]:
    call_id, _, name = header.rpartition("<|tool_call:name|>")
    return name, call_id


def _deepseek_call(buffer: TextBuffer, parts: Parts, marks: tuple[str, ...]) -> Parse[None]:
    before: list[str] = []
    buffer.mark()
    mark = yield from copy_until(buffer, ("<｜tool▁sep｜>", *marks), before.append)
    if mark != "<｜tool▁sep｜>":  # Not a call; the next one may be.
        parts.text("".join(before))
        if mark:
            buffer.unread(mark)
        return
    name = "".join(before).strip()
    if name == "function" and (yield from next_letter(buffer)) != "{":  # V3: this was the type, and the name follows.
        lines: list[str] = []
        fence = yield from copy_until(buffer, ("```json", "{", "<｜tool▁call▁end｜>"), lines.append)
        name = "".join(lines).strip() or name
        if fence and fence != "```json":  # V3.1 without arguments ends here
            buffer.unread(fence)
    if not name:
        parts.text("".join(before))
        return
    yield from begins_with(buffer, "```json")
    yield from _arguments(buffer, parts, marks[3], name)
    yield from begins_with(buffer, "```")


def _python_calls(buffer: TextBuffer, parts: Parts, names: frozenset[str]) -> Parse[None]:
    """Read `[f(a=1), g()]`, emitted when complete. A list that does not start with a tool's call is text at once."""
    while not buffer.is_over and _may_be_python(text := buffer.text.lstrip(), names, is_whole=False):
        if any(text.startswith(f"[{name}(") for name in names):
            break
        yield
    if not _may_be_python(buffer.text.lstrip(), names, is_whole=True):
        return
    held: list[str] = []
    yield from copy_until(buffer, ("<|python_end|>",), held.append)
    _say_python_calls(parts, "".join(held), names)


def _say_python_calls(parts: Parts, text: str, names: frozenset[str], opening: str = "", closing: str = "") -> None:
    """Emit the calls; if the text is no list of calls, emit it with its tags as text."""
    try:
        calls = _python(text, names)
    except (Malformed, SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        parts.text(opening + text + closing)
        return
    for name, arguments in calls:
        _say_call(parts, name, "", arguments)


def _may_be_python(text: str, names: frozenset[str], is_whole: bool) -> bool:
    openings = [f"[{name}(" for name in names]
    return any(text.startswith(each) or (not is_whole and each.startswith(text)) for each in openings)


def _python(text: str, names: frozenset[str]) -> list[tuple[str, str]]:
    """Return the calls of a list, or of one or more lines."""
    if len(text) > MAX_PYTHON_CHARS:
        raise Malformed
    code = text.strip().removeprefix("```python").removesuffix("```").strip()
    nodes = [each.value for each in ast.parse(code).body if isinstance(each, ast.Expr)]
    if len(nodes) == 1 and isinstance(nodes[0], ast.List):
        nodes = nodes[0].elts
    if not nodes:
        raise Malformed
    return [_python_call(node, names) for node in nodes]


class _JsonNames(ast.NodeTransformer):
    """Replaces JSON's names of values, which OLMo writes in Python."""

    NAMES: ClassVar[dict[str, bool | None]] = {"null": None, "true": True, "false": False}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self.NAMES[node.id]) if node.id in self.NAMES else node


def _python_call(node: ast.expr, names: frozenset[str]) -> tuple[str, str]:
    """Return name and arguments. Raises for Python values without a JSON form: sets, bytes, infinity."""
    name = ""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):  # `a-name(x=1)` parses as a difference
        name, node = ast.unparse(node.left).replace(" ", "") + "-", node.right
    if not isinstance(node, ast.Call) or node.args:
        raise Malformed
    name += ast.unparse(node.func)
    if name not in names:
        raise Malformed
    arguments = {str(each.arg): ast.literal_eval(_JsonNames().visit(each.value)) for each in node.keywords if each.arg}
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()  # raises for an unpaired surrogate, which cannot be sent
    return name, text
