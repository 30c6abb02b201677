"""Token ids -> text, piece by piece: the pieces join to exactly what decoding all ids gives.

Three ways: a byte-level vocabulary, which nearly all served models have, spells every token as bytes, and those are
read as they come; of any other, a short window of ids is decoded again, and where it spells characters that it does not
have byte by byte, those are read as they come too. Bounded work per token in every way.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
# A character has at most 4 bytes, so at most 3 can be waiting for the rest; byte-fallback shows each as one mark.
MAX_HELD_MARKS = 3
# Beyond this many ids without a clean boundary the output is broken UTF-8, and the window is cut anyway.
MAX_WINDOW = 32
MAX_CUT = 8
_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """State of one sequence."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The new text; an incomplete character at the end is held back."""

    def flush(self) -> str:
        """What is still held, replacement marks included. The sequence has ended."""


class ByteDetokenizer:
    """For byte-level vocabularies. `bytes_of`: what a token stands for, nothing for one that is not spoken."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decode = _new_utf8_decoder("replace").decode

    def push(self, token_ids: Sequence[int]) -> str:
        """The new text; an incomplete character at the end is held back."""
        return self._decode(b"".join(map(self._bytes_of, token_ids)))

    def flush(self) -> str:
        """What is still held, replacement marks included. The sequence has ended."""
        return self._decode(b"", True)


class WindowDetokenizer:
    """For any vocabulary. The window holds the last clean group of ids as context, then what is not yet settled."""

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        """`context`: what the text goes on from; nothing of it is given out."""
        self._decode = decode
        self._window = list(context)
        self._num_context = len(context)
        # how much of the window's text has been given out
        self._shown = "" if not context else (text := decode(self._window))[: len(text) - _held_marks(text)]

    def push(self, token_ids: Sequence[int]) -> str:
        """The new text; an incomplete character at the end is held back."""
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
        else:  # ids without text, such as special tokens; but behind a first space, which is none, the next one is
            del self._window[self._num_context + MAX_CUT :]
        return fresh

    def flush(self) -> str:
        """What is still held, replacement marks included. The sequence has ended."""
        rest = self._decode(self._window)[len(self._shown) :]
        self._window.clear()
        self._num_context, self._shown = 0, ""
        return rest

    def _settle(self) -> None:
        """A clean boundary: the group that ends here becomes the context of the next."""
        del self._window[: self._num_context]
        self._num_context = len(self._window)
        self._shown = self._decode(self._window)

    def _bound(self, text: str, held: int) -> None:
        """Forget the head of a long window, where it can be cut without changing the text."""
        if len(self._window) <= MAX_WINDOW:
            return
        for cut in range(1, MAX_CUT + 1):
            tail = self._decode(self._window[-cut:])
            if len(tail) >= held and self._decode(self._window[:-cut]) + tail == text:
                del self._window[:-cut]
                self._num_context, self._shown = 0, tail[: len(tail) - held]
                return


class FallbackDetokenizer:
    """For a vocabulary with tokens for single bytes, as Llama 2's and Gemma's.

    Its decoder makes marks of a whole run of them, complete characters included, while the last one is incomplete, and
    for good where one is broken. So a run is no matter of windows; here only what is broken becomes marks.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], byte_of: Mapping[int, bytes], context: Sequence[int] = ()
    ) -> None:
        """`byte_of`: the tokens that are a byte each, with it. `context`: as of WindowDetokenizer."""
        self._decode, self._byte_of = decode, byte_of
        # what stands in for a run, before words that come behind it: they keep their first space
        self._letter = [token_id for token_id, byte in byte_of.items() if byte == b"A"]
        self._words = WindowDetokenizer(decode, context)
        self._bytes = _new_utf8_decoder("replace")
        self._in_run = False
        for token_id in context:
            self._in_run = token_id in byte_of
            self._bytes.decode(byte_of.get(token_id, b""), not self._in_run)

    def push(self, token_ids: Sequence[int]) -> str:
        """The new text; an incomplete character at the end is held back."""
        if not self._in_run and self._byte_of.keys().isdisjoint(token_ids):
            return self._words.push(token_ids)
        return "".join(map(self._push_one, token_ids))

    def flush(self) -> str:
        """What is still held, replacement marks included. The sequence has ended."""
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
