"""Reads harmony, the format of gpt-oss: messages in channels.

An answer is a series of `<|start|>assistant<|channel|>NAME<|message|>...<|end|>`; the prompt ends with the first
`<|start|>assistant`. The channel `analysis` has thoughts, `final` the answer, `commentary` text before calls. A header
with `to=functions.NAME` begins a call, before or after the channel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from weft_services.gateway.text.json_repair import repaired_object
from weft_services.gateway.text.parts import (
    Parse,
    Parser,
    PartKind,
    Parts,
    TextBuffer,
    copy_json,
    copy_until,
    next_letter,
)

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
FINAL_PIECES = (CHANNEL, "final", MESSAGE)
ANALYSIS, FINAL = f"{CHANNEL}analysis{MESSAGE}", "".join(FINAL_PIECES)
ENDS = (END, CALL, RETURN, START)
HEADERS = (*MARKS, "to=")
CHANNEL_NAME, RECIPIENT = re.compile(r"<\|channel\|>\s*(\w+)"), re.compile(r"\bto=([^\s<]+)")
FUNCTIONS = "functions."


def harmony(names: Iterable[str] | None, begun: str = "") -> Parser:
    """Return a parser for tools of these names; without tools the text of a call is text.

    `begun`: the header with which the prompt ends, if it ends within a message.
    """
    known = None if names is None else frozenset(names)

    def parse(buffer: TextBuffer, parts: Parts) -> Parse[None]:
        said: set[PartKind] = set()
        header = begun or (yield from _read_header(buffer, parts))
        while header is not None:
            kind, name = kind_of(header, known)
            if kind is PartKind.CALL:
                yield from _read_call(buffer, parts, name)
            else:
                yield from _read_text(buffer, parts, kind, kind in said)
                said.add(kind)
            header = yield from _read_header(buffer, parts)

    return parse


def kind_of(header: str, names: frozenset[str] | None) -> tuple[PartKind, str]:
    """Return what the message under a header is, and the name of the tool it calls.

    Messages to tools that the request lacks are thoughts, because the model runs them within its thoughts.
    """
    found = RECIPIENT.search(header)
    recipient = found[1] if found else ""
    name = recipient.removeprefix(FUNCTIONS)
    if names is not None and (name in names or recipient.startswith(FUNCTIONS)):
        return PartKind.CALL, name
    channel = CHANNEL_NAME.search(header)
    is_thought = (channel and channel[1] == "analysis") or (recipient and not recipient.startswith(FUNCTIONS))
    return PartKind.REASONING if is_thought else PartKind.TEXT, ""


def _read_header(buffer: TextBuffer, parts: Parts) -> Parse[str | None]:
    """Read up to a message. Return its header, "" for text without a header, None if no message follows."""
    if not (yield from next_letter(buffer)):
        return None
    while not buffer.is_over and any(each.startswith(buffer.text) for each in HEADERS):
        yield
    if not buffer.text.startswith(HEADERS):
        return ""
    written: list[str] = []
    mark = yield from copy_until(buffer, (MESSAGE,), written.append)
    header = "".join(written)
    if mark is None:
        parts.text("" if any(each in header for each in MARKS) else header)
        return None
    return header


def _read_text(buffer: TextBuffer, parts: Parts, kind: PartKind, is_next: bool) -> Parse[None]:
    """Read a message. `is_next`: an earlier message of this kind precedes it, on a line of its own."""
    is_thought = kind is PartKind.REASONING
    emit = parts.reasoning if is_thought else parts.text
    if is_thought:
        parts.begin_thoughts()
    if is_next:
        emit("\n")
    mark = yield from copy_until(buffer, ENDS, emit)
    if is_thought:
        parts.end_thoughts()
    if mark == START:
        buffer.unread(mark)


def _read_call(buffer: TextBuffer, parts: Parts, name: str) -> Parse[None]:
    """Read a call. Arguments that cannot become an object are text."""
    written: list[str] = []
    if (yield from next_letter(buffer)) == "{":
        parts.begin_call(name)
        yield from copy_json(buffer, parts.arguments)
        parts.end_call()
        mark = yield from copy_until(buffer, ENDS, _ignore)
    else:
        mark = yield from copy_until(buffer, ENDS, written.append)
        text = "".join(written)
        arguments = repaired_object(text) if text.strip() else "{}"
        if arguments is None:
            parts.text(text)
        else:
            parts.begin_call(name)
            parts.arguments(arguments)
            parts.end_call()
    if mark == START:
        buffer.unread(START)


def _ignore(text: str) -> None:
    """Ignore what follows the arguments."""


class ThoughtCounter:
    """Counts the tokens of thoughts, with the marks around them, by the ids of the marks."""

    def __init__(
        self, marks: Mapping[str, int], spell: Callable[[int], str], names: Iterable[str], begun: str = ""
    ) -> None:
        """`spell` returns a token's text. `names`, `begun`: as for the parser."""
        self._message = marks[MESSAGE]
        self._ends = {marks[each] for each in ENDS if each in marks}
        self._spell, self._names = spell, frozenset(names)
        self._header: str | None = None if begun else ""  # None: within a message
        self._is_thought = begun == ANALYSIS

    def count(self, token_ids: Iterable[int]) -> int:
        """Return how many of the next tokens are thoughts."""
        number = 0
        for token_id in token_ids:
            if self._header is None:
                number += self._is_thought
                self._header = "" if token_id in self._ends else None
            elif token_id == self._message:
                self._is_thought = kind_of(self._header, self._names)[0] is PartKind.REASONING
                self._header = None
                number += self._is_thought
            else:
                self._header += self._spell(token_id)
        return number
