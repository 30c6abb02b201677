"""Token ids of long prompts, cut where messages begin: what a chat has said before is looked up, not tokenized again.

Tokenizers find special tokens before they do anything else, and treat what lies between two of them alone. So a text
that is cut before one of them has the ids that the whole has. Knows no model and no request.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock

from tokenizers import AddedToken, Tokenizer

# Shorter texts are tokenized in less time than they are cut and looked up.
MIN_CHARS = 4096
MAX_BYTES = 64 << 20
WORD = re.compile(r"\w")
# of a piece, beside its text and ids: key, table, array
OVERHEAD_BYTES = 400

Key = tuple[bytes, str]


def message_marks(tokenizer: Tokenizer, template: str) -> list[str]:
    """The tokens that the template writes and before which any text can be cut."""
    added = list(tokenizer.get_added_tokens_decoder().values())
    return [
        token.content
        for token in added
        if token.content in template
        and not (token.normalized or token.single_word or token.lstrip)
        and not any(_overlaps(other.content, token.content) or _looks(other, token.content) for other in added)
    ]


def _overlaps(other: str, mark: str) -> bool:
    """Can a token that begins before the mark take some of it away."""
    if other.find(mark, 1) > 0:
        return True
    return any(mark.startswith(other[start:]) for start in range(1, len(other)))


def _looks(other: AddedToken, mark: str) -> bool:
    """Does a token look at what is on the other side of the cut: beyond its end, or, where it begins as the mark does,
    before it."""
    if other.content.startswith(mark):
        return other.single_word or other.lstrip
    return other.single_word and WORD.match(mark) is not None


class SegmentedEncoder:
    """One model's. Pieces are kept by tenant, so that nobody learns from the time it takes what others have asked."""

    def __init__(
        self,
        encode: Callable[[str], Sequence[int]],
        marks: Sequence[str],
        min_chars: int = MIN_CHARS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """`encode`: ids of a text with nothing put around it; may be called by several threads at a time."""
        self._encode, self._marks = encode, tuple(marks)
        self._min_chars, self._max_bytes = min_chars, max_bytes
        self._kept: OrderedDict[Key, array[int]] = OrderedDict()
        self._num_bytes = 0
        self._lock = Lock()

    def encode(self, text: str, salt: bytes) -> tuple[int, ...]:
        """All ids of the text, nothing put around it. `salt`: whose it is."""
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
