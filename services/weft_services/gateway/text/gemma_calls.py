"""Reads tool calls of Gemma 4 and FunctionGemma: `call:name{key:<|"|>text<|"|>,other:[1,true]}` between two tags.

Keys and most values have no quotes; a token of its own stands for those of a text, so that texts need no escapes.
"""

from __future__ import annotations

import json

from weft_services.gateway.text.json_repair import SPACE
from weft_services.gateway.text.parts import (
    Emit,
    Parse,
    Parser,
    Parts,
    TextBuffer,
    begins_with,
    copy_until,
    is_next,
    next_letter,
)
from weft_services.gateway.text.tag_calls import as_json, escaped

CALL = "call:"
MAX_NAME_CHARS = 128


def quoted_calls(opening: str, closing: str, quote: str) -> Parser:
    """Return a parser for calls between two tags, with text around. `quote` surrounds each text in the arguments."""

    def parse(buffer: TextBuffer, parts: Parts) -> Parse[None]:
        while (yield from copy_until(buffer, (opening,), parts.text)):
            buffer.mark()
            header: list[str] = []
            is_call = yield from begins_with(buffer, CALL)
            if is_call:
                is_call = (yield from copy_until(buffer, ("{", closing, opening), header.append)) == "{"
            name = "".join(header).strip(SPACE)
            if not is_call or not name or len(name) > MAX_NAME_CHARS:
                parts.text(opening + buffer.taken)
                continue
            parts.begin_call(name)
            yield from _copy_object(buffer, parts.arguments, quote, closing)
            parts.end_call()
            yield from begins_with(buffer, closing)

    return parse


def _copy_object(buffer: TextBuffer, emit: Emit, quote: str, closing: str) -> Parse[None]:
    """Emit the rest of an object as JSON, after its brace. The closing tag or the end of the answer closes it."""
    emit("{")
    ends, is_first = ["}"], True
    while ends:
        key = (yield from _read_key(buffer, quote, closing)) if ends[-1] == "}" else None
        if key is None and (ends[-1] == "}" or (yield from _is_list_over(buffer, closing))):
            emit(ends.pop())
            is_first = False
            continue
        emit(("" if is_first else ", ") + ("" if key is None else f"{json.dumps(key, ensure_ascii=False)}: "))
        letter = yield from next_letter(buffer)
        is_first = letter in ("{", "[")
        if is_first:
            buffer.take(1)
            emit(letter)
            ends.append("}" if letter == "{" else "]")
        elif (yield from begins_with(buffer, quote)):
            emit('"')
            yield from copy_until(buffer, (quote,), lambda text: emit(escaped(text)))
            emit('"')
        else:
            word: list[str] = []
            mark = yield from copy_until(buffer, (",", "}", "]", closing), word.append)
            if mark:
                buffer.unread(mark)
            emit(as_json("".join(word).strip(SPACE)))


def _read_key(buffer: TextBuffer, quote: str, closing: str) -> Parse[str | None]:
    """Read the next key and its colon. Return None at the end of the object, after its brace."""
    while True:
        letter = yield from next_letter(buffer)
        if letter == ",":
            buffer.take(1)
            continue
        if letter == "}":
            buffer.take(1)
        if letter in ("", "}") or (yield from is_next(buffer, closing)):
            return None
        word: list[str] = []
        if (yield from begins_with(buffer, quote)):
            yield from copy_until(buffer, (quote,), word.append)
            yield from begins_with(buffer, ":")
            return "".join(word)
        mark = yield from copy_until(buffer, (":", ",", "}", closing), word.append)
        if mark == ":":
            return "".join(word).strip(SPACE)
        if mark:  # a word without a value
            buffer.unread(mark)


def _is_list_over(buffer: TextBuffer, closing: str) -> Parse[bool]:
    """Return whether a list ends here, after an optional comma. Read its bracket."""
    while (letter := (yield from next_letter(buffer))) == ",":
        buffer.take(1)
    if letter == "]":
        buffer.take(1)
    return letter in ("", "]") or (yield from is_next(buffer, closing))
