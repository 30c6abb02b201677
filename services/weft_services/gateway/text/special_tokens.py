"""Keeps special tokens in user text from being read as such; only the chat template can write them.

A tokenizer recognizes special tokens anywhere, so user text could end a turn and start a system message. Therefore each
special token gets a secret prefix: in the template, in the values passed to it, and in a second tokenizer with the ids
of the first. Without the prefix a special token is ordinary text, even where the template joins two user texts.
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

# Private use characters of the last plane, which neither case mapping nor JSON changes; 64 bits cannot be guessed.
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
    """This tokenizer or template cannot separate its special tokens from user text."""


class SpecialTokenGuard:
    """Adds and removes the secret prefix for one model. The secret is new in each process, and only ids leave it."""

    def __init__(self, tokenizer_json: bytes, plain: Tokenizer) -> None:
        """`plain`: the tokenizer already loaded from `tokenizer_json`, as loading is slow. Raises GuardImpossible."""
        secret = "".join(chr(FIRST + secrets.randbelow(NUM_CHOICES)) for _ in range(NUM_CHARACTERS))
        self._secret = secret
        # The secret as Python's repr, JSON and URL quoting write it; templates use all three.
        written = (secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], quote(secret))
        self._written = re.compile("|".join(map(re.escape, written)))
        description = orjson.loads(tokenizer_json)
        added = description.get("added_tokens") or []
        self._names = {token["content"]: self._secret + token["content"] for token in added if token["special"]}
        # Two passes, in the order of the tokenizer: an ordinary added token may begin with a special one.
        self._rounds = [
            _any_of(token["content"] for token in added if token["normalized"] == late) for late in (False, True)
        ]
        for token in added:
            token["content"] = self._names.get(token["content"], token["content"])
        _rename(description["model"], self._names)
        self.tokenizer = _loaded(description)
        self._check(plain, _unknown(description["model"]))

    def escape(self, text: str) -> str:
        """Prefix the special tokens in a template, or in a value passed to it."""
        first, then = self._rounds
        pieces = first.split(text)
        pieces[::2] = ["".join(self._renamed(then.split(between))) for between in pieces[::2]]
        return "".join(self._renamed(pieces))

    def unescape(self, text: str) -> str:
        """Remove the secret, for messages to clients and logs."""
        return self._written.sub("", text)

    def _renamed(self, pieces: list[str]) -> list[str]:
        """Replace every second piece, which is a token."""
        pieces[1::2] = [self._names.get(token, token) for token in pieces[1::2]]
        return pieces

    def _check(self, plain: Tokenizer, unknown: str | None) -> None:
        """Check that ids are unchanged, and that the names without the secret encode to no special token except
        unknown.
        """
        special = {plain.token_to_id(name) for name, new in self._names.items() if new != unknown}
        for number, token in plain.get_added_tokens_decoder().items():
            if self.tokenizer.token_to_id(self._names.get(token.content, token.content)) != number:
                raise GuardImpossible(f"another id for {token.content!r}")
        for name in self._names:
            if special & {*self.tokenizer.encode(f"a{name} {name}", add_special_tokens=False).ids}:
                raise GuardImpossible(f"the tokenizer has {name!r} among its words")


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that prefers the longest token."""
    ordered = sorted(tokens, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, ordered)) or '(?!)'})")


def _rename(model: dict[str, Any], names: dict[str, str]) -> None:
    """Rename special tokens in the vocabulary, including the one for unknown words."""
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
    """Check that conversations without special tokens get the same ids with the guard.

    Raises GuardImpossible if not: a template may join special tokens from parts, which carry no secret.
    """
    for sample in SAMPLES:
        try:
            expected = plain(sample)
        except (InvalidRequest, ModelFailed):  # Some templates support neither tools nor system messages.
            continue
        try:
            found = sealed(sample)
        except InvalidRequest as error:
            raise GuardImpossible(f"the template rejects a conversation only with the guard: {error}") from error
        if found != expected:
            raise GuardImpossible("the template builds special tokens from parts")
