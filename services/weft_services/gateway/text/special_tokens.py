"""Special tokens that the chat template alone can write: what a user says stays text, whatever it spells.

A tokenizer finds its special tokens wherever they stand, in what a user says too, who can so end a turn and begin one
of the system's. Here each of them begins with a secret: in the template's source, in the values that it is given, and
in a second tokenizer, whose ids are the first one's. Without the secret they are text like any other, also where a
template puts two texts of a user together. Knows conversations to try it out on, and no model directory.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from urllib.parse import quote

import orjson
from tokenizers import Tokenizer

from weft.errors import InvalidRequest, ModelFailed
from weft_services.gateway.generation import Conversation

# the last plane of private characters, of which neither case nor JSON makes others; 64 bits are not guessed
FIRST, NUM_CHOICES, NUM_CHARACTERS = 0x100000, 0xFFFE, 4

_ASKS, _SAYS = {"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}
_RULES = {"role": "system", "content": "Be brief."}
_CALL = {"id": "123456789", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
_CALLS = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "tool_call_id": "123456789", "name": "add", "content": "4"}
_TOOL = {"type": "function", "function": {"name": "add", "description": "sum", "parameters": {"type": "object"}}}
SAMPLES = (
    Conversation((_ASKS,)),
    Conversation((_RULES, _ASKS, _SAYS, _ASKS)),
    Conversation((_ASKS, {**_SAYS, "reasoning_content": "Two and two."}, _ASKS), is_open=False),
    Conversation((_ASKS, _SAYS), is_continued=True),
    Conversation((_RULES, _ASKS, _CALLS, _RESULT), (_TOOL,)),
    Conversation((_ASKS, _CALLS, _RESULT, _SAYS, _ASKS), (_TOOL,)),
)
Ids = Callable[[Conversation], Sequence[int]]


class GuardImpossible(Exception):
    """This tokenizer's or template's special tokens cannot be told from a user's."""


class SpecialTokenGuard:
    """One model's, new in each process: ids alone leave it."""

    def __init__(self, tokenizer_json: bytes, plain: Tokenizer) -> None:
        """`plain`: what was read of it already, which takes long. Raises CannotSeal."""
        secret = "".join(chr(FIRST + secrets.randbelow(NUM_CHOICES)) for _ in range(NUM_CHARACTERS))
        self._secret = secret
        # as a list of tokens is written, and as templates may write a text for others
        written = (secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], quote(secret))
        self._written = re.compile("|".join(map(re.escape, written)))
        description = orjson.loads(tokenizer_json)
        added = description.get("added_tokens") or []
        self._names = {token["content"]: self._secret + token["content"] for token in added if token["special"]}
        # as tokenizers look for them: one that is not special may begin with one that is
        self._rounds = [
            _any_of(token["content"] for token in added if token["normalized"] == late) for late in (False, True)
        ]
        for token in added:
            token["content"] = self._names.get(token["content"], token["content"])
        _rename(description["model"], self._names)
        self.tokenizer = _loaded(description)
        self._check(plain, _unknown(description["model"]))

    def escape(self, text: str) -> str:
        """A template's own text, or a value that it is given: special tokens begin with the secret."""
        first, then = self._rounds
        pieces = first.split(text)
        pieces[::2] = ["".join(self._renamed(then.split(between))) for between in pieces[::2]]
        return "".join(self._renamed(pieces))

    def unescape(self, text: str) -> str:
        """The same without the secret, for others to read."""
        return self._written.sub("", text)

    def _renamed(self, pieces: list[str]) -> list[str]:
        """Every second one is a token."""
        pieces[1::2] = [self._names.get(token, token) for token in pieces[1::2]]
        return pieces

    def _check(self, plain: Tokenizer, unknown: str | None) -> None:
        """Ids are as they were, and what users may write is none of them, but for letters that are not known."""
        special = {plain.token_to_id(name) for name, new in self._names.items() if new != unknown}
        for number, token in plain.get_added_tokens_decoder().items():
            if self.tokenizer.token_to_id(self._names.get(token.content, token.content)) != number:
                raise GuardImpossible(f"another id for {token.content!r}")
        for name in self._names:
            if special & {*self.tokenizer.encode(f"a{name} {name}", add_special_tokens=False).ids}:
                raise GuardImpossible(f"the tokenizer has {name!r} among its words")


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """The longest that begins at a place."""
    ordered = sorted(tokens, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, ordered)) or '(?!)'})")


def _rename(model: dict[str, Any], names: dict[str, str]) -> None:
    """Some vocabularies have the special tokens as well; and words that are not known become one of them."""
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(piece, piece): number for piece, number in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    if (unknown := model.get("unk_token")) in names:
        model["unk_token"] = names[unknown]


def _unknown(model: dict[str, Any]) -> str | None:
    place = model.get("unk_id")
    return model["vocab"][place][0] if place is not None else model.get("unk_token")


def _loaded(description: dict[str, Any]) -> Tokenizer:
    try:
        return Tokenizer.from_str(orjson.dumps(description).decode())
    except Exception as error:  # the library raises bare Exception
        raise GuardImpossible(str(error)) from error


def check_samples(plain: Ids, sealed: Ids) -> None:
    """Conversations without special tokens have the same ids under a seal. Raises CannotSeal where they do not: a
    template may put special tokens together from parts, which have no secret."""
    for sample in SAMPLES:
        try:
            expected = plain(sample)
        except (InvalidRequest, ModelFailed):  # not all templates know tools, or the system
            continue
        try:
            found = sealed(sample)
        except InvalidRequest as error:
            raise GuardImpossible(f"the template refuses what it takes without: {error}") from error
        if found != expected:
            raise GuardImpossible("the template makes them of parts")
