"""The parts of an assistant's answer: text, thoughts and tool calls, collected as parsers find them."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from secrets import choice

from weft.request import new_id
from weft_services.gateway.text.json_repair import SPACE


class PartKind(Enum):
    """What a Part adds to the answer."""

    TEXT = auto()
    REASONING = auto()
    CALL = auto()  # a tool call begins; `text` is the tool's name
    ARGUMENTS = auto()  # more of the arguments, as JSON text
    CUSTOM = auto()  # a call of a custom tool begins; `text` is the tool's name
    INPUT = auto()  # more of the input, as free text


# kinds that begin a call
CALLS = (PartKind.CALL, PartKind.CUSTOM)
# kinds that extend a call -> the kind that began it
OPENED_BY = {PartKind.ARGUMENTS: PartKind.CALL, PartKind.INPUT: PartKind.CUSTOM}


@dataclass(slots=True)  # Not frozen: one is created per token.
class Part:
    """New content, never empty.

    `call` is the index of the tool call; `call_id` is set on the part that begins one.
    """

    kind: PartKind
    text: str
    call: int = 0
    call_id: str = ""


class Parts:
    """Collects what a parser finds. White space around calls and thoughts is dropped."""

    def __init__(self, new_id: Callable[[], str], is_parallel: bool = True, holds_space: bool = True) -> None:
        """Without `holds_space` text is emitted unchanged as it arrives."""
        self.num_calls = 0
        self.is_open = False  # the last call's arguments are incomplete
        self.found: list[Part] = []
        self._new_id = new_id
        self._max_calls = None if is_parallel else 1
        self._holds_space = holds_space
        self._held: list[str] = []  # white space that counts only if text follows

    @property
    def num_held(self) -> int:
        """Characters of white space held back until text follows."""
        return sum(map(len, self._held))

    def text(self, text: str) -> None:
        """Add text of the answer."""
        self._say(PartKind.TEXT, text)

    def reasoning(self, text: str) -> None:
        """Add text of the thoughts."""
        self._say(PartKind.REASONING, text)

    def hold_nothing(self) -> None:
        """Stop holding white space back; neither calls nor thoughts follow."""
        self._holds_space = False

    def drop_space(self) -> None:
        """Drop the white space held back, at the end of a text or thought."""
        self._held.clear()

    def begin_call(self, name: str, call_id: str = "") -> None:
        """Begin a call; its arguments follow."""
        self._held.clear()
        self.num_calls += 1
        self.is_open = True
        if self._is_wanted:
            self.found.append(Part(PartKind.CALL, name, self.num_calls - 1, call_id or self._new_id()))

    def arguments(self, text: str) -> None:
        """Add text to the last call's arguments."""
        if text and self._is_wanted:
            self.found.append(Part(PartKind.ARGUMENTS, text, self.num_calls - 1))

    def end_call(self) -> None:
        """Mark the last call's arguments as complete."""
        self.is_open = False

    def end(self) -> None:
        """End the answer; emit white space held back if there was no call."""
        if self._held and not self.num_calls:
            self.found.append(Part(PartKind.TEXT, "".join(self._held)))
        self._held.clear()

    @property
    def _is_wanted(self) -> bool:
        return self._max_calls is None or self.num_calls <= self._max_calls

    def _say(self, kind: PartKind, text: str) -> None:
        spoken = text.rstrip(SPACE) if self._holds_space else text
        if spoken:
            if self._held:
                text_before = "".join(self._held)
                self._held.clear()
                self.found.append(Part(kind, text_before + spoken))
            else:
                self.found.append(Part(kind, spoken))
        if len(spoken) < len(text):
            self._held.append(text[len(spoken) :])


def joined(parts: Iterable[Part]) -> list[Part]:
    """Merge consecutive parts of the same kind and call."""
    alike: list[tuple[Part, list[str]]] = []  # joined at the end, so that every character is copied once
    for part in parts:
        first = alike[-1][0] if alike else None
        if first and part.kind not in CALLS and (first.kind, first.call) == (part.kind, part.call):
            alike[-1][1].append(part.text)
        else:
            alike.append((part, [part.text]))
    return [Part(first.kind, "".join(texts), first.call, first.call_id) for first, texts in alike]


def new_call_id() -> str:
    """Return a new id in OpenAI's format."""
    return f"call_{new_id()[:24]}"


def new_short_id() -> str:
    """Return nine random letters or digits, as Mistral's templates require."""
    return "".join(choice(string.ascii_letters + string.digits) for _ in range(9))
