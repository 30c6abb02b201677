"""What an assistant's answer is made of: text, thoughts, tool calls. Collects it as parsers find it."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from secrets import choice

from weft.ids import new_id
from weft_services.gateway.text.json_repair import SPACE


class PartKind(Enum):
    """Of a Part."""

    TEXT = auto()
    REASONING = auto()
    CALL = auto()  # a tool call begins; `text` is the tool's name
    ARGUMENTS = auto()  # more of its arguments, as JSON text
    CUSTOM = auto()  # a call of a custom tool begins; `text` is the tool's name
    INPUT = auto()  # more of its input, as free text


# parts that begin a call
CALLS = (PartKind.CALL, PartKind.CUSTOM)
# parts that extend a call -> the part that began it
OPENED_BY = {PartKind.ARGUMENTS: PartKind.CALL, PartKind.INPUT: PartKind.CUSTOM}


@dataclass(slots=True)  # not frozen: there is one a token
class Part:
    """What is new. Never empty; `call` counts the answer's tool calls and `call_id` names the one that begins."""

    kind: PartKind
    text: str
    call: int = 0
    call_id: str = ""


class Parts:
    """Takes in what a parser finds, and gives out parts; white space around calls and thoughts is nobody's."""

    def __init__(self, new_id: Callable[[], str], is_parallel: bool = True, holds_space: bool = True) -> None:
        """Without `holds_space` text is given out as it comes."""
        self.num_calls = 0
        self.is_open = False  # the last call's arguments have not come to their end
        self.found: list[Part] = []
        self._new_id = new_id
        self._max_calls = None if is_parallel else 1
        self._holds_space = holds_space
        self._held: list[str] = []  # white space that counts only if something follows

    @property
    def num_held(self) -> int:
        """Letters of white space that wait for something to follow."""
        return sum(map(len, self._held))

    def text(self, text: str) -> None:
        """Of the answer proper."""
        self._say(PartKind.TEXT, text)

    def reasoning(self, text: str) -> None:
        """Thoughts."""
        self._say(PartKind.REASONING, text)

    def hold_nothing(self) -> None:
        """From here on text is given out as it comes: no calls or thoughts follow."""
        self._holds_space = False

    def drop_space(self) -> None:
        """What was said ends here."""
        self._held.clear()

    def begin_call(self, name: str, call_id: str = "") -> None:
        """A call; its arguments follow."""
        self._held.clear()
        self.num_calls += 1
        self.is_open = True
        if self._is_wanted:
            self.found.append(Part(PartKind.CALL, name, self.num_calls - 1, call_id or self._new_id()))

    def arguments(self, text: str) -> None:
        """More of the last call's arguments."""
        if text and self._is_wanted:
            self.found.append(Part(PartKind.ARGUMENTS, text, self.num_calls - 1))

    def end_call(self) -> None:
        """Its arguments are whole."""
        self.is_open = False

    def end(self) -> None:
        """The answer ends."""
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
    """The same with what follows upon its like in one part."""
    alike: list[tuple[Part, list[str]]] = []  # of long answers every letter is copied once
    for part in parts:
        first = alike[-1][0] if alike else None
        if first and part.kind not in CALLS and (first.kind, first.call) == (part.kind, part.call):
            alike[-1][1].append(part.text)
        else:
            alike.append((part, [part.text]))
    return [Part(first.kind, "".join(texts), first.call, first.call_id) for first, texts in alike]


def new_call_id() -> str:
    """As OpenAI's look."""
    return f"call_{new_id()[:24]}"


def new_short_id() -> str:
    """Nine letters or digits: what Mistral's templates take."""
    return "".join(choice(string.ascii_letters + string.digits) for _ in range(9))
