"""Caches the token ids of long prompts per message, so that the earlier turns of a chat are not tokenized again.

Tokenizers split a text at special tokens first and encode the pieces independently. So cutting a text before a special
token does not change its ids.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock

from tokenizers import AddedToken, Tokenizer

# Tokenizing shorter texts is faster than cutting them and looking them up.
MIN_CHARS = 4096
MAX_BYTES = 64 << 20
WORD = re.compile(r"\w")
# Memory of an entry in addition to its text and ids: key, table, array.
OVERHEAD_BYTES = 400

Key = tuple[bytes, str]


def message_marks(tokenizer: Tokenizer, template: str) -> list[str]:
    """Return the special tokens of the template before which a text can be cut."""
    added = list(tokenizer.get_added_tokens_decoder().values())
    return [
        token.content
        for token in added
        if token.content in template
        and not (token.normalized or token.single_word or token.lstrip)
        and not any(_overlaps(other.content, token.content) or _looks(other, token.content) for other in added)
    ]


def _overlaps(other: str, mark: str) -> bool:
    """True if a token that begins before the mark can include some of it."""
    if other.find(mark, 1) > 0:
        return True
    return any(mark.startswith(other[start:]) for start in range(1, len(other)))


def _looks(other: AddedToken, mark: str) -> bool:
    """True if a token depends on text across the cut, after its end or before the mark."""
    if other.content.startswith(mark):
        return other.single_word or other.lstrip
    return other.single_word and WORD.match(mark) is not None


class SegmentedEncoder:
    """Encoder of one model. The cache is separate per tenant, so that timing reveals nothing about other tenants."""

    def __init__(
        self,
        encode: Callable[[str], Sequence[int]],
        marks: Sequence[str],
        min_chars: int = MIN_CHARS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """`encode` returns the ids of a text without added special tokens; several threads may call it."""
        self._encode, self._marks = encode, tuple(marks)
        self._min_chars, self._max_bytes = min_chars, max_bytes
        self._kept: OrderedDict[Key, array[int]] = OrderedDict()
        self._num_bytes = 0
        self._lock = Lock()

    def encode(self, text: str, salt: bytes) -> tuple[int, ...]:
        """Return the ids of the text without added special tokens. `salt` identifies the tenant's cache."""
        if len(text) < self._min_chars:
            return tuple(self._encode(text))
        keys = [(salt, piece) for piece in self._cut(text)]
        known = self._look_up(keys)
        if missing := [key for key in dict.fromkeys(keys) if key not in known]:
            fresh = {key: array("I", self._encode(key[1])) for key in missing}
            self._keep(fresh)
            known |= fresh
        ids = array("I")
        for key in keys:
            ids += known[key]
        return tuple(ids)

    def _cut(self, text: str) -> list[str]:
        pieces = [text]
        for mark in self._marks:
            if mark not in text:
                continue
            pieces = [part for piece in pieces for part in _before_each(mark, piece)]
        return pieces

    def _look_up(self, keys: Sequence[Key]) -> dict[Key, array[int]]:
        with self._lock:
            known = {key: ids for key in keys if (ids := self._kept.get(key)) is not None}
            for key in known:
                self._kept.move_to_end(key)
        return known

    def _keep(self, fresh: dict[Key, array[int]]) -> None:
        with self._lock:
            for key, ids in fresh.items():
                if key not in self._kept:
                    self._kept[key] = ids
                    self._num_bytes += _size(key, ids)
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= _size(*self._kept.popitem(last=False))


def _before_each(mark: str, text: str) -> list[str]:
    first, *rest = text.split(mark)
    pieces = [mark + piece for piece in rest]
    return [first, *pieces] if first else pieces


def _size(key: Key, ids: array[int]) -> int:
    return 4 * (len(key[1]) + len(ids)) + OVERHEAD_BYTES
