"""Converts token ids to text incrementally; the pieces join to exactly what decoding all ids gives.

Byte-level vocabularies, which nearly all models have, spell every token as bytes, so the bytes are decoded as UTF-8.
For any other vocabulary a short window of ids is decoded again. Tokens that stand for a single byte are decoded as
UTF-8 there, too. The work per token is bounded in all cases.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
# A character has at most 4 bytes, so at most 3 can wait for the rest; byte fallback shows each as one mark.
MAX_HELD_MARKS = 3
# Beyond this many ids without a clean boundary the output is broken UTF-8, and the window is cut anyway.
MAX_WINDOW = 32
MAX_CUT = 8
_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """Incremental detokenizer of one sequence."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the new text; an incomplete character at the end is held back."""

    def flush(self) -> str:
        """Return what is held back, including replacement marks. Call it once, at the end."""


class ByteDetokenizer:
    """For byte-level vocabularies. `bytes_of` returns a token's bytes; empty for hidden tokens."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decode = _new_utf8_decoder("replace").decode

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the new text; an incomplete character at the end is held back."""
        return self._decode(b"".join(map(self._bytes_of, token_ids)))

    def flush(self) -> str:
        """Return what is held back, including replacement marks."""
        return self._decode(b"", True)


class WindowDetokenizer:
    """For any vocabulary. The window holds the last clean group of ids as context, then the unsettled ids."""

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        """`context`: the tokens before the answer; their text is not returned."""
        self._decode = decode
        self._window = list(context)
        self._num_context = len(context)
        # the part of the window's text that was returned
        self._shown = "" if not context else (text := decode(self._window))[: len(text) - _held_marks(text)]

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the new text; an incomplete character at the end is held back."""
        self._window.extend(token_ids)
        text = self._decode(self._window)
        held = _held_marks(text)
        settled = text[: len(text) - held]
        fresh = settled[len(self._shown) :]
        if held:
            self._shown = max(self._shown, settled, key=len)
            self._bound(text, held)
        elif fresh:
            self._settle()
        # Ids without text, such as special tokens. They stay in the window, because only the first token of a text
        # loses its space.
        else:
            del self._window[self._num_context + MAX_CUT :]
        return fresh

    def flush(self) -> str:
        """Return what is held back, including replacement marks."""
        rest = self._decode(self._window)[len(self._shown) :]
        self._window.clear()
        self._num_context, self._shown = 0, ""
        return rest

    def _settle(self) -> None:
        """Make the group that ends here the context of the next one."""
        del self._window[: self._num_context]
        self._num_context = len(self._window)
        self._shown = self._decode(self._window)

    def _bound(self, text: str, held: int) -> None:
        """Cut the head off a long window where that does not change the text."""
        if len(self._window) <= MAX_WINDOW:
            return
        for cut in range(1, MAX_CUT + 1):
            tail = self._decode(self._window[-cut:])
            if len(tail) >= held and self._decode(self._window[:-cut]) + tail == text:
                del self._window[:-cut]
                self._num_context, self._shown = 0, tail[: len(tail) - held]
                return


class FallbackDetokenizer:
    """For a vocabulary with tokens for single bytes, such as Llama 2's and Gemma's.

    Its decoder replaces a whole run of such tokens by marks while the last character is incomplete, and permanently if
    one is invalid. So runs bypass the window here, and only invalid bytes become marks.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], byte_of: Mapping[int, bytes], context: Sequence[int] = ()
    ) -> None:
        """`byte_of`: the tokens that stand for one byte. `context`: as in WindowDetokenizer."""
        self._decode, self._byte_of = decode, byte_of
        # Stands in for a run of bytes as the context of the next words, so that they keep their first space.
        self._letter = [token_id for token_id, byte in byte_of.items() if byte == b"A"]
        self._words = WindowDetokenizer(decode, context)
        self._bytes = _new_utf8_decoder("replace")
        self._in_run = False
        for token_id in context:
            self._in_run = token_id in byte_of
            self._bytes.decode(byte_of.get(token_id, b""), not self._in_run)

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the new text; an incomplete character at the end is held back."""
        if not self._in_run and self._byte_of.keys().isdisjoint(token_ids):
            return self._words.push(token_ids)
        return "".join(map(self._push_one, token_ids))

    def flush(self) -> str:
        """Return what is held back, including replacement marks."""
        return self._bytes.decode(b"", True) if self._in_run else self._words.flush()

    def _push_one(self, token_id: int) -> str:
        byte = self._byte_of.get(token_id)
        if byte is not None:
            rest = "" if self._in_run else self._words.flush()
            self._in_run = True
            return rest + self._bytes.decode(byte)
        if not self._in_run:
            return self._words.push((token_id,))
        self._in_run = False
        self._words = WindowDetokenizer(self._decode, self._letter)
        return self._bytes.decode(b"", True) + self._words.push((token_id,))


def _held_marks(text: str) -> int:
    held = 0
    while held < min(MAX_HELD_MARKS, len(text)) and text[-1 - held] == REPLACEMENT:
        held += 1
    return held
